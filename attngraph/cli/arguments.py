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
--strict); 2 the command or what it was given cannot be used; 130 interrupted.
Measurements of attngraph itself and fuzzing are in its repository: python -m workshop --help.
"""


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
    """The number that a text such as 80GB, 80GiB, 3.35TB/s or 989T says; argparse.ArgumentTypeError where it
    says none, or nothing positive."""
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
Argument = tuple[list[str], dict[str, Any]]
"""The names of an argument, and how argparse reads it."""


class Command:
    """A command: what it does, examples, its arguments, and what its module finds set besides."""

    def __init__(self, name: str, help: str, epilog: str, *arguments: Argument, **defaults: Any) -> None:
        self.name, self.help, self.epilog = name, help, epilog
        self.arguments, self.defaults = arguments, defaults


def option(names: str, help: str, **reads: Any) -> Argument:
    return names.split(), {"help": help, **reads}


def flag(name: str, help: str) -> Argument:
    return option(name, help, action="store_true")


def file(names: str, help: str, metavar: str = "FILE") -> Argument:
    return option(names, help, type=Path, metavar=metavar)


def _targets(name: str = "target", nargs: str | None = None) -> tuple[Argument, ...]:
    """The arguments that name a target and the sizes of its example."""
    said = "package.module:NAME or path/file.py:NAME of a function, a class or a model; or hf:FOLDER"
    return (
        option(name, said, nargs=nargs),
        option("--tokens", "tokens of the example", type=POSITIVE),
        option("--batch", "batch size of the example", type=POSITIVE),
    )


_JSON = flag("--json", "print one JSON object")
_BACKEND = option("--backend", "whose kernels to use", default="auto", choices=backends())
_OWN_PASSES = option(
    "--add",
    "a pass of yours, as mine.py:DropOnes before select-kernels, or mine.py:DropOnes@merge-heads",
    action="append", default=[], metavar="PASS[@BEFORE]",
)  # fmt: skip
_HOW_TO_COMPILE = (
    flag("--json", "print one JSON object for each target"),
    _BACKEND,
    option("--absorb", "latent attention: the order of multiplication", default="auto", choices=ABSORB),
    option("--disable", f"a pass that is not to run: {', '.join(PASSES)}",
           action="append", default=[], metavar="PASS", choices=PASSES),
    option("--min-scores", "run the graph from N scores per attention on; smaller calls run the model "
           "itself, as those of attngraph.compile do by default", type=at_least(0), metavar="N"),
    _OWN_PASSES,
    flag("--inductor", "compile the rest with Inductor too"),
    flag("--consistent", "the same bits in every batch, chunk and training step (docs/same-bits.md)"),
    option("--freeze", "weights will not change, or may be given up too (docs/frozen.md)", nargs="?",
           default=False, const="keep", choices=("keep", "release")),
    flag("--no-torch-compile", "do not measure torch.compile, nor inductor=True, beside it"),
    option("--rounds", "rounds of timing (default %(default)s)", type=POSITIVE, default=5),
)  # fmt: skip

COMMANDS = (
    Command(
        "compile", "compile a model, show the report, check it against eager, time it",
        "example: attngraph compile attngraph.models.targets:tiny_decoder_lm --page report.html",
        *_targets(nargs="+"),
        option("--dump", "write the graph after each pass here", metavar="DIR"),
        file("--page", "write the report as one HTML page, with your code, measured times and weights"),
        flag("--strict", "fail where something is not fused"),
        *_HOW_TO_COMPILE,
        full=True,
    ),
    Command(
        "explain", "what was fused, and each place that was not: its code, line, reason, what to change",
        "example: attngraph explain lm.py:LM --json. Nothing is timed. The codes are explained in "
        "docs/when-it-will-not-fuse.md.",
        *_targets(),
        _JSON,
    ),
    Command(
        "advise", "what would make each place fuse, as a patch where an edit was found and tried",
        "example: attngraph advise lm.py:LM > fix.patch; git apply fix.patch. An edit is told only if the "
        "model gives the same results with it (float64, the target's inputs) and fewer places are left.",
        *_targets(),
        _JSON,
    ),
    Command(
        "demo", "GPT-2 with six layers on real text, and attention alone at 2048 tokens",
        "example: attngraph demo --full. It takes about a minute and a half on two cores, and says on "
        "standard error what it does.",
        flag("--full", "GPT-2 itself and another model too, and inductor=True beside them: a few minutes"),
        *_HOW_TO_COMPILE,
        batch=None, dump=None, page=None, strict=False, rounds=3,
    ),
    Command(
        "export", "write a model, or its decoder, as a file that runs without attngraph",
        "example: attngraph export attngraph.models.targets:tiny_decoder_lm --decoder -o lm.onnx. The file "
        "is run and compared with the model before it is kept.",
        *_targets(),
        option("-o --out", "the file to write", type=Path, required=True, metavar="FILE"),
        option("--format", "default: by the file's name", choices=FORMATS),
        flag("--decoder", "with a cache as its input and output"),
        option("--fallback", "how attention is written in pt2", default="sdpa", choices=FALLBACKS),
        flag("--no-padding", "decoder: all rows are equally long"),
        flag("--no-check", "do not run the file"),
        _JSON,
    ),
    Command(
        "inspect", "a dump as one HTML page: what was missed, each pass before and after, the graph, kernels",
        "example:\n"
        "  attngraph compile attngraph.models.targets:tiny_decoder_lm --dump out\n"
        f"  attngraph inspect out --open       writes out/{PAGE} and shows it in your browser\n"
        "  attngraph inspect out --json       the report as JSON, no page\n"
        "  attngraph inspect new --against old   what is different after a change of the model\n"
        "  attngraph inspect out/graph-1      one graph of several",
        file("dump", "the folder that --dump wrote", "DUMP_DIR"),
        file("--out", f"where the page is written (default: DUMP_DIR/{PAGE})"),
        file("--against", "an earlier dump, which the page compares this one with", "DIR"),
        flag("--open", "show the page in your browser"),
        flag("--json", "print the report as JSON; a page only with --out"),
    ),
    Command(
        "opt", "run passes on the graph of a dump's file and print what comes out",
        "example: attngraph opt DIR/graph-0/01-canonicalize.txt -p fuse-attention,merge-heads; a pass takes "
        "options as in -p \"absorb-mla(absorb='always')\". What is printed can be given to opt again. "
        "Buffers' contents are read from values.json beside the file, where there are any.",
        option("file", "a file NN-<pass>.txt of a dump", type=Path),
        option("-p --passes", f"in this order: {', '.join(PASSES)}", required=True, metavar="PASS,PASS"),
        option("--import",
               "a module that registers ops which the graph has (transformers.integrations.moe, say)",
               dest="modules", action="append", default=[], metavar="MODULE"),
        file("--dump", "write the graph after each pass here", "DIR"),
        flag("--json", "print what the passes did, not the graph"),
    ),
    Command(
        "bisect", "find the first pass after which a model's answer is not eager's",
        "example: attngraph bisect attngraph.models.targets:tiny_decoder_lm --tokens 64. Exit code 1 if a "
        "pass is found; attngraph.compile(model, disable=('PASS',)) compiles without it.",
        *_targets(),
        _BACKEND,
        _OWN_PASSES,
        _JSON,
    ),
    Command(
        "show", "a score program: normalised, its mask in words and as a picture, the share that is computed",
        "well-known programs:\n"
        + "".join(f"  {name:<14} {known.about}\n" for name, known in WELL_KNOWN.items())
        + "\nexamples: attngraph show window --size n0=128\n"
        '          attngraph show "keep k <= q and k > q - 100 * (h + 1)" --head 0 1 2 --svg mask.svg',
        option("program", "a score program, a file with one, - for standard input, or a name below"),
        option("--queries", "how many queries (default: as many as keys, or 1024)", type=int),
        option("--keys", "how many keys (default: as many as queries)", type=int),
        option("--tile", "queries and keys of one tile (default 64)", type=int, default=64),
        option("--size", "the program's sizes", nargs="+", default=[], metavar="nN=VALUE"),
        option("--head", "which heads (default 0)", type=int, nargs="+", default=[0], metavar="H"),
        option("--width", "width of a head, for operations (default 64)", type=int, default=64),
        file("--svg", "write the picture of the tiles here"),
        _JSON,
    ),
    Command(
        "bench", "time and memory of a model beside eager and torch.compile, without the report",
        "example: attngraph bench attngraph.models.targets:tiny_decoder_lm --rounds 9. The suites that "
        "compare attngraph with others are in its repository: python -m workshop --help.",
        *_targets(nargs="+"),
        *_HOW_TO_COMPILE,
        dump=None, page=None, strict=False, full=True,
    ),
    Command(
        "cache", "what is kept on disk of earlier compilations; clear removes it",
        "ATTNGRAPH_CACHE=DIR moves it, ATTNGRAPH_CACHE=0 keeps no graphs. example: attngraph cache clear",
        option("action", "what to do", nargs="?", choices=("show", "clear"), default="show"),
        _JSON,
    ),
    Command(
        "plan", "the ways to run a model on many ranks: what each holds, sends and takes; needs no devices",
        "example: attngraph plan attngraph.models.targets:decoder_lm --ranks 8 --memory 80GB. Exit code 1 if "
        "no way fits. Defaults are those of an H100 SXM by its data sheet.",
        *_targets(),
        option("--ranks", "how many devices there are", type=POSITIVE, required=True),
        option("--memory", "of one device, such as 80GB", type=quantity, required=True),
        option("--group", "divide one model among at most so many ranks (default 8)",
               type=POSITIVE, default=8, metavar="N"),
        flag("--training",
             "plan steps of training: gradients, AdamW's state and activations are counted, and no cache"),
        option("--flops", "operations a second of one (default 989T)", type=quantity, default=989e12),
        option("--bandwidth", "of its memory (default 3.35TB/s)", type=quantity, default=3.35e12),
        option("--link", "of its link, in one direction (default 450GB/s)", type=quantity, default=450e9),
        _JSON,
    ),
    Command(
        "verify", "whether two models compute the same: a port, say, and what was ported",
        "example: attngraph verify attngraph.models.targets:tiny_decoder_lm port.py:LM --tokens 24\n"
        "Both are called with the reference's inputs, or those of --inputs. Sides may also be FILE.onnx, a\n"
        "folder that `save` wrote, and functions that take arguments, such as kernel.py:attend.\n"
        "exit codes: 0 equal; 1 they differ; 2 they cannot be compared, or a target cannot be used.",
        *_targets("reference"),
        option("candidate", "what is compared with it, named in the same way"),
        file("--rename", "JSON: the name of the reference's weight for each of the candidate's that differs"),
        option("--inputs", "a function, as inputs.py:NAME, that returns the arguments", metavar="NAME"),
        flag("--no-gradients", "compare results alone"),
        option("--seed", "repeats a run (default 0)", type=int, default=0),
        option("--budget", "seconds after which nothing new is tried (default 60)",
               type=at_least(0, float), default=60.0, metavar="S"),
        flag("--subprocess", "run the candidate in a process of its own, with limits"),
        option("--seconds", "its time for a call (default 60)",
               type=at_least(0, float), default=60.0, metavar="S"),
        option("--memory", "its memory besides what torch takes (default 4GiB)",
               type=quantity, default=4 * 2.0**30, metavar="SIZE"),
        file("--html", "write the verdict as one HTML page"),
        _JSON,
    ),
)  # fmt: skip
"""Every command. Its name is that of the module that runs it; `bench` is run by `compile`."""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    made = argparse.ArgumentParser(
        "attngraph", description="A compiler for attention: what it makes of a model, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EPILOG,
    )  # fmt: skip
    made.add_argument("--version", action="version", version=f"attngraph {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for told in COMMANDS:
        has_lines = "\n" in told.epilog
        kind = argparse.RawDescriptionHelpFormatter if has_lines else argparse.HelpFormatter
        command = commands.add_parser(told.name, help=told.help, epilog=told.epilog, formatter_class=kind)
        for names, reads in told.arguments:
            command.add_argument(*names, **reads)
        command.set_defaults(**told.defaults)
    return made
