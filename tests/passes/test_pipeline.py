"""Running passes: their order is checked, and the verifier catches a graph that breaks its level's rules."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import attngraph
from attngraph import cli, pipeline
from attngraph.cli.target import passes_named
from attngraph.errors import PassError, VerificationError
from attngraph.ir.graph.program_graph import Level, ProgramGraph
from attngraph.ir.graph.verify import verify
from attngraph.passes import DEFAULT_PIPELINE, PASSES, order, pass_named
from attngraph.passes.absorb_mla.absorb import AbsorbMLA
from attngraph.passes.canonicalize import Canonicalize
from attngraph.passes.fuse_attention import FuseAttention
from attngraph.passes.select_kernels import SelectKernels
from attngraph.pipeline import Outcome
from attngraph.report.dump import Dump, read_graph_file

aten = torch.ops.aten


def test_the_default_pipeline_reads_in_order_and_ends_lowered(captured: ProgramGraph) -> None:
    assert [p.name for p in DEFAULT_PIPELINE] == [
        "canonicalize", "fuse-attention", "merge-heads", "absorb-mla", "reassociate-linear",
        "tabulate-scores", "skip-padding", "fuse-token-wise", "select-kernels",
    ]  # fmt: skip
    for before, after in itertools.pairwise(DEFAULT_PIPELINE):
        assert before.yields == after.requires
    result = pipeline.run(captured, DEFAULT_PIPELINE)
    assert captured.level is Level.LOWERED
    assert [r.name for r in result.records] == [p.name for p in DEFAULT_PIPELINE]
    assert len(captured.attentions()) == 1


@pytest.mark.parametrize(
    ("passes", "needs", "has"),
    [
        ((FuseAttention(),), "canonical", "captured"),
        ((SelectKernels(),), "fused", "captured"),
        ((Canonicalize(), SelectKernels()), "fused", "canonical"),
        ((Canonicalize(), Canonicalize()), "captured", "canonical"),
    ],
    ids=str,
)
def test_passes_in_the_wrong_order_are_named(
    passes: tuple[pipeline.Pass, ...], needs: str, has: str, captured: ProgramGraph
) -> None:
    with pytest.raises(ValueError, match=f"{passes[-1].name} needs a graph at level {needs}.*{has}"):
        pipeline.run(captured, passes)


def test_progress_is_told_each_pass_as_it_starts(captured: ProgramGraph) -> None:
    told: list[str] = []
    pipeline.run(captured, DEFAULT_PIPELINE, progress=told.append)
    assert told == [p.name for p in DEFAULT_PIPELINE]


def test_a_graph_runs_after_every_pass(make_model: Callable[[], nn.Module]) -> None:
    from attngraph.capture.trace import capture

    model, x = make_model(), torch.randn(2, 7, 32)
    with torch.no_grad():
        found = capture(model, (x,), {})
        graph = found.graph
        stores = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        inputs = [
            x
            if i.kind == "argument"
            else graph.constants[i.name]
            if i.kind == "constant"
            else stores[i.label]
            for i in graph.inputs
        ]
        expected = model(x)
        for step in ((), *((p,) for p in DEFAULT_PIPELINE)):
            pipeline.run(graph, step)
            assert torch.allclose(graph.module(*inputs)[0], expected, atol=1e-6)


def test_ones_own_passes_run_instead(make_model: Callable[[], nn.Module]) -> None:
    model, x = make_model(), torch.randn(2, 7, 32)
    ran: list[str] = []

    @dataclasses.dataclass(frozen=True)
    class Watch:
        name: str = "watch"
        requires: Level = Level.CANONICAL
        yields: Level = Level.CANONICAL

        def run(self, graph: ProgramGraph) -> Outcome:
            ran.append(graph.level.name)
            return Outcome(["watched"])

    compiled = attngraph.compile(model, passes=(Canonicalize(), Watch(), *DEFAULT_PIPELINE[1:]))
    assert torch.allclose(compiled(x), model(x), atol=1e-6)
    assert ran == ["CANONICAL"]
    watch = compiled.report.passes[1]
    assert (watch.name, watch.changed, watch.notes) == ("watch", False, ("watched",))


# --- the verifier ------------------------------------------------------------------------------------


def node_of(graph: ProgramGraph, target: str) -> torch.fx.Node:
    return next(n for n in graph.graph.nodes if target in str(n.target))


def test_a_captured_graph_verifies(captured: ProgramGraph) -> None:
    verify(captured)


def test_a_wrong_shape_is_caught(captured: ProgramGraph) -> None:
    node = node_of(captured, "softmax")
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(2, 3)
    node.meta.pop("inferred", None)
    with pytest.raises(VerificationError, match=f"{node.name}: recorded as"):
        verify(captured)


def test_a_wrong_symbolic_size_is_caught(captured: ProgramGraph) -> None:
    node = node_of(captured, "softmax")
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = value.new_empty((*value.shape[:-1], value.shape[-1] + 1))
    node.meta.pop("inferred", None)
    with pytest.raises(VerificationError, match=r"recorded as|cannot be applied"):
        verify(captured)


def test_a_wrong_dtype_is_caught(captured: ProgramGraph) -> None:
    node = node_of(captured, "softmax")
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = torch.empty(value.shape, dtype=torch.float64)
    node.meta.pop("inferred", None)
    with pytest.raises(VerificationError, match=f"{node.name}: recorded as torch.float64"):
        verify(captured)


def test_a_pass_that_changes_an_op_and_not_its_type_is_caught(captured: ProgramGraph) -> None:
    @dataclasses.dataclass(frozen=True)
    class Break:
        name: str = "break"
        requires: Level = Level.CANONICAL
        yields: Level = Level.CANONICAL

        def run(self, graph: ProgramGraph) -> Outcome:
            node = node_of(graph, "softmax")
            node.target, node.args = aten.sum.dim_IntList, (node.args[0], [-1], False)
            node.kwargs = {}
            return Outcome()

    with pytest.raises(PassError, match="pass break failed: VerificationError") as caught:
        pipeline.run(captured, (Canonicalize(), Break()))
    assert isinstance(caught.value.__cause__, VerificationError)


@dataclasses.dataclass(frozen=True)
class Fails:
    """A pass that has changed the graph already when it fails."""

    how: str = "loudly"
    name: str = "fails"
    requires: Level = Level.CANONICAL
    yields: Level = Level.CANONICAL

    def run(self, graph: ProgramGraph) -> Outcome:
        node_of(graph, "softmax").replace_all_uses_with(node_of(graph, "matmul"))
        raise KeyError(self.how)


@pytest.mark.parametrize("with_dump", [False, True])
def test_a_pass_that_fails_leaves_the_graph_before_it_in_a_file_and_a_command_that_runs_it_again(
    with_dump: bool, captured: ProgramGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dump = Dump(tmp_path / "dump") if with_dump else None
    with pytest.raises(PassError, match="pass fails failed: KeyError: 'loudly'") as caught:
        pipeline.run(captured, (Canonicalize(), Fails()), dump)
    file = Path(caught.value.file)
    assert caught.value.name == "fails"
    command = shlex.split(str(caught.value).splitlines()[-1])
    assert command[:4] == ["attngraph", "opt", str(file), "-p"]
    assert command[4].endswith(f":{Fails.__name__}(how='loudly')")
    assert (file.parent.name == "graph-0") == with_dump
    before = read_graph_file(file)
    assert before.level is Level.CANONICAL
    pipeline.run(before, DEFAULT_PIPELINE[1:])
    assert len(before.attentions()) == 1


def test_the_command_of_a_pass_of_ones_own_runs_it_from_its_file(
    captured: ProgramGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "import dataclasses\n"
        "from attngraph.ir.graph.program_graph import Level\n"
        "import beside\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Mine:\n"
        "    how: str = 'softly'\n"
        "    name: str = 'mine'\n"
        "    requires: Level = Level.CANONICAL\n"
        "    yields: Level = Level.CANONICAL\n"
        "    def run(self, graph): raise KeyError(self.how)\n"
    )
    (tmp_path / "beside.py").write_text("")
    own = passes_named(f"{tmp_path}/mine.py:Mine(how='loudly')", "-p")
    with pytest.raises(PassError, match="pass mine failed: KeyError: 'loudly'") as caught:
        pipeline.run(captured, (Canonicalize(), *own))
    assert cli.main(shlex.split(str(caught.value).splitlines()[-1])[1:]) == 1
    assert "pass mine failed: KeyError: 'loudly'" in capsys.readouterr().err


def test_a_pass_that_no_command_can_name_is_run_again_by_lines_of_python(
    captured: ProgramGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @dataclasses.dataclass(frozen=True)
    class Local(Fails):
        pass

    with pytest.raises(PassError) as caught:
        pipeline.run(captured, (Canonicalize(), Local()))
    lines = textwrap.dedent("\n".join(str(caught.value).splitlines()[2:]))
    with pytest.raises(PassError, match="pass fails failed"):
        exec(lines, {"your_pass": Local()})


def test_a_graph_that_cannot_be_written_does_not_hide_the_failure(
    captured: ProgramGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(PassError, match=r"(?s)KeyError: 'loudly'.*could not be written"):
        pipeline.run(captured, (Canonicalize(), Fails()))


# --- passes that are disabled ------------------------------------------------------------------------


def test_a_disabled_pass_does_not_run_and_the_report_says_so(make_model: Callable[[], nn.Module]) -> None:
    model, x = make_model(), torch.randn(2, 7, 32)
    compiled = attngraph.compile(model, disable=("fuse-attention",))
    assert torch.equal(compiled(x), model(x))
    assert compiled.report.attention == ()
    record = compiled.report.passes[1]
    assert (record.name, record.changed, record.notes) == ("fuse-attention", False, ("disabled",))


def test_a_pass_that_the_level_needs_cannot_be_disabled(make_model: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"select-kernels cannot be disabled.*no kernel was chosen"):
        attngraph.compile(make_model(), disable=("select-kernels",))(torch.randn(2, 7, 32))


def test_a_name_that_no_pass_has_is_told_what_is_meant() -> None:
    with pytest.raises(ValueError, match="no pass 'merge-head' to disable; did you mean 'merge-heads'"):
        attngraph.compile(torch.relu, disable=("merge-head",))
    with pytest.raises(ValueError, match=r"disable takes names of passes.*\('merge-heads',\)"):
        attngraph.compile(torch.relu, disable="merge-heads")
    with pytest.raises(ValueError, match=r"insert-kv-cache does; it cannot be disabled"):
        attngraph.compile(torch.relu, disable=("insert-kv-cache",), cache=True)


def test_a_decoder_goes_without_a_disabled_pass() -> None:
    from attngraph.models.targets import tiny_decoder_lm

    model, (ids,) = tiny_decoder_lm(tokens=8)
    decoder = attngraph.compile(model, cache=True, disable=("tidy",))
    logits, _ = decoder.prefill(ids)
    assert torch.allclose(logits, model(ids)[:, -1], atol=1e-5) or torch.allclose(
        logits, model(ids), atol=1e-5
    )
    assert next(p for p in decoder.report.passes if p.name == "tidy").notes == ("disabled",)


# --- passes by name ----------------------------------------------------------------------------------


def test_passes_are_made_by_name_and_options() -> None:
    assert pass_named("merge-heads") == DEFAULT_PIPELINE[2]
    assert pass_named("absorb-mla(absorb='always', keeps=True)") == AbsorbMLA("always", True)
    assert {step.name for step in PASSES} >= {step.name for step in order(decoder=True)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fuse-atention", "no pass 'fuse-atention'; did you mean 'fuse-attention'"),
        ("xyz", "no pass 'xyz'; there are canonicalize,"),
        ("absorb-mla(absorbe='always')", "no option 'absorbe'; did you mean 'absorb'"),
        ("absorb-mla(absorb=always)", "'always' is no value for absorb"),
        ("absorb-mla(absorb='sometimes')", "absorb must be one of"),
    ],
)
def test_what_names_no_pass_is_told(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        pass_named(text)


def test_an_op_that_its_level_forbids_is_caught(captured: ProgramGraph) -> None:
    first = captured.placeholders()[0]
    with captured.graph.inserting_before(captured.graph.output_node()):
        captured.graph.call_function(aten._assert_tensor_metadata.default, (first,))
    verify(captured)  # a capture may hold it
    captured.level = Level.CANONICAL
    with pytest.raises(VerificationError, match="may not occur at level CANONICAL"):
        verify(captured)


def test_an_attention_without_a_kernel_is_caught_once_lowered(captured: ProgramGraph) -> None:
    pipeline.run(captured, (Canonicalize(), FuseAttention()))
    captured.level = Level.LOWERED
    with pytest.raises(VerificationError, match="no kernel was chosen"):
        verify(captured)


def test_an_input_that_nobody_declared_is_caught(captured: ProgramGraph) -> None:
    first = captured.placeholders()[0]
    with captured.graph.inserting_before(first):
        extra = captured.graph.placeholder("extra")
    extra.meta["val"] = first.meta["val"]
    with pytest.raises(VerificationError, match="placeholders for"):
        verify(captured)


def test_a_tensor_held_by_the_graph_itself_is_caught(captured: ProgramGraph) -> None:
    captured.module.register_buffer("hidden", torch.ones(1))
    with captured.graph.inserting_before(captured.graph.output_node()):
        captured.graph.get_attr("hidden")
    with pytest.raises(VerificationError, match="a graph holds no attributes"):
        verify(captured)


def test_a_graph_that_uses_a_value_before_it_exists_is_caught(captured: ProgramGraph) -> None:
    calls = [n for n in captured.graph.nodes if n.op == "call_function"]
    calls[0].append(calls[-1])
    calls[0].prepend(calls[-1])
    with pytest.raises((VerificationError, RuntimeError)):
        verify(captured)


def test_more_equal_layers_take_no_more_inferences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and verification infer equal calls once, however many layers have them."""
    import attngraph.ir.graph.call as inferring
    from attngraph.capture.trace import capture
    from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig

    def inferred(layers: int) -> int:
        config = DecoderLMConfig(vocab_size=17, layers=layers, width=16, heads=2, max_tokens=32)
        graph = capture(DecoderLM(config).eval(), (torch.randint(0, 17, (2, 9)),), {}).graph
        calls: list[object] = []
        infer = inferring.infer
        with monkeypatch.context() as patch:
            patch.setattr(inferring, "infer", lambda *args: (calls.append(args[0]), infer(*args))[1])
            pipeline.run(graph, DEFAULT_PIPELINE)
        assert len(graph.attentions()) == layers
        return len(calls)

    assert inferred(5) == inferred(3) > 0
