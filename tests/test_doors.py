"""The doors for what is added from outside: passes at a place of an order, backends, rules of operations."""

from __future__ import annotations

import dataclasses
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attngraph
from attngraph import cli
from attngraph.ir import choices
from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.ir.ops.kernels import KERNELS, Reference, register
from attngraph.meaning.rule import RULES, Category, rule
from attngraph.models.targets import tiny_decoder_lm
from attngraph.pipeline import Outcome, placed

TINY = "attngraph.models.targets:tiny_decoder_lm"


@dataclasses.dataclass(frozen=True)
class Scale:
    """Multiplies the first result."""

    by: float = 1.0
    check: bool = False
    name: str = "scale"
    requires: Level = Level.FUSED
    yields: Level = Level.FUSED

    def run(self, graph: ProgramGraph) -> Outcome:
        out = graph.graph.output_node()
        value, *others = out.args[0]  # type: ignore[misc]
        with graph.graph.inserting_before(out):
            found = graph.graph.call_function(torch.ops.aten.mul.Tensor, (value, self.by))
        found.meta = dict(value.meta)  # type: ignore[union-attr]
        out.args = ((found, *others),)
        return Outcome()


def test_a_pass_stands_at_a_place_of_the_order_for_whole_sequences_and_of_a_decoders() -> None:
    model, (ids,) = tiny_decoder_lm(tokens=12)
    compiled = attngraph.compile(
        model, passes=lambda order: placed(order, Scale(2.0), before="select-kernels")
    )
    torch.testing.assert_close(compiled(ids), 2 * model(ids))
    cached = Scale(2.0, requires=Level.CACHED, yields=Level.CACHED)
    decoder = attngraph.compile(
        model, cache=attngraph.CacheConfig(proof=False),
        passes=lambda order: placed(order, cached, before="select-kernels"),
    )  # fmt: skip
    torch.testing.assert_close(decoder.prefill(ids)[0], 2 * model(ids))
    names = [record.name for record in decoder.report.passes]
    assert names[names.index("scale") + 1] == "select-kernels"


def test_a_place_that_an_order_does_not_have_is_named_and_a_list_is_no_order_of_a_decoder() -> None:
    model, (ids,) = tiny_decoder_lm(tokens=12)
    with pytest.raises(
        ValueError, match="no pass 'select-kernel' in this order; did you mean 'select-kernels'"
    ):
        attngraph.compile(model, passes=lambda o: placed(o, Scale(), before="select-kernel"))(ids)
    with pytest.raises(ValueError, match="Give a function that changes it"):
        attngraph.compile(model, cache=True, passes=["canonicalize"])


def test_a_pass_that_asks_for_it_is_compared_with_the_graph_before_it() -> None:
    def attend(x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x

    def compiled(by: float) -> Any:
        return attngraph.compile(
            attend, passes=lambda order: placed(order, Scale(by, check=True), before="select-kernels")
        )

    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(compiled(1.0)(x), attend(x))
    with pytest.raises(
        attngraph.PassError, match="result 0 is not what it was before the pass: its value differs"
    ):
        compiled(1.001)(x)


def test_bisect_finds_a_pass_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(Path(__file__).read_text().partition("def test_")[0])
    for by, code in ((1.0, 0), (2.0, 1)):
        arguments = ["--add", f"{tmp_path}/mine.py:Scale(by={by})@tabulate-scores", "--json"]
        assert cli.main(["bisect", TINY, "--tokens", "12", *arguments]) == code
        assert f'"culprit": "{"scale" if code else ""}"' in capsys.readouterr().out


class Mine(Reference):
    name = "mine.attention"


@pytest.fixture
def kernels() -> Any:
    before = dict(KERNELS)
    yield
    KERNELS.clear()
    KERNELS.update(before)


@pytest.mark.usefixtures("kernels")
def test_a_backend_that_was_registered_is_asked_for_by_its_name() -> None:
    x = torch.randn(2, 5, 4)
    with pytest.raises(
        ValueError, match="backend must be one of auto, cpu, triton, gluon, gluon_unordered, reference"
    ):
        attngraph.compile(torch.relu, backend="mine")
    register(Mine(), devices=frozenset({"nowhere"}))
    compiled = attngraph.compile(lambda x: torch.softmax(x @ x.mT, -1) @ x, backend="mine")
    compiled(x)
    assert compiled.report.attention[0].kernel.name == "mine.attention"


@pytest.mark.usefixtures("kernels")
def test_a_backend_of_another_package_is_imported_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(self: EntryPoint) -> types.ModuleType:
        register(Mine(), devices=frozenset({"nowhere"}))
        return types.ModuleType(self.value)

    found = EntryPoint("mine", "package_of_a_test", "attngraph.backends")
    monkeypatch.setattr(choices, "entry_points", lambda group: [found] if group == found.group else [])
    monkeypatch.setattr(EntryPoint, "load", load)
    assert list(choices.backends()) == [*choices.BACKENDS, "mine"]
    compiled = attngraph.compile(lambda x: torch.softmax(x @ x.mT, -1) @ x, backend="mine")
    compiled(torch.randn(2, 5, 4))
    assert compiled.report.attention[0].kernel.name == "mine.attention"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softshrnk.default", "torch has no operation aten.softshrnk; did you mean 'softshrink'"),
        ("softshrink.defualt", "aten.softshrink has no overload 'defualt'; did you mean 'default'"),
    ],
)
def test_a_rule_for_an_operation_that_torch_does_not_have_is_refused(name: str, message: str) -> None:
    before = dict(RULES)
    with pytest.raises(ValueError, match=message):
        rule(Category.POINTWISE, name)(lambda context, node, at: None)
    assert before == RULES
