"""Trees of new tokens: each token sees its ancestors alone, whatever a model keeps of its tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngraph
from attngraph import CacheConfig, CacheError
from tests.cache.test_drafts import KINDS
from tests.cache.test_generate import VOCABULARY, stir

pytestmark = pytest.mark.usefixtures("graphs_of_this_run")

PARENTS = [[-1, 0, 0, 1, -1, 4], [-1, -1, 1, 2, 2, 0]]


@pytest.fixture(
    scope="module", params=[(kind, layout) for kind in KINDS for layout in ("contiguous", "paged")]
)
def decoder(request: Any) -> Any:
    kind, layout = request.param
    model = KINDS[kind]().eval()
    stir(model, 0)
    return attngraph.compile(model, cache=CacheConfig(page=4, layout=layout, snapshots=1))


def path_to(parents: list[int], place: int) -> list[int]:
    return [*(path_to(parents, parents[place]) if parents[place] >= 0 else []), place]


def test_each_token_gets_what_its_path_alone_gets(decoder: Any) -> None:
    torch.manual_seed(1)
    prompts, news = torch.randint(3, VOCABULARY, (2, 7)), torch.randint(3, VOCABULARY, (2, 6))
    _, state = decoder.prefill(prompts)
    found = decoder.decode(news, state, parents=PARENTS)
    assert found.shape == (2, 6, VOCABULARY)
    for row in range(2):
        for place in range(6):
            path = path_to(PARENTS[row], place)
            whole = torch.cat([prompts[row], news[row, path]]).unsqueeze(0)
            wanted, _ = decoder.prefill(whole)
            torch.testing.assert_close(found[row, place], wanted[0, -1], rtol=1e-4, atol=1e-5)


def test_a_kept_path_goes_on_as_if_there_had_been_no_other(decoder: Any) -> None:
    torch.manual_seed(2)
    prompts, news = torch.randint(3, VOCABULARY, (2, 7)), torch.randint(3, VOCABULARY, (2, 6))
    more = torch.randint(3, VOCABULARY, (2, 2))
    _, state = decoder.prefill(prompts)
    decoder.decode(news, state, parents=PARENTS)
    assert state.rows == 3 + 3
    paths = [[0, 1, 3], [1, 2, 4]]
    state.keep(paths)
    assert state.lengths == [10, 10]
    found = decoder.decode(more, state)
    for row, path in enumerate(paths):
        whole = torch.cat([prompts[row], news[row, path], more[row]]).unsqueeze(0)
        wanted, _ = decoder.prefill(whole)
        torch.testing.assert_close(found[row], wanted[0, -2:], rtol=1e-4, atol=1e-5)


def test_none_of_a_tree_may_be_kept_and_it_fits_or_nothing_happens(decoder: Any) -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    _, state = decoder.prefill(ids)
    before, _ = decoder.prefill(torch.cat([ids, ids[:, :1]], 1))
    with pytest.raises(CacheError, match="no tree"):
        state.keep([0])
    for wrong, message in (
        ([0, 0, 1], "earlier token"),
        ([-1, 0], r"\[S\] or \[B, S\]"),
        ([-1, 5, 0], "earlier"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.decode(ids[:, :3], state, parents=wrong)
    with pytest.raises((IndexError, RuntimeError)):
        decoder.decode(torch.tensor([[3, 99999]]), state, parents=[-1, -1])
    assert state.lengths == [4]
    decoder.decode(ids[:, :3], state, parents=[-1, -1, 1])
    with pytest.raises(CacheError, match="no path"):
        state.keep([0, 1])
    state.keep([])
    assert state.lengths == [4]
    found = decoder.decode(ids[:, :1], state)
    torch.testing.assert_close(found[0, 0], before[0, -1], rtol=1e-4, atol=1e-5)
