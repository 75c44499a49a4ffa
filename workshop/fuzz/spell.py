"""The body of a case's function, step by step: inputs, dot, scale, bias, masks, softmax, values, output."""

from __future__ import annotations

from workshop.fuzz.body import Body
from workshop.fuzz.grammar import Case
from workshop.fuzz.operands import change_operands, group_heads, read_inputs
from workshop.fuzz.scores import add_bias, hide, multiply, scale_operands, scale_scores
from workshop.fuzz.weights import attend


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
