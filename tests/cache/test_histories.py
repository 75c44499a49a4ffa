"""Decoders of attention that is none of ours: computed anew from all tokens, where none sees a later one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from tests.cache.small import by_steps, refuses

Weights = Callable[[Tensor, Tensor], Tensor]


def _most_similar(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores.masked_fill(~keep, -math.inf)
    chosen = torch.zeros_like(keep.expand_as(scores)).scatter(-1, _largest(scores, 4), True)
    return scores.masked_fill(~chosen, -math.inf).softmax(-1)


def _largest(scores: Tensor, count: int) -> Tensor:
    return scores.topk(min(count, scores.shape[-1]), -1).indices


def _mixed_heads(scores: Tensor, keep: Tensor) -> Tensor:
    mix = torch.tensor([[0.8, 0.3], [-0.4, 1.1]], dtype=scores.dtype)
    scores = torch.einsum("bhqk,hg->bgqk", scores, mix).masked_fill(~keep, -math.inf)
    return torch.einsum("bhqk,hg->bgqk", scores.softmax(-1), mix)


def _stick_breaking(scores: Tensor, keep: Tensor) -> Tensor:
    left = nn.functional.logsigmoid(-scores).masked_fill(~keep, 0.0)
    after = left.flip(-1).cumsum(-1).flip(-1) - left
    return (nn.functional.logsigmoid(scores) + after).exp().masked_fill(~keep, 0.0)


def _chosen_among_all(scores: Tensor, keep: Tensor, count: int) -> Tensor:
    """The keys are chosen before later ones are hidden: which earlier ones are left depends on later ones."""
    chosen = torch.zeros_like(keep.expand_as(scores)).scatter(-1, _largest(scores, count), True)
    return scores.masked_fill(~(chosen & keep), -1e9).softmax(-1)


class Model(nn.Module):
    """Layers of attention with the weights that a function makes of scores and a causal mask."""

    def __init__(self, weights: Weights, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = weights
        self.embed, self.places = nn.Embedding(24, 16), nn.Embedding(96, 16)
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(layers))
        self.out = nn.Linear(16, 24)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.places(at)
        for qkv in self.qkv:
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            weights = self.weights(q @ k.transpose(-1, -2) / 8**0.5, at[:, None] >= at)
            x = x + (weights @ v).transpose(1, 2).reshape(*x.shape)
        return self.out(x)


def _bounded(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.tanh() * keep


@pytest.mark.parametrize(
    ("weights", "layers"), [(_most_similar, 2), (_mixed_heads, 1), (_stick_breaking, 1), (_bounded, 1)]
)
def test_what_pairs_of_tokens_decide_is_computed_anew(weights: Weights, layers: int, decodes: Any) -> None:
    decoder = decodes(Model(weights, layers))
    assert len(decoder.report.cache.anew) == layers
    assert "computed anew from all tokens at every step" in str(decoder.report)


class RelativeKeys(nn.Module):
    """Keys of relative positions, multiplied as `[T, B * H, d] @ [T, d, T]`: sequences and heads are one
    dimension there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.near, self.out = nn.Embedding(24, 16), nn.Embedding(9, 8), nn.Linear(16, 24)

    def forward(self, ids: Tensor) -> Tensor:
        (rows, tokens), at = ids.shape, torch.arange(ids.shape[1])
        x = self.embed(ids)
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        near = self.near((at - at[:, None]).clamp(-4, 4) + 4)
        relative = q.permute(2, 0, 1, 3).reshape(tokens, rows * 2, 8) @ near.mT
        scores = q @ q.mT + relative.transpose(0, 1).view(rows, 2, tokens, tokens)
        weights = scores.masked_fill(at > at[:, None], -1e9).softmax(-1)
        return self.out(x + (weights @ q).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_pairs_of_tokens_whose_sequences_and_heads_are_one_dimension(decodes: Any) -> None:
    report = decodes(RelativeKeys()).report
    assert len(report.cache.anew) == 1
    assert "would be 0" not in str(report)


def test_which_of_equal_scores_is_chosen_is_no_obstacle() -> None:
    """An indexer's scores are zero for many keys; torch's choice among them depends on how many there are."""
    model = Model(lambda scores, keep: _most_similar(scores.relu(), keep)).eval()
    decoder: Any = attngraph.compile(model, cache=True)
    assert decoder.prefill(torch.randint(0, 24, (1, 4))) is not None  # so few that all are chosen


def test_attention_within_a_token_is_computed_for_that_token_alone(decodes: Any) -> None:
    """Heads are in the place of tokens, as where a transpose was forgotten."""

    class OfHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkv, self.out = nn.Embedding(24, 16), nn.Linear(16, 48), nn.Linear(16, 24)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))
            return self.out(x + ((q @ k.mT / 2).softmax(-1) @ v).flatten(2))

    assert decodes(OfHeads()).report.cache.anew == ()


def test_one_token_at_a_time_from_the_first_on() -> None:
    model = Model(_most_similar).eval()
    decoder: Any = attngraph.compile(model, cache=True)
    ids = torch.randint(0, 24, (1, 12))
    with torch.no_grad():
        torch.testing.assert_close(by_steps(decoder, ids, 1)[0], model(ids))


def _of_the_largest_value(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores.masked_fill(~keep, -math.inf)
    least = scores.topk(min(4, scores.shape[-1]), -1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf).softmax(-1)


def _added(scores: Tensor, keep: Tensor) -> Tensor:
    return (scores + (1.0 - keep.to(scores.dtype)) * -1e4).softmax(-1) * (1 + scores.tanh())


def _less_of_itself(scores: Tensor, keep: Tensor) -> Tensor:
    weights = scores.masked_fill(~keep, -math.inf).softmax(-1)
    return weights - 0.1 * weights * torch.eye(keep.shape[0])


def _turned_round(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.flip(-1).masked_fill(~keep.flip(-1), -math.inf).softmax(-1).flip(-1) * scores.tanh()


def _of_the_largest_alone(scores: Tensor, keep: Tensor) -> Tensor:
    scores = scores.relu().masked_fill(~keep, -math.inf)
    return scores.masked_fill(scores < scores.topk(1, -1).values, -math.inf).softmax(-1)


@pytest.mark.parametrize(
    "weights", [_of_the_largest_value, _of_the_largest_alone, _added, _less_of_itself, _turned_round]
)
def test_what_algebra_shows_to_look_back_has_a_decoder(weights: Weights, decodes: Any) -> None:
    decodes(Model(weights))


def _far(scores: Tensor, keep: Tensor, distance: Callable[[Tensor], Tensor]) -> Tensor:
    at = torch.arange(scores.shape[-1])
    return scores.sigmoid() * (keep | distance(at[:, None] - at))


class FarKeys(nn.Module):
    """Attention to keys in the other order, one of which comes 50 tokens later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.key, self.out = nn.Embedding(24, 8), nn.Linear(8, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x, at = self.embed(ids), torch.arange(ids.shape[1])
        far, k = at[:, None] - at.flip(0), self.key(x).flip(1)
        mask = (far >= 0) | (far == -50)
        found = nn.functional.scaled_dot_product_attention(x[:, None], k[:, None], k[:, None], attn_mask=mask)
        return self.out(found[:, 0])


FAR: dict[str, Callable[[], nn.Module]] = {
    "a negative number": lambda: Model(lambda s, k: _far(s, k, lambda d: d == -300)),
    "a float": lambda: Model(lambda s, k: _far(s, k, lambda d: -d == 300.0)),
    "a sum": lambda: Model(lambda s, k: _far(s, k, lambda d: d + 150 == -150)),
    "a product": lambda: Model(lambda s, k: _far(s, k, lambda d: d * 2 == -600)),
    "a tensor": lambda: Model(lambda s, k: _far(s, k, lambda d: d == torch.tensor(-300))),
    "a quotient": lambda: Model(lambda s, k: _far(s, k, lambda d: -d // 300 == 1)),
    "keys in the other order": FarKeys,
}


@pytest.mark.parametrize("model", FAR)
def test_a_token_that_sees_one_far_ahead_has_no_decoder(model: str) -> None:
    """However far, and however the distance is written: nothing of it follows from short sequences."""
    refuses(FAR[model](), r"token is read|reads token")


@pytest.mark.parametrize("fill", [-50.0, -300.0])
def test_a_fill_that_lets_large_scores_through_is_refused(fill: float) -> None:
    def weights(scores: Tensor, keep: Tensor) -> Tensor:
        return scores.flip(1).masked_fill(~keep, fill).softmax(-1) * (1 + scores.tanh())

    refuses(Model(weights))


def test_a_model_that_does_something_else_with_short_sequences_goes_on_with_long_ones() -> None:
    def weights(scores: Tensor, keep: Tensor) -> Tensor:
        scores = scores.masked_fill(~keep, -math.inf)
        if scores.shape[-1] > 4:
            chosen = torch.zeros_like(keep.expand_as(scores)).scatter(-1, scores.topk(4, -1).indices, True)
            scores = scores.masked_fill(~chosen, -math.inf)
        return scores.softmax(-1)

    model, ids = Model(weights).eval(), torch.randint(0, 24, (1, 12))
    decoder: Any = attngraph.compile(model, cache=True)
    with torch.no_grad():
        torch.testing.assert_close(by_steps(decoder, ids, 9)[0], model(ids))
        _, short = decoder.prefill(ids[:, :4])
        line = weights.__code__.co_firstlineno + 2
        with pytest.raises(attngraph.CacheError, match=rf"test_histories.py:{line} whether tokens <= 4"):
            decoder.decode(ids[:, 4:5], short)


class InChunks(nn.Module):
    """Attention inside of chunks of a sequence that is padded up to a multiple of their length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.out = nn.Embedding(24, 8), nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        padded = nn.functional.pad(self.qkv(self.embed(ids)), (0, 0, 0, -tokens % 4))
        q, k, v = padded.unflatten(1, (-1, 4)).chunk(3, -1)
        keep = torch.ones(4, 4, dtype=torch.bool).tril()
        out = (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1) @ v
        return self.out(out.flatten(1, 2)[:, :tokens])


class LaterQueries(InChunks):
    """Each token is weighed by what the queries of its chunk give it, those of later tokens too."""

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        padded = nn.functional.pad(self.qkv(self.embed(ids)), (0, 0, 0, -tokens % 4))
        q, k, v = padded.unflatten(1, (-1, 4)).chunk(3, -1)
        keep = torch.ones(4, 4, dtype=torch.bool).tril()
        given = (q @ k.mT).masked_fill(~keep, -math.inf).softmax(-1).sum(-2)
        return self.out((given.unsqueeze(-1) * v).flatten(1, 2)[:, :tokens])


def test_weights_that_are_no_numbers_in_a_trial_show_nothing() -> None:
    """Random masks may hide a whole row, and a sum over queries then is NaN for every token of the chunk."""
    ids = torch.randint(0, 24, (2, 9))
    with pytest.raises(attngraph.NoDecoderError, match="Token 0 sees token 1"):
        attngraph.compile(LaterQueries().eval(), cache=True).prefill(ids)
    config = attngraph.CacheConfig(assume_causal=True)
    with pytest.raises(
        attngraph.NoDecoderError, match=r"with assume_causal it is taken.*but the decoder does not give"
    ):
        attngraph.compile(LaterQueries().eval(), cache=config).prefill(ids)


def test_attention_in_chunks_is_computed_anew_though_nobody_knows_how_many_there_will_be() -> None:
    model, ids = InChunks().eval(), torch.randint(0, 24, (2, 11))
    decoder: Any = attngraph.compile(model, cache=attngraph.CacheConfig(proof=False, assume_causal=True))
    with torch.no_grad():
        assert torch.allclose(by_steps(decoder, ids, 9)[0], model(ids), atol=1e-5)


@pytest.mark.parametrize("count", [3, 200])
def test_a_choice_that_depends_on_later_tokens_is_refused(count: int) -> None:
    """Also where more keys are chosen than a short sequence has: there, all of them are."""
    model = Model(lambda scores, keep: _chosen_among_all(scores, keep, count)).eval()
    refuses(model, "every token is read")


@pytest.mark.slow
def test_positions_of_transformer_xl_leave_the_graph_of_the_step_whole(decodes: Any) -> None:
    """Distances from the last token to the first are shifted by a reshape. Tests run copies of operations, in
    graphs of their own; the step's operations must not count these among their users."""

    class Relative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.qkv, self.out = nn.Embedding(24, 16), nn.Linear(16, 48), nn.Linear(16, 24)
            self.relative, self.other = nn.Linear(16, 16), nn.Parameter(torch.randn(2, 1, 8))

        def forward(self, ids: Tensor) -> Tensor:
            x, length = self.embed(ids), ids.shape[1]
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            far = torch.arange(length - 1, -1, -1.0)[:, None] / 10000 ** (torch.arange(8) / 8)
            places = self.relative(torch.cat([far.sin(), far.cos()], -1)).unflatten(-1, (2, 8))
            shifted = torch.einsum("bhqd,khd->bhqk", q + self.other, places)
            shifted = torch.cat([torch.zeros(*shifted.shape[:3], 1), shifted], -1)
            shifted = shifted.view(*shifted.shape[:2], length + 1, length)[:, :, 1:].reshape(*q.shape[:3], -1)
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            weights = ((q @ k.mT + shifted) / 8**0.5).masked_fill(later, -math.inf).softmax(-1)
            return self.out(x + (weights @ v).transpose(1, 2).flatten(2))

    decodes(Relative())


def _of_sorted_scores(scores: Tensor, keep: Tensor) -> Tensor:
    """Sparsemax (Martins and Astudillo, 2016)."""
    scores = scores.masked_fill(~keep, -1e9)
    ordered = scores.sort(-1, descending=True).values
    above, places = ordered.cumsum(-1) - 1, torch.arange(1, scores.shape[-1] + 1)
    count = (ordered * places > above).sum(-1, keepdim=True)
    return (scores - above.gather(-1, count - 1) / count).clamp(min=0)


def test_where_it_cannot_be_shown_that_no_later_token_is_seen_the_user_may_say_so() -> None:
    model = Model(_of_sorted_scores)
    with pytest.raises(attngraph.NoDecoderError, match="sort"):
        attngraph.compile(model.eval(), cache=True).prefill(torch.randint(0, 24, (1, 9)))
    config = attngraph.CacheConfig(assume_causal=True)
    decoder: Any = attngraph.compile(model, cache=config)
    ids = torch.randint(0, 24, (2, 14))
    with torch.no_grad():
        logits, state = decoder.prefill(ids[:, :9])
        found = torch.cat([logits, decoder.decode(ids[:, 9:], state)], 1)
        torch.testing.assert_close(found, model(ids))
    line = _of_sorted_scores.__code__.co_firstlineno + 6
    told = rf"taken to \(assume_causal\): .*test_histories.py:{line} \(every token is read\)"
    assert re.search(told, str(decoder.report))


def test_a_first_token_that_sees_nothing_under_a_finite_fill_sees_all_alike_and_is_told() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(0)
            return torch.softmax((x @ x.mT).masked_fill(mask, -1e9), -1) @ x

    with pytest.raises(attngraph.NoDecoderError, match="the first token sees nothing, and a finite fill"):
        attngraph.compile(Strict().eval(), cache=True).prefill(torch.zeros(1, 5, dtype=torch.int64))
