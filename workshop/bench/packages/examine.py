"""One model: its first call, compiled by attngraph or by torch.compile, beside a call of the model itself.

Run in a process of its own, whose caches of kernels are empty. A task's name is "attngraph: TITLE" or
"torch.compile: TITLE".
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import attngraph
from workshop.bench.packages.models import MODELS, Model, build, call_of
from workshop.harness import short
from workshop.processes import quietly

CLOSE = 1e-4
"""Differences up to this, relative to the result's largest entry, are rounding and not looked into."""
COMPILERS = ("attngraph", "torch.compile")


def work(name: str, answer: Connection) -> None:
    """Send the row of a task; the target of a process."""
    quietly()
    compiler, _, title = name.partition(": ")
    with tempfile.TemporaryDirectory() as caches:
        os.environ.update(
            XDG_CACHE_HOME=caches, TORCHINDUCTOR_CACHE_DIR=caches, TORCHINDUCTOR_COMPILE_THREADS="1"
        )
        torch._inductor.config.compile_threads = 1
        answer.send({"task": name, **examine(compiler, next(m for m in MODELS if m.title == title))})


def examine(compiler: str, described: Model) -> dict[str, Any]:
    """What becomes of the model: seconds, differences, and attngraph's report."""
    try:
        model, call = made(described)
        expected = results(model, call)
    except Exception as problem:
        return {"outcome": "does not run", "reason": short(problem, 300)}
    target = copy.deepcopy(model)
    compiled: Any = (
        attngraph.compile(target, min_scores=0) if compiler == "attngraph" else torch.compile(target)
    )
    start, building = time.process_time(), _compilers()
    try:
        found = results(compiled, call)
    except Exception as problem:
        return {"outcome": "failed", "reason": short(problem, 300)}
    row = {"seconds": time.process_time() - start, "building": _compilers() - building}
    row |= _judged(model, call, expected, found)
    return row if compiler != "attngraph" else {**row, **_reported(compiled.report)}


def made(described: Model) -> tuple[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The model in eval mode, with weights that make attention matter, and the arguments of a call."""
    torch.manual_seed(0)
    model: nn.Module = build(described.made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not (parameter.abs() < 100).all():  # never initialised
                parameter.zero_()
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    return model, call_of(described.arguments)


def results(run: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    """The tensors of one call. Random numbers are the same in every call; arguments are copies."""
    args, kwargs = copy.deepcopy(call)
    torch.manual_seed(1)
    with torch.no_grad():
        found = run(*args, **kwargs)
    return [leaf for leaf in _pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry of each result; infinite where shapes, integers
    or the places of NaN and infinities differ."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    return max((_difference(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)


def _difference(found: Tensor, expected: Tensor) -> float:
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0 if torch.equal(found, expected) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = found[finite].to(wide), expected[finite].to(wide)
    if not b.numel():
        return 0.0
    largest = float((a - b).abs().max())
    return largest / max(float(b.abs().max()), 1e-30)


def _judged(
    model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], expected: list[Tensor],
    found: list[Tensor],
) -> dict[str, Any]:  # fmt: skip
    """How far the result is from the model's own; if far, how far both are from the model in float64."""
    row: dict[str, Any] = {"difference": difference(found, expected)}
    if row["difference"] <= CLOSE:
        return row
    row["repeated"] = difference(results(copy.deepcopy(model), call), expected)
    try:
        exact = results(copy.deepcopy(model).double(), _pytree.tree_map_only(Tensor, _double, call))
    except Exception as problem:
        return {**row, "float64": short(problem, 300)}
    return {
        **row,
        "ours to float64": difference(found, exact),
        "eager to float64": difference(expected, exact),
    }


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _reported(report: attngraph.CompileReport) -> dict[str, Any]:
    missed: dict[str, int] = {}
    for place in report.missed:
        missed[place.reason] = missed.get(place.reason, 0) + 1
    return {
        "fused": len(report.attention),
        "missed": missed,
        "graphs": report.graphs,
        "pieces": [
            f"{stop.reason} ({stop.source})" if stop.source else stop.reason for stop in report.breaks
        ],
    }


def _compilers() -> float:
    """Seconds of CPU of the processes that this one started and that have ended: C and C++ compilers."""
    times = os.times()
    return times.children_user + times.children_system
