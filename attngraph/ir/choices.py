"""What users may choose by name. Nothing here imports torch: `--help` of a command answers at once."""

from importlib.metadata import entry_points
from typing import Any

BACKENDS = ("auto", "cpu", "triton", "gluon", "gluon_unordered", "reference")
"""Those of attngraph; `backends` has also those of others."""
ABSORB = ("auto", "always", "never", "fold")
PASSES = (
    "canonicalize", "fuse-attention", "merge-heads", "absorb-mla", "reassociate-linear", "tabulate-scores",
    "skip-padding", "fuse-token-wise", "select-kernels", "shard-heads", "shard-tokens", "insert-kv-cache",
    "divide-cache", "tidy", "quantised-linear", "order-sums", "freeze-weights", "quantise-cache",
)  # fmt: skip
"""The names of what `attngraph.passes.PASSES` has."""
FORMATS, FALLBACKS = ("pt2", "onnx"), ("sdpa", "eager")
"""Of exported files, and how attention is written in them."""


def backends() -> dict[str, Any]:
    """What `backend` may be, each with the entry point of the package that brings it, None for our own."""
    return dict.fromkeys(BACKENDS) | {e.name: e for e in entry_points(group="attngraph.backends")}
