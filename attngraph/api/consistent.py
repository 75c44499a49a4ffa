"""`consistent=True` for whole sequences: the logits are those of the model's decoder, whose sums have one
order.

A decoder computes a token's logits with the same bits in whatever batch, chunk, page and state
(`passes/order_sums.py`). So whole sequences are prompts to it: they have its bits by construction, and not
because two graphs happen to round alike. What else the model returns, and gradients, are the compiled
graph's: gradients of the same function, at values that differ by rounding.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.arguments import by_name
from attngraph.api.build import logits_among
from attngraph.capture.structure import flatten, unflatten
from attngraph.errors import NoDecoderError
from attngraph.ir.ops.declare import with_value
from attngraph.runtime.decoder import Decoder

log = logging.getLogger("attngraph")
NEAR = 0.01
"""By which share of the largest logit the decoder's may differ from the graph's: by more than any rounding is
another function (dropout, a batch norm in training mode)."""


Alone = dict[Any, tuple[list[Any], Any, int]]
"""What calls of one kind return besides logits, where that is no tensor: leaves, structure, and the place of
the logits."""


def consistently(
    decoder: Decoder, compute: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    alone: Alone, key_of: Callable[[], Any],
) -> Any:  # fmt: skip
    """The result of a call of the model, with the decoder's logits.

    Args:
        compute: gives the compiled graph's result of the same call.
        key_of: what a trace of this call depends on: the model's state, modes, arguments that are no tensors.
        alone: of earlier calls; a call of such a kind needs the decoder's logits and nothing else.

    NoDecoderError where the model has no decoder, or is not called with tokens.
    """
    found, mask = decoded(decoder, args, kwargs)
    kind = key_of() if _needs_logits_alone(decoder._model, mask) else None
    if kind in alone:
        others, spec, place = alone[kind]
        return unflatten([*others[:place], found, *others[place + 1 :]], spec)
    result = compute()
    leaves, spec = flatten(result)
    place = logits_among(leaves, spec)
    logits = leaves[place]
    if found.shape != logits.shape:
        raise NoDecoderError(
            f"consistent=True computes logits of every token, {list(found.shape)}; this call returns "
            f"{list(logits.shape)}."
        )
    theirs = logits.detach()
    if mask is not None:  # at padding the graph's results stand
        found = torch.where(mask.bool().unsqueeze(-1), found, theirs)
    far = (found - theirs).abs().flatten(1).amax(1) > NEAR * theirs.abs().amax()
    if far.any():
        log.warning(
            "consistent=True: for %d of %d row(s) this call computes something else than a decoder of the "
            "model does (dropout in training, or positions that count padding). Their results are the "
            "graph's, and not the same bits elsewhere.", int(far.sum()), len(far),
        )  # fmt: skip
        found = torch.where(far[:, None, None], theirs, found)
    elif kind is not None and sum(isinstance(leaf, Tensor) for leaf in leaves) == 1:
        alone[kind] = leaves, spec, place
    leaves[place] = with_value(logits, found) if logits.requires_grad else found
    return unflatten(leaves, spec)


def _needs_logits_alone(model: Any, mask: Tensor | None) -> bool:
    """Whether the graph may be left out: not for gradients, at padding, or in a mode that computes something
    else."""
    is_training = isinstance(model, nn.Module) and model.training
    return not (torch.is_grad_enabled() or is_training or (mask is not None and not mask.bool().all()))


def decoded(
    decoder: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The logits of a call's tokens, by a prompt to the decoder, and the mask of the real ones."""
    given = by_name(decoder._derived.signature, args, kwargs)
    named = {
        name: value for name, value in given.items() if isinstance(value, Tensor) and name not in _BESIDE
    }
    argument = decoder._derived.argument({n: v for n, v in given.items() if n not in named})
    ids, mask = named.pop(argument, None), named.pop("attention_mask", None)
    with _in_eval_mode(decoder._model), torch.no_grad():
        return decoder.prefill(ids, mask, **named)[0], mask


_BESIDE = frozenset({"labels"})
"""Arguments of transformers' models on which logits do not depend."""


@contextlib.contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """Run a block with all layers in eval mode, and put each back into its own."""
    modules = [m for m in model.modules() if m.training] if isinstance(model, nn.Module) else []
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module in modules:
            module.training = True
