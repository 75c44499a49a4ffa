"""A candidate in a process of its own, with limits of time and memory: nothing of it is run in this one.

Questions and answers are files of tensors and plain values. A process that ends, or gives no answer in time,
is ended with all it started, and started again at the next question. The limits keep a faulty candidate
from taking the machine; they are no sandbox: it can read and write what its user can.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.errors import first_line
from attngraph.runtime.verify import tensors_of

WORKER = "attngraph.cli.worker"
"""The module that the process runs."""
STARTING = 300.0
"""Seconds in which it must have loaded torch and attngraph."""
GRACE = 1.0
"""Seconds in which it may end by itself."""


class Ended(Exception):
    """The process of a candidate has ended: the text says why, after "the candidate"."""


class Late(Ended):
    """It gave no answer in time, and was ended."""


class Failed(RuntimeError):
    """The candidate raises an exception: its kind and the first line of its text."""


def code_of(problem: Exception) -> str:
    """The code of a difference that is an exception of the candidate."""
    if not isinstance(problem, Ended):
        return "candidate-refuses"
    return "candidate-late" if isinstance(problem, Late) else "candidate-ended"


class Process:
    """Answers questions about the candidate of a name. `seconds`: for each answer. `memory`: the bytes that
    it may take besides what Python and torch take."""

    def __init__(self, name: str, seconds: float, memory: int) -> None:
        self.name, self.seconds, self.memory = name, seconds, memory
        self.folder = tempfile.TemporaryDirectory(prefix="attngraph-")
        self._run: subprocess.Popen[bytes] | None = None
        weakref.finalize(self, self.folder.cleanup)

    def __deepcopy__(self, memo: Any) -> "Process":
        return self

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a question.

        Raises:
            Ended: there is none. Failed: the candidate raises an exception.
        """
        if self._run is None:
            path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
            self._run = subprocess.Popen(
                [sys.executable, "-m", WORKER, self.name, self.folder.name, str(self.memory)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
            self._wait(STARTING)
        torch.save(dict(question), Path(self.folder.name, "question"))
        with contextlib.suppress(BrokenPipeError):  # that it has ended is told below
            self._run.stdin.write(b"?")  # type: ignore[union-attr]
            self._run.stdin.flush()  # type: ignore[union-attr]
        self._wait(self.seconds)
        try:
            answer = torch.load(Path(self.folder.name, "answer"), weights_only=True)
            failed = answer["failed"]
        except Exception as problem:
            self.close()
            raise Ended(f"gave an answer that cannot be read: {first_line(problem)}") from problem
        if failed:
            raise Failed(failed)
        return dict(answer)

    def _wait(self, seconds: float) -> None:
        """Wait for a byte of the process."""
        answers = self._run.stdout.fileno()  # type: ignore[union-attr]
        if not select.select([answers], [], [], seconds)[0]:
            self.close()
            raise Late(f"gave no answer within {seconds:g} s")
        if not os.read(answers, 1):
            code = self.close()
            raise Ended(f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")

    def close(self) -> int:
        """End the process and all that it started, and give its exit code."""
        run, self._run = self._run, None
        if run is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(GRACE)  # one that has closed its end of the pipe is ending
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        for stream in (run.stdin, run.stdout):
            stream.close()  # type: ignore[union-attr]
        return run.wait()


class Apart(nn.Module):
    """Stands for the candidate: it has the same weights, and sends them with every call."""

    process: Process
    untraced = "it runs in a process of its own"
    has_gradients = False

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self.eval()
        found = process.ask({"ask": "weights"})
        for name, tensor in found["weights"].items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                owner = owner._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            if name in found["trained"]:
                owner._parameters[last] = nn.Parameter(tensor, tensor.is_floating_point())
            else:
                owner._buffers[last] = tensor

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        question = {"args": args, "kwargs": kwargs, "weights": dict(self.state_dict())}
        return tensors_of(self.process.ask({"ask": "results", **question})["results"])
