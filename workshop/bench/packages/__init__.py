"""Models of packages from PyPI, small and with random weights, beside eager PyTorch and torch.compile.

    python -m workshop.bench.packages --json rows.jsonl --table docs/packages.md

Files: `description.py` says how a model is described, `models.py` is the list, `one.py` runs one model,
`table.py` prints the rows. Each model has a process for attngraph and one for torch.compile
(`benchmark/processes.py`).
"""
