"""Queries, keys and values: the layouts they come in, shared heads, and changes that are near misses."""

from __future__ import annotations

from collections.abc import Callable

from workshop.fuzz.body import Body
from workshop.fuzz.repair import PACKED

_SIZE = {"b": "B", "h": "H", "g": "G", "n": "B * H", "q": "T", "k": "S", "d": "D", "e": "E"}
_LETTERS = {
    "heads_first": ("bhqd", "bgkd", "bgke"),
    "tokens_first": ("bqhd", "bkgd", "bkge"),
    "flat": ("nqd", "nkd", "nke"),
    "single": ("bqd", "bkd", "bke"),
}
_NUMBERS = {"large": " * 10", "zeros": " * 0"}


def read_inputs(body: Body) -> None:
    """The parameters that hold queries, keys and values, separated into `q`, `k` and `v`."""
    c = body.case

    def normal(name: str, shape: str) -> None:
        factor = _NUMBERS.get(c.numbers, "")
        body.input(name, f"torch.randn({shape}, generator=g, dtype=torch.float64){factor}")

    if c.layout == "channels":
        normal("x", "{B}, {3 * H * D}, {T}")
        body.add(f"q, k, v = x.unflatten(1, (3, {c.heads}, -1)).unbind(1)")
        body.q, body.k, body.v = "bhdq", "bhdk", "bhek"
    elif c.layout in PACKED:
        normal("x", "{B}, {T}, {3 * H * D}")
        _unpack(body)
        body.q, body.k, body.v = "bhqd", "bhkd", "bhke"
    elif c.layout == "joined":
        shared = c.groups == "shared"
        for name, sizes in (("q", "{T}, {H * D}"), ("k", "{S}, {G * D}"), ("v", "{S}, {G * E}")):
            normal(name, f"{{B}}, {sizes}")
        body.add(f"q = q.unflatten(-1, ({c.heads * c.repeats}, -1)).transpose(1, 2)")
        if not shared:
            body.add(f"k, v = (x.unflatten(-1, ({c.heads}, -1)).transpose(1, 2) for x in (k, v))")
        body.q, body.k, body.v = ("bhqd", "bkd", "bke") if shared else ("bhqd", "bgkd", "bgke")
    else:
        _read_separate(body, normal)
    if c.numbers == "nan_query":
        body.add(f"q = q.index_fill({body.q.index('q')}, torch.tensor([0]), math.nan)")


def _read_separate(body: Body, normal: Callable[[str, str], None]) -> None:
    """Three parameters, with heads as a dimension of their own, moved to the front where a matrix product
    needs that."""
    c = body.case
    body.q, body.k, body.v = _LETTERS[c.layout]
    shared = c.groups == "shared"
    if shared:
        body.k, body.v = "bkd", "bke"
    for name, letters in (("q", body.q), ("k", body.k), ("v", body.v)):
        normal(name, ", ".join(f"{{{_SIZE[letter]}}}" for letter in letters))
    if c.layout == "tokens_first" and (c.groups == "queries" or not c.dot.startswith("einsum")):
        body.q = "bhqd"
        if shared:
            body.add("q = q.transpose(1, 2)")
        else:
            body.add("q, k, v = (x.transpose(1, 2) for x in (q, k, v))")
            body.k, body.v = "bgkd", "bgke"


def _unpack(body: Body) -> None:
    H, layout = body.case.heads, body.case.layout
    if layout == "packed":
        body.add(f"q, k, v = x.unflatten(-1, (3, {H}, -1)).permute(2, 0, 3, 1, 4)")
    elif layout == "packed_chunks":
        body.add(f"q, k, v = (y.unflatten(-1, ({H}, -1)).transpose(1, 2) for y in x.chunk(3, dim=-1))")
    elif layout == "packed_per_head":
        body.add(f"q, k, v = x.unflatten(-1, ({H}, 3, -1)).permute(3, 0, 2, 1, 4).unbind(0)")
    else:
        body.add(f"q, k, v = x.unflatten(-1, ({H}, -1, 3)).permute(4, 0, 2, 1, 3)")


def group_heads(body: Body) -> None:
    """Repeat keys and values that several heads share, or arrange queries by groups of heads."""
    c, R = body.case, body.case.repeats
    if c.groups in {"none", "shared"}:
        body.k, body.v = body.k.replace("g", "h"), body.v.replace("g", "h")
        return
    if c.groups == "queries":
        body.add(f"q = q.unflatten(1, (-1, {R}))")
        body.q = "bgrqd"
        return
    place = body.k.index("g")
    after = [":"] * (place + 1)
    expanded, flat = ["-1"] * 5, f".flatten({place}, {place + 1})"
    expanded[place + 1] = str(R)
    if c.groups == "index":
        body.add(f"pick = torch.arange({body.size('h')}) // {R}")
    one = {
        "repeat_interleave": f"x.repeat_interleave({R}, dim={place})",
        "expand": f"x[{', '.join([*after, 'None'])}].expand({', '.join(expanded)}){flat}",
        "index": f"x[{', '.join([*after[:-1], 'pick'])}]",
        "tile": f"x.repeat({', '.join(str(R) if at == place else '1' for at in range(4))})",
        "stack": f"torch.stack([{', '.join(['x'] * R)}], {place + 1}){flat}",
    }[c.groups]
    body.add(f"k, v = ({one} for x in (k, v))")
    body.k, body.v = body.k.replace("g", "h"), body.v.replace("g", "h")


def change_operands(body: Body) -> None:
    """The changes to q, k or v that make the case a near miss."""
    c = body.case
    if c.change == "argument_changed":
        body.add("q.mul_(0.5)")
    elif c.change == "keys_detached":
        body.add("k = k.detach()")
    elif c.change == "keys_rolled":
        body.add(f"k = k.roll(1, {body.k.index('k')})")
    elif c.change == "values_reversed":
        body.add(f"v = v.flip({body.v.index('k')})")
    elif c.change == "heads_swapped":
        body.add(f"k = k.flip({body.k.index('h')})")
    elif c.change == "every_second_key":
        for name, letters in (("k", body.k), ("v", body.v)):
            body.add(f"{name} = {name}[{', '.join([':'] * letters.index('k') + ['::2'])}]")
    elif c.change == "keys_reshaped":
        lead = ", ".join(body.size(letter) for letter in body.k[:-2])
        body.add(f"k = k.reshape({lead}, {body.size('d')}, {body.size('k')})")
        body.k = body.k[:-2] + "dk"
