"""Exported files: run where attngraph is not installed, and in onnxruntime; equal answers, or an error."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.cli import main
from attngraph.exporter import lower
from attngraph.exporter import onnx as onnx_file
from attngraph.exporter.export import FORMATS

HEADS, WIDTH = 4, 8


class Block(nn.Module):
    """Attention as a textbook writes it; `way` is the mask."""

    def __init__(self, way: str = "causal") -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.slopes = nn.Parameter(torch.randn(HEADS))
        self.way = way

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, WIDTH).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        s = q @ k.mT / WIDTH**0.5
        i = torch.arange(t)
        if self.way == "softcap":
            s = 5 * torch.tanh(s / 5)
        if self.way == "alibi":
            s = s + self.slopes[:, None, None] * (i - i[:, None])
        if self.way == "sinks":
            s = torch.cat([s, self.slopes.view(1, HEADS, 1, 1).expand(b, -1, t, 1)], -1)
        if self.way == "window":
            s = s.masked_fill((i > i[:, None]) | (i <= i[:, None] - 3), float("-inf"))
        elif self.way == "finite":
            assert seen is not None
            s = s.masked_fill(~seen[:, None, None], torch.finfo(s.dtype).min)
        elif self.way == "squared":
            s = (s * s).masked_fill(i > i[:, None], float("-inf"))
        elif self.way not in ("none", "sinks"):
            s = s.masked_fill(i > i[:, None], float("-inf"))
        p = s.softmax(-1)[..., :t]
        return self.out((p @ v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A small language model of two blocks."""

    def __init__(self, way: str = "causal") -> None:
        super().__init__()
        self.embed = nn.Embedding(30, HEADS * WIDTH)
        self.place = nn.Embedding(64, HEADS * WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.head = nn.Linear(HEADS * WIDTH, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def example(way: str) -> tuple[Any, ...]:
    x = torch.randn(2, 6, HEADS * WIDTH)
    seen = torch.ones(2, 6, dtype=torch.bool)
    seen[0, :2] = False
    seen[1] = False  # nothing is seen: the mean of all keys
    return (x, seen) if way == "finite" else (x,)


WAYS = {
    "none": "", "causal": "causal", "window": "with a mask", "alibi": "with a mask", "finite": "with a mask",
    "sinks": "one more key", "softcap": "causal", "squared": "",
}  # fmt: skip


@pytest.fixture(params=["pt2", "onnx"])
def format(request: pytest.FixtureRequest) -> str:
    if request.param == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is not installed")
    return str(request.param)


def without_attngraph(code: str, folder: Path) -> str:
    """What code prints in a process that cannot import attngraph."""
    head = """
        import sys
        class Never:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("attngraph", "transformers"):
                    raise ImportError(name)
        sys.meta_path.insert(0, Never())
        import torch
        torch.set_num_threads(1)
    """
    text = textwrap.dedent(head) + textwrap.dedent(code)
    found = subprocess.run(
        [sys.executable, "-I", "-c", text], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.mark.parametrize("way", WAYS)
def test_a_module_as_pt2(way: str, tmp_path: Path) -> None:
    report = attngraph.export(attngraph.compile(Block(way).eval()), tmp_path / "block.pt2", example(way))
    plain = way in ("softcap", "squared")
    assert [a.how for a in report.attentions] == [
        "plain operations" if plain else "scaled_dot_product_attention"
    ]
    assert report.checked.startswith("equal to eager") and "other sizes" in report.checked


@pytest.mark.parametrize("format", ["onnx"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_module_as_onnx(way: str, format: str, tmp_path: Path) -> None:
    import onnx

    file = tmp_path / f"block.{format}"
    report = attngraph.export(attngraph.compile(Block(way).eval()), file, example(way))
    kinds = [n.op_type for n in onnx.load(file).graph.node]
    expected = 0 if way == "squared" else 1
    assert kinds.count("Attention") == report.count("Attention operation") == expected
    assert kinds.count("Softmax") == 1 - expected and WAYS[way] in report.attentions[0].words
    assert report.checked.startswith("equal to eager")


@pytest.mark.slow
def test_a_pt2_file_runs_where_attngraph_is_not(tmp_path: Path) -> None:
    model = Block("window").eval()
    attngraph.export(attngraph.compile(model), tmp_path / "block.pt2", example("window"))
    x = torch.randn(3, 11, HEADS * WIDTH)
    torch.save({"x": x, "y": model(x).detach()}, tmp_path / "call.pt")
    told = without_attngraph(
        """
        call = torch.load("call.pt")
        found = torch.export.load("block.pt2").module()(call["x"])
        torch.testing.assert_close(found, call["y"])
        print(any("attngraph" in name for name in sys.modules), tuple(found.shape))
        """,
        tmp_path,
    )
    assert told.strip() == "False (3, 11, 32)"


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("way", ["causal", "window", "alibi", "softcap"])
def test_a_decoder_with_its_cache(way: str, padding: bool, format: str, tmp_path: Path) -> None:
    decoder = attngraph.compile(Decoder(way).eval(), cache=True)
    ids = torch.randint(0, 30, (2, 9))
    report = attngraph.export(decoder, tmp_path / f"decoder.{format}", (ids,), padding=padding)
    names = [f"key_values.{n}.{part}" for n in range(2) for part in ("key", "value")]
    assert report.inputs == ("ids", *(["lengths"] if padding else []), *(f"past_{n}" for n in names))
    assert report.outputs == ("logits", *(f"present_{n}" for n in names))
    assert "prompts and then single tokens, equal to eager" in report.checked
    if format == "onnx":
        import onnx

        graph = onnx.load(tmp_path / "decoder.onnx").graph
        sizes = [[d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input]
        lengths = [["batch"]] if padding else []
        assert sizes == [["batch", "tokens"], *lengths, *[["batch", HEADS, "past", WIDTH]] * 4]
        made = [n for n in graph.node if n.op_type == "Attention"]
        assert len(made) == report.count("Attention operation") == 2
        assert all(n.input[4] and n.input[5] for n in made), "the past is an input of the operation"
        own = way in ("causal", "softcap") and not padding
        assert [bool(n.input[3]) for n in made] == [not own] * 2


@pytest.mark.slow
def test_a_decoder_generates_where_attngraph_is_not(tmp_path: Path) -> None:
    model = Decoder().eval()
    decoder = attngraph.compile(model, cache=True)
    ids = torch.randint(0, 30, (2, 5))
    attngraph.export(decoder, tmp_path / "decoder.pt2", (ids,))
    torch.save({"ids": ids, "wanted": decoder.generate(ids, 6)}, tmp_path / "call.pt")
    told = without_attngraph(
        """
        call = torch.load("call.pt")
        run = torch.export.load("decoder.pt2").module()
        ids, rows = call["ids"], call["ids"].shape[0]
        past = [torch.zeros(rows, 4, 0, 8) for _ in range(4)]
        tokens = ids
        for _ in range(6):
            total = ids.shape[1]
            logits, past = run(tokens, torch.full((rows,), total), past)
            tokens = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, tokens], 1)
        print(torch.equal(ids, call["wanted"]))
        """,
        tmp_path,
    )
    assert told.strip() == "True"


def test_a_wrong_file_is_not_kept_and_what_cannot_be_exported_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = attngraph.compile(Block().eval())
    with pytest.raises(ValueError, match="format must be one of pt2, onnx, found 'txt'"):
        attngraph.export(compiled, tmp_path / "a.txt", example(""))
    with pytest.raises(attngraph.ExportError, match="needs an example call"):
        attngraph.export(compiled, tmp_path / "a.pt2")
    with pytest.raises(TypeError, match=r"what attngraph\.compile returns, found Block"):
        attngraph.export(Block(), tmp_path / "a.pt2", example(""))
    with monkeypatch.context() as patch:
        patch.setattr(onnx_file.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(attngraph.ExportError, match="pip install onnx onnxscript"):
            attngraph.export(compiled, tmp_path / "a.onnx", example(""))
    right = lower.F.scaled_dot_product_attention
    wrong = lambda *args, **options: right(*args, **options) * 1.001  # noqa: E731
    monkeypatch.setattr(lower.F, "scaled_dot_product_attention", wrong)
    with pytest.raises(attngraph.ExportError, match="NOT equal to eager"):
        attngraph.export(compiled, tmp_path / "block.pt2", example(""))
    assert not list(tmp_path.iterdir())
    report = attngraph.export(compiled, tmp_path / "block.pt2", example(""), fallback="eager")
    assert report.count("plain operations") == 1
    assert "scaled_dot_product" not in str(torch.export.load(tmp_path / "block.pt2").graph)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.seen


def test_a_model_that_writes_to_a_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(attngraph.ExportError, match=r"writes to a buffer \(model.seen\)"):
        attngraph.export(attngraph.compile(Counter()), tmp_path / "a.pt2", (torch.randn(2, 3),))


@pytest.mark.slow
def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lm.pt2"
    target = ["export", "attngraph.models.targets:tiny_decoder_lm", "--tokens", "12"]
    assert main([*target, "-o", str(file), "--decoder"]) == 0
    told = capsys.readouterr().out
    assert f"{file}: 2 attention(s): 2 as scaled_dot_product_attention" in told
    assert "checked: prompts and then single tokens, equal to eager" in told and file.exists()
    assert main([*target, "-o", str(tmp_path / "lm.txt")]) == 2
    assert "format must be one of pt2, onnx" in capsys.readouterr().err


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.drop = Block(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.block(x))


@pytest.mark.slow
def test_a_model_in_training_mode_is_told_to_be_switched(tmp_path: Path) -> None:
    model = Dropping()
    with pytest.raises(attngraph.ExportError, match=r"(?s)random numbers.*call model\.eval\(\) first\.$"):
        attngraph.export(attngraph.compile(model), tmp_path / "a.pt2", example(""))
    attngraph.export(attngraph.compile(model.eval()), tmp_path / "a.pt2", example(""))
    model = Block().train()  # nothing in it is random
    attngraph.export(attngraph.compile(model), tmp_path / "a.pt2", example(""))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * 2 if x.shape[1] > 4 else self.block(x)


def test_a_file_refuses_sizes_for_which_the_model_takes_another_branch(format: str, tmp_path: Path) -> None:
    model, file = Branches().eval(), tmp_path / f"a.{format}"
    report = attngraph.export(attngraph.compile(model), file, (torch.randn(2, 8, 32),))
    assert "only for sizes with x.shape[1] > 4" in report.remarks
    run = FORMATS[format].reader(file, report.outputs)
    x = torch.randn(3, 5, 32)
    torch.testing.assert_close(run([x])[0], model(x).detach())
    with pytest.raises(
        (attngraph.ExportError, RuntimeError), match=r"this file is for sizes|out of|invalid index"
    ):
        run([torch.randn(3, 4, 32)])


def test_a_decoder_refuses_more_tokens_than_its_table_of_positions(format: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{format}"
    decoder = attngraph.compile(Decoder().eval(), cache=True)
    report = attngraph.export(decoder, file, (torch.randint(0, 30, (2, 9)),), padding=False)
    assert report.remarks == ("only for sizes with tokens in a row <= 64",)
    run = FORMATS[format].reader(file, report.outputs)
    _, *past = run([torch.zeros(2, 63, dtype=torch.int64), *report.empty_cache(2)])
    logits, *full = run([torch.zeros(2, 1, dtype=torch.int64), *past])
    assert logits.shape == (2, 1, 30)
    with pytest.raises((attngraph.ExportError, RuntimeError), match=r"tokens in a row <= 64|invalid index"):
        run([torch.zeros(2, 1, dtype=torch.int64), *full])


class HeadsOfTokens(nn.Module):
    """Each token attends to nine values of its own: the tokens are heads (as in ConvBERT)."""

    def forward(self, q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        s = torch.einsum("btd,btnd->btn", q, k) + bias
        return torch.einsum("btn,btnd->btd", s.softmax(-1), k[..., :4])


def test_heads_whose_number_varies(format: str, tmp_path: Path) -> None:
    call = (torch.randn(2, 6, 8), torch.randn(2, 6, 9, 8), torch.randn(9))
    report = attngraph.export(attngraph.compile(HeadsOfTokens()), tmp_path / f"a.{format}", call)
    expected = "plain operations" if format == "onnx" else "scaled_dot_product_attention"
    assert [a.how for a in report.attentions] == [expected]
    assert report.checked.startswith("equal to eager")


def test_a_file_has_what_the_model_computes_for_files(tmp_path: Path) -> None:
    class Rounds(Block):
        def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
            found = super().forward(x, seen)
            return found.neg().neg() if torch.compiler.is_exporting() else found.frac() + found.trunc()

    x = torch.randn(2, 5, HEADS * WIDTH)
    compiled = attngraph.compile(Rounds(), min_scores=0)
    compiled(x)
    attngraph.export(compiled, tmp_path / "model.pt2", (x,))
    program = torch.export.load(tmp_path / "model.pt2")
    targets = {str(node.target) for node in program.graph.nodes}
    assert "aten.neg.default" in targets and "aten.frac.default" not in targets
