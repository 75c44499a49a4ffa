"""The functions that users call; they combine capture, passes, kernels and runtime.

Importing this package registers attngraph's ops and kernels with torch, and the formulas by which torch
counts their operations.
"""

from attngraph.api import compile as compile
from attngraph.meaning.masks import flops as flops
