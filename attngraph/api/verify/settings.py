"""What modules of both sides with one name keep that is not the same: numbers, words, buffers.

A difference of values enters where a number is used; the line that computed it may be one of a constructor.
So the module is made again, from attributes that are named as its constructor's arguments are, with every
line followed: the first after which the two have other values is named.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attngraph.api.verify.recorded import mark, marks_alike
from attngraph.api.verify.verdict import Difference
from attngraph.capture.lines import line_at, line_of, room_of
from attngraph.capture.state.kinds import Place

_FOREIGN = {"torch", *sys.stdlib_module_names}
"""Packages whose functions are not followed."""
_LARGE = 1 << 26
"""How many weights a module may have that is made again."""
_MOST = 3
"""How many settings are told."""
_CLOSE = 1e-6
"""How far buffers may be apart, which are numbers of float32 before they are widened."""
_HAS = "a weight"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class _Setting(NamedTuple):
    """`name`, of the module of this name in both sides, which is `mine` in the reference and `theirs` in the
    candidate."""

    module: str
    name: str
    mine: Any
    theirs: Any


def settings_apart(reference: Any, candidate: Any, enters: str = "") -> list[Difference]:
    """What modules of the same names have set otherwise, with the lines that did. `enters`: the module in
    which a difference enters, whose settings come first."""
    if not isinstance(reference, nn.Module) or not isinstance(candidate, nn.Module):
        return []
    theirs = dict(candidate.named_modules())
    pairs = {name: (one, theirs[name]) for name, one in reference.named_modules() if name in theirs}
    found = [s for name, (a, b) in pairs.items() for s in _of_modules(name, a, b)]
    first: dict[tuple[str, str, str], _Setting] = {}
    for setting in sorted(found, key=lambda s: not (enters and f"{s.module}.".startswith(f"{enters}."))):
        first.setdefault((setting.name, _text(setting.mine), _text(setting.theirs)), setting)
    told = []
    for (name, one, other), setting in [*first.items()][:_MOST]:
        owner = f" of {setting.module}" if setting.module else ""
        one, other = ("one", "another") if one == other else (one, other)
        about = f"{name}{owner} is {one} in the reference, {other} in the candidate"
        lines = made_at(reference, candidate, setting.module, name)
        told.append(Difference("setting", about, *lines, code="setting"))
    return told


def _text(value: Any) -> str:
    text = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# --- what is not the same ---


def _of_modules(name: str, mine: nn.Module, theirs: nn.Module) -> Iterator[_Setting]:
    if type(mine).__qualname__ != type(theirs).__qualname__ and not (_has_parts(mine) and _has_parts(theirs)):
        yield _Setting(name, "the class", type(mine).__name__, type(theirs).__name__)
        return
    one, other = _kept(mine), _kept(theirs)
    for key in one.keys() & other.keys():
        if not _equal(one[key], other[key]):
            yield _Setting(name, key, one[key], other[key])


def _has_parts(module: nn.Module) -> bool:
    """Whether a module has weights or modules: the class of one that has none is what it computes."""
    return any(True for _ in module.children()) or any(True for _ in module.parameters())


def _kept(module: nn.Module) -> dict[str, Any]:
    """Plain values that a module keeps, also in a configuration; its buffers; and which weights it has."""
    found: dict[str, Any] = dict(module.named_buffers(recurse=False))
    found |= {n: None if w is None else _HAS for n, w in module._parameters.items()}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        if _is_plain(value):
            found[name] = value
        elif not isinstance(value, (nn.Module, Tensor, type)) and hasattr(value, "__dict__"):
            inner = {f"{name}.{n}": v for n, v in vars(value).items() if not n.startswith("_")}
            found |= {n: v for n, v in inner.items() if _is_plain(v)}
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and marks_alike(mark(a), mark(b), _CLOSE, in_order=True)
    return type(a) is type(b) and repr(a) == repr(b)


# --- where it was made ---


def kept_at(sides: Sequence[Any], leaves: Sequence[Tensor | None]) -> tuple[str, str]:
    """The lines of both sides that made these tensors, which modules keep; "" if they do not."""
    reference, candidate = sides
    if not isinstance(reference, nn.Module) or not isinstance(candidate, nn.Module):
        return "", ""
    tensors = ([*side.named_buffers(), *side.named_parameters()] for side in (reference, candidate))
    pairs = zip(tensors, leaves, strict=True)
    names = [next((name for name, tensor in named if tensor is leaf), "") for named, leaf in pairs]
    module, _, name = (names[1] or names[0]).rpartition(".")
    return made_at(reference, candidate, module, name) if name else ("", "")


def made_at(reference: nn.Module, candidate: nn.Module, module: str, name: str) -> tuple[str, str]:
    """The lines of both sides, "FILE:LINE" or "", that gave modules another `name`: the first of a
    constructor after which values are not the same, else those that set it. What a layer of torch has, and
    what a constructor is given, is its owner's."""
    mine, theirs = (dict(side.named_modules()) for side in (reference, candidate))
    owner, kept = module, name
    while owner and (_is_torchs(mine.get(owner)) or _is_torchs(theirs.get(owner))):
        owner, _, kept = owner.rpartition(".")
    if owner not in mine or owner not in theirs:
        return "", ""
    first, second = (_line_setting(side[owner], kept.partition(".")[0]) for side in (mine, theirs))
    if owner != module and first and second:
        return first, second
    given = True
    while given:
        steps = _constructed(mine[owner]), _constructed(theirs[owner])
        lines, given = _first_apart(*steps)
        if all(lines):
            return lines
        given |= not all(steps)
        given, owner = given and bool(owner), owner.rpartition(".")[0]
    return ("", "") if "." in kept else (first, second)  # a configuration's is not made here


def _line_setting(module: nn.Module, name: str) -> str:
    init: Any = type(module).__init__
    return line_of(Place(module, name), init) or line_of(Place(module, name), module)


class _Step(NamedTuple):
    """A line of a function that is about to run, `ran`, "FILE:LINE", that which ran before: in the function,
    or the one that calls it ("": none); and the values of its variables."""

    code: Any
    line: int
    ran: str
    values: dict[str, Any]


def computed_at(reference: Callable[[], Any], candidate: Callable[[], Any]) -> tuple[str, str]:
    """The first line of each side after which a variable has another number than the other side's, in calls
    of both; "" if their lines or what they are given are not the same until there."""
    one, other = (_followed(side, numbers=True) for side in (reference, candidate))
    return _first_apart(one, other)[0]


def _first_apart(one: Sequence[_Step], other: Sequence[_Step]) -> tuple[tuple[str, str], bool]:
    """The lines after which steps are not the same, and whether they are not from the first on."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if (a.code.co_qualname, a.line) != (b.code.co_qualname, b.line):
            break
        if a.values != b.values:
            return (a.ran, b.ran), n == 0
    return ("", ""), False


def _followed(run: Callable[[], Any], numbers: bool = False) -> list[_Step]:
    """The steps of a call; none if it fails. `numbers`: of variables only those that are no tensors."""
    found, ran, before = list[_Step](), dict[int, str](), sys.gettrace()
    shown = (lambda value: repr(value) if isinstance(value, (int, float)) else None) if numbers else _shown

    def trace(frame: Any, event: str, value: Any) -> Any:
        if event == "call":
            if room_of(frame) in _FOREIGN or frame.f_code.co_filename.startswith("<"):
                return None
            caller = frame.f_back
            ran[id(frame)] = line_at(caller) if id(caller) in ran else ""
        elif event in ("line", "return"):
            values = {n: shown(v) for n, v in frame.f_locals.items()}
            values |= {"return": shown(value)} if event == "return" else {}
            found.append(_Step(frame.f_code, frame.f_lineno, ran[id(frame)], values))
            ran[id(frame)] = line_at(frame)
        if event == "return":
            del ran[id(frame)]
        return trace

    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            sys.settrace(trace)
            run()
    except Exception:  # the user's code with arguments that it may not take
        return []
    finally:
        sys.settrace(before)
    return found


def _constructed(module: nn.Module) -> list[_Step]:
    """The steps in which a module like this one is made; none if its arguments are not known."""
    kind = type(module)
    init: Any = kind.__init__
    parameters = list(inspect.signature(init).parameters.values())[1:]
    given = {p.name: getattr(module, p.name) for p in parameters if hasattr(module, p.name)}
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    size = sum(w.numel() for w in module.parameters())
    unknown = any(p.kind not in plain or (p.name not in given and p.default is p.empty) for p in parameters)
    if unknown or size > _LARGE or _is_torchs(module):
        return []
    return _followed(functools.partial(kind, **given))


def _is_torchs(module: nn.Module | None) -> bool:
    return module is None or type(module).__module__.partition(".")[0] == "torch"


def _shown(value: Any, deep: bool = True) -> Any:
    """What of a value is compared."""
    if isinstance(value, nn.Module):
        return {n: _shown(v) for n, v in _kept(value).items()} if "_buffers" in vars(value) else None
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        return tuple(f"{n:.6g}" for n in mark(value)) if value.device.type != "meta" else None
    if isinstance(value, (list, tuple)) and deep:
        return [_shown(v, deep=False) for v in value]
    if _is_plain(value):
        return repr(value)
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return None
    return {n: repr(v) for n, v in vars(value).items() if not n.startswith("_") and _is_plain(v)}
