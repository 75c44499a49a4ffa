"""A CUDA device for machines that have none: PyTorch says `cuda`, and the CPU computes.

What is tested with it is all that stands around a GPU's kernels: which device a tensor is on, what is copied
where, when the CPU waits, what is launched, what a captured graph holds. Kernels of Triton run in its
interpreter. Times say nothing. `install()` comes before the first import of torch in a process, as the name
of a pytest plugin does:

    python -m pytest -p workshop.standin.plugin tests/standin
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_SOURCE = Path(__file__).with_name("device.cpp")


class StandIn:
    """The device of this process: what it has noticed so far. `kernels`: how many of Triton were launched."""

    def __init__(self, library: Path) -> None:
        self.kernels = 0
        self._library = ctypes.CDLL(str(library))
        self._library.standin_waits.restype = ctypes.c_char_p
        for name in ("launches", "allocated", "largest", "capture_end"):
            getattr(self._library, f"standin_{name}").restype = ctypes.c_size_t
        for name in ("replay", "forget"):
            getattr(self._library, f"standin_{name}").argtypes = [ctypes.c_size_t] * (1 + (name == "replay"))
        self._library.standin_replay.restype = ctypes.c_int64
        self._library.standin_is_capturing.restype = ctypes.c_bool

    def on(self) -> None:
        """From now on CUDA is this device."""
        self._library.standin_on()

    @property
    def launches(self) -> int:
        """How many operations that are no views have run, each at least a kernel on a card."""
        return int(self._library.standin_launches())

    def waits(self) -> list[str]:
        """The operations whose result the CPU waited for, since this was last asked."""
        return str(self._library.standin_waits().decode()).split()

    def may_wait(self, may: bool) -> None:
        """Whether waiting is allowed; else it is an error."""
        self._library.standin_may_wait(may)

    @contextlib.contextmanager
    def one_launch(self) -> Iterator[None]:
        """What runs in the body is one kernel: how it is interpreted is not noticed."""
        self.kernels += 1
        self._library.standin_pause(True)
        try:
            yield
        finally:
            self._library.standin_pause(False)

    @property
    def is_capturing(self) -> bool:
        return bool(self._library.standin_is_capturing())

    def capture_begin(self) -> None:
        """What is asked for from now on is not done, but kept as a graph."""
        self._library.standin_capture_begin()
        self._kernels: list[Callable[[], object]] = []

    def capture_kernel(self, run: Callable[[], object]) -> None:
        self._library.standin_capture_kernel()
        self._kernels.append(run)

    def capture_end(self) -> "Graph":
        return Graph(self._library, self._library.standin_capture_end(), self._kernels)

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold."""
        return int(self._library.standin_allocated())

    @property
    def largest(self) -> int:
        """The most bytes that tensors held at once since `forget_largest`."""
        return int(self._library.standin_largest())

    def forget_largest(self) -> None:
        self._library.standin_reset_largest()


class Graph:
    """What was asked for while it was captured, on the memory that it had then."""

    def __init__(self, library: ctypes.CDLL, number: int, kernels: list[Callable[[], object]]) -> None:
        self._library, self._number, self._kernels = library, number, kernels

    def replay(self) -> None:
        kernels, place = iter(self._kernels), self._library.standin_replay(self._number, 0)
        while place >= 0:
            next(kernels)()
            place = self._library.standin_replay(self._number, place + 1)

    def __del__(self) -> None:
        self._library.standin_forget(self._number)


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def build() -> Path:
    """The compiled device, made anew where its source or torch has changed."""
    torch = _torch()
    text = _SOURCE.read_text(encoding="utf-8") + (torch / "version.py").read_text(encoding="utf-8")
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"attngraph-standin-{os.getuid()}" / f"{key}.so"
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        include = torch / "include"
        command = [
            "c++", "-O1", "-shared", "-fPIC", "-std=c++20", "-Wno-attributes", f"-I{include}",
            f"-I{include / 'torch/csrc/api/include'}", str(_SOURCE), "-o", str(made), f"-L{torch / 'lib'}",
            f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        made.rename(path)
    return path


@functools.cache
def install() -> StandIn:
    """CUDA is the stand-in in this process, and Triton's kernels are interpreted."""
    if "torch" in sys.modules:
        raise RuntimeError("the stand-in device must be installed before torch is imported")
    os.environ["TRITON_INTERPRET"] = "1"
    device = StandIn(build())
    from workshop.standin import cuda

    cuda.patch(device)
    device.on()
    return device
