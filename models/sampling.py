"""Sampling text from a language model, one token at a time and without a cache.

Each new token is drawn from softmax(logits / temperature) of the last position, then appended; the
model processes the whole sequence again for the next one, which costs O(T^2 C) per token.
"""

import torch
from torch import Tensor, nn


@torch.no_grad()
def sample(
    model: nn.Module,
    ids: Tensor,
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row: ids int64 `[B, T]` to `[B, T + new_tokens]`.

    `model` maps ids `[B, T]` to logits `[B, T, vocab_size]`. Temperature 0 takes the likeliest token
    (greedy); `top_k` restricts the draw to the k likeliest. Raises ValueError for a negative
    temperature or `top_k` below 1.
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature={temperature} must not be negative and top_k={top_k} must be at least 1"
        )
    for _ in range(new_tokens):
        logits = model(ids)[:, -1]  # [B, vocab_size]
        if temperature == 0:
            chosen = logits.argmax(dim=-1, keepdim=True)  # [B, 1]
        else:
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # [B, 1]
                logits = logits.masked_fill(logits < least, float("-inf"))
            weights = torch.softmax(logits / temperature, dim=-1)
            chosen = torch.multinomial(weights, 1, generator=generator)
        ids = torch.cat([ids, chosen], dim=1)
    return ids
