"""`attngraph inspect DUMP_DIR`: a dump as one page, in a file that needs no server and no network.

The dump is what `attngraph compile TARGET --dump DIR` or `attngraph.compile(model, dump=DIR)` wrote; one
graph of it (`DIR/graph-0`) can be named too. Exit codes: 0, and 2 if the dump cannot be read or the page
cannot be written.
"""

import argparse
import json
import sys
import webbrowser

from attngraph.cli.arguments import PAGE
from attngraph.cli.terminal import Progress, check_writable
from attngraph.report.dump import read_dump
from attngraph.report.report import merge


def run(options: argparse.Namespace) -> int:
    check_writable(options.out, "--out")
    tell = Progress()
    tell(f"reading {options.dump}")
    report = merge(read_dump(options.dump))
    if options.json:
        parts = [json.loads(part.to_json()) for part in report.parts]  # if there are several graphs
        print(json.dumps({**json.loads(report.to_json()), "parts": parts}, indent=2))
        if options.out is None and not options.open:
            return 0
    earlier = None if options.against is None else merge(read_dump(options.against))
    tell("drawing the page")
    page = report.to_html(options.out or options.dump / PAGE, options.dump.resolve().name, None, earlier)
    tell.done()
    print(page, file=sys.stderr if options.json else sys.stdout)
    if options.open and not webbrowser.open(page.resolve().as_uri()):
        print(f"attngraph: no browser was found; open {page} yourself.", file=sys.stderr)
    return 0
