"""What a step copies by C (`cpu/carried.py`), against PyTorch, and in recorded steps of decoders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.codegen.cpu.carried import Keeping, link_of
from attngraph.codegen.cpu.native import Chain
from attngraph.codegen.cpu.record import recording

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_rows_and_numbers_are_pytorchs(dtype: torch.dtype) -> None:
    table, index = (torch.randn(11, 5) * 9).to(dtype), torch.tensor([[3, 10, 0, 3]])
    x, picked = (torch.randn(1, 6, 5) * 9).to(dtype), torch.tensor([5, 0, 5])
    calls = [
        (aten.embedding.default, (table, index), {}),
        (aten.embedding.default, (table[:, :3], index), {}),
        (aten.index_select.default, (x, 1, picked), {}),
        (aten.add.Tensor, (index, 2), {"alpha": 3}),
        (aten._to_copy.default, (index,), {"dtype": torch.float32}),
    ]
    links = [link_of(*call) for call in calls]
    assert Chain([link for link in links if link is not None]).run()
    for link, (target, args, kwargs) in zip(links, calls, strict=True):
        assert link is not None
        assert torch.equal(link.results[0], target(*args, **kwargs))


@pytest.mark.parametrize("row", [-1, 11])
def test_a_row_that_a_table_does_not_have_is_not_read(row: int) -> None:
    link = link_of(aten.embedding.default, (torch.randn(11, 5), torch.tensor([0, row])), {})
    assert link is not None
    assert not Chain([link]).run()


def test_what_is_not_copied_by_c_is_left_to_pytorch() -> None:
    x, index = torch.randn(2, 6, 5), torch.tensor([1])
    calls = [
        (aten.index_select.default, (x, 1, index)), (aten.index_select.default, (x[:1].mT, 1, index)),
        (aten.embedding.default, (x[0].T, index)), (aten.embedding.default, (x[0], index.int())),
        (aten.add.Tensor, (x, 1)), (aten.add.Tensor, (index, 1.5)), (aten.add.Tensor, (index, True)),
        (aten._to_copy.default, (index,)), (aten.mul.Tensor, (index, 2)),
    ]  # fmt: skip
    assert [link_of(target, args, {}) for target, args in calls] == [None] * len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tokens_are_written_to_the_places_of_their_rows(dtype: torch.dtype) -> None:
    """Two rows: one of two pages, one that goes round its ring of six places more than once."""
    fresh = torch.randn(1, 2, 11, 4).to(dtype)
    pages = torch.zeros(5, 2, 3, 4, dtype=dtype)
    table, starts, first = torch.tensor([[4, 1], [0, 3]]), torch.tensor([0, 2, 11]), torch.tensor([2, 5])
    wanted = pages.clone()
    for row, (begin, end) in enumerate(((0, 2), (2, 11))):
        for token in range(begin, end):
            slot = int(first[row] + token - begin) % 6
            wanted[table[row, slot // 3], :, slot % 3] = fresh[0, :, token]
    keeping = Keeping()
    move = keeping.add(fresh, torch.empty_like(pages), table, starts, first, 0, 2)
    assert move is not None
    assert move(pages)
    keeping.run()
    assert torch.equal(pages, wanted)
    assert not move(pages.transpose(2, 3).contiguous().transpose(2, 3))  # a token's elements lie apart


class Small(nn.Module):
    """A table of positions, attention and logits: a step that needs nothing of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(9, 16), nn.Embedding(12, 16)
        self.qkv, self.out, self.logits = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 9)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = self.embed(ids) + self.places(torch.arange(tokens))
        q, k, v = self.qkv(x).chunk(3, -1)
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        seen = (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        found: Tensor = self.logits(x + self.out(seen))
        return found


def test_a_step_is_one_call_and_returns_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[recording.Recording] = []
    record = recording.Recording.__init__

    def recorded(self: recording.Recording, *args: object) -> None:
        record(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(recording.Recording, "__init__", recorded)
    model, ids = Small().eval(), torch.randint(0, 9, (3, 12))
    decoder = attngraph.compile(model, cache=True)
    logits, state = decoder.prefill(ids[:, :4])
    steps = [decoder.decode(ids[:, n], state) for n in range(4, 12)]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat([logits, *steps], 1), model(ids))
    (found,) = made
    assert [type(piece) for piece in found.pieces] == [Chain]
    assert found.keeping is not None
    assert [renewed.place for renewed in found.renewed] == [0]


def test_a_token_that_the_model_does_not_know_raises_its_own_error_and_changes_nothing() -> None:
    model, ids = Small().eval(), torch.randint(0, 9, (3, 12))
    decoder = attngraph.compile(model, cache=True)
    _, state = decoder.prefill(ids[:, :4])
    for n in range(4, 8):
        decoder.decode(ids[:, n], state)
    with pytest.raises(IndexError):
        decoder.decode(torch.tensor([0, 9, 0]), state)
    assert state.lengths == [8, 8, 8]
    with torch.no_grad():
        torch.testing.assert_close(decoder.decode(ids[:, 8], state)[:, 0], model(ids[:, :9])[:, -1])
