"""A mask in words: `causal & window(4096) & r1[b, k]`."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx

from attngraph.ir.dtypes import DTYPES, FLOATS
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language import E, Expr, Keep, Score, ScoreProgram, format_expr, format_number
from attngraph.ir.walk import reached
from attngraph.meaning.algebra import M
from attngraph.meaning.rule import ELEMENTWISE, category_of

_K = E.var("k")


def describe(program: ScoreProgram, hiding: Collection[int] = (), given: Collection[int] = ()) -> str:
    """What a program keeps, in words: its `keep` statements, and what is read of the tensors `hiding`, which
    hold minus infinity, and of those `given` by the caller, which may; "none" without any."""
    words = [_describe_keep(k) for k in program.keeps]
    asked = {n for k in program.keeps for n in E.walk(k.predicate)}
    read = dict.fromkeys(n for e in program.expressions for n in E.reads(e))
    words += [f"{format_expr(n)} > -inf" for n in read if n.value in hiding and n not in asked]
    scores = (M.canonical(s.value) for s in program.statements if isinstance(s, Score))
    terms = [term for value in scores if value.op == "add" for term in value.args]
    terms = [t for t in terms if all(n.op not in ("dot", "s") for n in E.walk(t))]
    added = dict.fromkeys(n for t in terms for n in E.reads(t) if _K in n.args)
    words += [f"whatever {format_expr(n)} adds" for n in added if n.value in given and n not in asked]
    return " & ".join(words) or "none"


def hiding(reads: Sequence[object], values: Mapping[fx.Node, Tensor]) -> frozenset[int]:
    """Which of the tensors that scores read are known to hold minus infinity."""
    known = ((n, values.get(node)) for n, node in enumerate(reads) if isinstance(node, fx.Node))
    return frozenset(n for n, value in known if value is not None and bool(torch.isneginf(value).any()))


def given(reads: Sequence[object], graph: ProgramGraph) -> frozenset[int]:
    """Which of them are the caller's: arguments of the call, or computed from these element by element."""
    kinds = {n: i.kind for n, i in zip(graph.placeholders(), graph.inputs, strict=True)}
    return frozenset(n for n, r in enumerate(reads) if isinstance(r, fx.Node) and _is_given(r, kinds))


def _is_given(node: fx.Node, kinds: Mapping[fx.Node, str]) -> bool:
    def tensors(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]

    sources = set()
    for at in reached([node], tensors):
        if at.op == "placeholder":
            sources.add(kinds[at])
        elif category_of(at) not in ELEMENTWISE:
            return False
    return "argument" in sources and sources <= {"argument", "constant", "buffer"}


def _describe_keep(keep: Keep) -> str:
    words, fill = _conjunction(_conjuncts(keep.predicate)), keep.fill
    if keep.is_hard or keep.lowers:
        return words
    return f"{words} (else {named(format_number(fill.value) if fill.op == 'const' else format_expr(fill))})"


LARGEST = {DTYPES[dtype].name: format_number(DTYPES[dtype].largest) for dtype in FLOATS}
"""The largest number of each dtype as programs write it; models add or fill in its negative, `finfo.min`."""


def named(fill: str) -> str:
    """What is filled in, with a dtype's smallest number by its name: `s + finfo(float32).min`."""
    for dtype, number in LARGEST.items():
        name = f"finfo({dtype}).min"
        fill = fill.replace(f" - {number}", f" + {name}").replace(f"-{number}", name)
    return fill


def remarks(program: str) -> list[str]:
    """What readers may not know of the numbers in a score program."""
    named = ((dtype, number) for dtype, number in LARGEST.items() if number in program)
    return [f"{number} is the largest {dtype}; finfo.min is its negative" for dtype, number in named]


def _conjuncts(node: Expr) -> list[Expr]:
    return [c for a in node.args for c in _conjuncts(a)] if node.op == "and" else [node]


def _conjunction(parts: list[Expr]) -> str:
    words: list[str] = []
    limits: dict[str, Expr] = {}
    for part in parts:
        side, limit = distance_limit(part) or ("", E.ZERO)
        if not side:
            words.append(_other(part))
        elif side in limits:
            words.append(format_expr(part))
        else:
            limits[side] = limit
    return " & ".join([*_distance_words(limits.get("behind"), limits.get("ahead")), *words])


def _distance_words(behind: Expr | None, ahead: Expr | None) -> list[str]:
    """Words for -behind <= k - q <= ahead."""
    if ahead is None:
        return [] if behind is None else [f"q - k <= {_shown(behind)}"]
    if behind is None:
        return ["causal" if E.is_const(ahead, 0) else f"k - q <= {_shown(ahead)}"]
    if E.is_const(ahead, 0):
        return ["causal", f"window({format_expr(M.add(behind, E.ONE))})"]
    if ahead is behind:
        return [f"window(+-{format_expr(ahead)})"]
    if any(n.op == "const" and n.value < 0 for n in (behind, ahead)):
        return [f"{format_expr(M.scale(-1, behind))} <= k - q <= {format_expr(ahead)}"]
    return [f"window(-{format_expr(behind)}, +{format_expr(ahead)})"]


def _shown(node: Expr) -> str:
    """A distance, with subtracted terms after a minus sign."""
    terms = [M.coefficient(t) for t in E.parts(node, "add") if t.op != "const"]
    if not any(factor < 0 for factor, _ in terms):
        return format_expr(node)
    numbers = [int(t.value) for t in node.args if t.op == "const"] if node.op == "add" else []
    signed = [(factor, format_expr(M.scale(abs(factor), rest))) for factor, rest in terms]
    signed = sorted(signed, key=lambda t: t[0] < 0) + [(n, str(abs(n))) for n in numbers if n]
    text = "".join(f" {'-' if factor < 0 else '+'} {shown}" for factor, shown in signed)
    return text.removeprefix(" + ").removeprefix(" ")


def distance_limit(node: Expr) -> tuple[str, Expr] | None:
    """("ahead", n) for k - q <= n, ("behind", n) for q - k <= n."""
    if node.op not in ("le", "lt", "ge", "gt"):
        return None
    parts = [n for a in node.args for n in E.walk(a)]
    if any(n.op not in ("var", "size", "const", "add", "sub", "mul") or n.kind != "int" for n in parts):
        return None
    left, right = map(M.canonical, node.args)
    slack = M.sub(right, left) if node.op in ("le", "lt") else M.sub(left, right)
    if node.op in ("lt", "gt"):
        slack = M.sub(slack, E.ONE)
    distance = M.sub(_K, E.var("q"))
    limits = (("ahead", M.add(slack, distance)), ("behind", M.sub(slack, distance)))
    return next(((side, limit) for side, limit in limits if not limit.free), None)


def _other(node: Expr) -> str:
    """Padding: a vector over the keys, kept or dropped where it is set. Documents: query and key must
    read the same value of a vector over tokens."""
    if node.op == "eq":
        names = [_vector(a) for a in node.args]
        if None not in names and names[0] == names[1] and node.args[0] is not node.args[1]:
            return f"documents({names[0]})"
    is_asked = node.op == "not" or (node.op in ("eq", "ne") and E.is_const(node.args[1], 0))
    inner = node.args[0] if is_asked else node
    name = _vector(inner)
    if name is not None and _K in inner.args:
        return f"padding({'not ' if node.op in ('not', 'eq') else ''}{name})"
    return format_expr(node, 3)


def _vector(node: Expr) -> str | None:
    """`rN` if the node reads that tensor by batch and at most one position."""
    if node.op != "read" or any(a.op not in ("const", "var") for a in node.args):
        return None
    names = [a.value for a in node.args if a.op == "var"]
    return f"r{node.value}" if set(names) <= {"b", "k"} or set(names) <= {"b", "q"} else None
