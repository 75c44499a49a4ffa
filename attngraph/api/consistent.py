"""`consistent=True` for whole sequences: the logits are those of the model's decoder, whose sums have one
order.

A decoder computes a token's logits with the same bits in whatever batch, chunk, page and state
(`passes/order_sums.py`). So whole sequences are prompts to it: they have its bits by construction, and not
because two graphs happen to round alike. What else the model returns, and gradients, are the compiled
graph's: gradients of the same function, at values that differ by rounding. A model without a decoder (an
encoder) has the values of its graph, whose sums get one order in the same way.
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
from attngraph.runtime.derived import MASK

log = logging.getLogger("attngraph")
NEAR = 0.01
"""By which share of the largest logit the decoder's may differ from the graph's: by more than any rounding is
another function (dropout, a batch norm in training mode)."""


Alone = dict[Any, tuple[list[Any], Any, int]]
"""What calls of one kind return besides logits, where that is no tensor: leaves, structure, and the place of
the logits."""


def consistently(
    model: Any, found: Tensor, mask: Tensor | None, compute: Callable[[], Any], alone: Alone, kind: Any
) -> Any:
    """The result of a call of the model, with the decoder's logits.

    Args:
        found, mask: what `decoded` gives.
        compute: gives the compiled graph's result of the same call.
        kind: what a trace of this call depends on: the model's state, modes, arguments that are no tensors.
        alone: of earlier calls; a call of such a kind needs the decoder's logits and nothing else.

    NoDecoderError where the call returns other logits.
    """
    needs_more = not _is_plain(model) or not (mask is None or bool(mask.bool().all()))
    if kind in alone and not needs_more:
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
    elif not needs_more and sum(isinstance(leaf, Tensor) for leaf in leaves) == 1:
        alone[kind] = leaves, spec, place
    leaves[place] = with_value(logits, found) if logits.requires_grad else found
    return unflatten(leaves, spec)


def ordered(model: Any, compute: Callable[[], Any]) -> Any:
    """The result of a call whose graph has one order of sums where nothing asks for gradients: then, and in
    training, values are those of the call in eval mode without gradients."""
    if _is_plain(model):
        return compute()
    with _in_eval_mode(model), torch.no_grad():
        values = flatten(compute())[0]
    leaves, spec = flatten(compute())
    for place, (value, leaf) in enumerate(zip(values, leaves, strict=True)):
        is_floating = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()
        if is_floating and leaf.shape == value.shape:
            theirs = leaf.detach()
            if (value - theirs).abs().amax() > NEAR * theirs.abs().amax():
                log.warning(
                    "consistent=True: this call computes something else than one in eval mode does (dropout "
                    "in training). A result is the graph's, and not the same bits elsewhere."
                )
            else:
                leaves[place] = with_value(leaf, value) if leaf.requires_grad else value
    return unflatten(leaves, spec)


def _is_plain(model: Any) -> bool:
    """Whether nothing asks for gradients, or for what training computes."""
    return not (torch.is_grad_enabled() or (isinstance(model, nn.Module) and model.training))


def decoded(
    decoder: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The logits of a call's tokens, by a prompt to the decoder, and the mask of the real ones. Raises
    NoDecoderError: the model has no decoder, or is not called with tokens."""
    given = by_name(decoder._derived.signature, args, kwargs)
    named = {
        name: value for name, value in given.items() if isinstance(value, Tensor) and name not in _BESIDE
    }
    others = {n: v for n, v in given.items() if n not in named}
    try:
        argument = decoder._derived.argument(others)
    except ValueError as problem:
        raise NoDecoderError(str(problem)) from problem
    ids, mask = named.pop(argument, None), named.pop(MASK, None)
    if ids is None or ids.ndim != 2 + ids.is_floating_point():
        raise NoDecoderError("it is not called with tokens.")
    with _in_eval_mode(decoder._model), torch.no_grad():
        return decoder.prefill(ids, mask, **named)[0], decoder._mask(mask, dict(named))


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
