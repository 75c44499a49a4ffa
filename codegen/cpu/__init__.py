"""The CPU backend: ATen's flash kernel where the program is one it can do, tiles of plain PyTorch
elsewhere. Both hold memory linear in the number of tokens, forward and backward."""

from attngraph.codegen.cpu.flash import Flash
from attngraph.codegen.cpu.tiled import Tiled
from attngraph.ir import kernels

kernels.register(Flash())
kernels.register(Tiled())
