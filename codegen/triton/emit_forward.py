"""The forward kernel of a plan, in the order of work that its blocks ask for."""

from __future__ import annotations

from attngraph.codegen.triton.emit import Emitter
from attngraph.codegen.triton.emit_ahead import AheadEmitter
from attngraph.codegen.triton.module import Kernel
from attngraph.codegen.triton.plan import Plan


def emit(plan: Plan) -> Kernel:
    """The forward kernel of a plan.

    Raises:
        UnsupportedError: the score program has an operation that cannot be emitted; says which.
    """
    return (AheadEmitter if plan.blocks.ahead else Emitter)(plan).kernel()
