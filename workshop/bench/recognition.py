"""What is recognised: attngraph beside Inductor's numbered patterns, on the spellings of the test-suite and
on stock transformers models.

    python -m workshop.bench.recognition [--models] [--json FILE]

Run in a clone of the repository: the spellings are `tests/fusion/spellings/`, the models those of
`tests/fusion/test_transformers.py`. Inductor gets what it is best at: float32, no gradients, fixed sizes
(and once more dynamic ones); counted are the attentions that its own counter says were fused. Only its
graph passes are run, no code is generated. Every answer of ours is compared with eager's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import attngraph
from attngraph.meaning.check.comparison import compare, elementwise

TOLERANCE = 2e-4
"""Largest accepted difference from eager in float32, relative to 1 + |value|; the tests check float64."""


def _load(path: Path) -> types.ModuleType:
    """A module from its file, or a package from its folder."""
    path = path / "__init__.py" if path.is_dir() else path
    name = path.parent.name if path.stem == "__init__" else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"{path} is not there: run this in a clone of the repository.")
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


def _spellings(
    root: Path,
) -> dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, dict[str, Any]]], int]]:
    found = _load(root / "tests" / "fusion" / "spellings")
    heads: dict[str, int] = {name: found.COUNT.get(name, 1) for name in found.MUST_FUSE}

    def inputs(make: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Any, dict[str, Any]]]:
        return lambda: (tuple(t.float() if t.is_floating_point() else t for t in make()), {})

    return {n: (f, inputs(make), heads[n]) for n, (f, make) in found.MUST_FUSE.items()}


def _models(
    root: Path,
) -> dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, dict[str, Any]]], int]]:
    found = _load(root / "tests" / "fusion" / "test_transformers.py")

    def inputs(case: Any) -> Callable[[], tuple[Any, dict[str, Any]]]:
        return lambda: ((), case.inputs(found.T))

    return {name: (case.build(), inputs(case), case.attentions) for name, case in found.CASES.items()}


def measure(root: Path, models: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Counts for every spelling (or every model), and their totals."""
    entries = _models(root) if models else _spellings(root)
    rows: dict[str, dict[str, Any]] = {}
    for place, (name, (function, make, wanted)) in enumerate(entries.items()):
        progress(f"{place + 1} of {len(entries)}: {name}")
        torch.manual_seed(0)
        args, kwargs = make()
        row: dict[str, Any] = {"attentions": wanted}
        with torch.no_grad():
            row["attngraph"], row["equal to eager"] = attngraph_fuses(function, args, kwargs)
            for label, dynamic in (("inductor", False), ("inductor, dynamic", True)):
                try:
                    row[label] = inductor_fuses(function, args, kwargs, dynamic)
                except Exception as problem:
                    row[label], row[f"{label}: error"] = 0, f"{type(problem).__name__}: {problem}"[:200]
        rows[name] = row
    sums = {
        key: sum(min(r[key], r["attentions"]) if key != "attentions" else r[key] for r in rows.values())
        for key in ("attentions", "attngraph", "inductor", "inductor, dynamic")
    }
    whole = {
        key: sum(r[key] >= r["attentions"] for r in rows.values())
        for key in ("attngraph", "inductor", "inductor, dynamic")
    }
    wrong = [n for n, r in rows.items() if not r["equal to eager"]]
    return {
        "entries": len(rows),
        "fused whole": whole,
        "attentions": sums,
        "not equal to eager": wrong,
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--models", action="store_true", help="stock transformers models instead of spellings"
    )
    parser.add_argument("--json", metavar="FILE", help="write every entry's counts here")
    parser.add_argument("--root", default=".", help="the clone (default: the working directory)")
    options = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("attngraph").setLevel(logging.ERROR)
    found = measure(Path(options.root), options.models, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    whole, sums = found["fused whole"], found["attentions"]
    kind = "models" if options.models else "spellings"
    print(f"{found['entries']} {kind}, {sums['attentions']} attentions")
    for name in ("attngraph", "inductor", "inductor, dynamic"):
        print(f"  {name:<20} {whole[name]:>4} {kind} whole, {sums[name]:>4} attentions")
    print(f"  not equal to eager: {', '.join(found['not equal to eager']) or 'none'}")
    return 1 if found["not equal to eager"] else 0


if __name__ == "__main__":
    sys.exit(main())
