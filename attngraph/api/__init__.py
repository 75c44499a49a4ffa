"""The functions that users call; they combine capture, passes, kernels and runtime.

Importing this package registers attngraph's ops and kernels with torch.
"""

from attngraph.api import compile as compile
