"""The Triton backend: one readable kernel for each score program.

    plan.py        what a kernel must know        expression.py  formulas as Triton
    weights.py     what may follow the softmax    helpers.py     functions that Triton lacks
    emit.py        a plan as source               store.py       where the source is kept
    schedule.py    which of two schedules a kernel gets, and why not the other
    emit_specialised.py  a plan as warp-specialised source
    launch.py      `triton.forward`, the kernel of the registry
    call.py        what launched kernels are told       device.py      what they run on
    visits.py      which tiles of keys are visited
    emit_backward.py  gradients as source, the tiles of which are in emit_gradients.py
    launch_backward.py  from gradients to gradients
    emit_decode.py attention over a cache as source     decode.py  `triton.decode`, its kernel
    compiler.py    compiling one kernel            isolated.py      in a process that may crash
    attempts.py    what happens when one does not compile
    tuned.py       block sizes that were measured       tuning.py      measuring them

Aimed at CUDA devices (AMD's among them). On a CPU it serves only when asked for by name, under
TRITON_INTERPRET=1, which is how it is tested without a GPU.
"""

from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.tuning import tune
from attngraph.ir.ops import cached_attention as cache
from attngraph.ir.ops import kernels

__all__ = ["tune"]

kernels.register(Forward(), devices=frozenset({"cuda"}))
cache.CACHED.append(Decode())
