"""Measuring block sizes and splits: `tune`, which runs only if the user calls it.

A choice is kept only if its results agree with those of PyTorch's operations: what a compiler makes may be
fast and wrong.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attngraph.codegen.cpu.operands import OverCache
from attngraph.codegen.cpu.tiled import Tiled
from attngraph.codegen.scalar.read_gradients import wanted_gradients
from attngraph.codegen.triton import decode, device, launch, tuned
from attngraph.codegen.triton.blocks import blocks_of_groups, decode_blocks, no_groups
from attngraph.codegen.triton.plan import Blocks, in_two, padded
from attngraph.ir.language import ScoreProgram, parse
from attngraph.ir.ops.cached_attention import Pair, Rows, counts, row_by_row
from attngraph.ir.ops.kernels import Operands, Reads, Sizes

_log = logging.getLogger("attngraph.codegen.triton")
_NUMBERS = 1 << 16
"""Registers of a multiprocessor: larger tiles are not tried."""
_PROGRAMS = (1, 2, 4, 8)
"""The numbers of programs per multiprocessor that are measured, over a cache."""
Timer = Callable[[Callable[[], object]], float]
"""Seconds (or any unit) that a call takes."""
Results = Sequence[Tensor | None]
_ROUNDINGS = 4
"""By how many roundings of its dtype a result's row may be off (`difference`)."""
C = TypeVar("C")


def tune(
    program: ScoreProgram | str, operands: Operands, reads: Reads = (), sizes: Sizes = (), *,
    gradients: bool = False, cache: tuple[tuple[Tensor, Tensor], Sequence[Tensor]] | None = None,
    timer: Timer | None = None, name: str | None = None, seconds: float = math.inf,
    turn: Callable[[], None] = lambda: None, times: dict[str, dict[Any, float]] | None = None,
) -> dict[str, Blocks]:  # fmt: skip
    """Measure block sizes for calls like this one, and store the fastest for this user and device.

    Args:
        operands: q, k, v, as for the op, on the device. gradients: also those of the backward pass.
        cache: pages of keys and of values, and rows (`ir/ops/cached_attention.py`): attention
            over a cache is measured, with `operands` as the new tokens.
        timer: by default this file's. name: of the device; by default PyTorch's name.
        seconds: after so many, no other choice is begun, and the best so far is kept. The choice that is made
            without measurements is the first.
        turn: called when all choices are compiled; it returns when nothing else uses the device.
        times: where to leave what each choice for each entry took, by the timer.

    Returns:
        The table entries that were stored. Choices that do not run, or give other results than PyTorch's
        operations, are left out; if none is left, there is no entry.
    """
    parsed = parse(program) if isinstance(program, str) else program
    name = device.name_of(operands[0].device) if name is None else name
    clock = timer or _on_device(operands[0].device)
    if cache is not None:
        made = _over_cache(parsed, operands, cache[0], Rows(*cache[1]), reads, sizes)
        found = _fastest([made], clock, seconds, turn, times)
        lines = {line: choice[0] for line, choice in found.items()}
        tuned.add(name, lines, {line: choice[1] for line, choice in found.items()})
        return lines
    whole: list[_Choices[Any]] = [_forward(parsed, operands, reads, sizes)]
    if gradients:
        whole += _backward(parsed, operands, reads, sizes)
    blocks: dict[str, Blocks] = _fastest(whole, clock, seconds, turn, times)
    if blocks:
        tuned.add(name, blocks)
    return blocks


@dataclasses.dataclass
class _Choices(Generic[C]):
    """What may be chosen for one entry of a table, the choice without measurements first.

    Attributes:
        call: the results by a choice. wanted: what they must be.
    """

    line: str
    options: Sequence[C]
    call: Callable[[C], Results]
    wanted: Callable[[], Results]


def _forward(program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes) -> _Choices[Blocks]:
    plan = launch.plan_forward(program, operands, reads, sizes)

    def call(blocks: Blocks) -> Results:
        return launch.launch_forward(dataclasses.replace(plan, blocks=blocks), operands, reads, sizes)

    options, lie_in_two = _options(operands), any(in_two(tensor.shape[3])[1] for tensor in operands)
    choose = [
        launch.blocks_by_rule(program, operands),
        *(dataclasses.replace(one, split=True) for one in options if lie_in_two),
        *group_choices(program, operands, device.capability(operands[0].device)),
        *ahead_choices(options, device.capability(operands[0].device)), *options,
    ]  # fmt: skip
    wanted = functools.partial(Tiled().forward, program, operands, reads, sizes)
    return _Choices(tuned.key_of_call("forward", program, operands), choose, call, wanted)


def _backward(
    program: ScoreProgram, operands: Operands, reads: Reads, sizes: Sizes
) -> list[_Choices[Blocks]]:
    """None, if no kernel computes the gradients."""
    plan = launch.Forward()._plan_backward(program, operands, reads, sizes)
    if plan is None:
        return []
    results = Tiled().forward(program, operands, reads, sizes)
    random = torch.Generator(operands[0].device).manual_seed(0)
    grad = torch.randn(results[0].shape, generator=random, device=operands[0].device).to(operands[2].dtype)
    grads = grad, torch.zeros_like(results[1])

    def call(blocks: Blocks) -> Results:
        chosen = dataclasses.replace(plan, blocks=blocks)
        return launch.differentiate(chosen, operands, reads, sizes, results, grads)

    needed = [*wanted_gradients(operands, reads)[0], *(False for _ in reads)]

    def wanted() -> Results:
        """Gradients of q, k and v that are asked for; others are zero, or not. Those of reads are left
        out: sums over many pairs, which may cancel to any degree, so what rounding does is not known."""
        made = Tiled().backward(program, operands, reads, sizes, results, grads)
        return [t if need else None for t, need in zip(made, needed, strict=True)]

    choose = [plan.blocks, *_options(operands)]
    return [_Choices(tuned.key_of_call("backward", program, operands), choose, call, wanted)]


def _options(operands: Operands) -> list[Blocks]:
    q, _, v = operands
    return list(choices(max(q.shape[3], v.shape[3]), q.dtype, device.shared_memory(q.device)))


def _over_cache(
    program: ScoreProgram, operands: Operands, pages: Pair, rows: Rows, reads: Reads, sizes: Sizes
) -> _Choices[tuple[Blocks, int]]:
    """Tiles, and the number of parts of the keys (as programs per multiprocessor)."""
    q, k, v = operands
    given, about = OverCache(program, q, (k, v), pages, reads, sizes, rows), counts(rows)
    lanes, width = q.shape[1] // pages[0].shape[1] * max(about.new), max(q.shape[3], pages[1].shape[3])
    shared, generation = device.shared_memory(q.device), device.capability(q.device)
    first = decode_blocks(lanes, width, q.dtype, shared, capability=generation)
    options = [(blocks, n) for blocks in (first, *decode_choices(first, width)) for n in _PROGRAMS]

    def call(choice: tuple[Blocks, int]) -> Results:
        made = decode.Decode(choice[0], programs=choice[1]).prepare(given, about)
        return [decode.launch_decode(made.plan, given, made.parts(about, pages[0].shape[1]))]

    def wanted() -> Results:
        return [row_by_row(*given[:7], "reference")]

    line = decode.tuned_line(program, lanes, q.shape[3], pages[1].shape[3], q.dtype)
    return _Choices(line, options, call, wanted)


def _fastest(
    lines: Sequence[_Choices[C]], clock: Timer, seconds: float, turn: Callable[[], None],
    times: dict[str, dict[Any, float]] | None,
) -> dict[str, C]:  # fmt: skip
    """For each line the fastest option whose results are the wanted ones. All options run once, in three
    quarters of the time, since most of that is compilation; then those that did are measured."""
    share = seconds / (4 * len(lines))
    running = [_compiled(line, 3 * share) for line in lines]
    turn()
    found: dict[str, C] = {}
    for line, options in zip(lines, running, strict=True):
        taken = _times(line, options, clock, time.monotonic() + share)
        best = _best(line, taken)
        found |= {} if best is None else {line.line: best}
        if times is not None:
            times[line.line] = taken
    return found


def _compiled(line: _Choices[C], seconds: float) -> list[C]:
    """The options that run. After so many seconds no other is tried, but for the first."""
    begin, found = time.monotonic(), []
    for option in dict.fromkeys(line.options):
        if option != line.options[0] and time.monotonic() - begin > seconds:
            break
        with _left_out(line, option):
            line.call(option)
            found.append(option)
    return found


def _times(line: _Choices[C], options: Sequence[C], clock: Timer, until: float) -> dict[C, float]:
    """What each option takes. `until`: when no other is begun, by `time.monotonic`."""
    taken: dict[C, float] = {}
    for option in options:
        if taken and time.monotonic() > until:
            break
        with _left_out(line, option):
            taken[option] = clock(functools.partial(line.call, option))
    return taken


@contextlib.contextmanager
def _left_out(line: _Choices[C], option: C) -> Iterator[None]:
    """An option that does not compile, or does not fit, is left out."""
    try:
        yield
    except Exception as problem:
        _log.info("%s do not run %s: %s: %s", option, line.line, type(problem).__name__, problem)


def _best(line: _Choices[C], times: Mapping[C, float]) -> C | None:
    """The fastest option whose results are right."""
    exact = line.wanted() if times else []
    eps = max((torch.finfo(t.dtype).eps for t in exact if t is not None), default=0.0)
    for option in sorted(times, key=lambda option: times[option]):
        # Memory that is given out next holds NaN, so that what a kernel forgets to write is seen.
        spoilt = [torch.full_like(t, math.nan) for t in exact if t is not None and t.is_floating_point()]
        del spoilt
        pairs = zip(line.call(option), exact, strict=True)
        wrong = next(filter(None, (difference(one, other, eps) for one, other in pairs)), "")
        if not wrong:
            return option
        _log.warning("%s are fast but wrong %s, and not kept: %s", option, line.line, wrong)
    return None


def difference(found: Tensor | None, wanted: Tensor | None, eps: float) -> str:
    """How a result differs from the wanted one by more than rounding; empty if it does not. `eps`: of the
    narrowest dtype of results.

    Rows have scales of their own: rows that see many keys are small. A row may be off in proportion to its
    norm, to the mean norm of all rows, and to that of the rows at its place in other heads: gradients depend
    on the rounded result, so a row whose own gradient happens to vanish is off by what others have.
    """
    if found is None or wanted is None:
        return ""
    if not torch.equal(found.isfinite(), wanted.isfinite()):
        return "NaN or infinity in other places"
    a, b = (t.detach().nan_to_num(0.0, 0.0, 0.0).float() for t in (found, wanted))
    a, b = (t.unsqueeze(-1) if t.ndim < 4 else t for t in (a, b))
    size, off = b.norm(dim=-1), (a - b).norm(dim=-1)
    squares = size.square()
    at_place = squares.reshape(-1, squares.shape[-1]).mean(0)
    others = squares.mean().sqrt() + at_place.sqrt()
    wrong = off > _ROUNDINGS * max(eps, 1e-5) * (size + others)
    if not bool(wrong.any()):
        return ""
    return f"{int(wrong.count_nonzero())} of {wrong.numel()} rows are off, by up to {float(off.max()):.3g}"


def choices(width: int, dtype: torch.dtype, shared: int) -> Iterator[Blocks]:
    """Block sizes worth measuring for a width, large tiles first."""
    row = padded(width) * dtype.itemsize
    for q, k, warps, stages in itertools.product((128, 64, 32), (128, 64, 32), (8, 4), (3, 2, 1)):
        fits = (q + 2 * stages * k) * row <= shared
        if fits and q * (padded(width) + k) <= _NUMBERS // 2 * (warps // 4):
            yield Blocks(q, k, warps, stages)


def ahead_choices(options: Sequence[Blocks], capability: tuple[int, int] | None) -> Iterator[Blocks]:
    """Those of these blocks with products a tile ahead of weights, where warps multiply in groups (sm_90)."""
    if capability is not None and capability[0] == 9:
        yield from (dataclasses.replace(one, ahead=True) for one in options if one.q >= 64)


def group_choices(
    program: ScoreProgram, operands: Operands, capability: tuple[int, int] | None
) -> Iterator[Blocks]:  # fmt: skip
    """Block sizes of kernels with groups of warps, where there are such: those of the rule, and half as many
    keys."""
    if no_groups(operands, capability) is None:
        first = blocks_of_groups(program, operands[0].shape[3], operands[2].shape[3])
        yield first
        yield dataclasses.replace(first, k=64, stages=min(4, first.stages * first.k // 64))


def decode_choices(first: Blocks, width: int) -> Iterator[Blocks]:
    """Block sizes worth measuring over a cache, besides those of the rule: of the same height, since the
    number of queries of a group is given."""
    for k, warps, stages in itertools.product((16, 32, 64, 128), (4, 8), (1, 2, 3)):
        if k * padded(width) <= _NUMBERS // 2:
            yield dataclasses.replace(first, k=k, warps=warps, stages=stages)


ROUNDS = 9
_CYCLES = 2e9
"""About as many a second does a GPU's clock have."""


def timed(call: Callable[[], object], flush: Tensor, before_it: float = 0.0) -> tuple[float, float]:
    """Seconds of the device, whose cache is emptied by writing to `flush` before, and of the host until it
    has launched everything. The device is kept busy for longer than that: for `before_it` seconds, and half
    as many again."""
    if not flush.is_cuda:
        flush.zero_()
        start = time.perf_counter()
        call()
        return (spent := time.perf_counter() - start), spent
    event: Any = torch.cuda.Event
    sleep: Any = torch.cuda._sleep
    before, after = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    flush.zero_()
    sleep(int(1.5 * before_it * _CYCLES))
    before.record()
    start = time.perf_counter()
    call()
    spent = time.perf_counter() - start
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / 1e3, spent


def memory_to_flush(device: torch.device | str) -> Tensor:
    """As much as a device's cache holds."""
    is_cuda = torch.device(device).type == "cuda"
    return torch.empty(128 << 20 if is_cuda else 1, dtype=torch.int32, device=device)


def _on_device(device: torch.device) -> Timer:
    flush = memory_to_flush(device)

    def median(call: Callable[[], object]) -> float:
        timed(call, flush)
        launched = timed(call, flush)[1]
        return statistics.median(timed(call, flush, launched)[0] for _ in range(ROUNDS))

    return median
