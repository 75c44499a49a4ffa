"""When a saved graph may be used: everything that its trace depended on, by name, as text.

Sections, compared entry by entry, so that what does not fit has a name: `call` (the arguments but for sizes,
and torch's modes), `ran` (the functions that ran, and variables of the environment that they read), `state`
(what the model and these functions can read) and `contents` (of buffers whose values were read). Versions are
compared before.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attngraph.capture.asked import answers
from attngraph.capture.guards import aliases, repeats, things
from attngraph.capture.state.content import Content, names_of, ran_of
from attngraph.capture.state.kinds import own_attributes
from attngraph.capture.state.scope import Ran, Scope
from attngraph.capture.structure import is_value
from attngraph.ir.modes import autocast_of, settings


@dataclasses.dataclass(frozen=True)
class Names:
    """What decides what of the state counts: the names of functions that ran, of variables of the environment
    that they read, and whether the layouts of tensors count, and what is asked of arguments."""

    functions: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    asked: tuple[tuple[int, str], ...] = ()
    layouts: bool = False

    def scope(self, describe: Callable[[Scope], Content]) -> Scope:
        ran = ran_of(self.functions, describe)
        ran.environment.update(self.environment)
        return ran.scope(asked=frozenset(self.asked), layouts=self.layouts)


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a trace depended on, as `guards.json` has it. `left_out`: the attributes that its forward sets;
    `contents`: digests of tensors whose values were read. `doubts`, which files do not have: what may matter
    and cannot be compared in another process."""

    call: dict[str, str]
    state: dict[str, str]
    ran: Names
    left_out: tuple[str, ...]
    contents: dict[str, str]
    doubts: tuple[str, ...] = ()


def describe_call(leaves: Sequence[Any], spec: Any) -> dict[str, str]:
    """The arguments of a call, but for sizes and values of tensors, and the modes that torch is in."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    found = {"structure of the arguments": str(spec)}
    for place, leaf in enumerate(leaves):
        found[f"argument {place}"] = _leaf(leaf)
    found["arguments that are the same"] = f"{repeats(tensors)} {aliases(tensors)}"
    found["gradients"] = f"{torch.is_grad_enabled()}, inference {torch.is_inference_mode_enabled()}"
    found["default dtype and device"] = f"{torch.get_default_dtype()} {torch.get_default_device()}"
    found["autocast"] = str([(device, *autocast_of(device)) for device in ("cpu", "cuda")])
    found["torch's settings"] = str(settings())
    return found


def describe_answers(tensors: Sequence[Tensor], ran: Names) -> dict[str, str]:
    """What is true of a call's tensors of what the code asked."""
    if not ran.asked and not ran.layouts:
        return {}
    found = answers(tensors, frozenset(ran.asked), ran.layouts)
    return {"what is asked of arguments": str(found)}


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        kind = type(leaf)
        own = own_attributes(leaf)
        return f"with the attributes {own} " * bool(own) + (
            f"{kind.__module__}.{kind.__qualname__} of {leaf.dtype}, {leaf.ndim} dimensions, {leaf.device}, "
            f"{'with' if leaf.requires_grad else 'without'} gradient"
        )
    kind_name = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    return f"{kind_name} {leaf!r}" if is_value(leaf) else kind_name


def describe_state(target: Callable[..., Any], leaves: Sequence[Any], scope: Scope) -> Content:
    """The model's state, that of arguments that are objects, and what code that ran can read."""
    content = Content(scope)
    content.of("model", target)
    for place, thing in enumerate(things(leaves)):
        content.of(f"object {place} among the arguments", thing)
    content.everything(())  # what the code of the scope can read by name
    return content


def traced(
    call: Mapping[str, str], tensors: Sequence[Tensor], describe: Callable[[Scope], Content],
    executed: Ran, scope: Scope,
) -> tuple[Traced, Content]:  # fmt: skip
    """What a trace depended on, just after it; `scope`: that of its graph."""
    names, lost = names_of(executed.codes.values(), describe)
    ran = Names(tuple(names), scope.environment, tuple(sorted(scope.asked)), scope.layouts)
    content = describe(ran.scope(describe))
    doubts = [*content.doubts, *lost, *executed.outside]
    described = {**call, **describe_answers(tensors, ran)}
    return Traced(described, dict(content.lines), ran, (), {}, tuple(dict.fromkeys(doubts))), content


def differences(saved: Traced, call: Mapping[str, str], content: Content) -> Iterator[str]:
    """What does not fit, by name, the plainest first."""
    for before, now, skipped in ((saved.call, call, ()), (saved.state, content.lines, saved.left_out)):
        for name in (*before, *(n for n in now if n not in before)):
            is_left_out = any(name == p or name.startswith((f"{p}.", f"{p}[")) for p in skipped)
            if before.get(name) == now.get(name) or is_left_out:
                continue
            if name not in now:
                yield f"{name} was {before[name]}, and is gone"
            elif name not in before:
                yield f"{name} is new: {now[name]}"
            else:
                yield f"{name} was {before[name]}, and is {now[name]}"
