"""Decoders of models whose attention looks at blocks of tokens: what is kept are the blocks' entries."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph import NoDecoderError
from tests.cache.small import greedy

VOCAB, WIDTH, HEADS, BLOCK = 31, 16, 2, 4


class _Blocks(nn.Module):
    """One layer of attention over blocks, with weights of ordinary size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.q, self.k, self.v, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.null = nn.Parameter(torch.randn(HEADS))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.mixed(x).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def in_blocks(self, x: Tensor) -> Tensor:
        count = x.shape[1] // BLOCK
        return x[:, : count * BLOCK].view(x.shape[0], count, BLOCK, WIDTH)


class Pooled(_Blocks):
    """Keys are means of four tokens; a score of its own stands for "none of them"."""

    see = 1

    def mixed(self, x: Tensor) -> Tensor:
        pooled = self.in_blocks(x).mean(2)
        scores = self.heads(self.q(x)) @ self.heads(self.k(pooled)).mT / (WIDTH / HEADS) ** 0.5
        full = (torch.arange(x.shape[1]) + self.see) // BLOCK
        scores = scores.masked_fill(torch.arange(pooled.shape[1]) >= full[:, None], -torch.inf)
        none = self.null.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, none], -1).softmax(-1)[..., :-1] @ self.heads(self.v(pooled))


class SeesTheOpenBlock(Pooled):
    """The last tokens of a block are seen by its first ones."""

    see = BLOCK


class Gated(_Blocks):
    """A window of tokens, and blocks weighed by a gate, in one softmax."""

    def mixed(self, x: Tensor) -> Tensor:
        entries = (self.in_blocks(x) * self.in_blocks(self.gate(x)).softmax(2)).sum(2)
        every = torch.cat([x, entries], 1)
        scores = self.heads(self.q(x)) @ self.heads(self.k(every)).mT / (WIDTH / HEADS) ** 0.5
        t, k, w = (torch.arange(n) for n in (x.shape[1], x.shape[1], entries.shape[1]))
        near = (k <= t[:, None]) & (k > t[:, None] - 6)
        seen = torch.cat([near, w < ((t + 1) // BLOCK)[:, None]], -1)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ self.heads(self.v(every))


@pytest.mark.parametrize(
    ("kind", "kept"), [(Pooled, {(4, 1), (None, 4)}), (Gated, {(6, 1), (4, 1), (None, 4)})]
)
@pytest.mark.parametrize("prompt", [1, 3, 9])
@torch.no_grad()
def test_entries_of_blocks_are_kept(
    kind: type[_Blocks], kept: set[tuple[int | None, int]], prompt: int
) -> None:
    model = kind().eval()
    ids = torch.randint(VOCAB, (2, prompt), generator=torch.Generator().manual_seed(1))
    decoder = attngraph.compile(model, cache=True)
    assert decoder.generate(ids, max_new_tokens=24).equal(greedy(model, ids, 24))
    cache = decoder.report.cache
    assert cache is not None
    assert {(window, tokens) for _, _, window, tokens in cache.stores} == kept


@torch.no_grad()
def test_rows_of_unequal_length_chunks_and_pages() -> None:
    model, ids = Gated().eval(), torch.randint(VOCAB, (1, 23), generator=torch.Generator().manual_seed(2))
    for config in (attngraph.CacheConfig(), attngraph.CacheConfig(layout="paged", page=3)):
        decoder = attngraph.compile(model, cache=config)
        found, state = decoder.prefill(ids[:, :5])
        for end in (6, 7, 12, 13, 23):
            found = decoder.decode(ids[:, state.lengths[0] : end], state)
        torch.testing.assert_close(found[:, -1], model(ids)[:, -1])


def test_a_block_that_is_not_full_may_not_be_seen() -> None:
    with pytest.raises(NoDecoderError, match=r"Token 0 sees token 1"):
        attngraph.compile(SeesTheOpenBlock().eval(), cache=True).prefill(torch.zeros(1, 9, dtype=torch.int64))


@torch.no_grad()
def test_deepseek_v4_keeps_compressed_entries() -> None:
    """A window, and keys compressed from four tokens of which an indexer chooses three."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        head_dim=16, q_lora_rank=16, num_experts_per_tok=2, n_routed_experts=4, hc_mult=2,
        layer_types=["compressed_sparse_attention"], hc_sinkhorn_iters=2, num_hash_layers=0, sliding_window=8,
        o_groups=2, o_lora_rank=8, index_n_heads=16, index_head_dim=8, index_topk=3,
        partial_rotary_factor=0.5, eos_token_id=None,
    )  # fmt: skip
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    decoder, ids = attngraph.compile(model, cache=True), torch.randint(61, (2, 20))
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False, use_cache=False)
    assert decoder.generate(ids, max_new_tokens=24).equal(wanted)
    cache = decoder.report.cache
    assert cache is not None
    assert {(window, tokens) for _, _, window, tokens in cache.stores} == {(8, 1), (None, 4)}


@torch.no_grad()
def test_saved_decoders_and_states_beams_and_an_engine(tmp_path: Path) -> None:
    model = Gated().eval()
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    decoder = attngraph.compile(model, cache=True)
    wanted = decoder.generate(ids, max_new_tokens=12)
    decoder.save(tmp_path / "decoder")
    loaded = attngraph.load(tmp_path / "decoder", model)
    assert loaded.generate(ids, max_new_tokens=12).equal(wanted)
    _, state = decoder.prefill(ids)
    state.save(tmp_path / "state")
    again = type(state).load(tmp_path / "state")
    assert decoder.decode(ids[:, :1], again).equal(decoder.decode(ids[:, :1], state))
    beams = decoder.generate(ids, max_new_tokens=6, num_beams=2)
    assert beams.shape == (2, 15)
    engine = attngraph.Engine(decoder, max_batch=2, chunk=4)
    requests = [engine.submit(row[:n].tolist(), 12) for row, n in zip(ids, (9, 5), strict=True)]
    assert requests[0].result() == wanted[0, 9:].tolist()
    assert requests[1].result() == greedy(model, ids[1:, :5], 12)[0, 5:].tolist()
