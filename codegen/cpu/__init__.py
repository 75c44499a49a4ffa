"""The CPU backend: attention compiled from C that is emitted for the program; without a compiler, ATen's
flash kernel for the programs that it supports, and tiles of plain PyTorch for the others. All use memory
linear in the number of tokens, forward and backward."""

from attngraph.codegen.cpu.carried import run_last_tokens, run_sums
from attngraph.codegen.cpu.compiled import Compiled
from attngraph.codegen.cpu.decode import DECODE
from attngraph.codegen.cpu.flash import Flash
from attngraph.codegen.cpu.loops import run_steps
from attngraph.codegen.cpu.tiled import Tiled
from attngraph.codegen.cpu.tokens.run import TOKENS
from attngraph.codegen.in_order import InOrder
from attngraph.ir.ops import cached_attention as cache
from attngraph.ir.ops import kernels, loop, token_program
from attngraph.ir.ops.declare import RUNNERS

kernels.register(Compiled())
kernels.register(Flash())
kernels.register(Tiled())
kernels.register(InOrder("cpu.in_order", DECODE))
cache.CACHED.append(DECODE)
token_program.RUNNERS.append(TOKENS)
RUNNERS["last_tokens"].append(run_last_tokens)
RUNNERS["running_sum"].append(run_sums)
loop.RUNNERS.append(run_steps)
