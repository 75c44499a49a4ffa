"""`attngraph opt FILE -p PASS,PASS`: run passes on the graph of a dump's file."""

import argparse
import importlib
import json
import sys
from dataclasses import asdict

from attngraph import pipeline
from attngraph.cli.target import passes_named
from attngraph.cli.terminal import Progress, TargetError
from attngraph.errors import told_as
from attngraph.ir.graph import format_file
from attngraph.ir.operations import of_library, spaces
from attngraph.ir.ops import nodes
from attngraph.passes.attention_entries import describe
from attngraph.report.dump import Dump, notes_of, read_graph_file


def run(options: argparse.Namespace) -> int:
    passes = passes_named(options.passes, "-p")
    libraries: set[str] = set()
    for name in options.modules:
        before = spaces()
        with told_as(TargetError, ImportError, before=f"--import {name}: "):
            importlib.import_module(name)
        libraries |= of_library(name, before)
    tell = Progress()
    tell(f"reading {options.file}")
    graph = read_graph_file(options.file, libraries)
    for node in graph.attentions():  # of which later passes use a description that the text does not contain
        if isinstance(nodes.view(node), nodes.Attention):
            node.meta["attention"] = describe(node, graph)
    dump = None if options.dump is None else Dump(options.dump)
    try:
        with told_as(TargetError, ValueError):
            result = pipeline.run(graph, passes, dump, tell)
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
        said = f"attngraph: there is no values.json beside {options.file.name}, so the contents of"
        print(f"{said} {len(unknown)} buffer(s) are not known to the passes.", file=sys.stderr)
    return 0
