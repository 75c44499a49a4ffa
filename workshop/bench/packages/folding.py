"""`python -m workshop folding`: attention of models that fold proteins, in training steps.

    python -m workshop folding --json docs/measured/folding.json
    python -m workshop tables --write

Modules of Boltz and OpenFold3 at their own widths: scores get a bias for each pair of tokens, which is
computed from the pairs and gets a gradient. A step is forward and backward. Results and all gradients are
compared first, relative to the largest of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import attngraph
from workshop.bench.packages.examine import difference
from workshop.bench.packages.models import build, call_of
from workshop.harness import Cell, Options, Row, Suite, installed, times
from workshop.processes import quietly

_BOLTZ, _OPEN = "boltz.model.layers", "openfold3.core.model.layers"
_TRIANGLE = "(128, 32, 4) | noise(1, {n}, {n}, 128), mask=noise(1, {n}, {n}).gt(-1).float()"
MODULES = {
    "Boltz TriangleAttention, 192 tokens":
        _BOLTZ + ".triangular_attention.attention:TriangleAttention" + _TRIANGLE.format(n=192),
    "Boltz AttentionPairBias, 512 tokens":
        _BOLTZ + ".attention:AttentionPairBias(384, 128, 16) | noise(1, 512, 384), noise(1, 512, 512, 128), "
        "noise(1, 512).gt(-1).float()",
    "Boltz PairformerLayer, 192 tokens":
        _BOLTZ + ".pairformer:PairformerLayer(384, 128, v2=True) | noise(1, 192, 384), "
        "noise(1, 192, 192, 128), noise(1, 192).gt(-1).float(), noise(1, 192, 192).gt(-1).float()",
    "OpenFold3 TriangleAttention, 192 tokens":
        _OPEN + ".triangular_attention:TriangleAttention" + _TRIANGLE.format(n=192),
    "OpenFold3 AttentionPairBias, 512 tokens":
        _OPEN + ".attention_pair_bias:AttentionPairBias(384, 384, 384, 384, 128, 24, 16) | "
        "noise(1, 512, 384), noise(1, 512, 512, 128), mask=noise(1, 512).gt(-1).float()",
}  # fmt: skip
"""What makes a module, and the arguments of a call."""


def step(run: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]], wanted: list[Tensor]) -> Any:
    """The results of a call, and the gradients of a loss of them."""
    args, kwargs = call
    results = run(*args, **kwargs)
    results = results if isinstance(results, tuple) else (results,)
    loss = torch.stack([result.square().mean() for result in results]).sum()
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [r.detach() for r in results], [torch.zeros(()) if g is None else g for g in grads]


def measured(name: str) -> dict[str, Row]:
    """Seconds and peak memory of a step, and how far ours is from eager's."""
    torch.manual_seed(0)
    made, arguments = MODULES[name].split(" | ")
    model, (args, kwargs) = build(made).eval(), call_of(arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
    inputs = [a.requires_grad_() for a in args if a.shape[-1] in (128, 384)]
    wanted = [*inputs, *model.parameters()]
    compiled = attngraph.compile(model, min_scores=0)
    runs = {"eager": model, "attngraph": compiled}
    found, expected = (step(run, (args, kwargs), wanted) for run in (compiled, model))
    joined = [torch.cat([g.flatten() for g in grads]) for _, grads in (found, expected)]
    about = {
        "fused": len(compiled.report.attention), "missed": len(compiled.report.missed),
        "difference": difference(found[0], expected[0]),
        "of gradients": difference(joined[:1], joined[1:]),
    }  # fmt: skip
    calls = {n: functools.partial(step, run, (args, kwargs), wanted) for n, run in runs.items()}
    rows = times(calls, rounds=5)
    return {"eager": rows["eager"], "attngraph": {**rows["attngraph"], **about}}


def cells(_: Options) -> Iterator[Cell]:
    quietly()
    for name in MODULES:
        if installed(name.split()[0].lower()) is not None:
            yield Cell(name, functools.partial(measured, name))


def _facts(_: Options) -> Row:
    return {"versions": {name: installed(name) for name in ("boltz", "openfold3")}}


def rows_of_page(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The lines of the table in docs/packages.md."""
    yield [
        "module", "fused", "difference", "of gradients", "eager, ms", "attngraph, ms", "eager, MiB",
        "attngraph, MiB",
    ]  # fmt: skip
    for eager, ours in zip(rows[::2], rows[1::2], strict=True):
        figures = [f"{1e3 * row['seconds']:.0f}" for row in (eager, ours)]
        figures += [f"{row['peak_bytes'] / 2**20:.0f}" for row in (eager, ours)]
        fused = f"{ours['fused']} of {ours['fused'] + ours['missed']}"
        yield [ours["cell"], fused, f"{ours['difference']:.0e}", f"{ours['of gradients']:.0e}", *figures]


MAIN = Suite("folding", __doc__, cells, facts=_facts, base="eager", gradients=True).main
