"""From a case to the text of a Python function and of the expressions that make its inputs.

The text is the only form of a graph: it is compiled as it is, so a failing test shows exactly what was run.
"""

from __future__ import annotations

import dataclasses
import linecache
import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workshop.fuzz.body import Body
from workshop.fuzz.grammar import Case
from workshop.fuzz.operands import change_operands, group_heads, read_inputs
from workshop.fuzz.scores import add_bias, hide, multiply, scale_operands, scale_scores
from workshop.fuzz.weights import attend


@dataclasses.dataclass(frozen=True)
class Source:
    """`text` is the module with the function `f`; `inputs` maps its parameters to expressions with sizes in
    braces, such as `torch.randn({B}, {H * D}, generator=g)`."""

    text: str
    inputs: Mapping[str, str]

    def function(self, name: str) -> Callable[..., Any]:
        """`f`, compiled under a file name for which tracebacks find the source lines."""
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(keepends=True), name)
        module = types.ModuleType(name.removesuffix(".py"))
        vars(module).update(torch=torch, F=F, math=math)
        exec(compile(self.text, name, "exec"), vars(module))
        function: Callable[..., Any] = module.f
        return function

    def expressions(self, sizes: Mapping[str, int]) -> dict[str, str]:
        """The inputs of one call as expressions of numbers; `g` stands for the random generator."""

        def number(found: re.Match[str]) -> str:
            return str(eval(found[1], {}, dict(sizes)))

        return {name: re.sub(r"\{([^}]*)\}", number, text) for name, text in self.inputs.items()}

    def make(self, sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
        """The inputs of one call; those of floating types in float64."""
        names = {"torch": torch, "g": torch.Generator().manual_seed(seed)}
        return tuple(eval(text, names) for text in self.expressions(sizes).values())


def spell(case: Case) -> Body:
    """The lines and inputs of the function `f` of a case."""
    body = Body(case)
    read_inputs(body)
    group_heads(body)
    change_operands(body)
    scale_operands(body)
    multiply(body)
    scale_scores(body)
    add_bias(body)
    hide(body)
    if case.scale == "after_mask":
        body.set_scores("scores * 0.3")
    results = attend(body)
    body.add(f"return {', '.join(results)}")
    return body


def render(case: Case) -> Source:
    """The function of a case and its inputs."""
    body = spell(case)
    constants = [*body.constants, "", ""] if body.constants else []
    lines = [*constants, f"def f({', '.join(body.inputs)}):", *(f"    {line}" for line in body.lines)]
    return Source("\n".join(lines) + "\n", dict(body.inputs))


def forget(name: str) -> None:
    """Drop the source lines that are kept for tracebacks under this file name."""
    linecache.cache.pop(name, None)
