"""A state belongs to the decoder that made it, and to the model as it was then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attngraph
from attngraph import CacheError
from tests.cache.models import VOCABULARY, WIDTH, Small, attend


def small() -> Small:
    return Small(lambda m, x: attend(*[x * m.factor] * 3), factor=1.0)


def decoder_of(model: nn.Module) -> attngraph.Decoder:
    return attngraph.compile(model.eval(), cache=True, backend="reference")


IDS = torch.arange(16).reshape(2, 8)


def _write(model: Small) -> None:
    with torch.no_grad():
        model.embed.weight.mul_(2)


CHANGES: dict[str, Callable[[Small], Any]] = {
    "a layer is replaced": lambda m: setattr(m, "logits", nn.Linear(WIDTH, VOCABULARY)),
    "a narrower head": lambda m: setattr(m, "logits", nn.Linear(WIDTH, 20)),
    "a hook": lambda m: m.logits.register_forward_hook(lambda layer, given, found: found * 2),
    "an attribute": lambda m: setattr(m, "factor", 3.0),
    "training": lambda m: m.train(),
    "a weight is written to": _write,
    "a weight is replaced": lambda m: setattr(
        m.embed, "weight", nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    ),
    "weights are loaded": lambda m: m.load_state_dict(small().state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_does_not_go_on_with_what_was_kept(change: str) -> None:
    model = small()
    decoder = decoder_of(model)
    _, state = decoder.prefill(IDS[:, :7])
    copy = state.copy()
    CHANGES[change](model)
    for each in (state, copy):
        with pytest.raises(CacheError, match="call prefill again"):
            decoder.decode(IDS[:, 7:], each)
        assert each.lengths == [7, 7]


def test_autocast_around_the_prompt_alone_is_a_change() -> None:
    decoder = decoder_of(small())
    with torch.autocast("cpu", torch.bfloat16):
        _, state = decoder.prefill(IDS[:, :7])
    with pytest.raises(CacheError, match="a mode of torch"):
        decoder.decode(IDS[:, 7:], state)


def test_a_state_of_another_decoder_is_refused_and_a_change_undone_is_none() -> None:
    model = small()
    one, other = decoder_of(model), decoder_of(small())
    _, state = one.prefill(IDS[:, :7])
    with pytest.raises(CacheError, match="belongs to another decoder"):
        other.decode(IDS[:, 7:], state)
    hook = model.logits.register_forward_hook(lambda layer, given, found: found * 2)
    hook.remove()
    with torch.no_grad():
        assert torch.allclose(one.decode(IDS[:, 7:], state), model(IDS)[:, 7:], atol=1e-4)


def test_a_loaded_state_belongs_to_the_decoder_that_goes_on_with_it(tmp_path: Path) -> None:
    model = small()
    decoder = decoder_of(model)
    decoder.prefill(IDS[:, :7])[1].save(tmp_path / "state")
    state = attngraph.KVCache.load(tmp_path / "state")
    with torch.no_grad():
        assert torch.allclose(decoder.decode(IDS[:, 7:], state), model(IDS)[:, 7:], atol=1e-4)
    model.logits = nn.Linear(WIDTH, VOCABULARY)
    with pytest.raises(CacheError, match="call prefill again"):
        decoder.decode(IDS[:, 7:], state)


def test_requests_end_where_the_model_changes_and_later_ones_begin_with_it_as_it_is() -> None:
    model = small()
    engine = attngraph.Engine(decoder_of(model), max_batch=2)
    request = engine.submit(IDS[0], max_new_tokens=4)
    engine.step()
    model.factor = 3.0
    with pytest.raises(CacheError, match="has changed since the prompt"):
        request.result()
    with torch.no_grad():
        wanted = model(IDS[:1])[0, -1].argmax().item()
    assert engine.submit(IDS[0], max_new_tokens=1).result() == [wanted]
