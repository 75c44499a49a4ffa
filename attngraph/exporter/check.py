"""Compares the answers of an exported file with those of the model, by the rule of `runtime/verify.py`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.compare_sides import resized
from attngraph.capture.captured import Captured
from attngraph.errors import ExportError
from attngraph.exporter.formats import Run
from attngraph.exporter.report import empty_cache
from attngraph.exporter.tracing import varies
from attngraph.runtime.step import Step
from attngraph.runtime.verify import compare, logits_of_tokens, tensors_of


def check_whole(
    run: Run, captured: Captured, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    named: Sequence[str],
) -> str:  # fmt: skip
    """What is to be said of the comparison for the example call, for a smaller one, and for sizes of one;
    ExportError where the answers differ."""

    def runs(*a: Any, **k: Any) -> list[Tensor]:
        return list(run(tensors_of((a, {n: k[n] for n in named}))))

    agreement = compare(runs, model, args, kwargs)
    if not agreement.holds:
        raise ExportError(f"the exported model is {agreement}. The file was not kept.")
    told = str(agreement)
    less = _of_sizes(captured, args, kwargs, lambda n: max(2, n - 1))
    if less is not None:
        other = compare(runs, model, *less)
        if not other.holds:
            raise ExportError(f"the exported model is {other} for other sizes. The file was not kept.")
        told += "; equal for other sizes too"
    ones = _of_sizes(captured, args, kwargs, lambda _: 1)
    if ones is None:
        return told
    try:
        holds = compare(runs, model, *ones).holds
    except Exception:
        holds = False
    return told if holds else f"{told}; sizes of 1 where the example has more: not equal, so give at least 2"


def _of_sizes(
    captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any], size: Callable[[int], int]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The example call with other sizes, cut from its tensors; None where sizes do not vary by themselves."""
    symbols = {extent for shape in captured.shapes for extent in shape if varies(extent)}
    if not symbols or not all(getattr(s, "is_Symbol", False) for s in symbols):
        return None
    hints = {str(s): captured.graph.hints[str(s)] for s in symbols}
    chosen = {name: size(n) for name, n in hints.items()}
    at_least_two = {name: max(2, n) for name, n in chosen.items()}
    if chosen == hints or not captured.graph.admits(at_least_two):
        return None
    return resized(args, kwargs, captured.shapes, chosen)


def check_decoder(
    run: Run, step: Step, model: Callable[..., Any], ids: Tensor, inputs: Mapping[str, Any], padding: bool
) -> str:
    """What is to be said of the comparison: prompts first, then single tokens; all rows, then one row alone.
    ExportError where the answers differ."""

    def logits(ids: Tensor, skipped: Sequence[int]) -> Tensor:
        total = ids.shape[1]
        counts = [n for n in (total - 2, 1, 1) if n > 0] if total > 2 else [1] * total
        past, found, at = empty_cache(step.plan.stores, ids.shape[0]), list[Tensor](), 0
        for count in counts:
            real = torch.tensor([at + count - skip for skip in skipped], dtype=torch.int64)
            made, *past = run([ids[:, at : at + count], *([real] if padding else []), *past])
            found.append(made)
            at += count
        return torch.cat(found, 1)

    def stepped(ids: Tensor) -> list[Tensor]:
        skipped = _padded(ids, padding)
        rows = zip(logits(ids, skipped), skipped, strict=True)
        return [*(row[skip:] for row, skip in rows), logits(ids[:1], [0])[0]]

    agreement = compare(stepped, _Whole(model, step.name, dict(inputs), padding), (ids,))
    if not agreement.holds:
        raise ExportError(f"the exported decoder is {agreement}. The file was not kept.")
    return f"prompts and then single tokens, {agreement}"


class _Whole(nn.Module):
    """The model's logits for whole sequences: of each row without its padding, then of the first row."""

    def __init__(self, model: Callable[..., Any], name: str, inputs: dict[str, Any], padding: bool) -> None:
        super().__init__()
        self.model = model
        self.name, self.given, self.padding = name, inputs, padding

    def forward(self, ids: Tensor) -> list[Tensor]:
        rows = [row[None, skip:] for row, skip in zip(ids, _padded(ids, self.padding), strict=True)]
        return [self._logits(tokens)[0] for tokens in (*rows, ids[:1])]

    def _logits(self, ids: Tensor) -> Tensor:
        return logits_of_tokens(
            lambda end: self.model(**{self.name: ids[:, :end], **self.given}), ids.shape[1]
        )


def _padded(ids: Tensor, padding: bool) -> list[int]:
    """How many tokens of each row are taken as padding."""
    most = max(0, min(3, ids.shape[1] - 3))
    return [row % (most + 1) if padding else 0 for row in range(ids.shape[0])]
