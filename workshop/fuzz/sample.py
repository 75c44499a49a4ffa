"""Random cases: graph number n of a seed depends on these two numbers alone."""

from __future__ import annotations

import random
from typing import Any

from workshop.fuzz.grammar import CHOICES, Case
from workshop.fuzz.repair import repaired

_SIMPLE_SHARE = {
    "tokens": 0.7, "groups": 0.65, "transpose": 0.5, "in_place": 0.75, "dot": 0.45, "scale": 0.25,
    "bias": 0.6, "softcap": 0.85, "mask": 0.25, "apply": 0.3, "fill": 0.45, "mask2": 0.75, "apply2": 0.4,
    "fill2": 0.5, "softmax": 0.4, "weights": 0.65, "values": 0.5, "output": 0.5, "change": 0.65,
    "numbers": 0.8, "grad": 0.6, "second": 0.1, "sizes": 0.2,
}  # fmt: skip
"""How often the simplest choice is taken; the others, and all of fields not listed, are equally likely.
A graph with numbers for sizes takes a third of the time, so most have numbers; all else varies as much.
Errors that need symbols (in a second call with other sizes) are looked for in the rest."""
_SHARE_OF_ONE = 0.04
"""How often a size is one, where it may be."""
_EQUAL = (("value_width", "width", 0.5), ("keys", "queries", 0.25))
"""Sizes of the first call, and how often they are equal: a trace must not assume that they always are."""


def case_of(seed: int, number: int) -> Case:
    """Graph `number` of `seed`."""
    source = random.Random(f"attngraph fuzz {seed} {number}")
    values = {name: _choose(source, name) for name in CHOICES if name != "sizes"}
    for name, other, share in _EQUAL:
        if source.random() < share:
            values[name] = values[other]
    values["sizes"] = _choose(source, "sizes")
    return repaired(Case(**values))


def _choose(source: random.Random, name: str) -> Any:
    options = CHOICES[name]
    if options[-1] == 1 and type(options[0]) is int:
        return 1 if source.random() < _SHARE_OF_ONE else source.choice(options[:-1])
    if name in _SIMPLE_SHARE and source.random() >= _SIMPLE_SHARE[name]:
        return source.choice(options[1:])
    return options[0] if name in _SIMPLE_SHARE else source.choice(options)
