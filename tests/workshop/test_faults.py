"""Faults of ports, by rule: what the rules change, and what becomes of a fault."""

import ast

import pytest

from workshop.faults import command
from workshop.faults.rules import RULES, faults

SOURCE = """
def attend(q, k, bias: int = 1 + 1):
    if q < k:
        raise ValueError(-q)
    seen = (q <= k) & ~bias
    s = (q @ k.transpose(-1, -2) * 8.0 ** -0.5 + bias).masked_fill(seen, -1e9)
    return -norm.norm(s.softmax(dim=-1).tanh()) if q > 0 else nn.Linear(3, 4)
"""


def test_each_rule_changes_one_expression_of_a_line() -> None:
    found = list(faults(SOURCE))
    assert {fault.rule for fault in found} == RULES.keys()
    for fault in found:
        before, after = SOURCE.splitlines(), fault.text.splitlines()
        differ = [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
        assert differ == [fault.line] and fault.line > 4 and fault.function == (2, 7)
        assert ast.dump(ast.parse(fault.text)) != ast.dump(ast.parse(SOURCE))
    said = {(fault.rule, fault.after) for fault in found}
    assert ("comparison off by one", "q < k") in said and ("mask not turned", "bias") in said
    assert ("power", "8.0 ** (-0.5 * 2)") in said and ("another axis", "s.softmax(dim=-2)") in said


def row(old: str) -> command.Row:
    faults = command.drawn("DecoderLM", 1, 1000)
    module, fault = next((m, f) for m, f in faults if f.before.startswith(old) and f.rule != "sign")
    return command.row_of("DecoderLM", module, fault, budget=1)


def test_a_fault_is_noticed_and_its_line_is_named() -> None:
    found = row("x + self.mlp(")
    assert found["rule"] == "summand left out"
    assert (found["verdict"], found["names"]) == ("noticed", "line")


@pytest.mark.parametrize("old, verdict", [("key.transpose", "not run")])
def test_what_is_no_fault_of_the_call_is_told_apart(old: str, verdict: str) -> None:
    assert row(old)["verdict"] == verdict
    assert command.build("DecoderLM")[0].__class__.__name__ == "DecoderLM"
