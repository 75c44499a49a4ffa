"""Stock decoders and encoders of transformers, exported and run where attngraph is not installed.

    python -m workshop.bench.exports --json rows.jsonl --table docs/export.md

Each class is built small, with random weights, and written as pt2 and as ONNX. `alone.py` then runs the files
in a process that cannot import attngraph: greedy tokens of decoders and answers of encoders must be those of
the whole model in PyTorch.
"""
