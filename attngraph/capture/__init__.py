"""From a call of a model to a graph, and what the graph is valid for.

`trace.py` is the way through: `flat.py` is what torch.export traces, and has the record of the trace; what
the forward asks, sets and changes meanwhile is heard by `asked.py`, `attributes.py` and `side_effects.py`,
and `instead.py` stands in functions' ways. `program/` makes a program graph of what was traced, `state/`
knows what a graph depends on besides its arguments, and `guards.py` which calls it serves. `faster/` may be
deleted, and only speed is lost.
"""
