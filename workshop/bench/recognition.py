"""What is recognised: attngraph beside Inductor's numbered patterns, on the spellings of the test-suite and
on stock transformers models.

    python -m workshop recognition [--models] [--json FILE]

The spellings are `tests/fusion/spellings/`, the models those of
`tests/fusion/test_transformers.py`. Inductor gets what it is best at: float32, no gradients, fixed sizes
(and once more dynamic ones); counted are the attentions that its own counter says were fused. Only its
graph passes are run, no code is generated. Every answer of ours is compared with eager's.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import attngraph
from attngraph.meaning.check.comparison import compare, elementwise
from workshop.harness import Cell, Options, Row, Suite

FOLDER = Path(__file__).parents[2] / "tests" / "fusion"
TOLERANCE = 2e-4
"""Largest accepted difference from eager in float32, relative to 1 + |value|; the tests check float64."""


def _load(path: Path) -> types.ModuleType:
    """A module from its file, or a package from its folder."""
    path = path / "__init__.py" if path.is_dir() else path
    name = path.parent.name if path.stem == "__init__" else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def inductor_fuses(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], dynamic: bool
) -> int:
    """How many attentions Inductor's patterns replace in the graphs of this call."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    def compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        mode = torch._guards.detect_fake_mode(inputs)
        with V.set_fake_mode(mode):
            joint_graph_passes(module)
        return module.forward

    torch._dynamo.reset()
    counters.clear()
    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table)
    torch.compile(function, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return int(counters["inductor"]["fuse_attention"])


def attngraph_fuses(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, bool]:
    """How many attentions attngraph fuses (merged ones count each), and whether its results match eager's."""
    compiled = attngraph.compile(function, min_scores=0)
    mine, theirs = (
        [t for t in pytree.tree_leaves(f(*args, **kwargs)) if isinstance(t, Tensor) and t.is_floating_point()]
        for f in (compiled, function)
    )
    same = all(compare(a, b, elementwise(TOLERANCE)).holds for a, b in zip(mine, theirs, strict=True))
    return sum(a.merged for a in compiled.report.attention), same


Entry = tuple[Callable[..., Any], Callable[[], tuple[Any, dict[str, Any]]], int]
"""A function, what makes the arguments of a call, and how many attentions it has."""


def _spellings() -> dict[str, Entry]:
    found = _load(FOLDER / "spellings")

    def inputs(make: Callable[[], tuple[Tensor, ...]]) -> tuple[Any, dict[str, Any]]:
        return tuple(t.float() if t.is_floating_point() else t for t in make()), {}

    return {
        name: (function, functools.partial(inputs, make), found.COUNT.get(name, 1))
        for name, (function, make) in found.MUST_FUSE.items()
    }


def _models() -> dict[str, Entry]:
    found = _load(FOLDER / "test_transformers.py")

    def inputs(case: Any) -> tuple[Any, dict[str, Any]]:
        return (), case.inputs(found.T)

    return {n: (c.build(), functools.partial(inputs, c), c.attentions) for n, c in found.CASES.items()}


def counted(
    function: Callable[..., Any], make: Callable[[], tuple[Any, dict[str, Any]]], wanted: int
) -> dict[str, Row]:
    """How many of its attentions each of the compilers fuses."""
    torch.manual_seed(0)
    args, kwargs = make()
    fused, same = attngraph_fuses(function, args, kwargs)
    found: dict[str, Row] = {"attngraph": {"attentions": wanted, "fused": fused, "equal_to_eager": same}}
    for label, dynamic in (("inductor", False), ("inductor, dynamic", True)):
        try:
            found[label] = {"attentions": wanted, "fused": inductor_fuses(function, args, kwargs, dynamic)}
        except Exception as problem:
            found[label] = {
                "attentions": wanted,
                "fused": 0,
                "error": f"{type(problem).__name__}: {problem}"[:200],
            }
    return found


def wrong(rows: Sequence[Row]) -> list[str]:
    return [row["cell"] for row in rows if not row.get("equal_to_eager", True)]


def summary(_: Options, rows: Sequence[Row]) -> str:
    """Counts of each compiler."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        own = [row for row in rows if row["name"] == name]
        whole = sum(row["fused"] >= row["attentions"] for row in own)
        each = sum(min(row["fused"], row["attentions"]) for row in own)
        every = sum(row["attentions"] for row in own)
        lines.append(f"{name:<20} {whole:>4} of {len(own)} whole, {each:>4} of {every} attentions")
    return "\n".join([*lines, f"not equal to eager: {', '.join(wrong(rows)) or 'none'}"])


def cells(options: Options) -> Iterator[Cell]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("attngraph").setLevel(logging.ERROR)
    entries: Mapping[str, Entry] = _models() if options.models else _spellings()
    for name, entry in list(entries.items())[: 3 if options.small else None]:
        yield Cell(name, functools.partial(counted, *entry))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", action="store_true", help="stock transformers models instead of spellings"
    )


MAIN = Suite(
    "recognition",
    __doc__,
    cells,
    _arguments,
    after=summary,
    fails=lambda rows: bool(wrong(rows)),
    tabled=False,
).main
