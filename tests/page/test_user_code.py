"""The user's code in reports: which lines are kept, how they were reached; dumps and pages have it."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.capture.trace import capture
from attngraph.report import page
from attngraph.report.dump import read_dump
from attngraph.report.page.html import html
from attngraph.report.report import CompileReport
from attngraph.report.user_code import UserCode, user_code


def weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v  # the softmax's line


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(
        self,
        x: Tensor,
    ) -> Tensor:
        return weighted(self.q(x), x, x)  # the layer's line


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)  # the model's line
        return x


def line(comment: str) -> str:
    """The name of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    (number,) = (n for n, text in enumerate(lines) if text.endswith(f"# {comment}"))
    return f"{Path(__file__).name}:{number + 1}"


@pytest.fixture(scope="module")
def code() -> UserCode:
    return user_code(capture(Two().eval(), (torch.randn(2, 5, 8),), {}).graph)


def test_a_line_knows_the_lines_that_led_to_it(code: UserCode) -> None:
    (how,) = (r for r in code.reached if r.source.endswith(line("the softmax's line")))
    assert how.module == "layers.#"
    expected = [line(c) for c in ("the model's line", "the layer's line", "the softmax's line")]
    assert [Path(f).name for f in how.frames] == expected
    assert how is code.how(how.source, "layers.1")


def test_whole_functions_are_kept_and_nothing_else(code: UserCode) -> None:
    assert {s.text for s in code.stretches} == {
        inspect.getsource(weighted).rstrip("\n"),
        inspect.getsource(Layer.forward).rstrip("\n"),
        inspect.getsource(Two.forward).rstrip("\n"),
    }


def test_the_models_own_line_stands_above_that_of_a_library() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16,
    )).eval()  # fmt: skip
    graph = capture(model, (torch.zeros(1, 5, dtype=torch.long),), {"use_cache": False}).graph
    found = user_code(graph)
    (how,) = (r for r in found.reached if "scaled_dot_product_attention(" in text(found, r.source))
    assert "attention_interface(" in text(found, how.frames[how.own]) and how.frames[-1] == how.source
    assert not any("*args, **kwargs" in text(found, frame) for frame in how.frames)
    (turned,) = (r for r in found.reached if "emb.cos" in text(found, r.source))
    assert turned.own == len(turned.frames) - 1


def text(code: UserCode, frame: str) -> str:
    found = code.line(frame)
    assert found is not None
    return found[0].text.split("\n")[found[1]]


def test_a_file_that_is_gone_leaves_the_names_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "gone.py"
    file.write_text("def attend(x):\n    return (x @ x.mT).softmax(-1) @ x\n")
    names: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    file.unlink()
    graph = capture(names["attend"], (torch.randn(2, 5, 8),), {}).graph  # type: ignore[arg-type]
    found = user_code(graph)
    assert not found.stretches and found.reached[0].frames[0].endswith("gone.py:2")


def test_a_dump_and_a_page_have_the_code(tmp_path: Path) -> None:
    compiled = attngraph.compile(Two().eval(), dump=tmp_path, min_scores=0)
    with torch.no_grad():
        compiled(torch.randn(2, 5, 8))
    report = compiled.report
    assert "the softmax's line" not in report.to_json()
    (again,) = read_dump(tmp_path)
    assert again.code == report.code
    shown = page.render(again)
    assert html("return torch.softmax(q @ k.mT, -1) @ v  # the softmax's line") in shown
    assert 'data-panel="attention-0"' in shown and 'href="#g0-chart-0-box-' in shown


def test_a_dump_of_an_earlier_version_has_a_page(tmp_path: Path) -> None:
    compiled = attngraph.compile(Two().eval(), dump=tmp_path, min_scores=0)
    with torch.no_grad():
        compiled(torch.randn(2, 5, 8))
    (tmp_path / "graph-0" / "code.json").unlink()
    (again,) = read_dump(tmp_path)
    assert again.code == UserCode() and 'data-at="' not in page.render(again)


def test_a_decoder_shows_its_token_programs_with_their_kernels(
    tmp_path: Path, decoder: CompileReport
) -> None:
    assert decoder.programs and all(
        p.kernel.name == "cpu.tokens" for p in decoder.programs if p.kernel.source
    )
    shown = page.render(decoder)
    for number, entry in enumerate(decoder.programs):
        assert html(entry.program) in shown
        assert f'data-panel="program-{number}"' in shown
    assert "source" not in decoder.to_json().partition('"programs"')[2].partition("]")[0]
    assert type(decoder).from_json(decoder.to_json()).programs[0].program == decoder.programs[0].program
