"""The stand-in itself: it computes what the CPU does, and notices what a card forbids or is slow at."""

import pytest
import torch
from torch import Tensor

import attngraph
from workshop.standin.plugin import DEVICE


@pytest.fixture(autouse=True)
def _unnoticed() -> None:
    DEVICE.waits()


def test_tensors_say_that_they_are_on_a_gpu() -> None:
    x = torch.randn(3, 4)
    assert x.is_cuda and (x.mT @ x).device == torch.device("cuda", 0)
    torch.testing.assert_close((x.mT @ x).cpu(), x.cpu().mT @ x.cpu())


def test_what_is_written_through_a_view_stands_in_the_tensor() -> None:
    x = torch.zeros(4, 3)
    x.t()[1:, 2:].add_(1)
    x[0].copy_(torch.tensor([5.0, 6.0, 7.0]))
    assert x.tolist() == [[5, 6, 7], [0, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_a_result_that_grows_has_its_new_size() -> None:
    out = torch.empty(0)
    assert torch.add(torch.ones(2, 3), 1, out=out) is out
    assert out.tolist() == [[2, 2, 2], [2, 2, 2]]
    out.resize_(1, 2)
    assert out.tolist() == [[2, 2]]


def test_gradients_flow() -> None:
    layer = torch.nn.Linear(4, 5)
    x = torch.randn(3, 4, requires_grad=True)
    layer(x).square().sum().backward()
    assert (
        x.grad is not None and x.grad.is_cuda and layer.weight.grad is not None and layer.weight.grad.is_cuda
    )
    torch.testing.assert_close(x.grad, 2 * layer(x).detach() @ layer.weight.detach())


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3) + torch.ones(3, device="cpu")
    assert (torch.ones(3) + torch.tensor(1.0, device="cpu")).tolist() == [2, 2, 2]


def test_waiting_for_a_result_is_noticed_and_can_be_forbidden() -> None:
    x = torch.ones(3)
    assert not DEVICE.waits()
    assert x.sum().item() == 3 and x.cpu().tolist() == [1, 1, 1] and x.nonzero().shape == (3, 1)
    assert DEVICE.waits() == ["aten::_local_scalar_dense", "aten::copy_", "aten::nonzero"]
    DEVICE.may_wait(False)
    try:
        with pytest.raises(RuntimeError, match="waits for the GPU in aten::_local_scalar_dense"):
            bool(x.sum())
    finally:
        DEVICE.may_wait(True)


def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000)
    assert torch.cuda.memory_allocated() == before + 4000
    torch.cuda.reset_peak_memory_stats()
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == before + 4000


def _captured(function: object) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        function()  # type: ignore[operator]
    return graph


def test_a_captured_graph_computes_again_on_the_same_memory() -> None:
    x, count = torch.ones(2, 16), torch.zeros((), dtype=torch.int64)
    results: list[Tensor] = []

    def step() -> None:
        results.append((x * 2).sum() + count)
        count.add_(1)

    graph = _captured(step)
    assert count.item() == 0  # what is captured does not run
    for times in range(1, 4):
        x.fill_(times)
        graph.replay()
        assert results[0].item() == 64 * times + times - 1 and count.item() == times


def test_a_captured_graph_launches_kernels_of_triton() -> None:
    q = torch.randn(1, 2, 8, 16)
    program = "s = dot\nkeep k <= q"
    attngraph.attention(q, q, q, program)
    results: list[Tensor] = []
    graph = _captured(lambda: results.append(attngraph.attention(q, q, q, program)))
    for _ in range(2):
        q.copy_(torch.randn(1, 2, 8, 16))
        graph.replay()
        torch.testing.assert_close(results[0], attngraph.attention(q, q, q, program))


def test_a_captured_graph_cannot_wait_or_read_the_memory_of_the_cpu() -> None:
    x, host = torch.ones(2), torch.ones(2, device="cpu")
    for refused in (lambda: x.sum().item(), lambda: x.copy_(host), lambda: x.cpu()):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            _captured(refused)
