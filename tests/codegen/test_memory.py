"""Large blocks of memory on the CPU are used again once they are free, and never before."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attngraph.ir import budgets
from attngraph.ir.ops import memory
from attngraph.ir.ops.kernels import empty_result
from attngraph.runtime.measure import peak_memory
from tests.runtime.small import together

CPU = torch.device("cpu")
ROWS = memory.LARGE // 4 // 256
"""Rows of 256 float32 that are just large."""


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    gc.collect()
    memory._free.clear()
    yield
    memory._free.clear()


def block(rows: int = ROWS, width: int = 256) -> Tensor:
    return memory.empty((rows, width), torch.float32, CPU)


def test_a_block_that_is_free_is_used_again() -> None:
    first = block()
    place = first.data_ptr()
    del first
    assert memory.kept() == memory.LARGE
    assert block().data_ptr() == place


def test_it_is_in_use_as_long_as_anything_reads_it() -> None:
    first = block()
    first.fill_(1.0)
    place, view = first.data_ptr(), first[3:5].T
    array = view.numpy()
    del first, view
    assert memory.kept() == 0 and block().data_ptr() != place
    assert (array == 1.0).all()


def test_a_graph_for_gradients_keeps_it_in_use() -> None:
    weight = torch.ones(256, requires_grad=True)
    first = block()
    first.fill_(2.0)
    total = (first * weight).sum()
    del first
    block().fill_(7.0)
    total.backward()
    assert weight.grad is not None and (weight.grad == 2.0 * ROWS).all()


def test_a_block_serves_what_needs_at_least_half_of_it() -> None:
    place = (whole := block(2 * ROWS)).data_ptr()
    del whole
    assert block(2 * ROWS + 1).data_ptr() != place  # too small for it
    part = block(ROWS)
    assert part.data_ptr() == place and part.untyped_storage().nbytes() == memory.LARGE
    del part
    larger = block(5 * ROWS)
    place = larger.data_ptr()
    del larger
    assert block(2 * ROWS).data_ptr() != place  # less than half of it


def test_small_tensors_and_other_devices_are_as_torch_makes_them() -> None:
    small = memory.empty((4, 4), torch.float64, CPU)
    assert small.dtype == torch.float64
    del small
    assert memory.empty((ROWS, 256), torch.float32, torch.device("meta")).is_meta
    assert memory.kept() == 0


def test_so_many_bytes_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MEMORY_KEPT", 3 * memory.LARGE)
    held = [block() for _ in range(5)]
    last = {t.data_ptr() for t in held[2:]}
    while held:
        held.pop(0)
    assert memory.kept() == 3 * memory.LARGE
    assert {b.data_ptr() for b in memory._free.values()} == last  # the first that were freed are gone


def test_results_have_the_heads_of_a_token_side_by_side_and_are_no_views() -> None:
    like = torch.empty(1, dtype=torch.bfloat16)
    for tokens in (5, memory.LARGE):
        found = empty_result(like, (1, 2, tokens, 8))
        assert found.stride() == (16 * tokens, 8, 16, 1) and not found._is_view()
        assert found.dtype == torch.bfloat16 and found.shape == (1, 2, tokens, 8)


def test_tracing_gets_tensors_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        assert isinstance(block(), FakeTensor)
    assert memory.kept() == 0


def test_threads_never_share_a_block() -> None:
    gc.collect()  # of other tests' blocks none is given back meanwhile
    wrong, before = list[int](), memory.kept()

    def work(number: int) -> None:
        for _ in range(200):
            own = block()
            own.fill_(number)
            if not bool((own == number).all()):
                wrong.append(number)
            del own

    together([functools.partial(work, n) for n in range(6)])
    assert not wrong and memory.kept() <= before + 6 * memory.LARGE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_memory_of_its_own() -> None:
    mine = block()
    mine.fill_(1.0)
    child = os.fork()
    if child == 0:
        mine.numpy()[:] = 5.0
        os._exit(0)
    os.waitpid(child, 0)
    assert (mine == 1.0).all()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no pages of 2 MiB"
)
@pytest.mark.parametrize("make", [lambda: block(8 * ROWS), lambda: memory.workspace(8 * ROWS * 256)])
def test_large_pages_are_asked_for(make: Callable[[], Tensor]) -> None:
    memory._own.__dict__.clear()
    made = make()
    middle = made.data_ptr() + made.nbytes // 2
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for mapping, flags in itertools.pairwise(mappings):
        bounds = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", mapping, re.MULTILINE)[-1]
        if int(bounds[0], 16) <= middle < int(bounds[1], 16):
            assert "hg" in flags.partition("\n")[0].split()
            return
    raise AssertionError("the block lies in no mapping")


def test_the_peak_of_a_call_counts_blocks_that_were_kept() -> None:
    """What an earlier call left for this one is memory that this one needs."""

    def call() -> None:
        memory.empty((32 << 20,), torch.uint8, torch.device("cpu")).fill_(1)

    call()
    assert memory.kept() >= 32 << 20
    assert peak_memory(call) >= 24 << 20
