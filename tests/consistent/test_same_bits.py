"""`consistent=True`: a token's logits are the same bits, whatever it is computed with and by whom."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import attngraph
from attngraph.api.compiled import CompiledModule
from attngraph.codegen.cpu import toolchain
from attngraph.ir.ops import token_program
from attngraph.models.targets import tiny_decoder_lm
from workshop.same_bits import CACHES, MODELS, Search

IDS = torch.randint(1, 200, (3, 40), generator=torch.Generator().manual_seed(1))


def model() -> nn.Module:
    return tiny_decoder_lm(tokens=40)[0]


def no_bit_differs(search: Search, ways: int) -> None:
    """Hypothesis draws the ways, and makes one that differs simple."""

    @settings(max_examples=ways)
    @given(st.randoms(use_true_random=False))
    def one_way(draw: random.Random) -> None:
        before, search.draw = search.differing, draw
        search.run()
        assert search.differing == before

    one_way()
    assert search.compared > 100
    assert search.decoder.report.unordered == ()


@pytest.mark.parametrize("name", MODELS)
def test_no_way_of_computing_a_token_changes_a_bit(name: str) -> None:
    no_bit_differs(Search(MODELS[name], consistent=True), 4)


@pytest.mark.parametrize(("name", "kept"), CACHES)
def test_a_cache_that_rounds_changes_no_bit(name: str, kept: torch.dtype) -> None:
    no_bit_differs(Search(MODELS[name], consistent=True, kept=kept), 3)


def test_the_search_finds_bits_that_differ_where_nothing_was_asked() -> None:
    search = Search(MODELS["llama, grouped heads"], consistent=False)
    for _ in range(4):
        search.run()
    assert search.differing > 0


def test_whole_sequences_beams_an_engine_and_another_layout_have_the_same_bits() -> None:
    whole = attngraph.compile(model(), consistent=True)
    decoder = attngraph.compile(model(), consistent=True, cache=True)
    with torch.no_grad():
        wanted = whole(IDS)
    assert torch.equal(decoder(IDS), wanted)
    alone = torch.cat([decoder.prefill(row[None])[0] for row in IDS])
    assert torch.equal(alone, wanted)
    _, state = decoder.prefill(IDS[:, :5])
    state.reorder([2, 0, 1])
    assert torch.equal(decoder.decode(IDS[[2, 0, 1], 5:], state), wanted[[2, 0, 1], 5:])


def test_a_call_that_returns_logits_alone_runs_the_decoder_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = attngraph.compile(model(), consistent=True)
    with torch.no_grad():
        wanted = compiled(IDS)
        monkeypatch.setattr(CompiledModule, "_computed", lambda *_, **__: pytest.fail("the graph was run"))
        assert torch.equal(compiled(IDS), wanted) and torch.equal(compiled(IDS[1:, :9]), wanted[1:, :9])


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.twice = model(), False

    def forward(self, ids: torch.Tensor) -> Any:
        logits = self.inner(ids)
        return (logits, logits + 1) if self.twice else logits


def test_what_else_is_returned_follows_what_the_model_says_now() -> None:
    own = Flagged().eval()
    compiled = attngraph.compile(own, consistent=True)
    with torch.no_grad():
        wanted = compiled(IDS)
        own.twice = True
        found = compiled(IDS)
    assert isinstance(found, tuple) and torch.equal(found[0], wanted)


def test_a_training_step_has_the_bits_of_the_decoder_and_the_gradients_of_the_graph() -> None:
    own, plain = model().train(), model().train()
    compiled = attngraph.compile(own, consistent=True)
    logits = compiled(IDS)
    decoder = attngraph.compile(own.eval(), consistent=True, cache=True)
    assert logits.requires_grad and torch.equal(logits.detach(), decoder.prefill(IDS)[0])
    logits.log_softmax(-1).pow(2).mean().backward()
    plain(IDS).log_softmax(-1).pow(2).mean().backward()
    for (name, found), (_, wanted) in zip(own.named_parameters(), plain.named_parameters(), strict=True):
        assert found.grad is not None, name
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_layers_keep_their_modes() -> None:
    own = model().train()
    next(own.children()).eval()
    before = [m.training for m in own.modules()]
    attngraph.compile(own, consistent=True)(IDS)
    assert [m.training for m in own.modules()] == before


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(ids), 0.5, self.training)


def test_rows_that_compute_something_else_are_told_and_stay_the_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = attngraph.compile(WithDropout().train(), consistent=True)
    logits = compiled(IDS)
    assert "for 3 of 3 row(s) this call computes something else" in caplog.text
    assert (logits == 0).float().mean() > 0.3


def test_a_saved_decoder_has_the_same_bits(tmp_path: Path) -> None:
    own = model()
    decoder = attngraph.compile(own, consistent=True, cache=True)
    wanted, _ = decoder.prefill(IDS)
    decoder.save(tmp_path / "saved")
    loaded = attngraph.load(tmp_path / "saved", own, strict=True)
    assert isinstance(loaded, attngraph.Decoder)
    assert torch.equal(loaded.prefill(IDS[1:, :11])[0], wanted[1:, :11])


def test_probabilities_of_sampled_tokens_are_those_of_the_trainer() -> None:
    own = model()
    decoder, trainer = attngraph.compile(own, consistent=True, cache=True), None
    logits, state = decoder.prefill(IDS[:, :4])
    sampled = []
    for at in range(4, 12):
        sampled.append(attngraph.logprobs(logits[:, -1], IDS[:, at]))
        logits = decoder.decode(IDS[:, at : at + 1], state)
    assert torch.equal(decoder.logprobs(IDS)[:, 4:12], torch.stack(sampled, 1))
    ragged = decoder.logprobs([IDS[0, :7], IDS[1, :0], IDS[2]])
    assert torch.equal(ragged[2], decoder.logprobs(IDS)[2]) and not ragged[1].any()
    assert torch.equal(ragged[0, :7], decoder.logprobs(IDS[:1, :7])[0]) and not ragged[0, 7:].any()
    trainer = attngraph.compile(own, consistent=True)
    found = attngraph.logprobs(trainer(IDS)[:, 3:11], IDS[:, 4:12])
    assert found.requires_grad and torch.equal(found.detach(), torch.stack(sampled, 1))
    exact = trainer(IDS)[:, 3:11].double().log_softmax(-1).gather(-1, IDS[:, 4:12, None])[..., 0]
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    grads = torch.autograd.grad(found.sum(), own.parameters(), retain_graph=True)
    for one, other in zip(grads, torch.autograd.grad(exact.sum(), own.parameters()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits are \[\.\.\., vocabulary\] and tokens"):
        attngraph.logprobs(torch.zeros(2, 3, 5), torch.zeros(2, 2, dtype=torch.int64))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / 4).masked_fill(~real[:, None, None], -torch.inf)
        return self.norm(x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Bessel(nn.Module):
    """What has no element rule in the language of tokens is not in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(self.inner(ids))


def test_what_has_no_order_is_named_and_strict_refuses_it() -> None:
    decoder = attngraph.compile(Bessel().eval(), consistent=True, cache=True)
    decoder.prefill(IDS)
    assert "the same bits   not in every batch and chunk, because of special_bessel_j0 at " in str(
        decoder.report
    )
    with pytest.raises(
        attngraph.NotFusedError, match=r"there is none in special_bessel_j0 at .*test_same_bits"
    ):
        attngraph.compile(Bessel().eval(), consistent=True, strict=True, cache=True).prefill(IDS)


def test_the_report_says_that_bits_are_the_same() -> None:
    decoder = attngraph.compile(model(), consistent=True, cache=True)
    decoder.prefill(IDS)
    assert "the same bits   in every batch, chunk and page" in str(decoder.report)


@pytest.mark.parametrize("training", [False, True])
def test_a_model_without_a_decoder_has_the_same_bits_in_every_batch(training: bool) -> None:
    own = Encoder().train(training)
    compiled = attngraph.compile(own, consistent=True)
    x, lengths = torch.randn(4, 50, 32), torch.tensor([50, 7, 33, 1])
    real = torch.arange(50) < lengths[:, None]
    with torch.set_grad_enabled(training):
        found = compiled(x, real)
        for row, length in enumerate(lengths):
            alone = compiled(x[row : row + 1, :length], real[row : row + 1, :length])
            assert torch.equal(alone[0], found[row, :length])
    torch.testing.assert_close(found, own(x, real))
    if training:
        weights = torch.randn(found.shape)  # not the values, whose squares a norm keeps: gradients near zero
        wanted = torch.autograd.grad((own(x, real) * weights).sum(), own.parameters())
        grads = torch.autograd.grad((found * weights).sum(), own.parameters())
        torch.testing.assert_close(grads, wanted, rtol=1e-3, atol=1e-5)
    else:
        assert compiled.report.unordered == ()


@pytest.mark.parametrize("option", [{"backend": "reference"}, {"mesh": attngraph.SimulatedMesh(tensor=2)}])
def test_options_that_do_not_go_together_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="consistent=True is for one device"):
        attngraph.compile(model(), consistent=True, **option)


def test_without_a_compiler_the_report_says_that_nothing_has_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> tuple[str, ...]:
        raise toolchain.CompilerError("there is no C compiler")

    monkeypatch.setattr(toolchain, "compiler", none)
    decoder = attngraph.compile(model(), consistent=True, cache=True)
    decoder.prefill(IDS)
    assert "because of all of it: there is no C compiler" in str(decoder.report)


def test_what_no_code_computes_in_order_is_an_error() -> None:
    text = "r0[t, 3]\nr1[] = sum[j < 3] r0[t, j]\nreturn r1[t]\nin order"
    with pytest.raises(attngraph.BackendError, match=r"in one order of sums \(float32 on meta\)"):
        token_program.token_program([torch.zeros(2, 3, device="meta")], text)
