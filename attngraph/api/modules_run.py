"""What each module of a side was given and returned: in one call of whole sequences, or in all its steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attngraph.api.calls import Call
from attngraph.api.steps import Sequences, Way
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.verify import tensors_of

Given = dict[str, Tensor]
Seen = dict[str, tuple[Given, list[Tensor]]]


def recorded(side: Any, call: Call) -> Seen:
    """What each module of a side was given, by the name or the place of the argument, and returned, in the
    order in which they returned. Of several calls, the values of all tokens, one after the other."""
    model = side.side if isinstance(side, Sequences) else side
    calls: dict[str, list[tuple[Given, list[Tensor]]]] = {}
    if getattr(model, "untraced", "") or not isinstance(model, nn.Module) or isinstance(model, Decoder):
        return {}  # what runs graphs, and no modules

    def keep(name: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
            named = pytree.tree_flatten_with_path({**{str(n): a for n, a in enumerate(args)}, **kwargs})[0]
            given = {_path(path): value for path, value in named if isinstance(value, Tensor)}
            calls.setdefault(name, []).append((given, tensors_of(result)))

        return hook

    hooks = [m.register_forward_hook(keep(n), with_kwargs=True) for n, m in model.named_modules() if n]
    try:
        with torch.no_grad():
            if isinstance(side, Sequences):
                given = side.read(*call)
                rows, tokens = given.ids.shape[:2]
                list(side.logits(given, [Way([*range(rows)], max(1, tokens // 2), False)]))
            else:
                model(*call[0], **call[1])
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(side, Sequences):
        return {name: found[0] for name, found in calls.items()}
    return {name: _joined(found) for name, found in calls.items()}


def _joined(calls: Sequence[tuple[Given, list[Tensor]]]) -> tuple[Given, list[Tensor]]:
    """The values of all tokens: where a call has another number of places in the second dimension only."""
    names = [n for n in calls[0][0] if all(n in given for given, _ in calls)]
    given = {n: torch.cat([g[n] for g, _ in calls], 1) for n in names if _fit([g[n] for g, _ in calls])}
    columns = [list(column) for column in zip(*(result for _, result in calls), strict=False)]
    return given, [torch.cat(column, 1) for column in columns if _fit(column)]


def _fit(parts: Sequence[Tensor]) -> bool:
    return all(
        p.ndim > 1 and (p.shape[:1], p.shape[2:]) == (parts[0].shape[:1], parts[0].shape[2:]) for p in parts
    )


def _path(path: Any) -> str:
    return "".join(str(getattr(part, "key", part)) if n == 0 else str(part) for n, part in enumerate(path))
