"""A score program as Python source for PyTorch: the functions that FlexAttention takes, or a call of SDPA.

A formula prints as Python already (`ir/language/expr.py`), but for the names of functions and for `and`, `or`
and `not`, which tensors do not have: these are replaced, and then it is printed. Inside of FlexAttention an
index is a number; outside it is a dimension of its own, and the same text broadcasts.
"""

from collections.abc import Iterable, Sequence

import torch

from attngraph.errors import told_as
from attngraph.ir.language import E, operation_of, parse
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.score import Keep, Score, ScoreProgram, Statement
from attngraph.meaning.masks.standard import NotStandard, after_softmax, keeps_own, sdpa_form

_NUMBERS = {"inf": "torch.inf", "-inf": "-torch.inf", "nan": "torch.nan", "true": "True", "false": "False"}
_ARITHMETIC = frozenset({"add", "sub", "mul", "neg", "floordiv", "mod", "pow", "abs", "sign", "min", "max"})
_PLACES = {
    "b": ("query.shape[0]", (-1, 1, 1, 1)), "h": ("query.shape[1]", (-1, 1, 1)),
    "q": ("query.shape[2]", (-1, 1)), "k": ("key.shape[2]", (-1,)),
}  # fmt: skip
_BLIND = "# A query that sees no key may be 0 here; it is NaN in the model."


def flex(program: str, sizes: Sequence[int], reads: Sequence[str], grouped: bool) -> str:
    """Source of `mods(r0, ...)`, which gives `score_mod` and `mask_mod`, and of `attention(query, key, value,
    r0, ...)`, which calls FlexAttention with them.

    Raises:
        ValueError: FlexAttention cannot say it: says why.
    """
    with told_as(ValueError, NotStandard, before="FlexAttention cannot say this attention: "):
        parsed = parse(program)
        scale, statements = parsed.scale, list(parsed.without_scale.statements)
        factor, zero = after_softmax(parsed)
        statements = [s for s in statements if isinstance(s, (Score, Keep))]
        masks: list[Keep] = []
        while statements and isinstance(statements[-1], Keep) and _is_mask(statements[-1]):
            masks.insert(0, statements.pop())  # type: ignore[arg-type]
        given = _given(parsed, sizes)
        score = [f"    def score_mod(dot, {', '.join(S.INDICES)}):", *_scores(statements, "dot", " " * 8)]
        mask = [f"    def mask_mod({', '.join(S.INDICES)}):", f"        return {_seen(masks)}"]
        call = f"scale={1.0 if scale is None else scale!r}, enable_gqa={grouped}"
        block = "create_block_mask(mask_mod, *query.shape[:3], key.shape[2], device=query.device)"
        used, after = "", list[str]()
        if parsed.sink is not None:
            used = "AuxRequest, "
            call += ", return_aux=AuxRequest(lse=True)"
            after.append(f"    out = out * torch.sigmoid(aux.lse[..., None] - {_text(parsed.sink, 6)})")
        if factor is not None:
            after.append(f"    out = out * {_text(factor, 7)}")
        return "\n".join([
            "import torch",
            f"from torch.nn.attention.flex_attention import {used}create_block_mask, flex_attention",
            "", "",
            f"def mods({given}):",
            *_told(reads),
            *(score if statements else ["    score_mod = None"]), "",
            *(mask if masks else ["    mask_mod = None"]), "",
            "    return score_mod, mask_mod",
            "", "",
            f"def attention(query, key, value{given and f', {given}'}):",
            f"    score_mod, mask_mod = mods({', '.join(_names(parsed))})",
            f"    block_mask = {block if masks else None}",
            *(_blind(parsed.keeps) if not zero and parsed.sink is None else []),
            *_indices([e for e in (parsed.sink, factor) if e is not None]),
            f"    {'out, aux' if used else 'out'} = flex_attention(",
            f"        query, key, value, score_mod, block_mask, {call}",
            "    )",
            *after,
            "    return out",
            "",
        ])  # fmt: skip


def sdpa(program: str, sizes: Sequence[int], reads: Sequence[str], grouped: bool, dtype: torch.dtype) -> str:
    """Source of `attention(query, key, value, r0, ...)`, which calls `scaled_dot_product_attention`.

    Raises:
        ValueError: the operation cannot say it: says why.
    """
    before = "scaled_dot_product_attention cannot say this attention: "
    with told_as(ValueError, NotStandard, before=before):
        parsed = parse(program)
        form = sdpa_form(parsed, dtype)
        given, by_itself = _given(parsed, sizes), form.causal and form.sink is None
        expressions = [e for e in (form.queries, form.results, form.sink) if e is not None]
        lines: list[str] = []
        if form.queries is not None:
            lines.append(f"    query = query * {_text(form.queries, 7)}")
        masked = not by_itself and (bool(form.mask) or form.sink is not None)
        if masked:
            expressions += [e for s in form.mask for e in S.formulas(s)]
            shape = "*query.shape[:3], key.shape[2]"
            if form.adds or form.sink is not None:
                lines += [
                    "    s = torch.zeros((), device=query.device)",
                    *_scores(form.mask, "s", "    ", "s = "),
                ]
                lines.append(f"    mask = s.to(query).expand({shape})")
            else:
                masks = [s for s in form.mask if isinstance(s, Keep)]
                lines.append(f"    mask = ({_seen(masks)}).expand({shape})")
            if form.sink is not None:  # one more key
                sink = f"({_text(form.sink)}).to(query).expand(*query.shape[:3], 1)"
                lines.append(f"    mask = torch.cat([mask, {sink}], -1)")
                lines.append(
                    "    key, value = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (key, value))"
                )
            lines += [] if form.blind_is_zero else _blind(form.mask)
        mask = "mask" if masked else "None"
        call = f"query, key, value, attn_mask={mask}, is_causal={by_itself}, scale={form.scale!r}, "
        after = [] if form.results is None else [f"    out = out * {_text(form.results, 7)}"]
        if form.blind_is_zero and form.adds and form.sink is None:
            after.append("    out = out.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)")
        return "\n".join([
            "import torch",
            "", "",
            f"def attention(query, key, value{given and f', {given}'}):",
            *_told(reads),
            *_indices(expressions),
            *lines,
            "    out = torch.nn.functional.scaled_dot_product_attention(",
            f"        {call}enable_gqa={grouped}",
            "    )",
            *after,
            "    return out",
            "",
        ])  # fmt: skip


def _names(program: ScoreProgram) -> list[str]:
    return [*(f"r{n}" for n in program.reads), *(f"n{n}" for n in range(program.sizes))]


def _given(program: ScoreProgram, sizes: Sequence[int]) -> str:
    """Parameters: tensors, and sizes with those of the traced call."""
    defaults = {f"n{number}": f"={size}" for number, size in enumerate(sizes)}
    return ", ".join(name + defaults.get(name, "") for name in _names(program))


def _told(reads: Sequence[str]) -> list[str]:
    return [f"    # r{number}: {what}" for number, what in enumerate(reads)]


def _indices(expressions: Iterable[Expr]) -> list[str]:
    """Lines that make each index that is used a dimension of its own."""
    used = {n.value for e in expressions for n in E.walk(e) if n.op == "var"}
    lines = []
    for name, (extent, shape) in _PLACES.items():
        if name in used:
            lines.append(
                f"    {name} = torch.arange({extent}, device=query.device).view{shape}".replace(",)", ")")
            )
    return lines


def _blind(mask: Iterable[Statement]) -> list[str]:
    keeps = (s for s in mask if isinstance(s, Keep))
    return [] if all(map(keeps_own, keeps)) else [f"    {_BLIND}"]


def _is_mask(keep: Keep) -> bool:
    return keep.is_hard and not any(n is S.DOT or n is S.SCORE for n in E.walk(keep.predicate))


def _seen(masks: Sequence[Keep]) -> str:
    """All predicates as one."""
    parts = [p for keep in masks for p in _parts(keep.predicate)]
    texts = [_text(_true(part)) for part in parts]
    return texts[0] if len(texts) == 1 else " & ".join(f"({text})" for text in texts)


def _parts(predicate: Expr) -> list[Expr]:
    return [p for a in predicate.args for p in _parts(a)] if predicate.op == "and" else [predicate]


def _scores(statements: Sequence[Statement], first: str, indent: str, last: str = "return ") -> list[str]:
    """Lines that change the score; it is called `first` before them."""
    lines, name = [], first
    for place, statement in enumerate(statements):
        text = {S.SCORE: E.make("var", (), name)}
        if isinstance(statement, Keep):
            seen, fill = (_text(E.replaced(e, text)) for e in (_true(statement.predicate), statement.fill))
            made = f"torch.where({seen}, {name}, {fill})"
        else:
            made = _text(E.replaced(S.formulas(statement)[0], text))
        lines.append(f"{indent}{last if place == len(statements) - 1 else 's = '}{made}")
        name = "s"
    return lines


def _true(value: Expr) -> Expr:
    """What is true where a number is not 0."""
    return value if value.kind == "bool" else E.make("ne", (value, E.ZERO), kind="bool")


def _text(value: Expr, level: int = 0) -> str:
    """The formula as Python, a tensor; in brackets where it binds less tightly."""
    return E.format_expr(_as_tensor(value, E.rebuild(value, _python)), level)


def _as_tensor(value: Expr, written: Expr) -> Expr:
    has_tensor = any(n.op in ("var", "read", "dot", "s", "p") for n in E.walk(value))
    return written if has_tensor else E.make("torch.as_tensor", (written,))


def _python(node: Expr, args: tuple[Expr, ...]) -> Expr:
    if node.op == "random":
        raise NotStandard("it draws random numbers by their places (dropout)")
    if node.op == "const":
        name = _NUMBERS.get(E.format_number(node.value))
        return node if name is None else E.make("var", (), name, node.kind)
    if node.op == "read" and not args:
        return E.make("var", (), f"r{node.value}", node.kind)
    row = operation_of(node.op)
    if row is None:
        return E.with_args(node, args)
    if row.name in _ARITHMETIC and all(a.kind in ("bool", "any") for a in node.args):
        args = (E.make("mul", (E.ONE, args[0]), None, "int"), *args[1:])  # a truth counts as 0 or 1
    if row.name == "where":
        condition = args[0] if node.args[0].kind == "bool" else _true(args[0])
        args = (_as_tensor(node.args[0], condition), *args[1:])
    elif row.name in E.COMPARISONS:
        args = (_as_tensor(node, args[0]), args[1])
    elif row.name not in E.BINARY or row.takes == "truths":
        args = tuple(map(_as_tensor, node.args, args))
    if row.name == "neg" or (row.name in E.BINARY and row.takes != "truths"):
        return E.make(node.op, args, node.value, node.kind)
    kind = "torch.Tensor." if row.name in ("float", "int") else "torch."
    return E.make(f"{kind}{row.torch.__name__}", args, None, node.kind)
