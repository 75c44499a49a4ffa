"""Text from a language model without a cache: sampling, and beam search.

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
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue each row: ids int64 `[B, T]` to `[B, T + new_tokens]`.

    `model` maps ids `[B, T]` to logits `[B, T, vocab_size]`. Temperature 0 takes the likeliest token
    (greedy); `top_k` restricts the draw to the k likeliest, `top_p` to the fewest tokens whose
    probabilities add up to p (Holtzman et al. 2020), after the temperature and `top_k`. Raises
    ValueError for a negative temperature, `top_k` below 1, or `top_p` outside of (0, 1].
    """
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"temperature={temperature} must not be negative and top_k={top_k} must be at least 1"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be above 0 and at most 1")
    for _ in range(new_tokens):
        logits = model(ids)[:, -1]  # [B, vocab_size]
        if temperature == 0:
            chosen = logits.argmax(dim=-1, keepdim=True)  # [B, 1]
        else:
            if top_k is not None:
                least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # [B, 1]
                logits = logits.masked_fill(logits < least, float("-inf"))
            weights = torch.softmax(logits / temperature, dim=-1)
            if top_p is not None:
                weights = nucleus(weights, top_p)
            chosen = torch.multinomial(weights, 1, generator=generator)
        ids = torch.cat([ids, chosen], dim=1)
    return ids


def nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Probabilities `[B, vocab_size]` with zeros outside of the nucleus: a token is in it if the likelier
    ones add up to less than `top_p`. The likeliest always is. Not normalised again."""
    ordered, places = weights.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered  # what the likelier tokens add up to
    return torch.zeros_like(weights).scatter(-1, places, ordered.masked_fill(before >= top_p, 0.0))


@torch.no_grad()
def beam_search(model: nn.Module, ids: Tensor, new_tokens: int, beams: int) -> tuple[Tensor, Tensor]:
    """The likeliest continuations that a search of some width finds (Sutskever et al. 2014, section 3.2).

    Of all one-token extensions of a row's beams the `beams` likeliest are kept at each step. ids int64
    `[B, T]` to sequences `[B, beams, T + new_tokens]` and the log-probabilities of what was added,
    `[B, beams]`, likeliest first. Raises ValueError for fewer than 1 beam or more than the
    vocabulary has tokens.
    """
    if beams < 1:
        raise ValueError(f"beams={beams} must be at least 1")
    batch = ids.shape[0]
    paths = ids.unsqueeze(1)  # [B, 1, T]: one beam, until there are others
    scores = torch.zeros(batch, 1, device=ids.device)
    for _ in range(new_tokens):
        last = model(paths.flatten(0, 1))[:, -1].log_softmax(-1)  # [B * beams so far, vocab_size]
        vocabulary = last.shape[-1]
        if beams > vocabulary:
            raise ValueError(f"beams={beams} must be at most the {vocabulary} tokens of the vocabulary")
        total = scores.unsqueeze(-1) + last.unflatten(0, (batch, -1))
        scores, places = total.flatten(1).topk(beams)  # [B, beams]
        source, token = places // vocabulary, places % vocabulary
        kept = paths.gather(1, source.unsqueeze(-1).expand(-1, -1, paths.shape[-1]))
        paths = torch.cat([kept, token.unsqueeze(-1)], dim=-1)
    return paths, scores
