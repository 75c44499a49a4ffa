"""Which tiles of keys kernels visit, where masks other than a causal one leave some out.

Every tile of scores is empty, open (all masks keep everything) or neither (`meaning/masks/tiles.py`). This is
derived from the positions, and from the least and largest element that each tile reads of small tensors
(lengths, documents, padding). A block of queries gets a list: its open tiles, then those in which masks are
evaluated, then those in which all keys are behind a finite fill, where kernels may find that they have no
weight. The backward kernels visit the same tiles, with another list of the blocks of queries for each block
of keys. Lists are computed on the device, without synchronisation. Lists that depend on shapes alone are
cached. Those that depend on tensors are shared by the layers of one run of a graph, or of one backward pass
(`ir/ops/declare.py`), and computed anew anywhere else. In a CUDA graph that is captured, the lists are
computed by the graph itself, in each replay, or are such as stay where they are for good.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attngraph.codegen.triton import plan as P
from attngraph.codegen.triton.device import is_captured
from attngraph.codegen.triton.plan import Blocks
from attngraph.ir.language import DOT, SCORE, E, Expr, Keep, S, ScoreProgram
from attngraph.ir.ops.declare import shared
from attngraph.ir.ops.kernels import Operands, Reads, Sizes
from attngraph.ir.versions import version_of
from attngraph.meaning.masks import tiles
from attngraph.meaning.masks.tiles import Cut, Grid

WORTH = 1 << 26
"""For calls with at least this many scores, tiles are listed also for masks that read tensors, which takes
some dozens of small operations."""
_KEPT = 64
"""How many lists that depend on shapes alone are cached."""


class Visits(NamedTuple):
    """`tiles` `[rows, blocks of k]`: numbers of blocks of keys, int32; `counts` `[rows, 3]`: how many are
    open, how many of these and the next have a key before a fill, and how many there are in all. Block i of
    queries of batch b and head h has row b * `b` + h * `h` + i."""

    tiles: Tensor
    counts: Tensor
    b: int
    h: int


@functools.lru_cache(maxsize=1024)
def masks(program: ScoreProgram) -> tuple[Keep, ...]:
    """The masks, besides the diagonal, that can make tiles empty and that can be bounded before the
    launch."""
    statements = P.conjuncts(program)
    kinds = (
        (P.lasting_masks(statements), P.diagonal(statements)),
        (P.soft_masks(program), P.soft_diagonal(program)),
    )
    others = (keep for found, own in kinds for keep in found if own is None or keep != own[0])
    return tuple(keep for keep in others if _is_known(keep.predicate))


def _is_known(predicate: Expr) -> bool:
    nodes = list(E.walk(predicate))
    return not any(n in (DOT, SCORE) or n.op == "random" or _is_large(n) for n in nodes)


def _is_large(node: Expr) -> bool:
    """Whether the node reads an element for each score, which is as much as the kernel itself reads."""
    return node.op == "read" and S.index("q") in node.free and S.index("k") in node.free


def are_listed(program: ScoreProgram, operands: Operands) -> bool:
    """Whether a call's tiles are listed: whether it has masks that leave out tiles and, if they read tensors,
    is large enough."""
    (B, Hq, Sq, _), Skv = operands[0].shape, operands[1].shape[2]
    found = masks(program)
    reads = any(n.op == "read" for keep in found for n in E.walk(keep.predicate))
    return bool(found) and (not reads or bool(B * Hq * Sq * Skv >= WORTH))


def find(
    program: ScoreProgram, blocks: Blocks, operands: Operands, reads: Reads, sizes: Sizes,
    turned: bool = False,
) -> Visits:  # fmt: skip
    """The lists of a call. `turned`: for each block of keys, the blocks of queries that it visits."""
    (B, Hq, Sq, _), Skv = operands[0].shape, operands[1].shape[2]
    cuts = Cut(0, B, 1), Cut(0, Hq, 1), Cut(0, Sq, blocks.q), Cut(0, Skv, blocks.k)
    grid, device = Grid(*cuts, tuple(sizes[: program.sizes])), operands[0].device
    if not tiles.reads_data(program):
        return _from_shapes(program, grid, device, turned)
    return _from_tensors(program, grid, reads, device, turned)


_of_shapes: collections.OrderedDict[tuple[object, ...], Visits] = collections.OrderedDict()
_captured: dict[tuple[object, ...], Visits] = {}
"""Lists whose addresses captured CUDA graphs hold: nobody says when the last of these graphs is gone."""


def _from_shapes(program: ScoreProgram, grid: Grid, device: torch.device, turned: bool) -> Visits:
    key = program, grid, device, turned
    known = _captured.get(key) or _of_shapes.get(key)
    if is_captured(device):
        if known is None:  # a copy from the host would not be part of the graph
            return _compute(program, grid, device, turned)
        _captured[key] = known
    if known is None:
        has_fill = P.largest_filled(program) is not None
        found = _listed(*_maps(program, grid, tiles.block_map, has_fill), grid, turned)
        known = found._replace(tiles=found.tiles.to(device), counts=found.counts.to(device))
    _of_shapes[key] = known
    _of_shapes.move_to_end(key)
    if len(_of_shapes) > _KEPT:
        _of_shapes.popitem(last=False)
    return known


def _from_tensors(
    program: ScoreProgram, grid: Grid, reads: Reads, device: torch.device, turned: bool
) -> Visits:
    used, large = _used(program)
    unknown = torch.empty((0,), dtype=torch.int8)  # tiles draw no conclusion from int8
    small = tuple(unknown if n in large else r.detach() for n, r in enumerate(reads))
    grid, shapes = dataclasses.replace(grid, reads=small), grid
    kept = shared()
    if kept is None:
        return _compute(program, grid, device, turned)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    own = [reads[number] for number in used]
    key = program, shapes, turned, stream, *((id(t), version_of(t)) for t in own)
    # The tensors are kept too, so that no other gets the number of one of them.
    known: tuple[Visits, list[Tensor]] | None = kept.get(key)
    if known is None:
        known = kept[key] = _compute(program, grid, device, turned), own
    return known[0]


@functools.lru_cache(maxsize=1024)
def _used(program: ScoreProgram) -> tuple[tuple[int, ...], frozenset[int]]:
    """The numbers of the tensors that tiles follow from, and of those that are as large as the scores."""
    nodes = [n for keep in program.keeps for n in E.walk(keep.predicate) if n.op == "read"]
    large = frozenset(n.value for n in nodes if _is_large(n))
    return tuple(sorted({n.value for n in nodes} - large)), large


def _compute(program: ScoreProgram, grid: Grid, device: torch.device, turned: bool) -> Visits:
    """Lists by operations on the device."""
    has_fill = P.largest_filled(program) is not None  # asked before: it computes with numbers of the host
    with _PlacesOn(device):
        found, softly = (found.to(device) for found in _maps(program, grid, tiles.map_anew, has_fill))
        return _listed(found, softly, grid, turned)


class _PlacesOn(TorchFunctionMode):
    """Creates indices and single numbers on the device of the tensors that they are compared with. (Few
    operations accept a number of the host beside them, and a copy would synchronise with the device.)"""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and isinstance(args[0], (bool, int, float)):
            return torch.full((), args[0], device=self.device, **kwargs)
        there = {"device": self.device} if func is torch.arange else {}
        return func(*args, **kwargs, **there)


def _maps(
    program: ScoreProgram, grid: Grid, block_map: Callable[[ScoreProgram, Grid, bool], Tensor], has_fill: bool
) -> tuple[Tensor, Tensor]:
    """The block map, and where finite fills hide too, if kernels can tell when they do (`has_fill`)."""
    found = block_map(program, grid, False)
    return found, block_map(program, grid, True) if has_fill else found


def _listed(found: Tensor, softly: Tensor, grid: Grid, turned: bool) -> Visits:
    """Block maps `[blocks of b or 1, of h or 1, of q, of k]` as lists."""
    found, softly, k = (found.mT, softly.mT, grid.q) if turned else (found, softly, grid.k)
    is_open = found == tiles.OPEN
    if (k.stop - k.start) % k.step:
        is_open[..., -1] = False  # it extends beyond the last key
    visited, seen = found != tiles.SKIP, softly != tiles.SKIP
    seen = seen & visited
    rank = torch.where(is_open, 0, torch.where(seen, 1, torch.where(visited, 2, 3))).to(torch.uint8)
    order = torch.argsort(rank, dim=-1, stable=True).to(torch.int32).flatten(0, 2)
    counts = torch.stack([is_open.sum(-1), seen.sum(-1), visited.sum(-1)], -1).to(torch.int32).flatten(0, 2)
    batches, heads, rows, _ = found.shape
    return Visits(
        order.contiguous(), counts.contiguous(),
        heads * rows if batches > 1 else 0, rows if heads > 1 else 0,
    )  # fmt: skip
