"""The arguments of every command. Nothing here imports torch: `attngraph --help` answers at once."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attngraph import __version__
from attngraph.ir.choices import ABSORB, FALLBACKS, FORMATS, PASSES, backends
from attngraph.report.programs import WELL_KNOWN

PAGE = "report.html"
"""The file in which `attngraph inspect` writes its page, in the folder of the dump."""
_TEXT = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kKMGTPE]?)(i?)(B|B/s|FLOPS|FLOP/s)?")
_POWERS = "kMGTPE"

_EPILOG = """\
to begin with:
  attngraph compile attngraph.models.targets:tiny_decoder_lm --dump out
  attngraph inspect out --open
  attngraph show "keep k <= q and k > q - 16"

TARGET is package.module:NAME or path/file.py:NAME. NAME is a function that returns (model, inputs) and
may take batch and tokens; or a model, or its class, as in "lm.py:LM(width=64)", for which inputs are
made. hf:FOLDER is a checkpoint of transformers.
Results go to standard output, progress to standard error; every command has --json.
exit codes: 0 all good; 1 the answer is no (not equal to eager or to the reference, not fused under
--strict); 2 the command
or what it was given cannot be used; 130 interrupted.
Measurements of attngraph itself and fuzzing are in its repository: python -m workshop --help.
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` is the name of the module that runs it."""
    made = argparse.ArgumentParser(
        "attngraph", description="A compiler for attention: what it makes of a model, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG,
    )  # fmt: skip
    made.add_argument("--version", action="version", version=f"attngraph {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_compile, _demo, _export, _inspect, _opt, _bisect, _show, _bench, _cache, _plan, _verify):
        add(commands)
    return made


def at_least(least: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """An argument type: a number that is not smaller."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not value >= least:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {what} of at least {least}, found {text!r}")
        return value

    return read


def quantity(text: str) -> float:
    """The number that a text such as 80GB, 80GiB, 3.35TB/s or 989T says.

    Raises:
        argparse.ArgumentTypeError: it says none, or nothing positive.
    """
    found = _TEXT.fullmatch(text.strip())
    value = 0.0
    if found and not (found[3] and not found[2]):
        power = _POWERS.index(found[2].replace("K", "k")) + 1 if found[2] else 0
        value = float(found[1]) * (1024.0 if found[3] else 1000.0) ** power
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a positive number, with a unit such as 80GB, 80GiB, 450GB/s or 989T, found {text!r}"
        )
    return value


POSITIVE = at_least(1)


def _target(parser: argparse.ArgumentParser, nargs: str | None = None, name: str = "target") -> None:
    """The arguments that name a target and the sizes of its example."""
    parser.add_argument(
        name,
        nargs=nargs,
        help="package.module:NAME or path/file.py:NAME of a function, a class or a model; or hf:FOLDER",
    )
    parser.add_argument("--tokens", type=POSITIVE, help="tokens of the example")
    parser.add_argument("--batch", type=POSITIVE, help="batch size of the example")


def _compile(commands: Any) -> None:
    one = commands.add_parser(
        "compile",
        help="compile a model, show the report, check it against eager, time it",
        epilog="example: attngraph compile attngraph.models.targets:tiny_decoder_lm --page report.html",
    )
    _target(one, nargs="+")
    one.add_argument("--dump", metavar="DIR", help="write the graph after each pass here")
    one.add_argument(
        "--page", type=Path, metavar="FILE",
        help="write the report as one HTML page, with your code, measured times and weights",
    )  # fmt: skip
    one.add_argument("--strict", action="store_true", help="fail where something is not fused")
    one.set_defaults(full=True)
    _how_to_compile(one)


def _bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time and memory of a model beside eager and torch.compile, without the report",
        epilog="example: attngraph bench attngraph.models.targets:tiny_decoder_lm --rounds 9. "
        "The suites that compare attngraph with others are in its repository: python -m workshop --help.",
    )
    _target(bench, nargs="+")
    bench.set_defaults(dump=None, page=None, strict=False, full=True)
    _how_to_compile(bench)


def _demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="two language models at real size on real text, and attention alone at 2048 tokens",
        epilog="example: attngraph demo --full. It takes a minute or two on two cores, and says on standard "
        "error what it does.",
    )
    demo.add_argument("--full", action="store_true", help="measure inductor=True too, twice the time")
    _how_to_compile(demo)
    demo.set_defaults(batch=None, dump=None, page=None, strict=False, rounds=3)


def _cache(commands: Any) -> None:
    cache = commands.add_parser(
        "cache",
        help="what is kept on disk of earlier compilations; clear removes it",
        epilog="ATTNGRAPH_CACHE=DIR moves it, ATTNGRAPH_CACHE=0 keeps no graphs. "
        "example: attngraph cache clear",
    )
    cache.add_argument("action", nargs="?", choices=("show", "clear"), default="show", help="what to do")
    cache.add_argument("--json", action="store_true", help="print one JSON object")


def _how_to_compile(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object for each target")
    command.add_argument("--backend", default="auto", choices=backends(), help="whose kernels to use")
    command.add_argument(
        "--absorb", default="auto", choices=ABSORB, help="latent attention: the order of multiplication"
    )
    command.add_argument(
        "--disable", action="append", default=[], metavar="PASS", choices=PASSES,
        help=f"a pass that is not to run: {', '.join(PASSES)}",
    )  # fmt: skip
    command.add_argument(
        "--min-scores", type=at_least(0), metavar="N",
        help="run the graph from N scores per attention on; smaller calls run the model itself, as those of "
        "attngraph.compile do by default",
    )  # fmt: skip
    _own_passes(command)
    command.add_argument("--inductor", action="store_true", help="compile the rest with Inductor too")
    command.add_argument(
        "--no-torch-compile", action="store_true",
        help="do not measure torch.compile, nor inductor=True, beside it",
    )  # fmt: skip
    command.add_argument("--rounds", type=POSITIVE, default=5, help="rounds of timing (default %(default)s)")


def _own_passes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--add", action="append", default=[], metavar="PASS[@BEFORE]",
        help="a pass of yours, as mine.py:DropOnes before select-kernels, or mine.py:DropOnes@merge-heads",
    )  # fmt: skip


def _verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="whether two models compute the same: a port, say, and what was ported",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: attngraph verify attngraph.models.targets:tiny_decoder_lm port.py:LM --tokens 24\n"
        "Both are called with the reference's inputs, or those of --inputs. Sides may also be FILE.onnx, a\n"
        "folder that `save` wrote, and functions that take arguments, such as kernel.py:attend.\n"
        "exit codes: 0 equal; 1 they differ; 2 they cannot be compared, or a target cannot be used.",
    )
    _target(verify, name="reference")
    verify.add_argument("candidate", help="what is compared with it, named in the same way")
    verify.add_argument(
        "--rename", type=Path, metavar="FILE",
        help="JSON: the name of the reference's weight for each of the candidate's that differs",
    )  # fmt: skip
    verify.add_argument(
        "--inputs", metavar="NAME", help="a function, as inputs.py:NAME, that returns the arguments"
    )
    verify.add_argument("--no-gradients", action="store_true", help="compare results alone")
    verify.add_argument("--seed", type=int, default=0, help="repeats a run (default 0)")
    verify.add_argument(
        "--budget", type=at_least(0, float), default=60.0, metavar="S",
        help="seconds after which nothing new is tried (default 60)",
    )  # fmt: skip
    verify.add_argument(
        "--subprocess", action="store_true", help="run the candidate in a process of its own, with limits"
    )
    verify.add_argument(
        "--seconds", type=at_least(0, float), default=60.0, metavar="S",
        help="its time for a call (default 60)",
    )  # fmt: skip
    verify.add_argument(
        "--memory", type=quantity, default=4 * 2.0**30, metavar="SIZE",
        help="its memory besides what torch takes (default 4GiB)",
    )  # fmt: skip
    verify.add_argument("--html", type=Path, metavar="FILE", help="write the verdict as one HTML page")
    verify.add_argument("--json", action="store_true", help="print one JSON object")


def _export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a model, or its decoder, as a file that runs without attngraph",
        epilog="example: attngraph export attngraph.models.targets:tiny_decoder_lm --decoder -o lm.onnx. The "
        "file is run and compared with the model before it is kept.",
    )
    _target(export)
    export.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the file to write")
    export.add_argument("--format", choices=FORMATS, help="default: by the file's name")
    export.add_argument("--decoder", action="store_true", help="with a cache as its input and output")
    export.add_argument(
        "--fallback", default="sdpa", choices=FALLBACKS, help="how attention is written in pt2"
    )
    export.add_argument("--no-padding", action="store_true", help="decoder: all rows are equally long")
    export.add_argument("--no-check", action="store_true", help="do not run the file")
    export.add_argument("--json", action="store_true", help="print one JSON object")


def _inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="a dump as one HTML page: what was missed, each pass before and after, the graph, kernels",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n"
        "  attngraph compile attngraph.models.targets:tiny_decoder_lm --dump out\n"
        f"  attngraph inspect out --open       writes out/{PAGE} and shows it in your browser\n"
        "  attngraph inspect out --json       the report as JSON, no page\n"
        "  attngraph inspect new --against old   what is different after a change of the model\n"
        "  attngraph inspect out/graph-1      one graph of several",
    )
    inspect.add_argument("dump", type=Path, metavar="DUMP_DIR", help="the folder that --dump wrote")
    inspect.add_argument(
        "--out", type=Path, metavar="FILE", help=f"where the page is written (default: DUMP_DIR/{PAGE})"
    )
    inspect.add_argument(
        "--against", type=Path, metavar="DIR", help="an earlier dump, which the page compares this one with"
    )
    inspect.add_argument("--open", action="store_true", help="show the page in your browser")
    inspect.add_argument(
        "--json", action="store_true", help="print the report as JSON; a page only with --out"
    )


def _opt(commands: Any) -> None:
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
        help=f"in this order: {', '.join(PASSES)}",
    )  # fmt: skip
    opt.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE",
        help="a module that registers ops which the graph has (transformers.integrations.moe, say)",
    )  # fmt: skip
    opt.add_argument("--dump", type=Path, metavar="DIR", help="write the graph after each pass here")
    opt.add_argument("--json", action="store_true", help="print what the passes did, not the graph")


def _bisect(commands: Any) -> None:
    parser = commands.add_parser(
        "bisect",
        help="find the first pass after which a model's answer is not eager's",
        epilog="example: attngraph bisect attngraph.models.targets:tiny_decoder_lm --tokens 64. Exit code 1 "
        "if a pass is found; attngraph.compile(model, disable=('PASS',)) compiles without it.",
    )
    _target(parser)
    parser.add_argument("--backend", default="auto", choices=backends(), help="whose kernels to use")
    _own_passes(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _show(commands: Any) -> None:
    names = "\n".join(f"  {name:<14} {known.about}" for name, known in WELL_KNOWN.items())
    show = commands.add_parser(
        "show",
        help="a score program: normalised, its mask in words and as a picture, the share that is computed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"well-known programs:\n{names}\n\n"
        "examples: attngraph show window --size n0=128\n"
        '          attngraph show "keep k <= q and k > q - 100 * (h + 1)" --head 0 1 2 --svg mask.svg',
    )
    show.add_argument(
        "program", help="a score program, a file with one, - for standard input, or a name below"
    )
    show.add_argument("--queries", type=int, help="how many queries (default: as many as keys, or 1024)")
    show.add_argument("--keys", type=int, help="how many keys (default: as many as queries)")
    show.add_argument("--tile", type=int, default=64, help="queries and keys of one tile (default 64)")
    show.add_argument("--size", nargs="+", default=[], metavar="nN=VALUE", help="the program's sizes")
    show.add_argument("--head", type=int, nargs="+", default=[0], metavar="H", help="which heads (default 0)")
    show.add_argument("--width", type=int, default=64, help="width of a head, for operations (default 64)")
    show.add_argument("--svg", type=Path, metavar="FILE", help="write the picture of the tiles here")
    show.add_argument("--json", action="store_true", help="print one JSON object")


def _plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="the ways to run a model on many ranks: what each holds, sends and takes; needs no devices",
        epilog="example: attngraph plan attngraph.models.targets:decoder_lm --ranks 8 --memory 80GB. Exit "
        "code 1 if no way fits. Defaults are those of an H100 SXM by its data sheet.",
    )
    _target(plan)
    plan.add_argument("--ranks", type=POSITIVE, required=True, help="how many devices there are")
    plan.add_argument("--memory", type=quantity, required=True, help="of one device, such as 80GB")
    plan.add_argument(
        "--group", type=POSITIVE, default=8, metavar="N",
        help="divide one model among at most so many ranks (default 8)",
    )  # fmt: skip
    plan.add_argument(
        "--training", action="store_true",
        help="plan steps of training: gradients, AdamW's state and activations are counted, and no cache",
    )  # fmt: skip
    plan.add_argument(
        "--flops", type=quantity, default=989e12, help="operations a second of one (default 989T)"
    )
    plan.add_argument("--bandwidth", type=quantity, default=3.35e12, help="of its memory (default 3.35TB/s)")
    plan.add_argument(
        "--link", type=quantity, default=450e9, help="of its link, in one direction (default 450GB/s)"
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
