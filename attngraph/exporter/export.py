"""The entry point: `attngraph.export`.

A model is captured and its attention recognised as for `attngraph.compile`, by the passes up to that point
alone; then its graph is traced again with each attention written as other runtimes have it, and written to a
file. The file's answers are compared with the model's before `export` returns.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from attngraph.api.arguments import require_fit, require_sequence
from attngraph.api.build import compile_graph, owner_of
from attngraph.api.compiled import CompiledModule
from attngraph.api.methods import decoder_of
from attngraph.api.options import Options
from attngraph.capture.instead import for_a_file
from attngraph.capture.structure import flatten
from attngraph.errors import ExportError
from attngraph.exporter import formats
from attngraph.exporter.check import check_decoder, check_whole
from attngraph.exporter.formats import PT2, Format, Run
from attngraph.exporter.lower import OPERATION, PLAIN, SDPA, Lowering
from attngraph.exporter.onnx import Onnx
from attngraph.exporter.report import ExportReport, empty_cache
from attngraph.exporter.step import StepModule
from attngraph.exporter.tracing import became_numbers, traced, varies
from attngraph.exporter.whole import REMARK, Whole
from attngraph.ir import choices
from attngraph.ir.ops.cached_attention import Store
from attngraph.passes.absorb_mla.absorb import AbsorbMLA
from attngraph.passes.fuse_token_wise.fuse import FuseTokenWise
from attngraph.passes.reassociate_linear import ReassociateLinear
from attngraph.passes.skip_padding import SkipPadding
from attngraph.passes.tabulate_scores import TabulateScores
from attngraph.passes.tidy import Tidy
from attngraph.report.entries import Missed
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.verify import tensors_of

FORMATS: dict[str, Format] = dict(zip(choices.FORMATS, (PT2, Onnx()), strict=True))
EXAMPLE = (2, 3, 4)
"""Rows, new tokens and cached tokens of the call that a decoder is traced with: torch.export takes sizes that
are equal for one size, and sizes of 1 for fixed."""


def export(
    compiled: Callable[..., Any], path: str | Path, args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None, *, format: str = "", fallback: str = "sdpa", check: bool = True,
    padding: bool = True,
) -> ExportReport:  # fmt: skip
    """Write a compiled model, or a decoder, to a file that runs without attngraph.

    Args:
        compiled: what `attngraph.compile` returned. With `cache` the file computes new tokens over a cache
            that is its input and its output (docs/export.md).
        path: the file to write.
        args, kwargs: an example call. Sizes that may vary in a compiled model may vary in the file. Arguments
            that hold no tensor keep the values given here. Of a decoder: prompts, `[B, T]`.
        format: "pt2" (torch.export's program; `torch.export.load`) or "onnx". Default: by the file's name.
        fallback: how attention is written in a pt2 file, and in an ONNX file what the Attention operation
            cannot say: "sdpa" (torch's scaled_dot_product_attention where it can say it) or "eager" (matmul
            and softmax everywhere).
        check: run the file and compare its answers with the model's.
        padding: of a decoder: whether rows may have unequal lengths, which is an input more, and a mask for
            every attention.

    Returns:
        What was written, and how each attention is written.

    Raises:
        TypeError: the model takes other arguments.
        ExportError: the model cannot be exported, or its file gives other answers; nothing is left at `path`.
        CaptureError, NoDecoderError: as from compiling.
    """
    require_sequence(args, "args")
    path, kwargs = Path(path), dict(kwargs or {})
    format = format or path.suffix.removeprefix(".")
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, found {format!r}.")
    if fallback not in choices.FALLBACKS:
        raise ValueError(f"fallback must be one of {', '.join(choices.FALLBACKS)}, found {fallback!r}.")
    chosen = FORMATS[format]
    chosen.require()
    formats.require_place(path)
    way = PLAIN if fallback == "eager" else OPERATION if chosen.has_attention else SDPA
    file = _File(path, chosen, Lowering(way, chosen), check)
    if not flatten((tuple(args), kwargs))[0]:
        raise ExportError("export needs an example call: export(compiled, path, args, kwargs).")
    whole = compiled.whole if type(compiled) is Decoder else compiled
    if type(whole) is CompiledModule and not whole._options.devices.is_one:
        raise ExportError("the model is divided among ranks; compile it without a mesh to export it.")
    with for_a_file():
        if type(compiled) is Decoder:
            return _decoder(file, compiled, tuple(args), kwargs, padding)
        if type(compiled) is not CompiledModule:
            raise TypeError(f"export takes what attngraph.compile returns, found {type(compiled).__name__}.")
        require_fit(compiled, args, kwargs)
        return _whole(file, compiled, tuple(args), kwargs)


def plain_options(options: Options, *more: str) -> Options:
    """The options with the passes alone that find attention; kernels are chosen by whoever runs the file."""
    more = (SkipPadding.name, FuseTokenWise.name, *more)
    left_out = (AbsorbMLA.name, ReassociateLinear.name, TabulateScores.name, *more)
    return dataclasses.replace(
        options, backend="reference", inductor=False, dump=None, disable=(*options.disable, *left_out),
        later=("attribute",),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _File:
    """What is to be written, and how."""

    path: Path
    format: Format
    lowering: Lowering
    check: bool

    def write(
        self, module: Whole | StepModule, call: tuple[tuple[Any, ...], dict[str, Any]],
        dynamic: Sequence[Sequence[int]], missed: Sequence[Missed], check: Callable[[Run], str],
        stores: tuple[Store, ...] = (),
    ) -> ExportReport:  # fmt: skip
        """Trace the module with this call, write the program and check it."""
        program = traced(module, *call, dynamic)
        remarks = [f"not recognised, so left as it is: {m.name or m.source}: {m.reason}" for m in missed]
        remarks += [f"only for sizes with {words}" for words in module.limits.words()]
        remarks += [REMARK] if self.lowering.by_expert else []
        remarks += became_numbers(program, module.inputs, dynamic)
        sizes = module.size_names(stores) if isinstance(module, StepModule) else ()
        names = formats.Names(tuple(module.inputs), tuple(module.outputs), sizes)
        told = formats.write(program, self.path, self.format, names, check if self.check else None)
        return ExportReport(
            self.path, self.format.name, tuple(self.lowering.found), names.inputs, names.outputs, told,
            tuple(remarks), stores,
        )  # fmt: skip


def _whole(
    file: _File, compiled: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ExportReport:
    model = compiled._model
    with torch.no_grad():
        found = compile_graph(model, args, kwargs, plain_options(compiled._options), sides=True)
    named = {name: value for name, value in kwargs.items() if tensors_of(value)}
    captured = found.captured
    if captured.changes:
        raise ExportError("forward() changes objects among its arguments, which a file cannot.")
    module = Whole(captured, owner_of(model), file.lowering, _names(model, args, named), list(named))
    dynamic = [[d for d, n in enumerate(shape) if varies(n)] for shape in captured.shapes]

    def checked(run: Run) -> str:
        return check_whole(run, captured, model, args, kwargs, list(named))

    return file.write(module, (args, named), dynamic, found.report.missed, checked)


def _decoder(
    file: _File, decoder: Decoder, args: tuple[Any, ...], kwargs: dict[str, Any], padding: bool
) -> ExportReport:
    model, whole = decoder._model, cast(CompiledModule, decoder.whole)
    options = plain_options(whole._options, Tidy.name)
    plain = decoder_of(whole, options, decoder.config_of_cache)
    ids = args[0] if args else kwargs.pop(plain._derived.argument({}), None)
    if not isinstance(ids, Tensor) or ids.ndim < 2 or len(args) > 1:
        raise ExportError("a decoder is exported with prompts as one tensor, [B, T].")
    with torch.no_grad():
        step = plain._derived.of_call(plain.calls.pack(ids, None), kwargs)
    module = StepModule(step, file.lowering, padding)
    rows, tokens, kept = EXAMPLE
    stores = step.plan.stores
    example_ids = ids[:1, :1].expand(rows, tokens, *ids.shape[2:]).contiguous()
    lengths = torch.tensor([tokens + kept, tokens + kept - 1]) if padding else None
    example = (example_ids, lengths, empty_cache(stores, rows, kept))
    dynamic = [[0, 1], *([[0]] if padding else []), *([s.row_dim, s.token_dim] for s in stores)]

    def checked(run: Run) -> str:
        given = (
            {"use_cache": False, **kwargs} if "use_cache" in plain._derived.signature.parameters else kwargs
        )
        try:
            return check_decoder(run, step, model, ids, given, padding)
        except RuntimeError as problem:
            if isinstance(problem, ExportError) or not module.limits.conditions:
                raise
            raise ExportError(
                "the file cannot be checked with this example, whose rows do not stay among the sizes that "
                f"it is for ({' and '.join(module.limits.words())}): {problem}\n"
                "What to do: give prompts that do, or export with check=False."
            ) from problem

    return file.write(module, (example, {}), dynamic, step.report.missed, checked, stores)


def _names(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of a call's tensors, in order: those of the model's arguments."""
    signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    parameters = list(signature.parameters.values())
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    plain += [f"input_{n}" for n in range(len(plain), len(args))]
    found: list[str] = []
    for name, value in (*zip(plain, args, strict=False), *kwargs.items()):
        own = tensors_of(value)
        found += [name] if len(own) == 1 else [f"{name}.{n}" for n in range(len(own))]
    return found
