"""Attention that does not fuse, and a command that says why and writes a patch that makes it fuse.

    attngraph explain examples/guarded_softmax.py:Guarded --json
    attngraph advise examples/guarded_softmax.py:Guarded > fix.patch; git apply fix.patch

A shifted softmax needs no small number in its divisor: the largest of its exponentials is 1.
"""

import torch
from torch import nn


class Guarded(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.q(x) @ self.k(x).mT
        e = torch.exp(s - s.amax(-1, keepdim=True))
        return (e / (e.sum(-1, keepdim=True) + 1e-9)) @ x
