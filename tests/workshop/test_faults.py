"""Faults of ports, by rule: what the rules change, and what becomes of a fault."""

import ast
import dataclasses

from workshop.faults import command
from workshop.faults.rules import RULES, faults
from workshop.faults.settings import settings
from workshop.faults.targets import ran, target
from workshop.harness import Row

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


def test_the_statement_of_a_fault_is_all_of_its_lines_but_not_its_body() -> None:
    source = "def f(x):\n    if g(\n        x, 0.5\n    ):\n        x = (\n            x + 1.5\n        )\n"
    found = {fault.before: fault.statement for fault in faults(source)}
    assert found == {"x + 1.5": (5, 7), "1.5": (5, 7)}


def row(old: str) -> Row:
    made = target("DecoderLM")
    with ran(made.modules) as lines:
        made.candidate()
        command.call(made.reference, made.inputs)
    drawn = command.drawn(made, 1, lines)
    module, fault = next((m, f) for m, f in drawn if f.before.startswith(old) and f.rule != "sign")
    return command.row_of(made, fault, 1, module)


def test_a_fault_is_noticed_and_its_line_is_named() -> None:
    found = row("x + self.mlp(")
    assert found["rule"] == "summand left out"
    assert (found["verdict"], found["names"]) == ("noticed", "line")
    assert command.counts([found]) == {"source: names line": 1, "source: noticed": 1}


def test_faults_are_drawn_where_lines_run() -> None:
    made = target("DecoderLM")
    assert command.drawn(made, 1, set()) == []
    assert made.candidate().state_dict().keys() == made.reference.state_dict().keys()


@dataclasses.dataclass(frozen=True)
class Config:
    window: int = 4
    eps: float = 0.5
    flag: bool = False
    act: str = "gelu"
    initializer_range: float = 0.02


def test_each_setting_of_a_configuration_gets_faults() -> None:
    assert [(one.name, one.value, one.first) for one in settings(Config(), 10)] == [
        ("window", 5, None), ("window", 4097, 4096), ("eps", 0.505, None), ("flag", True, None),
        ("act", "gelu_new", None),
    ]  # fmt: skip
    assert [one.rule for one in settings(Config(), 2)] == ["window one longer", "window of 4,096 one longer"]
