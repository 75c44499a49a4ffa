"""The passes, one rewrite per file, and the order in which they run."""

from attngraph.passes.canonicalize import Canonicalize
from attngraph.passes.fuse_attention import FuseAttention
from attngraph.passes.merge_heads import MergeHeads
from attngraph.passes.reassociate_linear import ReassociateLinear
from attngraph.passes.select_kernels import SelectKernels
from attngraph.pipeline import Pass

DEFAULT_PIPELINE: tuple[Pass, ...] = (
    Canonicalize(),
    FuseAttention(),
    MergeHeads(),
    ReassociateLinear(),
    SelectKernels(),
)
