"""Models of packages from PyPI, small and with random weights, beside eager PyTorch and torch.compile.

    python -m workshop packages --json rows.json --resume --table docs/packages.md

`models.py` is the list, a line of text each; `examine.py` runs one model; `table.py` prints the rows. Each
model has a process for attngraph and one for torch.compile (`workshop/processes.py`).
"""
