"""What a decoder computes from each token alone becomes one operation; what mixes tokens does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import attngraph
from attngraph.codegen.cpu import chosen, toolchain
from attngraph.codegen.cpu.tokens import run
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language.token_program import TokenProgram, parse
from attngraph.ir.ops import token_program as op
from tests.cache.small import by_steps

WIDTH, HEADS, VOCABULARY = 16, 2, 24
Mix = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """One attention, with `before` it, `heads` on queries and keys, and `after` it."""

    def __init__(self, before: Mix, after: Mix, heads: Mix = lambda x: x) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.before, self.after, self.heads = before, after, heads

    def forward(self, ids: Tensor) -> Tensor:
        x = self.before(self.embed(ids))
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = functional.scaled_dot_product_attention(self.heads(q), self.heads(k), v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(b, s, WIDTH))
        return self.after(x) @ self.embed.weight.T


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(functional.gelu(self.wide(self.norm(x)), approximate="tanh"))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate, self.up, self.down = (nn.Linear(*at, bias=False) for at in ((16, 40), (16, 40), (40, 16)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Layouts(nn.Module):
    """Weights that are turned or expanded, and a convolution's `[in, out]`."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(20, 16).T / 4)
        self.two = nn.Parameter(torch.randn(16, 20).T.contiguous().T / 4)
        self.row = nn.Parameter(torch.randn(1, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(x @ self.one)
        return x + functional.linear(y, self.two) + functional.linear(x, self.row.expand(16, 16))


class Batch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.norm.running_mean = torch.randn(16)
        self.norm.running_var = torch.rand(16) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Shapes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(2).expand(-1, -1, 3, -1) * torch.arange(3.0)[:, None]
        return y.sum(2) + x.unflatten(-1, (4, 4)).flip(-1).transpose(2, 3).flatten(2)


def rotated(x: Tensor) -> Tensor:
    s, d = x.shape[2:]
    angles = torch.arange(s)[:, None] * 0.1 ** torch.arange(d // 2)
    cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin


def identity(x: Tensor) -> Tensor:
    return x


class Features(nn.Module):
    """One matrix for the vectors of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.back = nn.Parameter(torch.randn(4, 6) / 2), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        features = (heads @ self.out - heads.pow(2).sum(-1, keepdim=True)).exp()
        return x + self.back(features.transpose(1, 2).flatten(2))


MODELS: dict[str, Callable[[], Model]] = {
    "layer norm, gelu": lambda: Model(nn.LayerNorm(16), Gelu()),
    "rms norm, swiglu": lambda: Model(nn.RMSNorm(16), SwiGLU()),
    "rotary": lambda: Model(SwiGLU(), Gelu(), rotated),
    "norms of heads": lambda: Model(identity, SwiGLU(), nn.RMSNorm(8)),
    "features of heads": lambda: Model(Features(), SwiGLU()),
    "layouts": lambda: Model(Layouts(), Layouts()),
    "batch norm": lambda: Model(Batch(), Gelu()),
    "shapes": lambda: Model(Shapes(), Shapes()),
    "running mean": lambda: Model(lambda x: x + x.cumsum(1) / 9, Gelu()),
}


def decoded(model: nn.Module) -> tuple[attngraph.Decoder, ProgramGraph]:
    made = attngraph.compile(model.eval(), cache=True)
    made.prefill(torch.zeros(1, 4, dtype=torch.int64))
    (step,) = made._derived.all()
    return made, step.graph


def programs(graph: ProgramGraph) -> list[TokenProgram]:
    target = torch.ops.attngraph.token_program.default
    return [parse(str(n.args[1])) for n in graph.graph.nodes if n.target is target]


def check(model: nn.Module, decoder: attngraph.Decoder, tokens: int = 12) -> None:
    ids = torch.randint(0, VOCABULARY, (2, tokens))
    with torch.no_grad():
        wanted = model.double()(ids)
        model.float()
    found, _ = by_steps(decoder, ids, tokens // 2)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_decoders_answer_as_their_models(name: str) -> None:
    model = MODELS[name]()
    decoder, graph = decoded(model)
    found = programs(graph)
    assert found and all(op.is_supported(program) for program in found)
    left = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert not left & {"aten.linear.default", "aten.layer_norm.default", "aten.mm.default"}
    check(model, decoder)


def test_the_program_of_a_gated_layer() -> None:
    _, graph = decoded(MODELS["rms norm, swiglu"]())
    found = programs(graph)
    products = [n for p in found for n in range(40) if _defines(p, n) and p.product(n) is not None]
    assert len(products) >= 5, [p.text for p in found]  # out, gate, up, down, and the tied embedding


def _defines(program: TokenProgram, number: int) -> bool:
    return len(program.given) <= number < len(program.given) + len(program.definitions)


class FirstPart(nn.Module):
    """A narrow projection of the first elements of a wider one, as Mamba's of its time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(16, 24), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        first, rest = self.wide(x).split([8, 16], -1)
        return self.back(first) * rest


def test_a_product_with_the_first_part_of_a_value() -> None:
    model = Model(FirstPart(), Gelu())
    decoder, _ = decoded(model)
    check(model, decoder)


class PickedHeads(nn.Module):
    """Parts of a projection, picked by a list or cut."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.up, self.down, self.first, self.second = nn.Linear(16, 24), nn.Linear(8, 16), first, second

    def forward(self, x: Tensor) -> Tensor:
        parts = functional.silu(self.up(x)).unflatten(-1, (3, 8))
        found: Tensor = self.down((parts[:, :, self.first] * parts[:, :, self.second]).flatten(2))
        return found


def test_a_list_of_one_head_cuts_no_region() -> None:
    counts = []
    for first, second in (([-3], [1]), (slice(0, 1), slice(1, 2))):
        model = Model(PickedHeads(first, second), Gelu())
        decoder, graph = decoded(model)
        counts.append(len(programs(graph)))
        check(model, decoder)
    assert counts[0] == counts[1]


class CountedBack(nn.Module):
    """Distances from the last token, cut from a table that holds the longest context."""

    def __init__(self, context: int = 32) -> None:
        super().__init__()
        self.context, self.qkv = context, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        slopes = 0.5 ** torch.arange(1, 3)[:, None, None]
        distances = torch.arange(1 - self.context, 1) * slopes
        scores = q @ k.mT + distances[:, :, max(0, self.context - k.shape[-2]) :]
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        p = scores.masked_fill(later, torch.finfo(x.dtype).min).softmax(-1)
        found: Tensor = (p @ v).transpose(1, 2).flatten(2)
        return found


@pytest.mark.slow
def test_a_length_that_the_trace_names_the_long_way_is_the_number_of_tokens() -> None:
    model = Model(nn.Sequential(CountedBack(), Gelu()), CountedBack())
    decoder, graph = decoded(model)
    assert programs(graph)
    check(model, decoder)
    assert decoder.report.cache is not None and decoder.report.cache.most_tokens == 31
    first, _, last = (a.program for a in decoder.report.attention)
    assert first == last and first.startswith("s = dot + (k - n0 + 1) * 0.5 ** (h + 1)\n")


def test_what_mixes_tokens_stays() -> None:
    _, graph = decoded(MODELS["running mean"]())
    targets = [str(n.target) for n in graph.graph.nodes]
    assert not any("cumsum" in program.text for program in programs(graph))
    assert len(targets) > 5


def test_other_dtypes_stay() -> None:
    _, graph = decoded(MODELS["layer norm, gelu"]().double())
    assert programs(graph) == []


@pytest.mark.parametrize("name", ["layer norm, gelu", "rms norm, swiglu", "norms of heads", "layouts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_16_bits_are_computed_with_fewer_roundings(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    decoder, graph = decoded(model)
    found = programs(graph)
    assert found and all(op.is_supported(program) for program in found)
    word = str(dtype).removeprefix("torch.")
    assert {about.dtype for p in found for about in (*p.given, *p.results)} <= {word, "float32"}
    left = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert not left & {"aten.linear.default", "aten.layer_norm.default", "aten.mm.default"}
    ids = torch.randint(0, VOCABULARY, (2, 40))
    with torch.no_grad():
        eager, exact = model(ids), model.double()(ids)
    model.to(dtype)
    logits, state = decoder.prefill(ids[:, :4])
    ours = [logits, decoder.decode(ids[:, 4:38], state)]  # few tokens, whose products are C's, and many
    ours += [decoder.decode(ids[:, n : n + 1], state) for n in range(38, 40)]
    made = torch.cat(ours, 1)
    assert made.dtype == dtype
    assert (made - exact).abs().max() <= 1.5 * (eager - exact).abs().max()


def test_nothing_is_done_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise toolchain.CompilerError("none")

    monkeypatch.setattr(toolchain, "compiler", missing)
    model = MODELS["rotary"]()
    decoder, graph = decoded(model)
    assert programs(graph) == []
    check(model, decoder)


def test_the_report_says_what_was_done() -> None:
    decoder, _ = decoded(MODELS["rotary"]())
    record = next(p for p in decoder.report.passes if p.name == "fuse-token-wise")
    assert "compute each token by itself" in " ".join(record.notes)


def test_the_faster_products_of_many_tokens_are_measured_once_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From so many multiplications on; the answers are the model's, and those of weights that change, because
    no copy of a weight is kept."""
    monkeypatch.setattr(chosen, "_path", lambda: tmp_path / "chosen.json")
    monkeypatch.setattr(chosen, "_known", None)
    monkeypatch.setattr(chosen, "_measured_here", set())
    timed: list[str] = []

    def time_of(way: Callable[[], None]) -> tuple[float, None]:
        timed.append(way.__name__)
        return 0.1 if way.__name__ == "ours" else 0.3, way()

    monkeypatch.setattr(chosen, "_timed", time_of)
    model = Model(Gelu(), SwiGLU()).eval()
    decoder, ids = attngraph.compile(model, cache=True), torch.randint(0, VOCABULARY, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(decoder.prefill(ids)[0], model(ids))
        assert not timed and "each token by itself" not in str(decoder.report)
        monkeypatch.setattr(run, "LARGE", 0)
        decoder.prefill(ids)
        measured = len(timed)
        assert 0 < measured == timed.count("ours") + timed.count("with_pytorch")
        model.qkv.weight.mul_(-0.5)
        model.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})
        torch.testing.assert_close(decoder.prefill(ids)[0], model(ids))
    assert len(timed) == measured
    assert "PyTorch takes 3.0 times as long as cpu.tokens, measured here for products of" in str(
        decoder.report
    )


def test_a_value_used_inside_and_outside_of_a_region() -> None:
    """The running sum needs a value of the region and the region needs the running sum: two regions."""

    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = functional.gelu(self.one(x))
            return functional.silu(self.two(y.cumsum(1) / 9)) * y

    model = Model(identity, After())
    decoder, _ = decoded(model)
    check(model, decoder)


STEPS_OF = (
    lambda r: nn.Linear(16, 16),
    lambda r: nn.LayerNorm(16),
    lambda r: nn.RMSNorm(16),
    lambda r: nn.GELU(),
    lambda r: nn.Sequential(nn.Linear(16, 33), nn.SiLU(), nn.Linear(33, 16)),
    lambda r: SwiGLU(),
    lambda r: Shapes(),
    lambda r: Layouts(),
    lambda r: Batch(),
)


@pytest.mark.parametrize("seed", range(6))
def test_random_chains(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def chain() -> nn.Sequential:
        return nn.Sequential(*(draw.choice(STEPS_OF)(draw) for _ in range(4)), nn.LayerNorm(16))

    model = Model(chain(), chain(), draw.choice([identity, rotated]))
    decoder, graph = decoded(model)
    assert programs(graph)
    check(model, decoder)
    for program in programs(graph):  # PyTorch's operations compute the same program
        given = [torch.randn([5 if n is None else n for n in g.shape]) / 4 for g in program.given]
        compiled = op.token_program(given, program.text)
        for one, other in zip(compiled, op.reference(program, [g.double() for g in given]), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


def test_a_norm_that_leaves_its_epsilon_to_the_dtype_is_part_of_a_program() -> None:
    """Its epsilon is that of the model's dtype, in the float64 of the proof as well."""
    decoder = attngraph.compile(Model(SwiGLU(), nn.RMSNorm(WIDTH)).eval(), cache=True)
    decoder.generate(torch.randint(VOCABULARY, (1, 4)), max_new_tokens=1)
    text = {record.name: record.text for record in decoder.report.passes}
    assert "rms_norm" in text["tidy"] and "rms_norm" not in text["fuse-token-wise"]
    assert f"+ {torch.finfo(torch.float32).eps}" in text["fuse-token-wise"]
