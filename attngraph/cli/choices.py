"""What the arguments of commands may be, as data, so that `--help` need not import torch.

tests/test_cli.py compares each with what it is copied from.
"""

BACKENDS = ("auto", "cpu", "triton", "reference")
ABSORB = ("auto", "always", "never", "fold")
PASSES = (
    "canonicalize", "fuse-attention", "merge-heads", "absorb-mla", "reassociate-linear", "select-kernels",
    "shard-heads", "shard-tokens", "insert-kv-cache", "divide-cache", "tidy", "quantised-linear",
    "fuse-token-wise", "quantise-cache",
)  # fmt: skip
FORMATS = ("pt2", "onnx")
FALLBACKS = ("sdpa", "eager")
PAGE = "report.html"
"""The file in which `attngraph inspect` writes its page, in the folder of the dump."""
