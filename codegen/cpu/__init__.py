"""The CPU backend: attention compiled from C that is emitted for the program; without a compiler, ATen's
flash kernel for the programs that it supports, and tiles of plain PyTorch for the others. All use memory
linear in the number of tokens, forward and backward."""

from attngraph.codegen.cpu.carried import LAST_TOKENS, RUNNING_SUM
from attngraph.codegen.cpu.compiled import Compiled
from attngraph.codegen.cpu.decode import Decode
from attngraph.codegen.cpu.flash import Flash
from attngraph.codegen.cpu.loops import LOOPS
from attngraph.codegen.cpu.tiled import Tiled
from attngraph.codegen.cpu.tokens.run import TOKENS
from attngraph.ir.ops import cached_attention as cache
from attngraph.ir.ops import history, kernels, loop, running_sum, token_program

kernels.register(Compiled())
kernels.register(Flash())
kernels.register(Tiled())
cache.CACHED.append(Decode())
token_program.RUNNERS.append(TOKENS)
history.RUNNERS.append(LAST_TOKENS)
running_sum.RUNNERS.append(RUNNING_SUM)
loop.RUNNERS.append(LOOPS)
