"""Products of tokens with the weights of the expert that each goes to (mixtures of experts), in operations
that other runtimes have.

Tokens are sorted by expert, and how many each gets is known when the program runs only. ONNX has no such
product, and the operation of a library such as transformers is not there where the library is not. So every
expert multiplies all tokens, and a token takes the product of its own: as exact, and as many times the work
as there are experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

REMARK = "products of tokens with the weights of their expert: every expert multiplies all tokens"


def by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x[t] @ weight[expert of t]`; zero for tokens behind those of the last expert.

    Args:
        x: `[tokens, D]`, sorted by expert. weight: `[experts, D, H]`. ends: `[experts]`, where each expert's
            tokens end.
    """
    place = torch.arange(x.shape[0], device=x.device)
    expert = (place[:, None] >= ends).sum(-1, keepdim=True)
    found = torch.zeros(x.shape[0], weight.shape[2], dtype=x.dtype, device=x.device)
    for number in range(weight.shape[0]):
        found = torch.where(expert == number, x @ weight[number], found)
    return found
