"""Faults of ports, written into models by rule, and which of them `attngraph.verify` notices:
`python -m workshop faults`.

A fault is one expression of a model's source that is changed (`rules`). The model and its changed copy, which
has the same weights, are verified; what is counted is whether they differ, and which line is named.
"""
