"""Backends: the kernels that compute attention nodes.

Importing this package registers every kernel with `attngraph.ir.ops.kernels`. A backend is a folder; its
kernels are named `<folder>.<kernel>`, and a backend is chosen by the folder's name.
"""

from attngraph.codegen import cpu, triton

__all__ = ["cpu", "triton"]
