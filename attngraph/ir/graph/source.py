"""Where in the user's code a node comes from: `model.py:61`, as a relative path where possible."""

import dataclasses
import functools
import linecache
import os
import re
import sys
import sysconfig

import torch
from torch import fx

ORIGIN = ("stack_trace", "nn_module_stack", "source")
"""The keys of a node's meta that say where it comes from."""
PASSES_ON = re.compile(r"\((self,\s*)?\*args,\s*\*\*kwargs\)")
"""A call that passes everything on, as a decorator's does."""
_WRAPPER = re.compile(r"\A(L\['self'\]\.?)?(model\.?)?")
"""Of a module's name the part that is the wrapper's in which the model was captured."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OURS = tuple(os.path.join(_PACKAGE, room) + os.sep for room in ("ir", "capture"))
_LAYERS = os.path.join(_TORCH, "nn") + os.sep


@dataclasses.dataclass(frozen=True)
class Frame:
    """A line of the user's code, by its file's path and by the name that it is shown under."""

    path: str
    line: int

    @property
    def file(self) -> str:
        return short_path(self.path)

    @property
    def source(self) -> str:
        return f"{self.file}:{self.line}"


def call_stack(trace: str) -> tuple[list[Frame], int]:
    """The lines outside of torch that call each other, the innermost last, and the place among them of the
    model's own line: the innermost of this module's forward that is in the file of the line which calls the
    module, so that it is not a library's."""
    frames, entered = _frames(trace)
    entered = min(entered, len(frames) - 1)
    home = frames[max(entered - 1, 0)].path if frames else ""
    inside = [n for n, f in enumerate(frames) if n >= entered and f.path == home]
    return frames, inside[-1] if inside else entered


def _frames(trace: str) -> tuple[list[Frame], int]:
    """The lines outside of torch, and the place of the first one below the innermost call of a module."""
    frames, entered = list[Frame](), 0
    for path, line in _FRAME.findall(trace):
        if path.startswith(_LAYERS):  # the call of a module: its forward is below
            entered = len(frames)
        elif not path.startswith((_TORCH, *_OURS, "<", "torch/")):
            frame = Frame(path, int(line))
            if len(frames) == entered or frames[-1] != frame:  # a generator's line calls itself
                frames.append(frame)
    return frames, entered


def source_of(node: fx.Node) -> str:
    """`file:line` of the innermost frame outside of torch, else of torch's own (a layer of torch.nn
    that is the model itself), or "" if none is known. A node read from text carries it in its meta."""
    if "source" in node.meta:
        return str(node.meta["source"])
    return line_of(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=2048)
def line_of(trace: str) -> str:
    """The same, of the text of a stack trace."""
    frames = [f for f in _FRAME.findall(trace) if not f[0].startswith(("<", "torch/", *_OURS))]
    outside = [f for f in frames if not f[0].startswith(_TORCH)]
    layers = [f for f in frames if f[0].startswith(_LAYERS) and not f[0].endswith("module.py")]
    for path, line in (outside or layers)[-1:]:
        return f"{short_path(path)}:{line}"
    return ""


def caller_of(node: fx.Node) -> tuple[str, str]:
    """The line of the same forward, in another file, that called the code in which the node stands (a
    model's call of a library's attention), and the text of that line; "" where there is none. Where a library
    calls itself, it is the model's own line, if that is known."""
    trace = node.meta.get("stack_trace") or ""
    (frames, own), (_, entered) = call_stack(trace), _frames(trace)
    called = frames[entered:]
    lines = {n: linecache.getline(f.path, f.line).strip() for n, f in enumerate(called, entered)}
    # A decorator calls nothing itself.
    others = [n for n in lines if frames[n].path != frames[-1].path and not PASSES_ON.search(lines[n])]
    if not others:
        return "", ""
    place = own if own in others else others[-1]
    return frames[place].source, lines[place]


def own_line(node: fx.Node) -> str:
    """The line to name to a user: the model's own that called a library's code, else the node's."""
    return caller_of(node)[0] or source_of(node)


@functools.lru_cache(maxsize=4096)
def short_path(path: str) -> str:
    """Relative to the working directory, or to where packages are installed or imported from, or else
    the file's own name."""
    roots = [os.getcwd(), *sysconfig.get_paths().values(), *(p for p in sys.path if p)]
    found = os.path.realpath(path)
    for root in sorted({os.path.realpath(r) for r in roots}, key=len, reverse=True):
        if root != os.sep and found.startswith(root + os.sep):
            return os.path.relpath(found, root)
    return os.path.basename(path)


def module_of(node: fx.Node) -> str:
    """The qualified name of the user's module that the node was computed in; "" for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    for name, _ in reversed(stack.values()):
        if name and not str(name).startswith("_empty"):
            return _WRAPPER.sub("", str(name), count=1)
    return ""
