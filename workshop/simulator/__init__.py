"""Gluon kernels without a GPU, on a machine stricter than the real one: `python -m workshop simulate`.

A kernel's warps run as coroutines in random orders (`schedule`). What each knows to have happened before is
kept, as it follows from barriers, fences and waits alone (`order`), so a wait that is missing is found in any
order of events, not only in one in which values come out wrong. `memory` is shared and global memory,
`barriers` and `engines` what works beside the warps (copies of boxes, products), `values` what is in
registers, `tensor_memory` what sm_100 has besides, `language` all of it by Gluon's names; `source` turns the
text of kernels into coroutines, `launch` runs them, and `mutants` breaks kernels and counts which of the
faults are noticed.
"""

from workshop.simulator.launch import Kernel, launch
from workshop.simulator.order import Wrong
from workshop.simulator.schedule import Deadlock
from workshop.simulator.source import load

__all__ = ["Deadlock", "Kernel", "Wrong", "launch", "load"]
