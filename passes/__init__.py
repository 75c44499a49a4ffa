"""The passes, one rewrite per file, and the order in which they run."""

from attngraph.ir.graph import Level
from attngraph.passes.absorb_mla import AbsorbMLA
from attngraph.passes.canonicalize import Canonicalize
from attngraph.passes.fuse_attention import FuseAttention
from attngraph.passes.insert_kv_cache import InsertKVCache
from attngraph.passes.merge_heads import MergeHeads
from attngraph.passes.reassociate_linear import ReassociateLinear
from attngraph.passes.select_kernels import SelectKernels
from attngraph.passes.tidy import Tidy
from attngraph.pipeline import Pass

DEFAULT_PIPELINE: tuple[Pass, ...] = (
    Canonicalize(),
    FuseAttention(),
    MergeHeads(),
    AbsorbMLA(),
    ReassociateLinear(),
    SelectKernels(),
)


def decoder_pipeline(
    backend: str = "auto", argument: int = 0, result: int = 0, absorb: str = "auto"
) -> tuple[Pass, ...]:
    """The order for a decoder: `argument` is the number of the input with the tokens, `result` that of the
    logits among the results."""
    return (
        Canonicalize(),
        FuseAttention(),
        MergeHeads(),
        AbsorbMLA(absorb, keeps=True),
        InsertKVCache(argument, result),
        Tidy(),
        SelectKernels("" if backend == "auto" else backend, requires=Level.CACHED),
    )
