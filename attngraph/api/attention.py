"""One attention by hand: from a score program, or from the functions that FlexAttention takes.

The functions are traced as a model's own call of FlexAttention is (`capture/subgraphs.py`) and compiled once;
what they compute is recognised by its meaning. Tensors that they read are arguments of what is compiled: the
functions run once, for one pair, to see which code runs and which tensors it uses, and a walk through what
that code reads (`capture/state/`) finds these again in any other functions of the same code.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attngraph.api.arguments import is_transformed
from attngraph.api.compile import compile
from attngraph.capture.state.fingerprint import Fingerprint, Same, Taken
from attngraph.capture.state.ran import recorded
from attngraph.capture.state.scope import Ran, Scope, functions_of
from attngraph.errors import NotFusedError
from attngraph.ir import budgets
from attngraph.ir.graph import short_path
from attngraph.ir.language import ScoreProgram
from attngraph.ir.ops.attention import check_operands

Function = Callable[..., Tensor] | None
Functions = tuple[Function, Function]


def attention(
    q: Tensor, k: Tensor, v: Tensor, program: str | ScoreProgram = "", *reads: Tensor,
    sizes: Sequence[int] = (), kernel: str = "", score_mod: Function = None, mask_mod: Function = None,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention whose scores follow `program` (docs/score-programs.md), or the functions of FlexAttention;
    differentiable.

    Args:
        q: `[B, Hq, Sq, D]`, floating. k: `[B, Hkv, Skv, D]`. v: `[B, Hkv, Skv, Dv]`. One dtype, one
            device, `Hq % Hkv == 0`; any strides.
        program: a score program, e.g. `"s = dot / 8; keep k <= q"`. Empty: softmax of the unscaled dot.
        reads: the tensors that the program reads as r0, r1, ...; floating ones get gradients.
        sizes: the integers that the program reads as n0, n1, ....
        kernel: a kernel's name; empty: the first that supports the program.
        score_mod, mask_mod: instead of a program, `score_mod(score, b, h, q_idx, kv_idx)` and
            `mask_mod(b, h, q_idx, kv_idx)` as `torch.nn.attention.flex_attention` takes them. Tensors that
            they read get gradients too. The first call with functions of some code compiles them.
        scale, enable_gqa: with functions or alone, as in FlexAttention: the scale is `D ** -0.5` if not
            given, and fewer heads of k and v need `enable_gqa=True`.

    Returns:
        `[B, Hq, Sq, Dv]` in the operands' dtype. A row that keeps no key is NaN by a program, and 0 by
        functions, as in FlexAttention.

    Raises:
        ProgramError: the program does not parse. ValueError: shapes, dtypes, devices, reads or sizes
            do not fit; says which and how. NotFusedError, CaptureError: functions compute what no score
            program can express; names it, and the line.
    """
    if score_mod is None and mask_mod is None and scale is None and not enable_gqa:
        text = program if isinstance(program, str) else str(program)
        out: Tensor = torch.ops.attngraph.attention(q, k, v, list(reads), list(sizes), text, kernel)[0]
        return out
    if program or reads or sizes or kernel:
        raise ValueError(
            "attention: a program with its reads, sizes and kernel is one way to say the scores, and "
            "score_mod, mask_mod, scale and enable_gqa are another; found both. Write the scale of a program "
            "as `s = 0.125 * dot` and a mask as `keep k <= q`; fewer key/value heads need no word."
        )
    check_operands(q, k, v, (), (), ScoreProgram(()))
    if q.shape[1] != k.shape[1] and not enable_gqa:
        told = f"{q.shape[1]} query heads share {k.shape[1]} key/value heads"
        raise ValueError(f"attention: {told}, which FlexAttention does with enable_gqa=True; give it, too.")
    functions, settings = (score_mod, mask_mod), (scale, enable_gqa)
    if torch.compiler.is_compiling() or is_transformed():
        return _flex(functions, settings, q, k, v)
    for scope in dict.fromkeys(scope for scope, _ in reversed([*_COMPILED])):
        walk = _Captured(scope, functions)
        found = _COMPILED.get((scope, (walk.key, settings)))
        # What was compiled reads what its own functions read now.
        if found and (found.functions == functions or _Captured(scope, found.functions).key == walk.key):
            break
    else:
        scope, used = _tried(functions, q)
        walk = _Captured(scope, functions)
        places = [n for n, tensor in enumerate(walk.tensors) if id(tensor) in used]
        found = _COMPILED[scope, (walk.key, settings)] = _Compiled(functions, settings, scope, places)
        if len(_COMPILED) > budgets.FUNCTIONS_KEPT:
            del _COMPILED[next(iter(_COMPILED))]
    return found(q, k, v, *(walk.tensors[place] for place in found.places))


def _flex(functions: Functions, settings: tuple[Any, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention itself."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (score_mod, mask_mod), (batch, heads, queries, _) = functions, q.shape
    block_mask = None
    if mask_mod is not None:  # torch takes plain functions alone
        block_mask = create_block_mask(
            lambda b, h, i, j: mask_mod(b, h, i, j), batch, heads, queries, k.shape[2], device=q.device
        )
    out: Tensor = flex_attention(q, k, v, score_mod, block_mask, *settings)  # type: ignore[assignment]
    return out


class _Captured(Fingerprint):
    """The fingerprint of functions, in which a tensor counts by its kind; `tensors` are those that it met."""

    def __init__(self, scope: Scope, functions: Sequence[Function]) -> None:
        super().__init__(scope)
        self.tensors: list[Tensor] = []
        self.everything(functions)
        self.key = Taken(self.found)

    def function(self, function: types.FunctionType, depth: int) -> None:
        if id(function.__code__) in self.codes:  # whichever function of this code it is
            self.found += (Same(function.__code__), Same(function.__globals__))
            self.inside_of(function, depth)
        else:
            super().function(function, depth)

    def tensor(self, value: Tensor) -> None:
        order = self.seen.setdefault(id(value), len(self.seen))
        self.found.append((order, value.dtype, value.device, value.ndim, value.requires_grad))
        self.tensors.append(value)

    def weight(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        super().weight(module, name, tensor)
        self.tensors += [] if tensor is None else [tensor]


class _Instead(TorchFunctionMode):
    """Gives other tensors to operations in the places of some, by their identities; notes what they get."""

    def __init__(self, others: dict[int, Tensor]) -> None:
        super().__init__()
        self.others, self.met = others, dict[int, Tensor]()

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        def other(tensor: Tensor) -> Tensor:
            self.met[id(tensor)] = tensor
            return self.others.get(id(tensor), tensor)

        args, kwargs = pytree.tree_map_only(Tensor, other, (args, kwargs or {}))
        return func(*args, **kwargs)


def _tried(functions: Sequence[Function], like: Tensor) -> tuple[Scope, set[int]]:
    """What the functions read, and the identities of tensors that they use: found by running them for the
    first pair."""
    ran, place = Ran(), torch.zeros((), dtype=torch.int64, device=like.device)
    scores = ((torch.zeros((), device=like.device),), ())
    with torch.no_grad(), _Instead({}) as mode, recorded(ran, lambda _: None):
        for function, first in zip(functions, scores, strict=True):
            if function is not None:
                function(*first, place, place, place, place)
    return ran.scope(), set(mode.met)


class _Compiled:
    """Two functions, compiled; tensors at `places` of those that a walk meets are further arguments."""

    def __init__(
        self, functions: Functions, settings: tuple[Any, Any], scope: Scope, places: Sequence[int]
    ) -> None:
        self.functions, self.places = functions, places

        def attend(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
            met = _Captured(scope, functions).tensors
            with _Instead({id(met[place]): new for place, new in zip(places, given, strict=True)}):
                return _flex(functions, settings, q, k, v)

        self.compiled = compile(attend, strict=True, min_scores=0)

    def __call__(self, *tensors: Tensor) -> Tensor:
        try:
            out: Tensor = self.compiled(*tensors)
        except NotFusedError as problem:
            codes = [f.__code__ for given in self.functions for f in functions_of(given)]
            where = [f"{c.co_name} ({short_path(c.co_filename)}:{c.co_firstlineno})" for c in codes]
            raise NotFusedError(
                f"attention: no score program computes what {' and '.join(where)} say: {problem.reason}.\n"
                "What to do: write them in other operations; FlexAttention itself computes them as they are.",
                problem.reason,
            ) from None
        return out


_COMPILED: dict[tuple[Scope, Any], _Compiled] = {}
"""What was compiled, by the scope of its functions and their fingerprint in it."""
