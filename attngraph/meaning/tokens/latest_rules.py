"""From which tokens the results of each operation follow (`latest.py`).

An operation without a rule of its own gives what may follow from anything. A number far below all others
hides what is added to it where a softmax, a maximum or a sort looks at it beside a number that does not; any
other use of it may show that.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from attngraph.meaning.masks.fold import HIDES, STEEP_OPS
from attngraph.meaning.tokens.latest import ALL, CONSTANT, LOW, NEVER_LOW, OF_WEIGHTS, Call, Latest, Rule

aten = torch.ops.aten


def tracking() -> Latest:
    """A `Latest` with these rules."""
    return Latest(_RULES, _other)


def _other(mode: Latest, call: Call) -> Any:
    if call.func.is_view:
        return _moved(mode, call)
    if torch.Tag.pointwise in call.func.tags:
        return _pointwise(mode, call)
    return _all_told(mode, call(), ALL)


def _all_told(mode: Latest, found: Any, latest: Tensor | float) -> Any:
    for each in pytree.tree_leaves(found):
        if isinstance(each, Tensor):
            mode.tell(each, latest)
    return found


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, tensors)


def _new(mode: Latest, call: Call) -> Any:
    return call()


def _moved(mode: Latest, call: Call) -> Any:
    """Elements are moved, and their shadows alike."""
    found = call()
    func = aten.reshape.default if call.func in _RESHAPED else call.func  # a shadow's strides may differ

    def moved(of: Callable[[Tensor], Tensor]) -> list[Any]:
        given = (call.args, call.kwargs)
        args, kwargs = pytree.tree_map(lambda t: of(t) if isinstance(t, Tensor) else t, given)
        return pytree.tree_leaves(func(*args, **kwargs))

    results = pytree.tree_leaves(found)
    for each, latest, lowered in zip(results, moved(mode.of), moved(mode.is_lowered), strict=True):
        mode.tell(each, latest)
        mode.tell_lowered(each, lowered)
    if len(call.tensors) == 1 and (some := mode.some(call.tensors[0])):
        along = torch.arange(some[0].shape[-1])
        for each, at, among in zip(results, moved(along.expand_as), moved(lambda _: some[0]), strict=True):
            if at.shape[-1:] == along.shape and (at == along).all():
                mode.tell_some(each, among, some[1])
    if any(map(mode.is_chosen, call.tensors)) and all(map(mode.has_range, call.tensors)):
        least, most = (moved(lambda t, end=end: mode.range(t)[end]) for end in (0, 1))  # type: ignore[misc]
        for each, *ends in zip(results, least, most, strict=True):
            mode.tell_range(each, *ends)
    return found


def _copied(mode: Latest, call: Call) -> Tensor:
    found: Tensor = call()
    mode.tell(found, mode.of(call.args[0]))
    mode.tell_lowered(found, mode.is_lowered(call.args[0]))
    if mode.is_chosen(call.args[0]):
        mode.tell_range(found, *mode.range(call.args[0]))
    return found


def _pointwise(mode: Latest, call: Call) -> Tensor:
    found: Tensor = call()
    name, operands = call.name, [t for t in call.args if isinstance(t, Tensor)]

    def spread(value: Any) -> Tensor:
        return torch.as_tensor(value).expand(found.shape)

    latest = _largest([spread(mode.plain(t)) for t in operands])
    lowered = functools.reduce(torch.logical_or, (spread(mode.is_lowered(t)) for t in operands))
    decides: dict[str, Callable[[Tensor], Tensor]] = {
        **dict.fromkeys(("mul", "bitwise_and", "logical_and"), lambda t: t == 0),
        **dict.fromkeys(("bitwise_or", "logical_or"), lambda t: t if t.dtype == torch.bool else t == -1),
    }
    for operand in operands if name in decides else operands[:1] if name == "div" else ():
        deciding = decides.get(name, decides["mul"])(operand)
        latest = latest.masked_fill(spread(mode.is_known(operand) & deciding) & ~found.isnan(), CONSTANT)
    if name in ("add", "sub"):
        found, latest = _added(mode, call, found, latest)
    elif name in ("mul", "div"):
        low = functools.reduce(torch.logical_or, (spread(mode.is_hidden(t)) for t in operands))
        rest = (spread(mode.is_hidden(t) | mode.is_known(t)) for t in operands)
        low = low & functools.reduce(torch.logical_and, rest) & (found <= -HIDES)
        latest = latest.masked_fill(low & (latest == ALL), LOW)
        for t in call.args:
            lowered = lowered | spread(mode.is_known(t) & (torch.as_tensor(t * 1.0).abs() >= HIDES))
    elif name in ("exp", "exp2", "sigmoid", "relu", "clamp", "clamp_min"):
        latest = latest.masked_fill(spread(mode.is_hidden(operands[0])) & (found == 0), CONSTANT)
    if name in STEEP_OPS and mode.is_chosen_number(operands[-1]):
        lowered = lowered | ~spread(mode.is_known(operands[-1]))
    corners = _corners(mode, call)
    if corners and name in ("lt", "le", "gt", "ge"):
        alike = functools.reduce(torch.logical_and, (c == corners[0] for c in corners)).expand(found.shape)
        found, latest = torch.where(alike, corners[0], found), latest.masked_fill(alike, CONSTANT)
    elif corners and name in _MONOTONE:
        ends = [c.double().expand(found.shape) for c in corners]
        mode.tell_range(found, functools.reduce(torch.minimum, ends), _largest(ends))
    for operand in operands if found.dtype == torch.bool else ():
        some = mode.some(operand) if operand.dtype == torch.bool else None
        if some and operand.shape[-1] == found.shape[-1]:
            given = (torch.full_like(t, some[1]) if t is operand else t for t in call.args)
            among, truths = spread(some[0]), call.func(*given, **call.kwargs)
            known = functools.reduce(
                torch.logical_and, (spread(mode.is_known(t)) for t in operands if t is not operand), among
            )
            if (known | ~among).all() and len(truths[among].unique()) == 1:
                mode.tell_some(found, among, bool(truths[among][0]))
    if name not in NEVER_LOW:
        mode.tell_lowered(found, lowered & (latest != CONSTANT))
    return mode.tell(found, latest)


def _added(mode: Latest, call: Call, found: Tensor, latest: Tensor) -> tuple[Tensor, Tensor]:
    """What is added to a number far below all others is not seen beside it."""
    if not found.is_floating_point() or call.given.get("alpha", 1) != 1:
        return found, latest
    about = found, latest
    known = [mode.is_known(t).expand(found.shape) for t in call.args[:2]]
    for place, operand in enumerate(call.args[:2]):
        value = torch.as_tensor(operand, dtype=found.dtype) * (-1 if call.name == "sub" and place else 1)
        low = (mode.of(operand) <= LOW) & (value <= -HIDES) & (found <= -HIDES / 2) & ~(known[0] & known[1])
        latest = torch.where(low, torch.where(value == -torch.inf, CONSTANT, LOW), latest)
        found = torch.where(low, value, found)
    for one, other in itertools.permutations(call.args[:2]):
        some = mode.some(one) if call.name == "add" else None
        low = mode.is_lowered(other) | mode.is_hidden(other)
        if some and one.shape[-1] == found.shape[-1] and not (some[0] & low).any():
            mode.tell_some(found, some[0].expand(found.shape), some[1])
    if found is not about[0] and (latest == LOW).any():
        mode.tell_sum(found, *about)
    return found, latest


def _corners(mode: Latest, call: Call) -> list[Tensor]:
    """The results at the ends of the ranges of indices; none where an operand has no range."""
    if not any(map(mode.is_chosen, call.tensors)) or not all(map(mode.has_range, call.tensors)):
        return []
    ends = [[end.to(t.dtype) for end in mode.range(t)] if isinstance(t, Tensor) else [t] for t in call.args]
    return [call.func(*choice, **call.kwargs) for choice in itertools.product(*ends)]


def _chosen(mode: Latest, call: Call) -> Tensor:
    """One of two by a condition."""
    found: Tensor = call()
    condition, yes, no = call.args if call.name == "where" else (*call.args[1:], call.args[0])
    asked, first, second = (mode.of(t).expand(found.shape) for t in (condition, yes, no))
    low = [mode.is_hidden(t) for t in (yes, no)]
    hidden, by_data, some = low[0] & low[1], asked != CONSTANT, mode.some(condition)
    is_some_shown = some is not None and not (some[0] & low[not some[1]]).any()
    given = [mode.sum(t) if is_some_shown else (t, mode.plain(t)) for t in (yes, no)]
    follow = (mode.plain(condition), *(latest for _, latest in given))
    either = _largest([t.expand(found.shape) for t in follow]).masked_fill(hidden, LOW)
    number = torch.where(hidden, _higher(yes, no), torch.where(condition, given[0][0], given[1][0]))
    found = torch.where(by_data, number.to(found.dtype), found)
    from_yes, from_no = (mode.is_lowered(t).expand(found.shape) for t in (yes, no))
    by_condition = torch.where(condition, from_yes, from_no)
    mode.tell_lowered(found, torch.where(by_data, from_yes | from_no | (low[0] ^ low[1]), by_condition))
    if (by_data & (low[0] ^ low[1])).any():
        if some is not None and is_some_shown:
            mode.tell_some(found, some[0].expand(found.shape), True)
    elif not by_data.any():
        for operand, taken in ((yes, condition), (no, ~condition)):
            some = mode.some(operand)
            if some is not None and operand.shape == found.shape and not (some[0] & ~taken).any():
                mode.tell_some(found, *some)
    mode.tell(found, torch.where(asked == CONSTANT, torch.where(condition, first, second), either))
    if any(map(mode.is_chosen, (yes, no))) and all(map(mode.has_range, (yes, no))):
        ends = [
            torch.where(asked == CONSTANT, torch.where(condition, a, b), of(a, b))
            for a, b, of in zip(mode.range(yes), mode.range(no), (torch.minimum, torch.maximum), strict=True)
        ]
        mode.tell_range(found, *ends)
    return found


def _higher(a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(a >= b), a, b)


def _dims(call: Call) -> list[int]:
    """The dimensions that a call reduces."""
    rank, dim = call.args[0].ndim, call.given.get("dim")
    dims = range(rank) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return [d % max(rank, 1) for d in dims]


def _along(mode: Latest, call: Call) -> Any:
    """What follows from all places of some dimensions."""
    found, value, dims = call(), call.args[0], _dims(call)
    latest = mode.plain(value)
    if call.name in ("amax", "max", "argmax", "logsumexp") and value.ndim:
        hidden = mode.is_hidden(value)
        latest = torch.where(
            hidden, torch.where(_is_shown(mode, value, hidden, dims), CONSTANT, mode.plain(value)), latest
        )
    if call.name == "cumsum":
        return mode.tell(found, latest.cummax(dims[0]).values if value.ndim else latest)
    if value.ndim:
        latest = latest.amax(dims, keepdim=True)
    for each in pytree.tree_leaves(found):
        mode.tell(each, latest.reshape(each.shape) if latest.numel() == each.numel() else latest)
    return found


def _is_shown(mode: Latest, value: Tensor, hidden: Tensor, dims: Sequence[int]) -> Tensor:
    """Whether scores along these dimensions hide those that are `hidden`: one is not low, whatever the data
    are."""
    shown = ~hidden & (value > -HIDES) & ~mode.is_lowered(value)
    some = mode.some(value) if [*dims] == [value.ndim - 1] else None
    shown = shown if some is None else shown | some[0]
    return functools.reduce(lambda t, d: t.any(d, keepdim=True), dims, shown)


def _softmax(mode: Latest, call: Call) -> Tensor:
    found, value, (dim,) = call(), call.args[0], _dims(call)
    hidden = mode.is_hidden(value)
    hidden = hidden & (_is_shown(mode, value, hidden, [dim]) | (value == -torch.inf))
    latest = mode.plain(value).masked_fill(hidden, CONSTANT).amax(dim, keepdim=True).expand(found.shape)
    return mode.tell(found, latest.masked_fill(hidden & (found == 0), CONSTANT))


def _sort(mode: Latest, call: Call) -> tuple[Tensor, Tensor]:
    """Those that are hidden come last, in the order of their places; so which places the first are among is
    known."""
    found, places = call()
    value, down = call.args[0], bool(call.given.get("descending", False))
    dim = int(call.given.get("dim", -1)) % value.ndim
    hidden = mode.is_hidden(value) & ~mode.is_lowered(value).any(dim, keepdim=True)
    extent = value.shape[dim]
    place = torch.arange(float(extent)).reshape([-1 if d == dim else 1 for d in range(value.ndim)])
    count = (~hidden).sum(dim, keepdim=True)
    first = (place < count if down else place >= extent - count).expand(value.shape)
    shown = mode.plain(value).masked_fill(hidden, CONSTANT).amax(dim, keepdim=True)
    low = mode.of(value).masked_fill(~hidden, CONSTANT).amax(dim, keepdim=True)
    mode.tell(found, torch.where(first, shown, low))
    mode.tell(places, torch.where(first, shown, low.masked_fill(low == LOW, ALL)))

    def ends(there: Tensor) -> tuple[Tensor, Tensor]:
        least = place.masked_fill(~there, extent - 1.0).amin(dim, keepdim=True)
        return least, place.masked_fill(~there, 0.0).amax(dim, keepdim=True)

    of_both = zip(ends(~hidden), ends(hidden), strict=True)
    mode.tell_range(places, *(torch.where(first, a, b) for a, b in of_both))
    return found, places


def _product(mode: Latest, call: Call) -> Tensor:
    """Products of matrices: nothing is added where one factor is zero."""
    found, adds = call(), "add" in call.name
    left, right = call.args[1:3] if adds else call.args[:2]
    (a, zero_a), (b, zero_b) = (
        (mode.plain(t), mode.is_known(t) & (t == 0))
        for t in (left, right[:, None] if right.ndim == 1 else right)
    )
    if not zero_a.any() and not zero_b.any():
        latest = torch.maximum(a.amax(-1, keepdim=True), b.amax(-2, keepdim=True))
    else:
        alike = bool((b == b[..., :1]).all() and (zero_b == zero_b[..., :1]).all())
        columns = [
            torch.maximum(a, b[..., None, :, n])
            .masked_fill(zero_a | zero_b[..., None, :, n], CONSTANT)
            .amax(-1)
            for n in range(1 if alike else b.shape[-1])
        ]
        latest = torch.stack(columns, -1)
    latest = latest[..., 0] if right.ndim == 1 else latest
    if adds:
        latest = _largest([t.expand(found.shape) for t in (latest, mode.plain(call.args[0]))])
    return mode.tell(found, latest)


def _gathered(mode: Latest, call: Call) -> Tensor:
    """Elements along a dimension, by an index of as many dimensions."""
    found, value, index = call(), call.args[0], call.given["index"]
    dim = call.given["dim"] % max(value.ndim, 1)
    latest = mode.of(value)
    if index.ndim == value.ndim:
        latest = latest[tuple(slice(None if d == dim else n) for d, n in enumerate(index.shape))]
    shape = index.shape if index.ndim == value.ndim else [-1 if d == dim else 1 for d in range(value.ndim)]
    least, most, own = (t.reshape(shape) for t in (*mode.range(index, value.shape[dim]), mode.plain(index)))
    place, latest = torch.arange(value.shape[dim]), latest.movedim(dim, -1).unsqueeze(-2)
    least, most = (end.movedim(dim, -1).unsqueeze(-1) for end in (least, most))
    if mode.is_known(index).all():
        mode.tell_lowered(found, call.func(mode.is_lowered(value), *call.args[1:], **call.kwargs))
    else:
        mode.tell_lowered(found, (mode.is_lowered(value) | mode.is_hidden(value)).any())
    read = torch.where((least <= place) & (place <= most), latest, CONSTANT).amax(-1).movedim(-1, dim)
    return mode.tell(found, torch.maximum(read, own.expand(found.shape)))


def _scattered(mode: Latest, call: Call) -> Any:
    """Elements of which some along a dimension are replaced."""
    if call.given.get("reduce") is not None:
        return _all_told(mode, call(), ALL)
    found, value, index, source = call(), call.args[0], call.given["index"], call.given.get("src")
    dim, written = call.given["dim"] % value.ndim, mode.plain(index)
    if isinstance(source, Tensor):
        written = torch.maximum(written, mode.plain(source)[tuple(map(slice, index.shape))])
    place = torch.arange(value.shape[dim]).unsqueeze(-1)
    ends = (*mode.range(index, value.shape[dim]), written)
    least, most, written = (t.movedim(dim, -1).unsqueeze(-2) for t in ends)
    there = torch.where((least <= place) & (place <= most), written, CONSTANT).amax(-1).movedim(-1, dim)
    latest = mode.plain(value).clone()
    part = tuple(slice(None if d == dim else n) for d, n in enumerate(index.shape))
    latest[part] = torch.maximum(latest[part], there)
    low = mode.is_hidden(call.given["value"] if source is None else source)
    lowered = mode.is_lowered(value)
    if low.any() or mode.is_hidden(value).any():
        lowered = lowered.clone()
        lowered[part] |= there > CONSTANT
    if not isinstance(source, Tensor) or not mode.is_lowered(source).any():
        mode.tell_lowered(found, lowered)
    is_whole = dim == value.ndim - 1 and index.shape[:-1] == value.shape[:-1] and index.numel()
    if source is None and is_whole and not low.any():
        least, most = (end[..., :1] for end in mode.range(index, value.shape[dim]))
        among = (least <= place.flatten()) & (place.flatten() <= most)
        mode.tell_some(found, among, bool(call.given["value"]))
    return mode.tell(found, latest)


def _indexed(mode: Latest, call: Call) -> Any:
    """Elements by indices of several dimensions; one that data choose is of any place."""
    found, value, indices = call(), call.args[0], call.args[1]
    indices = indices if call.name == "index" else [indices]
    given = {d: index for d, index in enumerate(indices) if index is not None}
    if any(index.dtype == torch.bool for index in given.values()):
        return _all_told(mode, found, ALL)
    latest = mode.plain(value)
    for dim in (d for d, index in given.items() if not mode.is_known(index).all()):
        latest = latest.amax(dim, keepdim=True).expand(latest.shape)
    if all(mode.is_known(index).all() for index in given.values()):
        mode.tell_lowered(found, aten.index.Tensor(mode.is_lowered(value), indices))
    else:
        mode.tell_lowered(found, (mode.is_lowered(value) | mode.is_hidden(value)).any())
    own = functools.reduce(torch.maximum, map(mode.plain, given.values()))
    dims = list(given)
    begin = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    own = own.reshape([*own.shape, *[1] * (found.ndim - begin - own.ndim)])
    return mode.tell(found, torch.maximum(aten.index.Tensor(latest, indices), own.expand(found.shape)))


def _window(mode: Latest, call: Call) -> Any:
    """What follows from windows of the last dimensions: convolutions, of all channels, and pools."""
    found, weight, latest = call(), call.given.get("weight"), mode.plain(call.args[0])
    size = list(call.given["kernel_size"] if weight is None else weight.shape[2:])
    if call.given.get("transposed") or latest.ndim <= len(size):
        return _all_told(mode, found, ALL)

    def each(name: str, otherwise: list[int]) -> list[int]:
        given = list(call.given.get(name) or otherwise)
        return given * len(size) if len(given) == 1 else given

    stride, padding = each("stride", [1] if weight is not None else size), each("padding", [0])
    if weight is not None:
        latest = torch.maximum(latest.amax(-len(size) - 1, keepdim=True), torch.tensor(OF_WEIGHTS))
    latest = F.pad(latest, [n for p in reversed(padding) for n in (p, p)], value=CONSTANT)
    pool: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(size)]
    pooled = pool(latest, size, stride, 0, each("dilation", [1]), bool(call.given.get("ceil_mode")))
    return _all_told(mode, found, pooled)


def _normed(mode: Latest, call: Call) -> Any:
    found, value = call(), call.args[0]
    dims = range(value.ndim - len(call.given["normalized_shape"]), value.ndim)
    return _all_told(mode, found, mode.plain(value).amax(tuple(dims), keepdim=True).clamp(min=OF_WEIGHTS))


def _padded(mode: Latest, call: Call) -> Tensor:
    found = call()
    mode.tell_lowered(found, F.pad(mode.is_lowered(call.args[0]).to(torch.uint8), call.args[1]).bool())
    return mode.tell(found, F.pad(mode.of(call.args[0]), call.args[1], value=CONSTANT))


def _triangle(mode: Latest, call: Call) -> Tensor:
    shadow = call.func(mode.of(call.args[0]) - CONSTANT, *call.args[1:], **call.kwargs)
    return mode.tell(call(), shadow + CONSTANT)


_RESHAPED = (aten.view.default, aten._unsafe_view.default)
_MONOTONE = frozenset({
    "add", "sub", "mul", "floor_divide", "div", "clamp", "clamp_min", "clamp_max", "minimum", "maximum",
})  # fmt: skip
"""Operations that grow, or fall, with each operand."""
_BY_RULE: dict[Rule, str] = {
    _new: "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty",
    _moved: "_unsafe_view repeat flip roll cat stack slice_scatter select_scatter view_copy expand_copy",
    _copied: "to _to_copy clone lift_fresh_copy",
    _chosen: "where masked_fill",
    _along: "sum nansum mean amax amin max min argmax argmin prod any all logsumexp std var std_mean "
    "var_mean linalg_vector_norm cumsum median count_nonzero",
    _softmax: "_softmax _safe_softmax",
    _sort: "sort",
    _product: "mm bmm addmm baddbmm mv",
    _gathered: "gather index_select",
    _scattered: "scatter",
    _indexed: "index embedding",
    _window: "convolution conv1d conv2d avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices",
    _normed: "native_layer_norm _fused_rms_norm",
    _padded: "constant_pad_nd",
    _triangle: "tril triu",
}
_RULES: dict[str, Rule] = {name: rule for rule, names in _BY_RULE.items() for name in names.split()}
