"""Caches whose tokens simulated ranks divide: what a rank holds and sends, and rows that are moved."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.ops import collectives
from attngraph.report.ranks import CACHE_EXCHANGE
from tests.parallel.models import Shared, on_ranks


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize(
    "ranks, team, sizes",
    [
        pytest.param(2, 2, {"latent": True}, id="latent on 2"),
        pytest.param(3, 3, {"latent": True, "heads": 6}, id="latent on 3"),
        pytest.param(2, 2, {}, id="one key head on 2"),
        pytest.param(3, 3, {"heads": 3}, id="one key head on 3"),
        pytest.param(4, 2, {"key_heads": 2}, id="two key heads on 4"),
    ],
)
def test_rows_that_differ_in_length_are_moved_as_on_one_device(
    ranks: int, team: int, sizes: dict[str, Any], layout: str
) -> None:
    """Rows shorter than the team, others that grow, are cut, copied and put in another order."""
    options: dict[str, Any] = {"layout": layout, "page": 2} if layout == "paged" else {}
    model = Shared(**sizes)
    one = attngraph.compile(model, cache=attngraph.CacheConfig(**options))
    many = on_ranks(ranks, model, **options)
    ids = torch.randint(3, 64, (3, 7))
    states = [decoder.prefill([ids[0], ids[1, :1], ids[2, :4]])[1] for decoder in (one, many)]

    def step(tokens: Tensor) -> None:
        found = [decoder.decode(tokens, state) for decoder, state in zip((one, many), states, strict=True)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

    step(ids[:, 0])
    step(ids[:, :3])
    for state in states:
        state.crop([6, 5, 1])
        state.reorder([2, 0, 1, 0])
    step(ids[[0, 1, 2, 0], :2])
    copies = [state.copy() for state in states]
    step(ids[[2, 1, 0, 0], :1])
    states = copies
    step(ids[[0, 0, 1, 2], :4])
    cache = many.report.cache
    assert cache is not None and cache.ranks is not None and not cache.ranks.heads and not cache.ranks.alike
    assert {of for *_, of in cache.ranks.tokens} == {team}
    assert states[1].bytes_per_token == ranks * cache.bytes_per_token


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_the_bytes_that_the_report_tells(ranks: int) -> None:
    """64 tokens of each of 2 rows, in pages that hold just what a rank keeps of them."""
    decoder = on_ranks(ranks, Shared(latent=True), max_length=64)
    _, state = decoder.prefill(torch.randint(0, 64, (2, 64)))
    cache = decoder.report.cache
    assert cache is not None and cache.bytes_per_token == 32 // ranks
    assert state.nbytes == ranks * cache.bytes_per_token * 2 * 64
    assert len(state.groups) == ranks


def test_ranks_send_what_the_report_says_and_nothing_for_a_first_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulated ranks wait once in each exchange."""
    decoder, sent, wait = on_ranks(2, Shared(latent=True)), list[int](), collectives._Waits.__init__

    def counted(self: Any, parts: Tensor, team: collectives.Team) -> None:
        sent.append(parts.nbytes * (team.size - 1) // team.size)
        wait(self, parts, team)

    ids = torch.randint(0, 64, (2, 5))
    decoder.prefill(ids)  # compiles, with its proof
    monkeypatch.setattr(collectives._Waits, "__init__", counted)
    _, state = decoder.prefill(ids)
    assert sent == []
    decoder.decode(ids[:, :3], state)
    ranks = decoder.report.ranks
    assert ranks is not None
    told = [e.sent_per_token for e in ranks.sent if e.what == CACHE_EXCHANGE]
    assert told == [2 * 8 * 4 + 2 * (8 * 4 + 4)]  # queries; results and log-sum-exps
    assert sum(sent) == 2 * 6 * sum(told)


@pytest.mark.parametrize(
    "most, options, kept, longest",
    [
        pytest.param(17, {}, 64, 17, id="short"),
        pytest.param(18, {}, 32, None, id="longer"),
        pytest.param(64, {"max_length": 17}, 64, 17, id="short by its option"),
        pytest.param(64, {"max_length": 18}, 32, None, id="longer by its option"),
        pytest.param(34, {"dtype": torch.bfloat16}, 32, 34, id="in bfloat16"),
        pytest.param(35, {"dtype": torch.bfloat16}, 16, None, id="longer in bfloat16"),
    ],
)
def test_the_bytes_of_the_longest_sequence_decide_whether_tokens_are_divided(
    most: int, options: dict[str, Any], kept: int, longest: int | None
) -> None:
    """8 heads of a rank send 544 bytes for a token; of each token that is kept 32 bytes less are, or 16."""
    model = Shared(heads=16, most=most)
    decoder = on_ranks(2, model, **options)
    ids = torch.randint(0, 64, (1, 5))
    torch.testing.assert_close(decoder.prefill(ids)[0], model(ids))
    cache = decoder.report.cache
    assert cache is not None and cache.bytes_per_token == kept and cache.ranks is not None
    assert {why.split("; ")[1] for *_, why in cache.ranks.alike} == (
        {f"of {longest} tokens 544 bytes less are no more than 544 sent for each"} if longest else set()
    )


def test_an_engine_serves_a_divided_cache_and_a_state_is_saved_and_loaded(tmp_path: Any) -> None:
    model, told, prompts = Shared(latent=True), [], torch.arange(3, 13).view(2, 5)
    for decoder in (attngraph.compile(model, cache=True), on_ranks(2, model)):
        engine = attngraph.Engine(decoder, max_batch=2, chunk=3)
        requests = [engine.submit(prompts[n % 2, : 2 + n], 4) for n in range(4)]
        engine.run()
        told.append([request.result() for request in requests])
    assert told[0] == told[1]
    _, state = decoder.prefill(prompts)
    state.save(tmp_path / "state")
    loaded = attngraph.KVCache.load(tmp_path / "state")
    assert torch.equal(decoder.decode(prompts[:, 0], loaded), decoder.decode(prompts[:, 0], state))


@pytest.mark.parametrize("rollback, page", [(0, None), (1, None), (5, None), (0, 2), (3, 2)])
@pytest.mark.parametrize(
    "ranks, team, size, sizes",
    [
        pytest.param(4, 2, 64, {"key_heads": 2}, id="two key heads on 4"),
        pytest.param(4, 4, 64, {}, id="one key head on 4"),
        pytest.param(3, 3, 32, {"latent": True, "heads": 6}, id="latent on 3"),
    ],
)
def test_the_ring_of_a_window_is_divided(
    ranks: int, team: int, size: int, sizes: dict[str, Any], rollback: int, page: int | None
) -> None:
    """Rings that overflow, longer chunks, tokens taken back, members of whose tokens none is seen."""
    model = Shared(**sizes, window=3)
    options: dict[str, Any] = {"rollback": rollback}
    options |= {} if page is None else {"layout": "paged", "page": page}
    one = attngraph.compile(model, cache=attngraph.CacheConfig(**options))
    many = on_ranks(ranks, model, cache="tokens", **options)
    ids = torch.randint(3, 64, (3, 60))
    states = [decoder.prefill([ids[0, :9], ids[1, :1], ids[2, :2]])[1] for decoder in (one, many)]
    own = -(-(2 + rollback) // team)  # of what one device keeps of a row

    def step(tokens: Tensor) -> None:
        found = [decoder.decode(tokens, state) for decoder, state in zip((one, many), states, strict=True)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

    for at in range(9, 16):
        step(ids[:, at])
    step(ids[:, 16:21])
    step(ids[:, 21:40])
    for state in states:
        state.crop([n - rollback for n in state.lengths])
    step(ids[:, 40])
    for state in states:
        state.reorder([2, 0, 0])
    step(ids[:, 41:43])
    if page is None:
        assert states[1].nbytes == ranks * 3 * own * size
    cache = many.report.cache
    assert cache is not None and cache.ranks is not None and not cache.ranks.heads
    assert {of for *_, of in cache.ranks.tokens} == {team}


class Convolved(Shared):
    """Each token is mixed with the two before it, before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3)

    def embedded(self, ids: Tensor) -> Tensor:
        x: Tensor = self.table(ids)
        return x + self.conv(nn.functional.pad(x.mT, (2, 0))).mT  # type: ignore[no-any-return]


@pytest.mark.slow
def test_tokens_that_a_convolution_reads_stay_with_every_rank_and_the_report_says_why() -> None:
    model = Convolved()
    decoder = on_ranks(2, model, cache="tokens")
    ids = torch.randint(0, 64, (2, 5))
    assert torch.equal(decoder.generate(ids, 6), attngraph.compile(model, cache=True).generate(ids, 6))
    cache = decoder.report.cache
    assert cache is not None and cache.ranks is not None and {of for *_, of in cache.ranks.tokens} == {2}
    ((_, size, per, why),) = cache.ranks.alike
    assert (size, per) == (128, "token") and why.endswith("reads all that is kept of it")
