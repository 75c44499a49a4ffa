"""When a saved graph may be used: everything that its trace depended on, by name, as text.

Four sections, compared entry by entry, so that what does not fit has a name: `call` (the arguments but for
sizes, and torch's modes), `state` (what the model and what it refers to hold), `code` (the functions that ran
and what the global names in them stand for) and `contents` (of buffers whose values were read). Versions are
compared before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.capture.guards import aliases, repeats, things
from attngraph.capture.state.code_content import Code, code_behind, described
from attngraph.capture.state.content import Content
from attngraph.capture.state.ran import Executed
from attngraph.capture.structure import is_value


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a trace depended on. `doubts`: what may matter and cannot be compared in another process."""

    call: dict[str, str]
    state: dict[str, str]
    code: Code
    doubts: tuple[str, ...]

    def sections(self) -> dict[str, Any]:
        return {"call": self.call, "state": self.state, "code": self.code}


def describe_call(leaves: Sequence[Any], spec: Any) -> dict[str, str]:
    """The arguments of a call, but for sizes and values of tensors, and the modes that torch is in."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found = {"structure of the arguments": str(spec)}
    for place, leaf in enumerate(leaves):
        found[f"argument {place}"] = _leaf(leaf)
    found["arguments that are the same"] = f"{repeats(tensors)} {aliases(tensors)}"
    found["gradients"] = f"{torch.is_grad_enabled()}, inference {torch.is_inference_mode_enabled()}"
    found["default dtype and device"] = f"{torch.get_default_dtype()} {torch.get_default_device()}"
    found["autocast"] = str(
        [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    )
    return found


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        kind = type(leaf)
        return (
            f"{kind.__module__}.{kind.__qualname__} of {leaf.dtype}, {leaf.ndim} dimensions, {leaf.device}, "
            f"{'with' if leaf.requires_grad else 'without'} gradient"
        )
    kind_name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return f"{kind_name} {leaf!r}" if is_value(leaf) else kind_name


def describe_state(target: Callable[..., Any], leaves: Sequence[Any]) -> Content:
    """The model's state, and that of arguments that are objects."""
    content = Content()
    content.visit("model", target)
    for place, thing in enumerate(things(leaves)):
        content.visit(f"object {place} among the arguments", thing)
    return content


def traced(call: Mapping[str, str], content: Content, executed: Executed) -> Traced:
    """What a trace depended on, just after it."""
    own = (code for place, code in executed.without_file.items() if place in content.codes)
    code, lost = code_behind([*executed.codes.values(), *own], content)
    doubts = [*content.doubts, *lost]
    if not executed.complete:
        doubts.append("the code that ran: another profiler was active")
    doubts += [f"the file {name}, which a trace opened" for name in executed.files]
    return Traced(dict(call), dict(content.lines), code, tuple(dict.fromkeys(doubts)))


def differences(
    saved: Mapping[str, Any], call: Mapping[str, str], content: Content, left_out: Sequence[str]
) -> Iterator[str]:
    """What does not fit, by name, the plainest first."""
    yield from _differences("", saved["call"], call, ())
    yield from _differences("", saved["state"], content.lines, left_out)
    about = Content()
    for name, text in saved["code"]:
        found = described(name, content, about)
        if found is None:
            yield f"{_readable(name)} is not loaded"
        elif found != text:
            yield f"the code of {_readable(name)}, or what it names"


def _differences(
    title: str, saved: Mapping[str, str], now: Mapping[str, str], left_out: Sequence[str]
) -> Iterator[str]:
    for name in (*saved, *(n for n in now if n not in saved)):
        if saved.get(name) == now.get(name) or _is_below(name, left_out):
            continue
        if name not in now:
            yield f"{title}{name} was {saved[name]}, and is gone"
        elif name not in saved:
            yield f"{title}{name} is new: {now[name]}"
        else:
            yield f"{title}{name} was {saved[name]}, and is {now[name]}"


def _is_below(name: str, paths: Sequence[str]) -> bool:
    return any(name == p or name.startswith((f"{p}.", f"{p}[")) for p in paths)


def _readable(name: str) -> str:
    return name.removeprefix("=").replace(":", ".")
