"""What a side is, besides a model or a function: an ONNX file, a folder that `save` wrote, a process.

A candidate in a process of its own has limits of time and memory, and nothing of it is run in this one.
Questions and answers are files of tensors and plain values. A process that ends, or gives no answer in time,
is ended with all it started, and started again at the next question. The limits keep a faulty candidate
from taking the machine; they are no sandbox: it can read and write what its user can.
"""

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.api.arguments import require_model
from attngraph.api.compile import load
from attngraph.api.compiled import CompiledModule
from attngraph.api.verify.steps import is_decoder
from attngraph.api.verify.verdict import Difference, Incomparable
from attngraph.errors import SavedError, first_line
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.verify import tensors_of
from attngraph.saved.folder import MANIFEST
from attngraph.saved.weights import put

WORKER = "attngraph.cli.worker"
"""The module that the process of a candidate runs."""
STARTING = 300.0
"""Seconds in which it must have loaded torch and attngraph."""
GRACE = 1.0
"""Seconds in which it may end by itself."""


def called(side: Any) -> Any:
    """What a side is, to be called.

    Raises:
        TypeError: it cannot be called, and is no file. SavedError: a file or a folder cannot be read.
    """
    if isinstance(side, str | Path):
        if not is_file_of_a_side(side):
            raise TypeError(
                f"attngraph.verify: {str(side)!r} is no ONNX file and no folder that `save` wrote; another "
                "name is run with subprocess=True."
            )
        return side_in(side)
    if not is_decoder(side):
        require_model(side, "attngraph.verify")
    return side


def in_a_process(name: Any, seconds: float, memory: int, ending: contextlib.ExitStack) -> "Apart":
    """The candidate of a name in a process, which ends with `ending`.

    Raises:
        TypeError: it is no name. Incomparable: it cannot be made there.
    """
    if not isinstance(name, str):
        raise TypeError("attngraph.verify: with subprocess=True the candidate is a name, as 'port.py:LM'.")
    process = Process(name, seconds, memory)
    ending.callback(process.close)
    try:
        return Apart(process)
    except (Ended, Failed) as problem:
        said = f"the candidate {'' if isinstance(problem, Ended) else 'fails: '}{problem}"
        raise Incomparable(Difference("call", said, code=code_of(problem))) from problem


def is_file_of_a_side(name: str | Path) -> bool:
    """Whether a name is that of an ONNX file, or of a folder that `save` wrote."""
    return str(name).endswith(".onnx") or (Path(name) / MANIFEST).is_file()


def side_in(path: str | Path) -> Any:
    """What a file or a folder holds, to be called.

    Raises:
        SavedError: it cannot be read; a folder has no weights, or has changed.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        loaded = load(path)
        if not isinstance(loaded, Decoder):
            return SavedGraphs(loaded)
        return SimpleNamespace(  # which keeps its weights: a module would be given the reference's
            prefill=loaded.prefill, decode=loaded.decode, config_of_cache=loaded.config_of_cache
        )
    if not path.is_file():
        raise SavedError(f"there is no file {path}.")
    return OnnxFile(path)


class OnnxFile:
    """An ONNX file as a function of its inputs, in their order or by name. It returns arrays."""

    untraced = "it is an ONNX file"

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise SavedError(
                f"{path} is run by onnxruntime, which is not installed: pip install onnxruntime."
            )
        runtime = importlib.import_module("onnxruntime")
        try:
            self.session: Any = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        except Exception as problem:  # onnxruntime's exceptions have no class in common
            raise SavedError(f"onnxruntime cannot read {path}: {problem}") from problem
        self.names: list[str] = [given.name for given in self.session.get_inputs()]

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> list[Any]:
        if len(args) > len(self.names):
            raise TypeError(
                f"the file takes {len(self.names)} input(s), {', '.join(self.names)}; found {len(args)}"
            )
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        found: list[Any] = self.session.run(None, {n: t.detach().numpy() for n, t in given.items()})
        return found


class SavedGraphs:
    """What a folder of saved graphs computes, for the dtypes and sizes that they serve."""

    untraced = "it is a folder of saved graphs"
    has_gradients = False

    def __init__(self, loaded: CompiledModule) -> None:
        self.loaded = loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        try:
            with torch.no_grad():
                return self.loaded(*args, **kwargs)
        except SavedError:
            with torch.enable_grad():
                return self.loaded(*args, **kwargs)


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

    untraced = "it runs in a process of its own"
    has_gradients = False

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self.eval()
        found = process.ask({"ask": "weights"})
        for name, tensor in found["weights"].items():
            trained = name in found["trained"]
            put(self, name, nn.Parameter(tensor, tensor.is_floating_point()) if trained else tensor)

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        question = {"args": args, "kwargs": kwargs, "weights": dict(self.state_dict())}
        return tensors_of(self._process.ask({"ask": "results", **question})["results"])
