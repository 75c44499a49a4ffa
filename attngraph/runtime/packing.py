"""Prompts of any lengths as one sequence without padding, and results back in the caller's layout."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Ids = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Packed tokens of several rows. `ids`: `[1, N]` (or `[1, N, C]`); `counts`: tokens of each row;
    `places`: theirs in the caller's layout, `[B, T]`, None if they fill it; `given`: the mask that told
    them; `name`: the model's argument that they were given by, where that is not the usual one."""

    ids: Tensor
    counts: list[int]
    places: Tensor | None = None
    given: Tensor | None = None
    name: str = ""

    @classmethod
    def of_rows(cls, rows: Sequence[Tensor]) -> "Packed":
        """The tokens of these rows, `[T]` each."""
        return cls(torch.cat(list(rows)).unsqueeze(0), [*map(len, rows)])

    @property
    def shape(self) -> tuple[int, int]:
        """The caller's layout, rows and tokens."""
        return (len(self.counts), self.counts[0]) if self.places is None else tuple(self.places.shape)  # type: ignore[return-value]

    @property
    def mask(self) -> Tensor:
        """The places of tokens in the caller's layout, `[B, T]`."""
        if self.places is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.ids.device)
        return self.places

    def last(self) -> Tensor:
        """The packed index of each row's last token, for rows that have tokens."""
        ends = torch.tensor(self.counts).cumsum(0) - 1
        return ends[torch.tensor(self.counts) > 0].to(self.ids.device)

    def rows(self) -> list[Tensor]:
        """The tokens of each row, `[T]`."""
        return list(torch.split(self.ids[0], self.counts))

    def repeated(self, times: int) -> "Packed":
        """Each row so many times."""
        found = Packed.of_rows([row for row in self.rows() for _ in range(times)])
        places, given = (t if t is None else t.repeat_interleave(times, 0) for t in (self.places, self.given))
        return dataclasses.replace(found, places=places, given=given, name=self.name)


def as_ids(prompt: Any) -> Tensor:
    """A prompt, or one row of several, as a tensor of token ids; a TypeError if it holds no whole numbers."""
    try:
        found = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or (found.numel() and (found.is_floating_point() or found.dtype == torch.bool)):
        shown = repr(prompt) if len(repr(prompt)) < 40 else f"a {type(prompt).__name__}"
        raise TypeError(
            f"a prompt is a sequence of token ids, found {shown}; a tokenizer gives them of a text."
        )
    return found if found.numel() else found.to(torch.int64)


def pack(ids: Ids, mask: Tensor | None, device: Callable[[], torch.device]) -> Packed:
    """All real tokens, packed. `device`: of the model, where lists of prompts are put."""
    if not isinstance(ids, Tensor):
        if mask is not None:
            raise ValueError("a list of prompts has no padding, so no attention_mask.")
        if isinstance(ids, str):
            as_ids(ids)
        rows = [row if isinstance(row, Tensor) else as_ids(row) for row in ids]
        rows = [torch.stack(rows)] if rows and rows[0].ndim == 0 else rows
        counts = [len(row) for row in rows]
        if not rows:
            raise ValueError("there are no prompts.")
        kept = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
        return Packed(torch.cat(rows).unsqueeze(0).to(device()), counts, kept.to(device()))
    rank = 3 if ids.is_floating_point() else 2
    if ids.ndim == rank - 1:
        ids, mask = ids.unsqueeze(0), None if mask is None else mask.reshape(1, -1)
    if ids.ndim != rank or 0 in ids.shape[:1]:
        raise ValueError(f"tokens must be [batch, tokens], found {tuple(ids.shape)}.")
    if mask is None:
        batch, width, *inner = ids.shape
        return Packed(ids.reshape(1, batch * width, *inner), [width] * batch)
    given = mask
    if mask.ndim > 2 and mask.shape == (len(ids), *[1] * (mask.ndim - 2), ids.shape[1]):
        # Numbers that are never above zero are added to scores, so they are zero at real tokens.
        is_added = mask.is_floating_point() and bool((mask <= 0).all())
        mask = mask.flatten(1) == 0 if is_added else mask.flatten(1)
    if mask.shape != ids.shape[:2]:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}, the tokens are {tuple(ids.shape[:2])}.")
    kept = mask.to(device=ids.device) != 0
    return Packed(ids[kept].unsqueeze(0), kept.sum(1).tolist(), kept, given)


def unpacked(logits: Tensor, packed: Packed) -> Tensor:
    """The logits `[1, N, V]` in the caller's layout, `[B, T, V]`, with zeros at padding."""
    rows, width = packed.shape
    if packed.places is None or (len(set(packed.counts)) == 1 and packed.counts[0] == width):
        return logits.reshape(rows, width, *logits.shape[2:])
    found = logits.new_zeros((rows, width, *logits.shape[2:]))
    found[packed.mask] = logits[0]
    return found


def as_given(ids: Ids, packed: Packed, pad: int) -> Tensor:
    """The prompts as they were given, `[B, T]`; a list of prompts is padded on the left."""
    if isinstance(ids, Tensor):
        return ids.unsqueeze(0) if ids.ndim == 1 else ids
    longest = max(packed.counts)
    rows = [torch.nn.functional.pad(r, (longest - len(r), 0), value=pad) for r in packed.rows()]
    return torch.stack(rows)


def equal_tokens(one: Tensor, other: Tensor) -> int:
    """How many tokens `[T]` both begin with."""
    shared = min(len(one), len(other))
    different = (one[:shared] != other[:shared]).nonzero()
    return int(different[0]) if len(different) else shared
