"""Every causal language model of the installed transformers, small and with random weights, as a decoder.

    python -m workshop.bench.causal_models --json rows.jsonl --table docs/transformers.md

Files: `shrink.py` makes a class's default configuration small, `one.py` compares one class with its own
forward and `generate`, `classes.py` lists the classes, `table.py` prints the rows. Each class
has a process of its own (`benchmark/processes.py`).
"""
