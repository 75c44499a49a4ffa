"""`attngraph.testing` and the pytest plugin: guards of a model hold, break when the model's meaning changes,
and say what was expected, what was found and what to do. The examples are those of docs/testing.md."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import attngraph.pytest_plugin
from attngraph import testing

pytest_plugins = "pytester"
ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
FILES = {name: code for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)}  # noqa: C416


class Attention(nn.Module):
    """Causal attention of one head; `scale`, `odd` and `last` change its meaning."""

    def __init__(self, scale: float = 0.25, odd: bool = False, last: bool = False) -> None:
        super().__init__()
        self.scale, self.last = scale, last
        self.project = nn.Linear(16, 48)
        seen = torch.ones(32, 32).tril().bool()
        seen[0, 20] |= odd
        self.register_buffer("seen", seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unsqueeze(1).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) * self.scale
        seen = self.get_buffer("seen")[: x.shape[1], : x.shape[1]]
        out = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        return out.softmax(-1) if self.last else out


@pytest.fixture(scope="module", autouse=True)
def everything_is_loaded() -> None:
    """Runs of pytest within this process take the modules that they load away with them."""
    torch.manual_seed(0)
    checked = testing.compile(Attention().eval(), torch.randn(2, 9, 16))
    checked.assert_close_to_eager()
    checked.check("CHECK: attention(")


@pytest.fixture
def plain() -> testing.Checked:
    return testing.compile(Attention().eval(), torch.randn(2, 9, 16))


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder with the files of docs/testing.md, beside a test that fails in all runs but of named files."""
    for name, code in FILES.items():
        pytester.path.joinpath(name).write_text(code)
    pytester.syspathinsert()
    return pytester


def run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_inprocess(
        "-p", "attngraph.pytest_plugin", "-p", "no:cacheprovider", "-W", "ignore", *arguments
    )


def changed(project: pytest.Pytester, old: str, new: str) -> None:
    path = project.path / "my_model.py"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# --- the handle -----------------------------------------------------------------------------------------


def test_what_the_report_says_can_be_asserted(plain: testing.Checked) -> None:
    plain.assert_fused()
    plain.assert_fused(count=1, mask="causal", program="s=0.25*dot\n\n keep k<=q")
    plain.assert_fused(mask="causal")
    plain.assert_fused(count=0, mask="none")
    plain.assert_close_to_eager()
    assert plain.output.shape == (2, 1, 9, 16)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"count": 2}, "expected 2 fused attention(s), found 1."),
        ({"mask": "none"}, "  - mask: none\n  + mask: causal"),
        ({"program": "s = dot; keep k <= q"}, "  -s = dot\n  +s = 0.25 * dot\n   keep k <= q"),
        ({"program": ""}, "expected every fused attention with this program; 1 of 1 are different."),
        ({"count": 1, "mask": "none"}, "expected 1 fused attention(s) with mask 'none', found 0."),
    ],
)
def test_a_failure_says_what_was_expected_what_was_found_and_what_to_do(
    plain: testing.Checked, wanted: dict[str, object], message: str
) -> None:
    with pytest.raises(AssertionError) as failure:
        plain.assert_fused(**wanted)  # type: ignore[arg-type]
    text = str(failure.value)
    assert message in text
    assert "| keep k <= q" in text and "test_testing.py:" in text  # the report, with the user's line
    assert "What to do: " in text


def test_a_softmax_left_alone_fails_unless_attentions_are_counted() -> None:
    checked = testing.compile(Attention(last=True).eval(), torch.randn(2, 9, 16))
    checked.assert_fused(count=1)
    with pytest.raises(AssertionError, match=r"1 softmax-like place.*\n(.*\n)*.*assert_fused\(count=1\)"):
        checked.assert_fused()
    with pytest.raises(AssertionError, match="expected no fused attention, found 1"):
        checked.assert_not_fused()


def test_what_is_not_fused_can_be_asserted_with_its_reason() -> None:
    checked = testing.compile(lambda x: x.softmax(-1).sum(0), torch.randn(3, 4))
    checked.assert_not_fused()
    checked.assert_not_fused(reason=checked.report.missed[0].reason[5:20])
    with pytest.raises(AssertionError, match="for the reason 'talking heads'"):
        checked.assert_not_fused("talking heads")
    with pytest.raises(AssertionError, match="expected fused attention, found none"):
        checked.assert_fused()
    with pytest.raises(AssertionError, match="found none"):
        testing.compile(torch.sin, torch.randn(3)).assert_not_fused()


def test_answers_that_differ_from_eager_fail(plain: testing.Checked) -> None:
    plain._compiled = lambda x: plain.output * 1.001
    with pytest.raises(AssertionError, match=r"NOT equal to eager: largest distance"):
        plain.assert_close_to_eager()


def test_a_model_that_draws_at_random_cannot_be_compared() -> None:
    class Drawn(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, training=self.training)

    checked = testing.compile(Drawn(), torch.randn(50))
    with pytest.raises(AssertionError, match=r"answers differently(.*\n)*.*call model.eval\(\) first"):
        checked.assert_close_to_eager()


def test_functions_are_compared_too() -> None:
    q = torch.randn(2, 3, 5, 8)
    checked = testing.compile(lambda q: (q @ q.transpose(-1, -2)).softmax(-1) @ q, q)
    checked.assert_fused(count=1, mask="none")
    checked.assert_close_to_eager()


def test_checks_are_lines_of_filecheck(plain: testing.Checked) -> None:
    plain.check("CHECK: attention(\nCHECK-NEXT: s = 0.25 * dot\nCHECK-NOT: softmax")
    plain.check("CHECK: softmax", after="canonicalize")
    plain.check("CHECK: [[x:%[0-9]+]] = attention(\nCHECK: [[x]]", after="merge-heads")
    with pytest.raises(AssertionError, match=r"Couldn't match \"sotfmax\"(.*\n)*.*graph after capture:"):
        plain.check("CHECK: sotfmax", after="capture")
    with pytest.raises(AssertionError, match="excluded string found"):
        plain.check("CHECK-NOT: keep k <= q")


def test_a_line_that_is_no_check_and_a_pass_that_is_not_there_are_errors(plain: testing.Checked) -> None:
    with pytest.raises(ValueError, match="CHEK: attention"):
        plain.check("CHECK: attention\nCHEK: attention")
    with pytest.raises(ValueError, match="not a check"):
        plain.check("")
    with pytest.raises(ValueError, match=r"did you mean 'fuse-attention'\?"):
        plain.check("CHECK: attention", after="fuse_attention")


def test_a_missing_filecheck_is_said_with_how_to_get_it(
    plain: testing.Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "filecheck.matcher", None)
    with pytest.raises(ImportError, match="pip install filecheck"):
        plain.check("CHECK: attention")


def test_a_model_captured_in_pieces_has_the_dumps_of_all_pieces() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = (x @ x.transpose(-1, -2)).softmax(-1) @ x
        print("a side effect")
        return (x @ x.transpose(-1, -2) * 3).softmax(-1) @ x

    checked = testing.compile(broken, torch.randn(2, 5, 8))
    checked.assert_fused(count=2)
    checked.check("CHECK: s = dot\nCHECK: s = 3", after="fuse-attention")


# --- golden files ---------------------------------------------------------------------------------------


def test_a_golden_file_is_asked_for_compared_and_written(plain: testing.Checked, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "attention.txt"
    with pytest.raises(AssertionError, match=r"there is no golden file .*(\n.*)*--attngraph-update"):
        plain.golden(path)
    plain._update = lambda written: None
    plain.golden(path)
    plain._update = None
    plain.golden(path)
    testing.compile(Attention().eval(), torch.randn(2, 9, 16)).golden(path)
    with pytest.raises(AssertionError, match=r"-.*s = 0.25 \* dot\n.*\+.*s = 0.5 \* dot"):
        testing.compile(Attention(scale=0.5).eval(), torch.randn(2, 9, 16)).golden(path)


# --- the plugin, as the documentation has it --------------------------------------------------------------


def test_the_documented_guard_is_short_and_holds(project: pytest.Pytester) -> None:
    lines = FILES["test_my_model.py"].strip().splitlines()
    assert len(lines) < 10
    run(project, "test_my_model.py").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("window=64", "window=65", "+keep k >= q - 64 and k <= q"),
        ("/ q.shape[-1] ** 0.5", "/ q.shape[-1]", "+s = 0.015625 * dot"),
        (
            'masked_fill(~seen, float("-inf"))',
            'masked_fill(~seen, -30.0)',
            "+s = where(k > q or k <= q - 64, -30.0, 0.125 * dot)",
        ),
        ("(i > i[:, None] - self.window)", "(i != 3)", "+keep k <= q and k != 3"),
    ],
    ids=["another window", "another scale", "a fill that leaks", "one key hidden"],
)  # fmt: skip
def test_the_documented_guard_breaks_when_the_mask_or_the_scale_changes(
    project: pytest.Pytester, old: str, new: str, found: str
) -> None:
    changed(project, old, new)
    result = run(project, "test_my_model.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*found 0.*", "*my_model.py:*is different:", f"*{found}"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5", "(q / q.shape[-1] ** 0.5) @ k.mT"),
        ("(i <= i[:, None]) & (i > i[:, None] - self.window)",
         "torch.ones(len(i), len(i)).tril().triu(1 - self.window).bool()"),
    ],
    ids=["the scale moved", "the mask from triangles"],
)  # fmt: skip
def test_the_documented_guard_holds_when_the_same_is_spelled_differently(
    project: pytest.Pytester, old: str, new: str
) -> None:
    changed(project, old, new)
    run(project, "test_my_model.py").assert_outcomes(passed=1)


def test_the_message_in_the_documentation_is_the_real_one(project: pytest.Pytester) -> None:
    changed(project, "window=64", "window=65")
    (shown,) = re.findall(r"```\n(expected 1 fused.*?)```", PAGE, re.DOTALL)
    said = [line.removeprefix("E").strip() for line in run(project, "test_my_model.py").stdout.lines]
    start = next(
        n
        for n, line in enumerate(said)
        if line.endswith("expected 1 fused attention(s) with this program, found 0.")
    )
    found = ["expected 1 fused attention(s) with this program, found 0.", *said[start + 1 :]]
    wanted = [line.strip() for line in shown.splitlines()]
    assert found[: len(wanted)] == wanted


def test_causal_but_for_one_entry_is_not_causal() -> None:
    checked = testing.compile(Attention(odd=True).eval(), torch.randn(2, 9, 16))
    with pytest.raises(AssertionError, match=r"- mask: causal"):
        checked.assert_fused(count=1, mask="causal")
    checked.assert_close_to_eager()


def test_the_graphs_of_a_failing_test_are_in_its_report_and_long_ones_say_where_they_are_whole(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attngraph.pytest_plugin, "MOST_LINES", 6)
    project.makepyfile(
        test_failing="""
        import torch
        from my_model import LocalAttention

        def test_it(attn):
            attn.compile(LocalAttention().eval(), torch.randn(2, 9, 128))
            assert False

        def test_fine(attn):
            attn.compile(LocalAttention().eval(), torch.randn(2, 9, 128))
        """
    )
    short = run(project, "test_failing.py")
    short.stdout.fnmatch_lines(["*graphs after each pass*", "*graph-0", "*--attngraph-graphs prints them*"])
    assert "# 02 fuse-attention" not in str(short.stdout)
    assert "torch.__trace" not in str(short.stdout)
    result = run(project, "--attngraph-graphs", "test_failing.py")
    result.assert_outcomes(failed=1, passed=1)
    text = str(result.stdout)
    assert text.count("model 1: report") == 1
    (project.path / "test_telling.py").write_text(
        (project.path / "test_failing.py")
        .read_text()
        .replace("    assert False", "    .assert_fused(count=7)")
        .replace("))\n    .assert", ")).assert")
    )
    told = str(run(project, "test_telling.py").stdout).partition("short test summary info")[0]
    assert told.count("softmax-like places fused") == 1  # the failing assertion tells the report already
    result.stdout.fnmatch_lines(
        ["*attngraph, model 1: report*", "*1 of 1 softmax-like places fused*",
         "*attngraph, model 1: graph after fuse-attention*", "# 02 fuse-attention*",
         "... and * more lines in *"]
    )  # fmt: skip
    whole = re.search(r"more lines in (\S+fuse-attention.txt)", text)
    assert whole is not None
    assert "keep k >= q - 63" in Path(whole[1]).read_text()


def test_the_other_documented_examples_run(project: pytest.Pytester) -> None:
    missing = run(project, "test_graph.py")
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(["*there is no golden file *golden/local-attention.txt*"])
    written = run(project, "--attngraph-update", "test_graph.py")
    written.assert_outcomes(passed=1)
    written.stdout.fnmatch_lines(["attngraph wrote *golden/local-attention.txt"])
    run(project, "test_graph.py").assert_outcomes(passed=1)
    changed(project, "window=64", "window=65")
    differs = run(project, "test_graph.py")
    differs.assert_outcomes(failed=1)
    differs.stdout.fnmatch_lines(["*-*keep k >= q - 63 and k <= q", "*+*keep k >= q - 64 and k <= q"])


def test_a_port_that_differs_fails_with_the_verdict(project: pytest.Pytester) -> None:
    run(project, "test_port.py").assert_outcomes(passed=1)
    test = project.path / "test_port.py"
    test.write_text(test.read_text().replace("LocalAttention(),", "LocalAttention(window=3),", 1))
    result = run(project, "test_port.py")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*expected a candidate that computes*", "*differs: result 0*", "*from 4 tokens on*"]
    )


def test_collecting_other_tests_loads_no_torch(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_other():
            assert "attngraph.pytest_plugin" in sys.modules
            assert "torch" not in sys.modules
        """
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    result = pytester.runpytest_subprocess("-p", "attngraph.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    made = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = made["project"]["entry-points"]["pytest11"]
    assert points == {"attngraph.pytest_plugin": "attngraph.pytest_plugin"}
    assert (ROOT / "attngraph" / "pytest_plugin.py").exists()


def test_a_failing_test_without_the_fixture_shows_no_lines_of_torchs_traces(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import logging

        def test_fails():
            logging.getLogger("torch.__trace").warning("")
            logging.getLogger("mine").warning("seen")
            assert False
        """
    )
    shown = str(run(pytester).stdout)
    assert "torch.__trace:" not in shown and "mine:" in shown
