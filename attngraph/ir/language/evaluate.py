"""The meaning of a score program, in plain PyTorch: the definition that backends are tested against.

Everything is evaluated over a tile, a box of the (b, h, q, k) space, so that the same code serves the
reference (one tile for everything) and executors that iterate over small tiles. Values broadcast against
`[B, Hq, Sq, Skv]` of the tile. The caller chooses the floating dtype.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.functions import operation_of
from attngraph.ir.language.score import Keep, Score, ScoreProgram, Statement, Weight

Value = Tensor | int | float | bool


@dataclasses.dataclass(frozen=True)
class Tile:
    """A box of the index space: half-open ranges for b, h, q and k."""

    b: tuple[int, int] = (0, 0)
    h: tuple[int, int] = (0, 0)
    q: tuple[int, int] = (0, 0)
    k: tuple[int, int] = (0, 0)

    def range(self, name: str) -> tuple[int, int]:
        found: tuple[int, int] = getattr(self, name)
        return found

    @functools.cached_property
    def shape(self) -> tuple[int, int, int, int]:
        b, h, q, k = (hi - lo for lo, hi in (self.b, self.h, self.q, self.k))
        return b, h, q, k


@dataclasses.dataclass(frozen=True)
class Environment:
    """The values of a program's names while it is evaluated on one tile.

    `places`: positions that are not those of the tile, by the name of the index. With them nothing looks at
    values, so that a trace can follow: that what is read is in range must be known.
    """

    tile: Tile
    reads: Sequence[Tensor]
    sizes: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    places: Mapping[str, Tensor] | None = None

    def index(self, name: str) -> Tensor:
        if self.places is not None and name in self.places:
            return self.places[name]
        lo, hi = self.tile.range(name)
        shape = [1, 1, 1, 1]
        shape[S.INDICES.index(name)] = hi - lo
        return torch.arange(lo, hi, device=self.device).view(shape)


def scores(
    program: ScoreProgram, dot: Tensor, env: Environment, skip: frozenset[int] = frozenset()
) -> Tensor:
    """The scores s of one tile, in the shape of `dot`. `skip` lists statements (by position) that are known
    to have no effect on this tile."""
    return applied((s for n, s in enumerate(program.statements) if n not in skip), dot, env).expand(dot.shape)


def applied(statements: Iterable[Statement], dot: Tensor, env: Environment) -> Tensor:
    """The scores s that statements make of `dot`, in a shape that broadcasts to the tile's."""
    s = dot
    for statement in statements:
        names: dict[str, Value] = {"dot": dot, "s": s}
        if isinstance(statement, Score):
            s = tensor(evaluate(statement.value, env, names), env)
        elif isinstance(statement, Keep):
            keep = evaluate(statement.predicate, env, names)
            fill = evaluate(statement.fill, env, names)
            s = torch.where(as_bool(keep, env), s, tensor(fill, env))
    return s


def weights(program: ScoreProgram, p: Tensor, env: Environment, dot: Tensor | None = None) -> Tensor:
    """The weights after the program's `p = ...` statements, in the shape of `p`. `dot` may be left out if
    none of them depends on it."""
    given: dict[str, Value] = {} if dot is None else {"dot": dot}
    for statement in program.statements:
        if isinstance(statement, Weight):
            p = tensor(evaluate(statement.value, env, {**given, "p": p}), env).expand(p.shape)
    return p


def sink(program: ScoreProgram, env: Environment) -> Tensor | None:
    """The sink of each row, broadcastable to `[B, Hq, Sq, 1]`, or None."""
    return None if program.sink is None else tensor(evaluate(program.sink, env, {}), env)


def tensor(value: Value, env: Environment) -> Tensor:
    """A value as a tensor of the environment's floating dtype."""
    if isinstance(value, Tensor):
        return value.to(env.dtype)
    return torch.tensor(value, dtype=env.dtype, device=env.device)


def as_bool(value: Value, env: Environment) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.tensor(value, device=env.device)
    return value if value.dtype == torch.bool else value != 0


def evaluate(node: Expr, env: Environment, names: dict[str, Value]) -> Value:
    """The value of an expression: a Python number where it is one, else a tensor that broadcasts
    against the tile."""
    op = node.op
    if op == "const":
        return math.nan if node.value == "nan" else node.value  # type: ignore[no-any-return]
    if op == "size":
        return env.sizes[int(node.value[1:])]
    if op == "var":
        return env.index(node.value)
    if op in ("dot", "s", "p"):
        return names[op]
    if op == "read":
        return read(node, env, names)
    args = [evaluate(arg, env, names) for arg in node.args]
    if not any(isinstance(a, Tensor) for a in args):
        # Operations on plain numbers are computed in double precision.
        exact = dataclasses.replace(env, dtype=torch.float64)
        return _apply(op, [_promote(a, exact, torch.device("cpu")) for a in args], exact).item()
    return _apply(op, args, env)


def number(node: Expr, sizes: Sequence[int] = ()) -> int | float | bool:
    """The value of an expression of constants and sizes."""
    point = Tile((0, 1), (0, 1), (0, 1), (0, 1))
    value = evaluate(node, Environment(point, (), sizes, torch.float32, torch.device("cpu")), {})
    assert not isinstance(value, Tensor), node
    return value


def _apply(op: str, args: Sequence[Value], env: Environment) -> Tensor:
    if op == "where":
        condition = as_bool(args[0], env)
        a, b = (_promote(x, env, condition.device) for x in args[1:])
        return torch.where(condition, a, b)
    if op == "random":
        return random(args, env)
    row = operation_of(op)
    if row is None:
        raise ValueError(f"`{op}` is no operation of the score language.")
    if row.takes == "truths":
        return row.torch(*(as_bool(x, env) for x in args))
    args = [a.to(torch.int64) if isinstance(a, Tensor) and a.dtype == torch.bool else a for a in args]
    args = [int(a) if isinstance(a, bool) else a for a in args]
    device = next(a.device for a in args if isinstance(a, Tensor))
    operands = [_promote(x, env, device) for x in args]
    if op == "float":
        return operands[0].to(torch.promote_types(env.dtype, torch.float32))
    real = (x if x.is_floating_point() else x.to(env.dtype) for x in operands)
    return row.torch(*(operands if row.takes == "alike" else real))


def _promote(value: Value, env: Environment, device: torch.device) -> Tensor:
    """A tensor unchanged; a Python number as a 0-dim tensor, floats in the environment's dtype. (Only `where`
    takes bools: as integers they would be ambiguous.)"""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=env.dtype if isinstance(value, float) else None, device=device)


def read(node: Expr, env: Environment, names: dict[str, Value]) -> Tensor:
    """`rN[...]` on this tile, in the environment's dtype or a wider one: a view if every index is a variable
    or a number, else a gather."""
    value = _read(node, env, names)
    return value.to(torch.promote_types(value.dtype, env.dtype)) if value.is_floating_point() else value


def _read(node: Expr, env: Environment, names: dict[str, Value]) -> Tensor:
    source = env.reads[node.value]
    plain = [a for a in node.args if a.op == "var"]
    counted = not env.places or not any(a.value in env.places for a in plain)
    if counted and len(set(plain)) == len(plain) and all(a.op in ("var", "const") for a in node.args):
        return _read_view(node.value, node.args, env)
    picks: list[Tensor] = []
    for extent, arg in zip(source.shape, node.args, strict=True):
        value = evaluate(arg, env, names)
        place = value if isinstance(value, Tensor) else torch.tensor(value, device=env.device)
        if env.places is not None:
            picks.append(place.to(torch.int64))
            continue
        low, high = (int(x) for x in torch.aminmax(place)) if place.numel() else (0, 0)
        if low < 0 or high >= extent:
            raise IndexError(
                f"{E.format_expr(node)} reads place {low if low < 0 else high} of a dimension of "
                f"{extent}; an index must be in range, also where its value is not used."
            )
        picks.append(place.to(torch.int64))
    picked: Tensor = source[tuple(picks)]
    return picked


def _read_view(number: int, args: tuple[Expr, ...], env: Environment) -> Tensor:
    source, names = env.reads[number], [arg.value for arg in args if arg.op == "var"]
    index: list[int | slice] = []
    for extent, arg in zip(source.shape, args, strict=True):
        first, end = (arg.value, arg.value + 1) if arg.op == "const" else env.tile.range(arg.value)
        if first < 0 or end > extent:
            place = arg.value if arg.op == "const" else f"{arg.value} = {end - 1}"
            raise IndexError(f"r{number} is read at {place} of a dimension of {extent}.")
        index.append(int(first) if arg.op == "const" else slice(first, end))
    view = source[tuple(index)].permute(sorted(range(len(names)), key=lambda n: S.INDICES.index(names[n])))
    return view[tuple(slice(None) if name in names else None for name in S.INDICES)]


def counters(places: Sequence[Value], extents: Sequence[Value]) -> list[Value]:
    """The four counters of `random` for an element of a tensor of any rank: its indices, with the leading
    ones flattened into one if there are more than four, and padded with zeros if there are fewer."""
    found = list(places)
    sizes = list(extents)
    while len(found) > 4:
        found[:2] = [found[0] * sizes[1] + found[1]]
        sizes[:2] = [sizes[0] * sizes[1]]
    return found + [0] * (4 - len(found))


def random(args: Sequence[Value], env: Environment) -> Tensor:
    """Uniform numbers in [0, 1) from a seed and a counter, one 32-bit mix per index: the finaliser
    of MurmurHash3 (Appleby, public domain), applied to (state ^ index) in turn. Stateless, so every
    tile, backend and backward pass sees the same numbers."""
    mask = 0xFFFFFFFF
    state = torch.as_tensor(args[0], device=env.device).to(torch.int64) & mask
    for index in args[1:]:
        place = torch.as_tensor(index, device=env.device).to(torch.int64)
        state = (state ^ (place * 0x9E3779B1)) & mask
        state = ((state ^ (state >> 16)) * 0x85EBCA6B) & mask
        state = ((state ^ (state >> 13)) * 0xC2B2AE35) & mask
        state = state ^ (state >> 16)
    return (state >> 8).to(env.dtype) * (1.0 / (1 << 24))
