"""Which attention of a candidate is which of the reference's, and where the programs of two differ.

Programs hold for all sizes, so a difference is looked for at numbers of tokens that no call has. Nothing is
said to differ that may be the same: a pair is compared only where it is known to be one, and programs that
read tensors only where both read the same arguments of the call, or weights and buffers of equal values.
"""

import dataclasses
import difflib
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.verify.calls import LOW, like, manners_of
from attngraph.api.verify.verdict import Difference, Pair
from attngraph.ir.language import Environment, ScoreProgram, Tile, evaluate, parse
from attngraph.report.entries import AttentionEntry

MOST_TOKENS = 1 << 13
"""The longest sequence for which programs are compared."""
_Where = tuple[str, int, str] | tuple[()]


def paired(mine: Sequence[AttentionEntry], theirs: Sequence[AttentionEntry]) -> list[Pair]:
    """The attentions of both sides in pairs: by their order where there are as many, else those of equal
    programs in the same order."""
    if len(mine) == len(theirs):
        return list(zip(mine, theirs, strict=True))
    keys = [[(e.program, e.heads, e.kv_heads) for e in side] for side in (mine, theirs)]
    blocks = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return [(mine[b.a + n], theirs[b.b + n]) for b in blocks for n in range(b.size)]


def by_meaning(
    pairs: Sequence[Pair], counts: Sequence[int], call: Sequence[Tensor], sides: Sequence[Any] = (None, None)
) -> tuple[list[Difference], list[str]]:
    """Where the programs of pairs differ, and what was not compared. Equal ones that read different tensors
    are not the same. `counts`: of attentions, by side. `call`: the tensors of the call. `sides`: what has the
    weights that are read."""
    found: list[Difference] = []
    notes: list[str] = []
    unread = 0
    known: dict[Any, _Where | None] = {}  # layers have equal programs
    for number, (a, theirs) in enumerate(pairs, start=1):
        b, held = _in_names_of(a, theirs, sides)
        comparable = _comparable(a, b, held)
        if comparable and a.program == b.program and (a.heads, a.kv_heads) == (b.heads, b.kv_heads):
            continue
        key = tuple((e.program, e.reads, e.heads, e.head_dim) for e in (a, b))
        if comparable and key not in known:
            known[key] = _first_difference(a, b, call, held)
        where = known[key] if comparable else None
        unread += where is None
        if where:
            code, tokens, how = where
            both = f"attention {number} differs {how}", a.source, b.source, a.program, b.program
            found.append(Difference("program", *both, code=code, tokens=tokens))
    if counts[0] != counts[1]:
        left = " and ".join(str(n - len(pairs)) for n in counts)
        said = f"{counts[0]} and {counts[1]} attention(s) were found in them"
        equal = f"{len(pairs)} have equal programs"
        notes.append(f"{said}: {equal}, {left} others are compared by number alone")
    if unread:
        said = f"the programs of {unread} attention(s) read tensors that are not known to be the same"
        notes.append(f"{said}: compared by number alone")
    return found, notes


def _in_names_of(
    a: AttentionEntry, b: AttentionEntry, sides: Sequence[Any]
) -> tuple[AttentionEntry, dict[str, Tensor]]:
    """`b` with the weights and buffers that it reads under the names that `a` has for equal ones, and those
    of `a`."""
    held = {name: t for name in a.reads if (t := _held(sides[0], name)) is not None}
    names: list[str] = []
    for read in b.reads:
        own = _held(sides[1], read)
        equal = (
            n for n, t in held.items() if own is not None and t.shape == own.shape and torch.equal(t, own)
        )
        names.append(read if own is None else next(equal, "another tensor"))
    return dataclasses.replace(b, reads=tuple(names)), held


def _held(side: Any, read: str) -> Tensor | None:
    """A parameter or a buffer of a module, by what an entry says that its program reads."""
    name, _, kind = read.rpartition(" (")
    if kind not in ("parameter)", "buffer)") or not isinstance(side, nn.Module):
        return None
    every = {**dict(side.named_parameters(remove_duplicate=False)), **dict(side.named_buffers())}
    return every.get(name)


def _comparable(a: AttentionEntry, b: AttentionEntry, held: Container[str]) -> bool:
    """Whether what both programs read is the same: nothing, or the same arguments of the call, or weights,
    which are `held`. What a model computes, or a piece of it is given, is another matter."""
    programs = parse(a.program), parse(b.program)
    if any(p.sizes for p in programs):
        return False
    if not any(p.reads for p in programs):
        return True
    known = (read in held or read.endswith(" of the arguments") for read in a.reads)
    given = {*a.reads} == {*b.reads} and all(known)
    same = a.program != b.program or a.reads == b.reads
    by_reads = any(re.search(r"\br\d", str(index)) for p in programs for _, _, index in p.places)
    return given and same and not by_reads


def _first_difference(
    a: AttentionEntry, b: AttentionEntry, call: Sequence[Tensor], held: Mapping[str, Tensor]
) -> _Where | None:
    """The code of the difference, the first number of tokens at which two programs give the last of them
    other weights, and how; () for none. None: they read an argument in different shapes."""
    if a.heads != b.heads:
        return "heads", 1, f"in its heads: {a.heads} and {b.heads}"
    programs = parse(a.program), parse(b.program)
    named = {int(n) for p in (a, b) for n in re.findall(r"\b\d+\b", p.program)}
    near = {n + more for n in (*named, 16, 64, 128, 256, 1024, 4096) for more in (-1, 0, 1, 2)}
    for tokens in sorted({*range(1, 10), *(n for n in near if 1 <= n <= MOST_TOKENS)}):
        tile = Tile((0, 1), (0, a.heads), (tokens - 1, tokens), (0, tokens))
        bare = Environment(tile, (), (), torch.float64, torch.device("cpu"))
        dot = torch.randn(tile.shape, dtype=torch.float64) * a.head_dim**0.5
        given = _given((a, b), programs, bare, call, held)
        if given is None:
            break
        if len(given) < len({*a.reads, *b.reads}):
            return None
        scores, weights = [], []
        for entry, program in zip((a, b), programs, strict=True):
            reads = [given[name] for name in entry.reads]
            env = Environment(tile, reads, (), bare.dtype, bare.device)
            scores.append(evaluate.scores(program, dot, env))
            sink, row = evaluate.sink(program, env), scores[-1]
            if sink is not None:
                row = torch.cat([row, sink.expand(*row.shape[:-1], 1)], -1)
            normalised = row.softmax(-1)[..., :tokens]
            weights.append(evaluate.weights(program, normalised, env, dot))
        apart = ~torch.isclose(weights[0], weights[1], rtol=1e-9, atol=1e-12, equal_nan=True)
        low = [s <= LOW for s in scores]
        if given:  # a query for which a mask hides every key has no result that means anything
            apart &= ~(low[0] & low[1]).all(-1, keepdim=True)
        if apart.any():
            code, what, where = "weighs", "they weigh this key differently", apart
            if (hidden := low[0] != low[1]).any():
                code, what, where = "hides", "one hides this key, the other does not", hidden
            _, head, _, key = where.nonzero()[0].tolist()
            at = f"query {tokens - 1}, key {key}, head {head}"
            return code, tokens, f"from {tokens:,} tokens on: {at}: {what}"
    return ()


def _given(
    pair: Pair,
    programs: Sequence[ScoreProgram],
    env: Environment,
    call: Sequence[Tensor],
    held: Mapping[str, Tensor],
) -> dict[str, Tensor] | None:
    """A tensor for each argument that one of two programs reads, by its name, of the kind of its own, and the
    weights. None: a weight ends before."""
    extents: dict[str, list[int]] = {}
    for entry, program in zip(pair, programs, strict=True):
        for read, axis, index in program.places:
            name = entry.reads[int(read.value)]
            shape = extents.setdefault(name, [1] * program.reads[int(read.value)])
            if len(shape) != len(read.args):  # it is read in another shape: nothing is known of it
                return {}
            last = torch.as_tensor(evaluate.evaluate(index, env, {})).max()
            shape[axis] = max(shape[axis], int(last) + 1)
    weights = {name: held[name].detach().double() for name in extents if name in held}
    if any(len(t.shape) != len(extents[name]) for name, t in weights.items()):
        return {}
    if any(n > own for name, t in weights.items() for n, own in zip(extents[name], t.shape, strict=True)):
        return None
    extents = {name: shape for name, shape in extents.items() if name not in held}
    own = {name: call[int(name.split()[1])] for name in extents}
    kinds = {name: next(iter(manners_of(own[name])), "") for name in extents}
    made = {name: like(own[name], shape, kinds[name]).double() for name, shape in extents.items()}
    return made | weights
