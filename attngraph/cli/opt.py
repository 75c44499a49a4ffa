"""`attngraph opt FILE -p PASS,PASS`: run passes on the graph of a dump's file."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attngraph import pipeline
from attngraph.cli.progress import Progress
from attngraph.cli.target import TargetError
from attngraph.ir.graph.literals import split
from attngraph.ir.graph.printer import format_file
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops import nodes
from attngraph.passes import PASSES, pass_named
from attngraph.passes.fuse_attention import describe
from attngraph.report.dump import Dump, notes_of, read_graph_file


def add(commands: Any) -> None:
    opt = commands.add_parser(
        "opt",
        help="run passes on the graph of a dump's file and print what comes out",
        epilog="example: attngraph opt DIR/graph-0/01-canonicalize.txt -p fuse-attention,merge-heads; a pass "
        "takes options as in -p \"absorb-mla(absorb='always')\". What is printed can be given to opt again. "
        "Buffers' contents are read from values.json beside the file, where there are any.",
    )
    opt.add_argument("file", type=Path, help="a file NN-<pass>.txt of a dump")
    opt.add_argument(
        "-p", "--passes", required=True, metavar="PASS,PASS",
        help=f"in this order: {', '.join(step.name for step in PASSES)}",
    )  # fmt: skip
    opt.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="a module that registers ops which the graph has (transformers.integrations.moe, say)",
    )  # fmt: skip
    opt.add_argument("--dump", type=Path, metavar="DIR", help="write the graph after each pass here")
    opt.add_argument("--json", action="store_true", help="print what the passes did, not the graph")
    opt.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        passes = [pass_named(text) for text in split(options.passes)]
    except ValueError as problem:
        raise TargetError(f"-p {options.passes}: {problem}") from problem
    for name in options.modules:
        try:
            importlib.import_module(name)
        except ImportError as problem:
            raise TargetError(f"--import {name}: {problem}") from problem
    tell = Progress()
    tell(f"reading {options.file}")
    graph = read_graph_file(options.file)
    _describe_attentions(graph)
    dump = None if options.dump is None else Dump(options.dump)
    try:
        result = pipeline.run(graph, passes, dump, tell)
    except ValueError as problem:
        raise TargetError(str(problem)) from problem
    finally:
        tell.done()
    if options.json:
        records = [{k: v for k, v in asdict(r).items() if k != "text"} for r in result.records]
        print(json.dumps({"passes": records, "missed": [asdict(m) for m in result.missed]}, indent=2))
        return 0
    head, text = format_file(graph)
    for record in result.records:
        print(f"# {record.name}   {record.before} -> {record.after} ops")
        for note in notes_of(record):
            print(f"# {note}")
    print(f"{head}\n{text}")
    unknown = [i.label for i in graph.inputs if i.kind in ("buffer", "constant")]
    if unknown and not graph.values:
        print(
            f"attngraph: there is no values.json beside {options.file.name}, so the contents of "
            f"{len(unknown)} buffer(s) are not known to the passes.",
            file=sys.stderr,
        )
    return 0


def _describe_attentions(graph: ProgramGraph) -> None:
    """Restore the description of each attention, which later passes use and the text does not contain."""
    for node in graph.attentions():
        if isinstance(nodes.view(node), nodes.Attention):
            node.meta["attention"] = describe(node, graph.hints)
