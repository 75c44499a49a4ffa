"""The functions that users call; they combine capture, passes, kernels and runtime.

Importing this package registers attngraph's ops and kernels with torch, and the formulas by which torch
counts their operations; and, if DTensors are in use, how attention is divided among ranks.
"""

from attngraph.api import compile as compile
from attngraph.ir.ops.shardings import tell_dtensor
from attngraph.meaning.masks import flops as flops

tell_dtensor()
