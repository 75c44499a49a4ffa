"""The composition root: what a user calls, and what puts capture, passes, kernels and runtime together.

Importing it registers our ops and kernels with torch.
"""

from attngraph.api import compile as compile
