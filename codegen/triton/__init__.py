"""The Triton backend: one readable kernel for each score program.

    plan.py        all that fixes a kernel        expression.py  formulas as Triton
    ../scalar/     what C and Triton share        helpers.py     functions that Triton lacks
    emit.py        a plan as source               store.py       where the source is kept
   emit_ahead.py  the same, with products a tile ahead of weights (emit_forward.py chooses)
    blocks.py      block sizes by rule
    launch.py      `triton.forward`, the kernel of the registry
    call.py        their arguments, and the launch      device.py      the GPU and its limits
    visits.py      which tiles of keys are visited
    emit_backward.py  gradients as source, the tiles of which are in emit_gradients.py
    launch_backward.py  from a call's gradients to launched kernels
    emit_decode.py attention over a cache as source     decode.py  `triton.decode`, its kernel
    emit_sums.py   sums carried from token to token as source     sums.py    their kernel
    compiler.py    compiling one kernel            attempts.py    fallbacks when one does not compile
    tuned.py       tables of measured block sizes       tuning.py      measuring them
    clock.py       how long a call takes

For CUDA and AMD GPUs. On a CPU it runs only if requested by name, under TRITON_INTERPRET=1; the tests without
a GPU do so.
"""

from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.sums import RunningSum
from attngraph.codegen.triton.tuning import tune
from attngraph.ir.ops import cached_attention as cache
from attngraph.ir.ops import kernels, running_sum

__all__ = ["tune"]

kernels.register(Forward(), devices=frozenset({"cuda"}))
cache.CACHED.append(Decode())
running_sum.RUNNERS.append(RunningSum())
