"""Comparing a model on simulated ranks with itself on one device, values and gradients; and processes that
are ranks, by gloo."""

import copy
import multiprocessing
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.report.entries import Entries
from attngraph.report.ranks import ContextEntry, RanksEntry

Compared = Callable[..., RanksEntry]
ComparedTokens = Callable[..., ContextEntry]


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _compared(
    mesh: attngraph.SimulatedMesh, model: nn.Module, *args: Any, gradients: bool = True, wide: bool = True,
    **kwargs: Any,
) -> Entries:  # fmt: skip
    """Check that simulated ranks give the results and the gradients of one device, in float64 or (not `wide`)
    as the model is; the report."""
    model, rounding = (model.double(), 1e-8) if wide else (model, 1e-5)
    alone = copy.deepcopy(model)
    compiled = attngraph.compile(model, mesh=mesh)
    with torch.set_grad_enabled(gradients):
        torch.manual_seed(5)
        found = _first(compiled(*args, **kwargs))
        torch.manual_seed(5)
        wanted = _first(alone(*args, **kwargs))
    torch.testing.assert_close(found, wanted, rtol=100 * rounding, atol=rounding, equal_nan=True)
    if gradients:
        weight = torch.randn_like(wanted)
        found.backward(weight)
        wanted.backward(weight)
        largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
        for (name, mine), (_, theirs) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(
                    mine.grad, theirs.grad, rtol=100 * rounding, atol=rounding * max(1, largest), msg=name
                )
    return compiled.report


@pytest.fixture
def same_on_ranks() -> Compared:
    """Checks that so many ranks give the results and the gradients of one device, dividing heads and hidden
    units; returns the report's entry about ranks."""

    def compared(model: nn.Module, ranks: int, *args: Any, **kwargs: Any) -> RanksEntry:
        entry = _compared(attngraph.SimulatedMesh(tensor=ranks), model, *args, **kwargs).ranks
        assert isinstance(entry, RanksEntry)
        return entry

    return compared


@pytest.fixture
def same_by_tokens() -> ComparedTokens:
    """The same for ranks that divide tokens."""

    def compared(model: nn.Module, ranks: int, *args: Any, **kwargs: Any) -> ContextEntry:
        entry = _compared(attngraph.SimulatedMesh(context=ranks), model, *args, **kwargs).context
        assert isinstance(entry, ContextEntry)
        return entry

    return compared


@pytest.fixture
def same_on_mesh() -> Callable[..., Entries]:
    """The same for 2 x 2 ranks, which divide heads along one axis and tokens along the other; the report."""

    def compared(model: nn.Module, *args: Any, **kwargs: Any) -> Entries:
        found = _compared(attngraph.SimulatedMesh(tensor=2, context=2), model, *args, **kwargs)
        assert found.ranks is not None and found.context is not None
        return found

    return compared


_SCRIPTS = Path(__file__).parent / "ranks"


@pytest.fixture
def ranks() -> Callable[..., list[str]]:
    """Runs a task of a script in `ranks/` in several processes; returns what each of them says last. They are
    forked from one that has imported attngraph."""

    def run(task: str, folder: Path, ranks: int = 2, script: str = "run.py") -> list[str]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["attngraph.api"])
        said = [folder / f"said by {rank}" for rank in range(ranks)]
        started = [
            context.Process(
                target=runpy.run_path,
                args=(
                    str(_SCRIPTS / script),
                    {"given": (task, rank, ranks, folder / "meet", said[rank])},
                    "__main__",
                ),
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        try:
            for process in started:
                process.join(timeout=240)
        finally:
            for process in started:
                process.kill()
        texts = [file.read_text() for file in said]
        for process, text in zip(started, texts, strict=True):
            assert process.exitcode == 0, text[-3000:]
        return [text.strip().splitlines()[-1] for text in texts]

    return run
