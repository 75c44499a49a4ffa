"""What an export wrote, and how each attention is written."""

import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from attngraph.ir.ops.cached_attention import Store


@dataclasses.dataclass(frozen=True)
class ExportedAttention:
    """One attention: its name in the model, how it is written ("Attention operation",
    "scaled_dot_product_attention" or "plain operations"), what is to be said of it, and its program."""

    name: str
    how: str
    words: str
    program: str

    def __str__(self) -> str:
        return f"{self.name}: {self.how}" + (f" ({self.words})" if self.words else "")


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What `attngraph.export` returns.

    Attributes:
        path: the file. format: "pt2" or "onnx".
        attentions: every recognised attention and how it is written.
        inputs, outputs: their names, in order.
        checked: what the answers of the file were compared with, and how far apart they are; "" if the
            check was left out.
        stores: what a decoder keeps of tokens: its inputs `past_...`, in order.
        remarks: what else is to be known: dimensions that became numbers, attentions not recognised.
    """

    path: Path
    format: str
    attentions: tuple[ExportedAttention, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    checked: str = ""
    remarks: tuple[str, ...] = ()
    stores: tuple[Store, ...] = ()

    def empty_cache(self, rows: int) -> list[Tensor]:
        """What a decoder is given for `past` with prompts."""
        return empty_cache(self.stores, rows)

    def count(self, how: str) -> int:
        """How many attentions are written so."""
        return sum(a.how == how for a in self.attentions)

    def __str__(self) -> str:
        ways = collections.Counter(a.how for a in self.attentions)
        shown = ", ".join(f"{n} as {how}" for how, n in ways.items()) or "none recognised"
        lines = [f"{self.path}: {len(self.attentions)} attention(s): {shown}"]
        lines += [f"  inputs   {', '.join(self.inputs)}", f"  outputs  {', '.join(self.outputs)}"]
        lines += [f"  {a}" for a in dict.fromkeys(map(str, self.attentions))]
        lines += [f"  {remark}" for remark in self.remarks]
        lines += [f"  checked: {self.checked}" if self.checked else "  not checked"]
        return "\n".join(lines)


def empty_cache(stores: Sequence[Store], rows: int, tokens: int = 0) -> list[Tensor]:
    """A cache for so many rows and tokens, of zeros."""
    found: list[Tensor] = []
    for about in stores:
        shape = list(about.shape)
        shape[about.row_dim], shape[about.token_dim] = rows, tokens
        found.append(torch.zeros(shape, dtype=about.dtype))
    return found
