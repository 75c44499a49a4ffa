"""Which pairs of query and key are kept, and how that is applied to scores: the text of each spelling.

A predicate is an expression with the letters of its dimensions; True means kept.
"""

from __future__ import annotations

from workshop.fuzz.body import Body, aligned

LONGEST = 16
"""Queries, and keys, of a mask that is a constant."""


def predicate(body: Body, kind: str, ending: str = "") -> tuple[str, str]:
    """The name of a boolean tensor that is computed in `body`, and its dimension letters."""
    keep = f"keep{ending}"
    if kind in _POSITIONS:
        if "i[" in _POSITIONS[kind] or "j[" in _POSITIONS[kind] or "behind" in _POSITIONS[kind]:
            positions(body, behind="behind" in _POSITIONS[kind])
        text = _POSITIONS[kind].replace("<t>", body.size("q")).replace("<s>", body.size("k"))
        body.add(f"{keep} = {text}")
        if kind == "entry_changed":
            body.add(f"{keep}[-1, 0] = False")
        return keep, "qk"
    if kind in {"constant", "constant_entry_changed"}:
        body.constant(f"KEEP = torch.ones({LONGEST}, {LONGEST}, dtype=torch.bool).tril()")
        if kind == "constant_entry_changed":
            body.constant("KEEP[1, 0] = False")
        body.add(f"{keep} = KEEP[:{body.size('q')}, :{body.size('k')}]")
        return keep, "qk"
    return _given(body, kind, keep, ending)


def _given(body: Body, kind: str, keep: str, ending: str) -> tuple[str, str]:
    """A predicate that reads data."""
    given = f"{kind}{ending}"
    lengths = "torch.randint(1, {S} + 1, ({B}, 1), generator=g)"
    padding = f"torch.arange({{S}}) < {lengths}"
    if kind == "padding":
        body.input(given, padding)
        return given, "bk"
    if kind == "padding_dropped":
        body.input(given, f"~({padding})")
        body.add(f"{keep} = ~{given}")
        return keep, "bk"
    if kind == "padding_integers":
        body.input(given, f"({padding}).long()")
        body.add(f"{keep} = {given} != 0")
        return keep, "bk"
    if kind == "empty_padding":
        body.input(given, f"({padding}) & (torch.arange({{B}})[:, None] > 0)")
        return given, "bk"
    if kind == "padding_both":
        body.input(given, padding)
        body.add(f"{keep} = {given}[:, :, None] & {given}[:, None]")
        return keep, "bqk"
    if kind == "lengths":
        body.input(given, "torch.randint(1, {S} + 1, ({B},), generator=g)")
        body.add(f"{keep} = torch.arange({body.size('k')}) < {given}[:, None]")
        return keep, "bk"
    if kind == "prefix_lengths":
        body.input(given, "torch.randint(0, {S} + 1, ({B},), generator=g)")
        positions(body)
        body.add(f"{keep} = (j[None] <= i[:, None]) | (j < {given}[:, None, None])")
        return keep, "bqk"
    if kind == "documents":
        body.input(given, "torch.randint(0, 3, ({B}, {S}), generator=g).sort(-1).values")
        body.add(f"{keep} = {given}[:, :, None] == {given}[:, None]")
        return keep, "bqk"
    if kind == "separators":
        body.input(given, "torch.randint(0, 3, ({B}, {S}), generator=g)")
        body.add(f"document{ending} = ({given} == 2).cumsum(-1)")
        body.add(f"{keep} = document{ending}[:, :, None] == document{ending}[:, None]")
        return keep, "bqk"
    assert kind == "dense", kind
    body.input("kept" + ending, "torch.rand({B}, {T}, {S}, generator=g) > 0.3")
    return "kept" + ending, "bqk"


_POSITIONS = {
    "causal": "torch.ones(<t>, <s>, dtype=torch.bool).tril()",
    "causal_triu": "torch.ones(<t>, <s>).triu(1) == 0",
    "causal_positions": "j[None] <= i[:, None]",
    "bottom_right": "torch.ones(<t>, <s>, dtype=torch.bool).tril(<s> - <t>)",
    "window": "(i[:, None] - j[None]).abs() <= 2",
    "window_triangles": "torch.ones(<t>, <s>).tril() * torch.ones(<t>, <s>).triu(-2) > 0",
    "dilated": "(behind >= 0) & (behind % 2 == 0)",
    "blocks": "i[:, None] // 3 == j[None] // 3",
    "prefix": "(j[None] <= i[:, None]) | (j[None] < 3)",
    "global": "((i[:, None] - j[None]).abs() <= 1) | (i[:, None] < 2) | (j[None] < 2)",
    "strict": "torch.ones(<t>, <s>, dtype=torch.bool).tril(-1)",
    "future": "j[None] > i[:, None]",
    "entry_changed": "torch.ones(<t>, <s>, dtype=torch.bool).tril()",
}


def positions(body: Body, behind: bool = False) -> None:
    """The positions `i` of queries and `j` of keys; with `behind`, also their distance."""
    body.once(f"i = torch.arange({body.size('q')})")
    body.once(f"j = torch.arange({body.size('k')})")
    if behind:
        body.once("behind = i[:, None] - j[None]")


def apply_mask(body: Body, keep: str, letters: str, how: str, fill: str, in_place: bool, ending: str) -> None:
    """Hide the scores that are not kept."""
    body.need(letters)
    dtype = "scores.dtype"
    number = {
        "-inf": "-math.inf",
        "-3.4e38": "torch.finfo(torch.float32).min",
        "lowest": f"torch.finfo({dtype}).min",
    }.get(fill, fill)
    full = aligned(keep, letters, body.scores)
    mask = f"mask{ending}"
    if how == "fill":
        if in_place:
            body.add(f"scores.masked_fill_(~{full}, {number})")
        else:
            body.set_scores(f"scores.masked_fill(~{full}, {number})")
    elif how == "fill_equal_zero":
        body.add(f"{mask} = {keep}.to({dtype})")
        body.set_scores(f"scores.masked_fill({aligned(mask, letters, body.scores)} == 0, {number})")
    elif how == "where":
        body.set_scores(f"torch.where({full}, scores, {number})")
    elif how == "where_tensor":
        body.set_scores(f"torch.where({full}, scores, torch.tensor({number}, dtype={dtype}))")
    elif how == "times":
        body.add(f"{mask} = {full}.to({dtype})")
        body.set_scores(f"scores * {mask} + {number} * (1 - {mask})")
    else:
        body.add(f"{mask} = " + {
            "add": f"torch.zeros({keep}.shape, dtype={dtype}).masked_fill(~{keep}, {number})",
            "add_commuted": f"torch.zeros({keep}.shape, dtype={dtype}).masked_fill(~{keep}, {number})",
            "add_where": f"torch.where({keep}, 0.0, {number})",
            "one_minus": f"(1.0 - {keep}.to({dtype})) * {number}",
            "logarithm": f"{keep}.to({dtype}).log()",
        }[how])  # fmt: skip
        full = aligned(mask, letters, body.scores)
        if how == "add_commuted":
            body.set_scores(f"{full} + scores")
        elif in_place:
            body.add(f"scores += {full}")
        else:
            body.set_scores(f"scores + {full}")
