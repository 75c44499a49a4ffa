"""Well-known score programs by name, with example sizes and tensors.

For `attngraph show`, docs and tests. torch is imported when tensors are made: `attngraph --help` lists the
names. The compiler uses none of these names: it recognises attention by what it computes, and these are only
examples of the language (docs/score-programs.md).
"""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class WellKnown:
    """`text` is the program, `about` describes it, `sizes` are the defaults of its n0, n1, ..., `small` those
    for a picture of two dozen tokens; `tensors` says what it reads."""

    text: str
    about: str
    sizes: tuple[int, ...] = ()
    small: tuple[int, ...] = ()
    tensors: str = ""

    def reads(self, queries: int, keys: int, sizes: tuple[int, ...]) -> "tuple[Tensor, ...]":
        """Example tensors r0, r1, ... for numbers of queries and keys, and sizes."""
        import torch

        match self.tensors:
            case "documents":  # [1, keys]: an eighth, a half, a quarter and an eighth of the tokens
                eighths = torch.arange(max(queries, keys)) * 8 // max(queries, keys)
                return (torch.tensor([0, 1, 1, 1, 1, 2, 2, 3])[eighths][None],)
            case "padding":  # [1, keys], true at tokens: the last quarter is padding
                return ((torch.arange(keys) < keys - keys // 4)[None],)
            case "slopes":  # [8]: those of ALiBi for 8 heads (Press et al. 2022)
                return (2.0 ** -torch.arange(1, 9),)
            case "sinks":  # [8]: a logit for each of 8 heads
                return (torch.zeros(8),)
            case "distances":  # [8, 2 * n0 + 1]: one bias for each distance up to n0, before and behind
                return (torch.zeros(8, 2 * sizes[0] + 1),)
        return ()


WELL_KNOWN: dict[str, WellKnown] = {
    "full": WellKnown("s = 0.125 * dot", "every query sees every key"),
    "causal": WellKnown("s = 0.125 * dot; keep k <= q", "a token sees itself and what came before"),
    "causal-fill": WellKnown("s = 0.125 * dot; keep k <= q else -1e9",
        "causal, written with a large number instead of -inf"),
    "window": WellKnown("s = 0.125 * dot; keep k <= q and k > q - n0",
        "the last n0 tokens (Mistral)", (256,), (6,)),
    "both-ways": WellKnown("s = 0.125 * dot; keep abs(q - k) <= n0",
        "n0 tokens to either side (Longformer)", (128,), (3,)),
    "window-global": WellKnown("s = 0.125 * dot; keep abs(q - k) <= n0 or k < n1 or q < n1",
        "a window, and n1 tokens that see all and are seen by all (Longformer, BigBird)", (128, 16), (2, 2)),
    "streaming": WellKnown("s = 0.125 * dot; keep k <= q and (k > q - n0 or k < n1)",
        "a window and the first n1 tokens (StreamingLLM)", (256, 4), (5, 2)),
    "prefix": WellKnown("s = 0.125 * dot; keep k <= q or k < n0",
        "the first n0 tokens see each other, the rest is causal", (256,), (8,)),
    "chunks": WellKnown("s = 0.125 * dot; keep k <= q and k // n0 == q // n0",
        "causal within chunks of n0 tokens", (256,), (8,)),
    "dilated": WellKnown("s = 0.125 * dot; keep k <= q and k > q - n0 and (q - k) % n1 == 0",
        "every n1-th of the last n0 tokens (LongNet)", (512, 4), (16, 3)),
    "strided": WellKnown("s = 0.125 * dot; keep k <= q and (k > q - n0 or (q - k) % n0 == 0)",
        "the last n0 tokens, and before them every n0-th (Sparse Transformer)", (128,), (6,)),
    "fixed": WellKnown("s = 0.125 * dot; keep k <= q and (k // n0 == q // n0 or k % n0 >= n0 - n1)",
        "the own stretch of n0 tokens, and the last n1 of each earlier one (Sparse Transformer)",
        (128, 32), (6, 2)),
    "padding": WellKnown("s = 0.125 * dot; keep r0[b, k]", "keys at which r0 is true", tensors="padding"),
    "documents": WellKnown("s = 0.125 * dot; keep k <= q and r0[b, k] == r0[b, q]",
        "causal, within the document that r0 numbers", tensors="documents"),
    "alibi": WellKnown("s = 0.125 * dot + r0[h] * (k - q); keep k <= q",
        "causal, with a slope r0 for each head", tensors="slopes"),
    "relative": WellKnown("s = 0.125 * dot + r0[h, min(max(k - q, -n0), n0) + n0]",
        "a bias for each head and distance, distances beyond n0 alike (Shaw et al., T5)",
        (128,), (6,), "distances"),
    "softcap": WellKnown("s = 50 * tanh(0.125 * dot / 50); keep k <= q",
        "causal, scores bent to within 50 (Gemma 2)"),
    "sinks": WellKnown("s = 0.125 * dot; keep k <= q; sink r0[h]",
        "causal, with a learned share of the weight that goes nowhere (gpt-oss)", tensors="sinks"),
    "dropout": WellKnown("s = 0.125 * dot; p = where(random(1, b, h, q, k) < 0.9, p / 0.9, 0.0)",
        "a tenth of the weights dropped"),
}  # fmt: skip
