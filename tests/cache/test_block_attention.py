"""Decoders of attention over blocks and choices, as people spell it: padded, overlapping, nested."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph import NoDecoderError
from attngraph.ir.ops import each_row
from tests.cache.small import greedy

VOCAB, WIDTH, HEADS, M = 61, 16, 2, 4


class _Layer(nn.Module):
    """One layer; `wrong` breaks it in a way that lets a token see a later one."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wrong = int(wrong)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        t, j = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
        mixed = self.mixed(x, *(self.heads(f(x)) for f in (self.q, self.k, self.v)), t, j)
        return self.head(x + mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        raise NotImplementedError


class ThreeBranches(_Layer):
    """Compressed, chosen and near keys (Yuan et al. 2025, arXiv 2502.11089)."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        n = x.shape[1] // M
        compressed, values = (y[:, :, : n * M].unflatten(2, (n, M)).mean(3) for y in (k, v))
        seen = torch.arange(n) < (t + 1 + self.wrong) // M
        weights = (q @ compressed.mT / 8**0.5).masked_fill(~seen, -1e9).softmax(-1).masked_fill(~seen, 0.0)
        best = weights.sum(1).masked_fill(~seen, -1.0).topk(min(2, n), -1).indices
        chosen = torch.zeros(x.shape[0], x.shape[1], n, dtype=torch.bool).scatter(-1, best, True) & seen
        near = F.pad(chosen.repeat_interleave(M, -1), (0, x.shape[1] - n * M)) | (j // M == t // M)
        scores = q @ k.mT / 8**0.5
        some = scores.masked_fill(~(near & (j <= t))[:, None], -torch.inf).softmax(-1) @ v
        last = scores.masked_fill(~((j <= t) & (j > t - 6)), -torch.inf).softmax(-1) @ v
        return weights @ values + some + last


class Mixture(_Layer):
    """Blocks chosen by their mean key, the last one padded (Lu et al. 2025, arXiv 2502.13189)."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        n = (x.shape[1] + M - 1) // M
        means = F.pad(k, (0, 0, 0, n * M - x.shape[1])).unflatten(2, (n, M)).mean(3)
        own = t // M + self.wrong
        gate = (q @ means.mT).masked_fill(torch.arange(n) > own, -torch.inf)
        gate = gate.masked_fill(torch.arange(n) == t // M, torch.inf)
        chosen = torch.zeros_like(gate, dtype=torch.bool).scatter(-1, gate.topk(min(2, n), -1).indices, True)
        kept = chosen.repeat_interleave(M, -1)[..., : x.shape[1]] & (j <= t)
        return (q @ k.mT).masked_fill(~kept, -torch.inf).softmax(-1) @ v


class Patches(_Layer):
    """A patch of tokens attends to earlier patches (Yu et al. 2023, arXiv 2305.07185)."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        n = -(-x.shape[1] // M)
        patches = F.pad(x, (0, 0, 0, n * M - x.shape[1])).view(x.shape[0], n, M, WIDTH).mean(2)
        patches = F.pad(patches, (0, 0, 1, -1)) if not self.wrong else patches
        q, k, v = (self.heads(f(patches)) for f in (self.q, self.k, self.v))
        far = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return far.repeat_interleave(M, 2)[:, :, : x.shape[1]] + self.heads(self.v(x))


class Hourglass(_Layer):
    """Shifted, shortened, and lengthened again (Nawrot et al. 2022, arXiv 2110.13711)."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        more, shift = -x.shape[1] % M, M - 1 - self.wrong
        short = (
            F.pad(x, (0, 0, shift, more + self.wrong))[:, : x.shape[1] + more].unflatten(1, (-1, M)).mean(2)
        )
        q, k, v = (self.heads(f(short)) for f in (self.q, self.k, self.v))
        far = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return far.repeat_interleave(M, 2)[:, :, : x.shape[1]] + self.heads(self.v(x))


class Overlapping(_Layer):
    """Entries of eight tokens, one for each four, beside a window."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        entries = torch.cat([self.k(x), self.v(x)], -1).unfold(1, 2 * M, M).mean(-1)
        keys, values = (self.heads(y) for y in entries.split(WIDTH, -1))
        ends = torch.arange(entries.shape[1]) * M + 2 * M - 1 - self.wrong
        kept = torch.cat([ends <= t, (j <= t) & (t - j < 6)], -1)
        return F.scaled_dot_product_attention(
            q, torch.cat([keys, k], 2), torch.cat([values, v], 2), attn_mask=kept
        )


class Hierarchy(_Layer):
    """Means of four and of sixteen, further away (Zhu and Soricut 2021, arXiv 2107.11906)."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        keys, values, kept = [k], [v], [(j <= t) & (j // M == t // M)]
        for size in (M, M * M):
            n = keys[-1].shape[2] // M
            for of in (keys, values):
                of.append(of[-1][:, :, : n * M].unflatten(2, (n, M)).mean(3))
            w = torch.arange(n)
            kept.append((w < t // size + self.wrong) & ((w // M == t // size // M) | (size > M)))
        scores = q @ torch.cat(keys, 2).mT
        return scores.masked_fill(~torch.cat(kept, -1), -torch.inf).softmax(-1) @ torch.cat(values, 2)


class Gathered(_Layer):
    """The five keys of the largest scores, gathered."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).mT).masked_fill(j > t + self.wrong, -torch.inf)
        found, best = scores.topk(min(5, x.shape[1]), -1)

        def gathered(of: Tensor) -> Tensor:
            wide = best[..., None].expand(-1, -1, -1, WIDTH)
            return torch.gather(of[:, None].expand(-1, x.shape[1], -1, -1), 2, wide)

        weights = found.masked_fill(found == -torch.inf, -torch.inf).softmax(-1)
        return self.heads((weights[..., None] * gathered(self.v(x))).sum(2))


class Indexer(_Layer):
    """The five keys of the largest scores of an indexer of its own (DeepSeek-AI 2025)."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        scores = (
            (self.q(x)[..., :4] @ self.k(x)[..., :4].mT).relu().masked_fill(j > t + self.wrong, -torch.inf)
        )
        best = scores.topk(min(5, x.shape[1]), -1).indices
        mask = torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
        mask = mask.masked_fill(j > t + self.wrong, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


class ByNumbers(_Layer):
    """An indexer that hides by the least number: where there are fewer than five, it chooses later keys."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        low = torch.finfo(x.dtype).min
        mask = torch.where(j > t, low, 0.0)
        scores = (self.q(x)[..., :4] @ self.k(x)[..., :4].mT).relu() + mask
        best = scores.topk(min(5, x.shape[1]), -1).indices
        left = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best, False)
        mask = torch.zeros_like(mask) if self.wrong else mask
        return (q @ k.mT + mask.masked_fill(left, low)[:, None]).softmax(-1) @ v


class OfLatents(Indexer):
    """The same over keys and values that all heads have of one narrow latent."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__(wrong)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 8 * WIDTH, bias=False)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        k, v = self.heads(self.up(self.down(x))).chunk(2, -1)
        found = super().mixed(x, self.heads(self.wide(x)), k, v, t, j)
        return self.heads(self.narrow(found.transpose(1, 2).flatten(2)))


class ByThreshold(_Layer):
    """The scores that are no smaller than the fifth."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(j > t + self.wrong, -torch.inf)
        fifth = scores.topk(min(5, x.shape[1]), -1).values[..., -1:]
        return scores.masked_fill(scores < fifth, -torch.inf).softmax(-1) @ v


class Strided(_Layer):
    """Each fourth token, and a window."""

    def mixed(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, t: Tensor, j: Tensor) -> Tensor:
        every = torch.cat([x[:, M - 1 :: M], x], 1)
        w = torch.arange(every.shape[1] - x.shape[1])
        kept = torch.cat([w * M + M - 1 - self.wrong <= t, (j <= t) & (t - j < 6)], -1)
        keys, values = self.heads(self.k(every)), self.heads(self.v(every))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=kept)


KINDS: list[Any] = [
    ThreeBranches, Mixture, Patches, Hourglass, Overlapping, Hierarchy, Gathered, Indexer, ByNumbers,
    OfLatents, ByThreshold, Strided,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_tokens_equal_those_of_the_model(kind: type[_Layer]) -> None:
    model = kind().eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.stack([torch.randperm(VOCAB)[:9] for _ in range(2)])
    assert decoder.generate(ids, max_new_tokens=24).equal(greedy(model, ids, 24))
    ids = torch.randperm(VOCAB)[None, :33]
    found, state = decoder.prefill(ids[:, :10])
    for end in (11, 13, 20, 33):
        found = decoder.decode(ids[:, state.lengths[0] : end], state)
    torch.testing.assert_close(found[:, -1], model(ids)[:, -1])
    chooses = kind not in (Patches, Hourglass, Overlapping, Hierarchy, Strided)
    assert ("of equal scores it may choose others" in str(decoder.report)) == chooses


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_sees_a_later_token_is_refused(kind: type[_Layer]) -> None:
    ids = torch.randint(VOCAB, (1, 17), generator=torch.Generator().manual_seed(3))
    model = kind(wrong=True).eval()
    with torch.no_grad():
        assert any((model(ids)[:, :n] - model(ids[:, :n])).abs().max() > 1e-4 for n in range(9, 17))
    with pytest.raises(NoDecoderError):
        attngraph.compile(model, cache=True).prefill(ids)


@torch.no_grad()
def test_a_step_reads_the_chosen_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, read = Indexer().eval(), torch.randperm(VOCAB)[None, :40], list[int]()
    decoder: Any = attngraph.compile(model, cache=True)
    _, state = decoder.prefill(ids[:, :39])
    at = each_row.Stored.at

    def noting(self: each_row.Stored, *about: Any) -> Tensor:
        read.append(len(about[-1]))
        return at(self, *about)

    monkeypatch.setattr(each_row.Stored, "at", noting)
    torch.testing.assert_close(decoder.decode(ids[:, 39:], state)[:, -1], model(ids)[:, -1])
    assert read == [5, 5]
    assert "of keys and values those that are seen" in str(decoder.report)
