"""How integers of 4 bits lie in bytes, two in each.

    low first by 1              byte 0 has elements 0 and 1 of its row, the first in its low bits
    high first by 32 less 8     byte 0 has elements 0 and 32, byte 31 elements 31 and 63, byte 32 64 and 96:
                                runs of 32 neighbours have one half of 32 bytes; 8 is subtracted from each
    low first by 1 signed       the digits are in two's complement, -8 .. 7
    low first by 1 of outputs   byte (0, d) has elements (0, d) and (1, d) of a matrix [out, in]

The words are part of a graph's text and of a token program's.
"""

import dataclasses
import re

import torch
from torch import Tensor

BITS = 4
WORD = "int4"
"""Stands before these words where a dtype may stand."""
_WORDS = re.compile(r"(low|high) first by (\d+)( signed)?(?: less (-?\d+))?( of outputs)?")


@dataclasses.dataclass(frozen=True)
class Packed:
    """A byte has two elements that are `run` apart. What a digit stands for: itself or, if `signed`, the
    number that it is in two's complement, `less` a number."""

    run: int = 1
    high_first: bool = False
    signed: bool = False
    less: int = 0
    of_outputs: bool = False

    def __str__(self) -> str:
        words = [f"{'high' if self.high_first else 'low'} first by {self.run}"]
        words += ["signed"] * self.signed
        words += [f"less {self.less}"] * bool(self.less)
        return " ".join([*words, *["of outputs"] * self.of_outputs])

    @staticmethod
    def of(text: str) -> "Packed":
        """What the words say; ValueError where they are others."""
        found = _WORDS.fullmatch(text)
        if found is None or int(found[2]) < 1:
            raise ValueError(f"no way in which integers of 4 bits lie in bytes: {text!r}")
        return Packed(int(found[2]), found[1] == "high", bool(found[3]), int(found[4] or 0), bool(found[5]))

    def splits(self, depth: int, group: int, vector: int) -> bool:
        """Whether rows of `depth` elements, of which each `group` has a scale of its own, fall into pieces of
        whole vectors of bytes whose elements have one scale, or one for each half of a byte."""
        if self.of_outputs or depth % (2 * self.run):
            return False
        if self.run > 1 and self.run % vector and 2 * self.run != depth:
            return False
        if group == depth:
            return True
        if group % (2 * self.run) == 0:
            return group // 2 % vector == 0
        return group % vector == 0 and self.run % group == 0

    def unpacked(self, data: Tensor, outs: int, rows: slice = slice(None)) -> Tensor:
        """The matrix `[outs, in]` of int8 whose bytes `data` has in the order of its elements, or some of its
        rows; an integer of several bytes begins with its lowest, as wherever PyTorch runs."""
        data = data.contiguous().view(torch.uint8)
        if self.of_outputs:
            return self._whole(data.reshape(outs // 2, -1), outs)[rows]
        data = data.reshape(outs, -1)[rows]
        return self._whole(data, data.shape[0])

    def _whole(self, data: Tensor, outs: int) -> Tensor:
        low, high = data & 15, data >> BITS
        halves = (high, low) if self.high_first else (low, high)
        if self.of_outputs:
            runs = [half.reshape(-1, self.run, half.shape[1]) for half in halves]
            whole = torch.stack(runs, 1).reshape(outs, -1)
        else:
            whole = torch.stack([half.reshape(outs, -1, self.run) for half in halves], 2).reshape(outs, -1)
        whole = (whole ^ 8 if self.signed else whole).view(torch.int8)
        less = self.less + 8 * self.signed
        return whole - less if less else whole
