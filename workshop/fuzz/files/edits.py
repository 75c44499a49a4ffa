"""Random edits of what a file holds: texts of graphs, JSON values, bytes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import attngraph.api  # registers our ops
from attngraph.ir.operations import _ATEN, READABLE

NUMBERS = (
    0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 65, 100, 1000, 4096, 10**6, 10**9, 1 << 31, (1 << 31) - 1, 1 << 32,
    1 << 62, (1 << 63) - 1, 1 << 63, 10**30, -1, -2, -64, -(1 << 31), -(1 << 63),
)  # fmt: skip
CANARY = "@CANARY@"
"""Stands for the path of a file that nothing may write, and of a library that nothing may load."""
LINES = (
    f"load_library.__self__.load_library('{CANARY}.so')", f"from_file('{CANARY}', True, 16)",
    f"aten.from_file.default('{CANARY}', True, 16)", "empty([16])", "zeros([1000000])", "arange(100)",
    "as_strided(%0, [1000], [1], 0)", "index_select(%0, 0, %0)", "full([4], 1.0)", "resize(%0, [1000000])",
    "set(%0, %0)", "embedding(%0, %0)", "gather(%0, 0, %0)", "narrow(%0, 0, 0, 1000000)",
    "expand(%0, [9, 9, 9])",
)  # fmt: skip
_NUMBER = re.compile(r"(?<![\w.])-?\d+")
_WORD = re.compile(r"[%$][\w.']+|\b[a-z_]{3,}\b")
_TYPE = re.compile(r"\b(f32|f64|f16|bf16|i64|i32|i8|u8|bool)\b")
assert attngraph.api
_OPS = sorted(_ATEN | {name for name, runs in READABLE.items() if runs})


def text(rng: random.Random, given: str) -> str:
    """One to three edits of lines, numbers and names."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        given = rng.choice(
            (_number, _number, _number, _name, _name, _line, _line, _operation, _type, _letter)
        )(rng, given)
    return given


def _swapped(
    rng: random.Random, given: str, pattern: re.Pattern[str], new: Callable[[str, list[str]], str]
) -> str:
    found = list(pattern.finditer(given))
    if not found:
        return given
    one = rng.choice(found)
    return given[: one.start()] + new(one[0], [m[0] for m in found]) + given[one.end() :]


def _number(rng: random.Random, given: str) -> str:
    return _swapped(
        rng, given, _NUMBER, lambda old, all_: str(number(rng, int(old), [int(n) for n in all_[:99]]))
    )


def number(rng: random.Random, old: int, others: list[int]) -> int:
    """A number in place of another: near it, one that is elsewhere, or one that is often too large."""
    return rng.choice((old + 1, old - 1, old * 2, -old, rng.choice([*others, 0]), rng.choice(NUMBERS)))


def _name(rng: random.Random, given: str) -> str:
    return _swapped(rng, given, _WORD, lambda _, all_: rng.choice(all_))


def _operation(rng: random.Random, given: str) -> str:
    return _swapped(
        rng,
        given,
        re.compile(r"(?<== )[\w.]+(?=\()"),
        lambda _, all_: rng.choice((rng.choice(_OPS), rng.choice(all_))),
    )


def _type(rng: random.Random, given: str) -> str:
    return _swapped(
        rng, given, _TYPE, lambda _, all_: rng.choice((rng.choice(all_), "f64", "i64", "bool", "c64"))
    )


def _letter(rng: random.Random, given: str) -> str:
    place = rng.randrange(len(given) + 1)
    return (
        given[:place] + chr(rng.choice((*range(32, 127), 10, 0, 0x202E))) + given[place + rng.randrange(2) :]
    )


def _line(rng: random.Random, given: str) -> str:
    lines = given.split("\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            del lines[place]
        case 1:
            lines.insert(other, lines[place])
        case 2:
            lines[place], lines[other] = lines[other], lines[place]
        case 3:
            lines.insert(
                place, f"  %{rng.choice((999, place))} = {rng.choice(LINES)} : f32[{rng.choice((4, 16))}]"
            )
        case 4:
            lines = lines[:place]
    return "\n".join(lines)


def tree(rng: random.Random, given: Any) -> Any:
    """One or two edits of the values of JSON, in place where that is possible."""
    for _ in range(rng.choice((1, 1, 2))):
        places = list(_places(given))
        if not places:
            return rng.choice((None, {}, [], 0))
        holder, key = rng.choice(places)
        old = holder[key]
        match rng.randrange(6):
            case 0 | 1 | 2 if isinstance(old, (int, float)) and not isinstance(old, bool):
                holder[key] = number(rng, int(old), list(NUMBERS))
            case 0 | 1 | 2 if isinstance(old, str) and old:
                holder[key] = text(rng, old)
            case 3:
                del holder[key]
            case 4:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[name])) if _is_json(other[name]) else other[name]
            case _:
                holder[key] = rng.choice((None, True, -1, 10**12, 0.5, "", "x", [], {}, [[]], "a" * 1000))
    return given


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _places(value: Any) -> Any:
    """Every value inside of lists and mappings, as its holder and its place there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def raw(rng: random.Random, given: bytes) -> bytes:
    """Bits flipped, bytes cut out, doubled or cut off."""
    data = bytearray(given)
    for _ in range(rng.choice((1, 1, 4, 32))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 | 1 | 2 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 3:
                del data[place : place + rng.choice((1, 8, 100))]
            case 4:
                data[place:place] = data[place : place + rng.choice((1, 8, 100))]
            case 5 if rng.random() < 0.2:
                del data[place:]
    return bytes(data)


def any_file(rng: random.Random, name: str, given: bytes) -> bytes:
    """An edit of a file by what it holds."""
    if rng.random() < 0.05 or name.endswith(".safetensors"):
        return raw(rng, given)
    if name.endswith(".json"):
        return json.dumps(tree(rng, json.loads(given))).encode()
    return text(rng, given.decode()).encode("utf-8", "replace")
