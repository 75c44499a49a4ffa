"""What users may choose by name. Nothing here imports torch: `--help` of a command answers at once."""

BACKENDS = ("auto", "cpu", "triton", "reference")
ABSORB = ("auto", "always", "never", "fold")
PASSES = (
    "canonicalize", "fuse-attention", "merge-heads", "absorb-mla", "reassociate-linear", "tabulate-scores",
    "fuse-token-wise", "select-kernels", "shard-heads", "shard-tokens", "insert-kv-cache", "divide-cache",
    "tidy", "quantised-linear", "quantise-cache",
)  # fmt: skip
"""The names of what `attngraph.passes.PASSES` has."""
FORMATS, FALLBACKS = ("pt2", "onnx"), ("sdpa", "eager")
"""Of exported files, and how attention is written in them."""
