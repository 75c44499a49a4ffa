"""FlexAttention's own kernels for a target that is not here: PyTorch's template, filled in as Inductor does.

The template is read from the PyTorch that is installed. Inductor would need a GPU to choose options and to
lower the user's functions, so options are taken from Inductor's tables for the target, and a program is given
as the lines that Inductor would write for it (`Mods`). Sizes and strides are constants, as in a first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from unittest import mock

import torch

from attngraph.codegen.triton.plan import Blocks
from workshop.bench.scorecard.ahead_of_time import Target

NAME = "flex_kernel"
GRAIN, _WHOLE = 128, 1 << 30
_TABLES = ("torch._inductor.heuristics.template.triton", "torch._inductor.template_heuristics.triton")
_ASKED = {"get_backend_num_stages": 2, "get_default_kpack": 1, "using_rocm_rdna3": False}
_PARTS = {
    "forward": ("flex_attention", "utilities", "common"), "backward": ("flex_backwards", "utilities"),
    "decode": ("flex_decode", "utilities", "common"),
}  # fmt: skip
_POINTERS = dict.fromkeys(("LSE", "MAX", "DELTA", "M", "L"), "*fp32")
_SPLITS = 32
Pass = Literal["forward", "backward", "decode"]
_HEADER = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"


@dataclasses.dataclass(frozen=True)
class Mods:
    """A program as lines of Triton: `score` sets post_mod_scores, `mask` mask_mod_output, `gradient`
    grad_scores, from {score}, {b}, {h}, {m}, {n} and {grad_score_mod}. An empty mask: all blocks are visited.
    `reads`: the types of in_ptr0 and so on."""

    score: str
    mask: str
    gradient: str = ""
    reads: tuple[str, ...] = ()


class RenderError(Exception):
    """This PyTorch's template cannot be filled in."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A kernel's source, the names and types of its arguments, its tiles, and those of its second part
    (backward: the kernel computes dk and dv in some programs and dq in others)."""

    source: str
    arguments: tuple[tuple[str, str], ...]
    blocks: Blocks
    second: Blocks | None = None


def render(
    mods: Mods, width: int, values: int, heads: int, group: int, tokens: int, target: Target, step: Pass
) -> Rendered:
    """The forward kernel, the backward one, or the one that decodes one new token.

    Raises:
        RenderError: this PyTorch's template, or its tables, are not as expected; says why.
    """
    try:
        options, blocks, second = _options(target, width, group, step)
        options |= _constants(mods, width, values, group)
        shapes = _shapes(width, values, heads, group, tokens, step)
        source, names = _fill(options, shapes, mods, step)
    except RenderError:
        raise
    except Exception as problem:  # a private part of PyTorch: it may have become anything
        raise RenderError(f"{type(problem).__name__}: {problem}") from problem
    kinds = {f"in_ptr{n}": kind for n, kind in enumerate(mods.reads)}
    kinds |= {"out_ptr0": "*fp32"} if step == "decode" else {}
    arguments = tuple((name, kinds.get(name) or _kind(name)) for name in names)
    return Rendered(source, arguments, blocks, second)


def _kind(name: str) -> str:
    plain = name.removeprefix("arg_")
    return "*i32" if "KV_" in plain or plain.startswith(("Q_", "FULL_")) else _POINTERS.get(plain, "*bf16")


def _options(
    target: Target, width: int, group: int, step: Pass
) -> tuple[dict[str, Any], Blocks, Blocks | None]:
    """The default tiles of Inductor's tables."""
    module = next((m for name in _TABLES if (m := _module(name)) is not None), None)
    is_amd = target.backend == "hip"
    kind = getattr(module, "ROCmConfigHeuristic" if is_amd else "CUDAConfigHeuristic", None)
    if kind is None:
        raise RenderError("Inductor's table of options for FlexAttention was not found")
    known = {"head_dim": width, "dtype": torch.bfloat16, "seq_len": 8192}
    number = 90 if is_amd else int(target.architecture)
    with contextlib.ExitStack() as stack:  # what the tables ask of a GPU
        stack.enter_context(
            mock.patch.object(torch.cuda, "get_device_capability", lambda *_: divmod(number, 10))
        )
        for asked, answer in _ASKED.items():
            stack.enter_context(mock.patch.object(module, asked, lambda answer=answer: answer, create=True))
        asked = {"forward": "attn_fwd", "backward": "attn_bwd", "decode": "decode"}[step]
        found = getattr(kind(), f"get_flex_{asked}_configs")
        one = found(**{name: known[name] for name in inspect.signature(found).parameters})[-1]
    how = {"num_warps": one.num_warps, "num_stages": one.num_stages}
    if step == "decode":
        blocks = Blocks(max(16, group), one.block_n, one.num_warps, one.num_stages)
        more = {"SPLIT_KV": _SPLITS, "SAFE_M_BOUNDARY": group >= 16, "SAFE_N_BOUNDARY": True}
        return {"BLOCK_M": blocks.q, "BLOCK_N": blocks.k, **more, **how}, blocks, None
    if step == "forward":
        blocks = Blocks(one.block_m, one.block_n, one.num_warps, one.num_stages)
        return {"BLOCK_M": one.block_m, "BLOCK_N": one.block_n, **how}, blocks, None
    sizes: dict[str, int] = {
        f"BLOCK_{axis}{n}": getattr(one, f"block_{axis.lower()}{n}") for n in (1, 2) for axis in "MN"
    }
    first, second = (
        Blocks(sizes[f"BLOCK_M{n}"], sizes[f"BLOCK_N{n}"], one.num_warps, one.num_stages) for n in (2, 1)
    )
    return {**sizes, **how}, first, second


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _constants(mods: Mods, width: int, values: int, group: int) -> dict[str, Any]:
    rounded = {name: 1 << (size - 1).bit_length() for name, size in (("QK", width), ("V", values))}
    block = GRAIN if mods.mask else _WHOLE
    return {
        "SM_SCALE": 1 / math.sqrt(width), "GQA_SHARED_HEADS": group, "HAS_FULL_BLOCKS": bool(mods.mask),
        "QK_HEAD_DIM": width, "QK_HEAD_DIM_ROUNDED": rounded["QK"],
        "V_HEAD_DIM": values, "V_HEAD_DIM_ROUNDED": rounded["V"],
        "SAFE_HEAD_DIM": rounded == {"QK": width, "V": values},
        "SPARSE_Q_BLOCK_SIZE": block, "SPARSE_KV_BLOCK_SIZE": block, "IS_DIVISIBLE": bool(mods.mask),
        "FLOAT32_PRECISION": "'ieee'", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": False, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
        "USE_TMA": False, "INDEX_DTYPE": "tl.int32",
    }  # fmt: skip


Shapes = Mapping[str, tuple[int, ...]]


def _shapes(width: int, values: int, heads: int, group: int, tokens: int, step: Pass) -> Shapes:
    blocks = -(-tokens // GRAIN)
    q, k, v, out = (
        (1, h, tokens, w)
        for w, h in ((width, heads), (width, heads // group), (values, heads // group), (values, heads))
    )
    found: dict[str, tuple[int, ...]] = {"Q": q, "K": k, "V": v, "DO": out, "DQ": q, "DV": v}
    for name in ("KV", "Q", "FULL_KV", "FULL_Q"):
        found[f"{name}_NUM_BLKS"], found[f"{name}_IDX"] = (1, 1, blocks), (1, 1, blocks, blocks)
    if step == "decode":
        found |= {"Q": (1, heads // group, group, 1, width), "M": (1, _SPLITS, heads, 1)}
        found |= {"L": found["M"], "DO": (1, _SPLITS, heads, 1, values)}
    return found


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


def _fill(options: Mapping[str, Any], shapes: Shapes, mods: Mods, step: Pass) -> tuple[str, tuple[str, ...]]:
    jinja2: Any = importlib.import_module("jinja2")
    load: Any = importlib.import_module("torch._inductor.kernel.flex.common").load_flex_template
    text = "".join(load(part) for part in _PARTS[step]).lstrip()
    named = re.search(r"def_kernel\(([^)]*)\)", text)
    if named is None:
        raise RenderError("the template has no signature where it had one")
    names = re.findall(r'"(\w+)"', named[1])
    arguments = (
        *(f"arg_{name}" for name in names),
        *(f"in_ptr{n}" for n in range(len(mods.reads))),
        "out_ptr0",
    )
    skipped = ("num_warps", "num_stages")
    defines = "".join(f"    {k} : tl.constexpr = {v}\n" for k, v in options.items() if k not in skipped)

    def def_kernel(*_: str) -> str:
        renamed = "".join(f"    {name} = arg_{name}\n" for name in names)
        return f"{_HEADER}@triton.jit\ndef {NAME}({', '.join(arguments)}):\n{defines}{renamed}"

    def modification(subgraph_number: int, output_name: str | None, **given: Any) -> str:
        order: tuple[str, ...] = (mods.score, mods.mask)
        if step == "backward":
            order = (mods.score, mods.gradient, mods.mask, "")
        line = order[subgraph_number]
        if output_name is None:
            return ""
        if output_name == "mask_mod_output" and not line:
            return "mask_mod_output = tl.full([1, 1], True, tl.int1)"
        return line.format(**{name: value for name, value in given.items() if isinstance(value, str)})

    def store_output(indices: Sequence[str], val: str, mask: str, **_: Any) -> str:
        strides = _strides(shapes["K" if step == "backward" else "DO"])
        where = " + ".join(f"{index} * {stride}" for index, stride in zip(indices, strides, strict=True))
        return f"tl.store(out_ptr0 + {where}, {val}, mask={mask})"

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, depth: text.replace("\n", "\n" + "    " * depth)
    source: str = environment.from_string(text).render(
        def_kernel=def_kernel, modification=modification, store_output=store_output,
        gen_argdefs=lambda: ", ".join(arguments), gen_defines=lambda: defines.strip().replace("\n    ", "\n"),
        size=lambda name, axis: shapes[name][axis],
        stride=lambda name, axis=None: (
            ", ".join(map(str, _strides(shapes[name]))) if axis is None else _strides(shapes[name])[axis]
        ), **options,
    )  # fmt: skip
    return source, arguments
