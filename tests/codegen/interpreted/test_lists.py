"""Kernels that are given lists of the tiles that they visit, and the lists, against the reference."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from frames import DOCUMENTS, LISTED, SMALL, agree, compare_gradients, operands
from torch import Tensor

import attngraph
from attngraph.codegen.triton import launch, visits
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks, conjuncts, diagonal
from attngraph.ir.language import evaluate
from attngraph.ir.language.evaluate import Tile
from attngraph.ir.language.parser import parse
from attngraph.ir.ops import kernels
from attngraph.ir.ops.declare import one_run


def is_listed(text: str, tensors: tuple[Tensor, Tensor, Tensor], reads: Sequence[Tensor]) -> bool:
    return launch.plan_forward(parse(text), tensors, reads, (), Blocks(32, 16)).listed


def is_causal(text: str) -> bool:
    return diagonal(conjuncts(parse(text))) is not None


TEXTS = [text for text, _ in LISTED]


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED, ids=[text for text, _ in LISTED])
@pytest.mark.parametrize("lengths", [pytest.param((80, 80), marks=pytest.mark.slow), (50, 71)], ids=str)
def test_what_is_visited_by_lists_agrees(
    text: str, reads: Sequence[Tensor], lengths: tuple[int, int]
) -> None:
    tensors = operands(Hkv=1, Sq=lengths[0], Skv=lengths[1])
    assert is_listed(text, tensors, reads)
    agree(text, tensors, reads)


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED, ids=[text for text, _ in LISTED])
def test_gradients_by_lists_agree(text: str, reads: Sequence[Tensor]) -> None:
    tensors, kernel = operands(Hkv=1, Sq=50, Skv=71), Forward(Blocks(32, 16))
    plan = kernel._plan_backward(parse(text), tensors, reads, ())
    assert plan is not None and plan.listed
    compare_gradients(text, tensors, list(reads), [], kernel)


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(
    ("text", "reads"), [case for case in LISTED if is_causal(case[0])], ids=filter(is_causal, TEXTS)
)
def test_the_causal_mask_may_be_one_comparison_with_the_end_of_the_keys(
    text: str, reads: Sequence[Tensor]
) -> None:
    """In kernels without a pipeline of loads."""
    tensors, kernel = operands(Hkv=1, Sq=50, Skv=71), Forward(Blocks(32, 16, stages=1))
    source = launch.emit(launch.plan_forward(parse(text), tensors, reads, (), Blocks(32, 16, 4, 1))).source
    assert "last_key - start" in source
    agree(text, tensors, reads, kernel=kernel)
    compare_gradients(text, tensors, list(reads), [], kernel)


@pytest.mark.usefixtures("all_listed")
def test_keys_and_queries_of_tiles_that_are_not_visited_have_no_part_in_gradients() -> None:
    lengths = torch.tensor([16, 48])
    program, (q, k, v) = parse("keep k < r0[b] and q < r0[b]"), operands(Sq=48, Skv=48)
    results = SMALL.forward(program, (q, k, v), [lengths], ())
    grads = torch.randn_like(results[0]), torch.zeros_like(results[1])
    grads[0][0, :, 32:] = 0  # the rows of the last block of queries see no key
    k[0, :, 16:], q[0, :, 32:] = torch.nan, torch.inf
    found = SMALL.backward(program, (q, k, v), [lengths], (), results, grads)
    assert found[0] is not None and found[1] is not None
    assert bool(found[0].isfinite().all()) and bool(found[1].isfinite().all())


@pytest.mark.usefixtures("all_listed")
@pytest.mark.parametrize(("text", "reads"), LISTED[:8], ids=[text for text, _ in LISTED[:8]])
def test_only_tiles_with_a_kept_score_are_visited(text: str, reads: Sequence[Tensor]) -> None:
    program, tensors, blocks = parse(text), operands(Sq=70, Skv=80), Blocks(32, 16)
    q, k, _ = tensors
    env = kernels.environment(Tile((0, 2), (0, 2), (0, 70), (0, 80)), reads, (), q)
    kept = evaluate.scores(program, q @ k.mT, env).isfinite()
    padded = torch.nn.functional.pad(kept, (0, 0, 0, 26)).view(2, 2, 3, 32, 5, 16).transpose(3, 4)
    found = visits.find(program, blocks, tensors, reads, ())
    for b, h, row in itertools.product(range(2), range(2), range(3)):
        place = b * found.b + h * found.h + row
        whole, seen, count = found.counts[place].tolist()
        assert seen == count
        needed = padded[b, h, row].flatten(1).any(1).nonzero().flatten().tolist()
        hidden_in_parts = "k % 3" in text
        assert sorted(found.tiles[place, :count].tolist()) == needed
        for tile in found.tiles[place, :whole].tolist():
            rows = min(32, 70 - 32 * row)
            assert not hidden_in_parts and bool(padded[b, h, row, tile, :rows].all())


@pytest.mark.usefixtures("all_listed")
def test_keys_of_tiles_that_are_not_visited_are_not_read() -> None:
    lengths = torch.tensor([16, 48])
    q, k, v = operands(Sq=48, Skv=48)
    k[0, :, 16:], v[0, :, 16:] = torch.nan, torch.inf
    for text, reads in (
        ("keep k < r0[b]", (lengths,)),
        ("keep r0[b, k]", (torch.arange(48) < lengths[:, None],)),
    ):
        out, _ = SMALL.forward(parse(text), (q, k, v), reads, ())
        assert bool(out.isfinite().all())


@pytest.mark.usefixtures("all_listed")
def test_lists_are_shared_within_a_run_while_tensors_stay_as_they_are() -> None:
    tensors, lengths = operands(), torch.tensor([17, 40])
    program, blocks = parse("keep k < r0[b]"), Blocks(32, 16)

    def find(reads: Tensor) -> visits.Visits:
        return visits.find(program, blocks, tensors, [reads], ())

    with one_run():
        first = find(lengths)
        assert find(lengths) is first
        assert find(lengths.clone()) is not first
        lengths += 5
        second = find(lengths)
        assert second is not first
        assert second.counts.tolist() == [[1, 2, 2], [1, 2, 2], [2, 3, 3], [2, 3, 3]]
    assert find(lengths) is not second and find(lengths) is not find(lengths)


@pytest.mark.usefixtures("all_listed")
def test_a_write_that_torch_does_not_count_is_noticed_by_the_next_call() -> None:
    tensors, text, documents = operands(), "keep r0[b, q] == r0[b, k]", torch.zeros(2, 40).long()
    agree(text, tensors, [documents])
    version = documents._version
    documents.numpy()[:, 20:] = 1  # as a kernel of the user's or a replayed graph would
    assert documents._version == version
    agree(text, tensors, [documents])


@pytest.mark.usefixtures("all_listed")
def test_layers_of_a_model_and_of_its_backward_pass_share_their_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Layers(torch.nn.Module):
        def forward(self, x: Tensor, documents: Tensor) -> Tensor:
            hidden = documents[:, None, :, None] != documents[:, None, None]
            for _ in range(3):
                x = x + (x @ x.mT / 4).masked_fill(hidden, -torch.inf).softmax(-1) @ x
            return x

    made: list[bool] = []
    real = visits._compute
    monkeypatch.setattr(visits, "_compute", lambda *a: (made.append(a[-1]), real(*a))[1])
    x, documents = torch.randn(1, 2, 40, 16, requires_grad=True), torch.arange(40)[None] // 9
    model = Layers().eval()
    compiled = attngraph.compile(model, backend="triton")
    out = compiled(x, documents)
    assert made == [False]
    (found,) = torch.autograd.grad(out.sin().sum(), x)
    assert made == [False, False, True]
    (wanted,) = torch.autograd.grad(model(x, documents).sin().sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("all_listed")
def test_lists_that_a_captured_graph_uses_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, blocks = operands(), Blocks(32, 16)
    program, other = parse("keep q - k < 9"), parse("keep q - k < 7")
    visits._of_shapes.clear()
    before = visits.find(program, blocks, tensors, (), ())
    monkeypatch.setattr(visits, "is_captured", lambda device: True)
    assert visits.find(program, blocks, tensors, (), ()) is before
    inside = visits.find(other, blocks, tensors, (), ())
    assert visits.find(other, blocks, tensors, (), ()) is not inside, "each replay computes them"
    monkeypatch.setattr(visits, "is_captured", lambda device: False)
    outside = visits.find(other, blocks, tensors, (), ())
    assert outside is not inside, "only a replay writes to what was made during the capture"
    assert torch.equal(outside.tiles, inside.tiles) and torch.equal(outside.counts, inside.counts)
    for width in range(100, 100 + 2 * visits._KEPT):
        visits.find(parse(f"keep q - k < {width}"), blocks, tensors, (), ())
    assert visits.find(program, blocks, tensors, (), ()) is before
    assert visits.find(other, blocks, tensors, (), ()) is not outside
    visits._captured.clear()


def test_small_calls_do_not_look_at_masks_beforehand() -> None:
    assert not is_listed("keep r0[b, q] == r0[b, k]", operands(), (DOCUMENTS,))
    assert not is_listed("keep k <= q", operands(), ())
    assert is_listed("keep q - k < 9", operands(), ())
