"""The Triton backend: readable kernels for each score program.

    kernels/         the kernels, written once, and the functions that Triton lacks
    plan.py          all that fixes a kernel            fold.py       a kernel's file as the source of a plan
    formulas.py      formulas as Triton                 emit.py       what a plan knows of kernels
    blocks.py        block sizes by rule                tuned.py      tables of measured block sizes
    tuning.py        measuring them                     visits.py     which tiles of keys are visited
    launch.py        `triton.forward`, and gradients    decode.py     `triton.decode`, over a cache
    sums.py          sums carried from token to token   attempts.py   plans that are kept; fallbacks
    tokens.py        token programs in order
    store.py         where sources are kept; launches   device.py     the GPU and its limits
    captured.py      a decoder's steps as CUDA graphs

For CUDA and AMD GPUs. On a CPU it runs only if requested by name, under TRITON_INTERPRET=1; the tests without
a GPU do so.
"""

from attngraph.codegen.cpu.record.replay import RECORDERS
from attngraph.codegen.in_order import InOrder
from attngraph.codegen.triton.captured import Captured
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward, Grouped
from attngraph.codegen.triton.sums import run_sums
from attngraph.codegen.triton.tokens import TOKENS
from attngraph.codegen.triton.tuning import tune
from attngraph.ir.ops import cached_attention as cache
from attngraph.ir.ops import kernels, token_program
from attngraph.ir.ops.declare import RUNNERS

__all__ = ["tune"]

RECORDERS["cuda"] = Captured
kernels.register(Forward(), devices=frozenset({"cuda"}))
for ordered in (True, False):  # by name alone: what these serve `Forward` serves
    kernels.register(Grouped(ordered=ordered), devices=frozenset({"cuda"}))
decoders = [Decode(family=family) for family in ("triton", "gluon", "gluon_unordered")]
cache.CACHED += decoders
kernels.register(InOrder("triton.in_order", decoders[0]), devices=frozenset({"cuda"}))
RUNNERS["running_sum"].append(run_sums)
token_program.RUNNERS.append(TOKENS)
