"""Log-probabilities of tokens, with the same bits for the same logits wherever these lie."""

import functools

import torch
from torch import Tensor

from attngraph.ir.dtypes import FLOATS
from attngraph.ir.language.score import IN_ORDER
from attngraph.ir.ops.declare import with_value


@functools.cache
def _program(width: int, dtype: str) -> str:
    """The largest of a token's logits, and the logarithm of the sum of all exponentials beside it."""
    word = "" if dtype == "float32" else f" {dtype}"
    return "\n".join((
        f"r0[t, {width}]{word}", f"r1[] = amax[j < {width}] r0[t, j]",
        f"r2[] = sum[j < {width}] exp(r0[t, j] - r1[])", "r3[] = log(r2[])", "return r1[t], r3[t]", IN_ORDER,
    ))  # fmt: skip


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token under its logits, `[...]`, in float32 (of float64 logits in float64).

    With `consistent=True`, tokens that were sampled and the same tokens in a training step have equal logits,
    and so the same bits here: the ratio of their probabilities is exactly 1. Gradients are those of
    `log_softmax`.

    Args:
        logits: `[..., V]`. tokens: int64 `[...]`, on the same device.

    Raises:
        ValueError: the shapes do not go together. BackendError: there is no C compiler, on a CPU.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits are [..., vocabulary] and tokens [...]; found {list(logits.shape)} and "
            f"{list(tokens.shape)}."
        )
    picked = logits.detach().gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if logits.dtype not in FLOATS or not logits.is_cpu or not logits.numel():
        value = torch.log_softmax(logits.detach(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    else:
        rows = logits.detach().reshape(-1, logits.shape[-1])
        text = _program(rows.shape[1], str(rows.dtype).removeprefix("torch."))
        top, rest = torch.ops.attngraph.token_program([rows], text)
        value = picked.float() - top.view(tokens.shape) - rest.view(tokens.shape)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        return value
    wide = logits if logits.dtype == torch.float64 else logits.float()
    derived = torch.log_softmax(wide, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return with_value(derived, value)
