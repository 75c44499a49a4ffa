"""Backends: the kernels that compute attention nodes.

Importing this package registers every kernel with `attngraph.ir.ops.kernels`. A backend is a folder; its
kernels are named `<folder>.<kernel>`, and a backend is chosen by the folder's name. `in_order.py` makes a
kernel for whole sequences in one order of sums of a backend's attention over a cache.
"""

from attngraph.codegen import cpu, triton

__all__ = ["cpu", "triton"]
