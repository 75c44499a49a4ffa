"""Decoders of models with integer weights: their tokens are the quantised model's, C reads the integers, and
what changes in the model is seen at the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops.quantised import linear_q, unpack
from attngraph.passes.fuse_token_wise.fuse import FuseTokenWise
from tests.cache.small import greedy

WIDTH, VOCABULARY = 32, 61


class Quantised(nn.Module):
    """A linear layer whose weight is computed from buffers."""

    def __init__(self, source: nn.Linear, made: Callable[[Any], Tensor], **buffers: Tensor) -> None:
        super().__init__()
        self.bias, self.made = source.bias, made
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.made(self), self.bias)


def rounded(source: nn.Linear) -> tuple[Tensor, Tensor]:
    """Integers, and a scale for each output."""
    scale = source.weight.detach().abs().amax(1) / 127
    return (source.weight.detach() / scale[:, None]).round().to(torch.int8), scale


def by_output(source: nn.Linear) -> nn.Module:
    weight, scale = rounded(source)
    return Quantised(source, lambda m: m.weight.float() * m.scale[:, None], weight=weight, scale=scale)


class Turned(Quantised):
    """With the matrix as `[in, out]`."""

    def forward(self, x: Tensor) -> Tensor:
        found = x @ self.weight.to(x.dtype) * self.scale
        return found if self.bias is None else found + self.bias


def turned(source: nn.Linear) -> nn.Module:
    weight, scale = rounded(source)
    return Turned(source, lambda m: m.weight, weight=weight.T.contiguous(), scale=scale)


def grouped(
    source: nn.Linear, size: int = 16, pack: Callable[[Tensor], Tensor] = lambda whole: whole,
    unpack: Callable[[Any], Tensor] = lambda m: m.weight, **more: Tensor,
) -> nn.Module:  # fmt: skip
    """With a scale and a zero for each group of inputs; `pack` says how the integers lie."""
    parts = source.weight.detach().unflatten(1, (-1, size))
    low = parts.amin(-1, keepdim=True)
    scale = (parts.amax(-1, keepdim=True) - low) / 15
    integers = ((parts - low) / scale).round().to(torch.uint8).flatten(1)
    buffers = {"weight": pack(integers), "scale": scale, "zero": -low / scale, **more}
    return Quantised(
        source, lambda m: ((unpack(m).unflatten(1, (-1, size)).float() - m.zero) * m.scale).flatten(1),
        **buffers,
    )  # fmt: skip


def both(m: Any) -> tuple[Tensor, Tensor]:
    """The integers in the low and in the high bits of each byte."""
    return m.weight & 15, m.weight >> 4


def neighbours(whole: Tensor) -> Tensor:
    return whole[:, ::2] | whole[:, 1::2] << 4


def halves(whole: Tensor) -> Tensor:
    """The second half of a row in the high bits."""
    low, high = whole.chunk(2, 1)
    return low | high << 4


def packed(source: nn.Linear) -> nn.Module:
    return grouped(source, 32, neighbours, lambda m: torch.stack(both(m), -1).flatten(1))


def in_halves(source: nn.Linear) -> nn.Module:
    return grouped(source, 16, halves, lambda m: torch.cat(both(m), 1))


def words(source: nn.Linear) -> nn.Module:
    """Eight integers in a word of 32 bits, each less 8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nothing = torch.zeros(source.out_features, source.in_features // 32, 1)
    return grouped(
        source, 32, lambda whole: neighbours(whole).view(torch.int32),
        lambda m: ((m.weight[..., None] >> m.by) & 15).flatten(1) - 8, by=shifts, zero=nothing,
    )  # fmt: skip


def two_outputs(source: nn.Linear) -> nn.Module:
    """Two outputs in a byte: PyTorch multiplies."""

    def pack(whole: Tensor) -> Tensor:
        whole = F.pad(whole, (0, 0, 0, len(whole) % 2))
        return whole[::2] | whole[1::2] << 4

    return grouped(source, 32, pack, lambda m: torch.stack(both(m), 1).flatten(0, 1)[: source.out_features])


def small_groups(source: nn.Linear) -> nn.Module:
    """Groups that are no whole vectors: PyTorch multiplies."""
    return grouped(source, 8)


class Wrapped(torch.Tensor):
    """A weight that wraps its integers and scales, as torchao's do."""

    integers: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, integers: Tensor, scales: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scales.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, integers: Tensor, scales: Tensor) -> None:
        self.integers, self.scales = integers, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["integers"], inner["scales"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and isinstance(args[1], Wrapped):
            x, weight, *bias = args
            found = F.linear(x, weight.integers.to(x.dtype)) * weight.scales
            return found + bias[0] if bias and bias[0] is not None else found
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Wrapped(*(function(t) for t in (args[0].integers, args[0].scales)))
        raise NotImplementedError(function)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(self.embedding(ids)))
        return found


def wrapped(source: nn.Linear) -> nn.Linear:
    source.weight = nn.Parameter(Wrapped(*rounded(source)), requires_grad=False)
    return source


def quantised(convert: Any, seed: int = 0, blocks: int = 2) -> Model:
    """The model with all its linear layers converted."""
    torch.manual_seed(seed)
    model = Model(blocks).eval().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, convert(child))
    return model


def by_torchao(config: Callable[[Any], Any]) -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    pytest.importorskip("torchao.quantization.granularity", reason="this torchao has no groups")
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    torchao.quantize_(model, config(torchao))
    return model


def ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1))


def note_of(decoder: Any) -> str:
    return " ".join(n for p in decoder.report.passes if p.name == "quantised-linear" for n in p.notes)


def fused_graph(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The graph of the model's decoder after tokens' operations were fused."""
    graphs: list[Any] = []
    run = FuseTokenWise.run

    def seen(self: FuseTokenWise, graph: Any) -> Any:
        found = run(self, graph)
        graphs.append(graph)
        return found

    monkeypatch.setattr(FuseTokenWise, "run", seen)
    attngraph.compile(model, cache=True).prefill(torch.randint(0, VOCABULARY, (1, 6)))
    return graphs[-1]


CONVERTED: dict[str, Callable[[], nn.Module]] = {
    "a scale for each output": lambda: quantised(by_output),
    "two integers in a byte": lambda: quantised(packed),
    "eight integers in a word": lambda: quantised(words),
    "wrapped weights of many equal layers": lambda: quantised(wrapped, blocks=5),
    "turned": lambda: quantised(turned),
    "a scale and a zero for each group": lambda: quantised(grouped),
    "small groups": lambda: quantised(small_groups),
    "two halves in a byte": lambda: quantised(in_halves),
    "two outputs in a byte": lambda: quantised(two_outputs),
    "torchao's IntxWeightOnlyConfig": lambda: by_torchao(
        lambda of: of.IntxWeightOnlyConfig(torch.int4, granularity=of.granularity.PerGroup(16))
    ),
    "torchao's Int8WeightOnlyConfig": lambda: by_torchao(lambda of: of.Int8WeightOnlyConfig()),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_greedy_tokens_are_those_of_the_quantised_model(name: str) -> None:
    """A trace repeats equal layers only where their weights are plain tensors."""
    model = CONVERTED[name]()
    decoder, prompts = attngraph.compile(model, cache=True), ids(3, 7)
    assert torch.equal(decoder.generate(prompts, max_new_tokens=10), greedy(model, prompts, 10))
    if name != "two outputs in a byte":
        count = 21 if "many" in name else 9
        assert note_of(decoder) == f"{count} product(s) read the weight's integers"


@pytest.mark.parametrize("count", [1, 40])
def test_logits_are_those_of_the_quantised_model(count: int) -> None:
    """After few new tokens, whose products are C's, and after many, whose products are PyTorch's."""
    model, tokens = quantised(by_output), ids(2, 9 + count)
    decoder = attngraph.compile(model, cache=True)
    _, state = decoder.prefill(tokens[:, :9])
    torch.testing.assert_close(
        decoder.decode(tokens[:, 9:], state), model(tokens)[:, 9:], rtol=1e-4, atol=1e-5
    )


def _other_weights(model: nn.Module) -> None:
    model.load_state_dict(quantised(words, seed=5).state_dict())


def _other_shifts(model: nn.Module) -> None:
    """What a small table held when the decoder was made is part of its formulas."""
    for module in model.modules():
        if isinstance(module, Quantised):
            module.by.copy_(module.by.flip(0))


@pytest.mark.parametrize("change", [_other_weights, pytest.param(_other_shifts, marks=pytest.mark.slow)])
def test_what_changes_is_read_at_the_next_token(change: Callable[[nn.Module], None]) -> None:
    model, prompts = quantised(words), ids(1, 6)
    decoder = attngraph.compile(model, cache=True)
    before = decoder.generate(prompts, max_new_tokens=8)
    change(model)
    after = decoder.generate(prompts, max_new_tokens=8)
    assert torch.equal(after, greedy(model, prompts, 8)) and not torch.equal(before, after)


def test_c_reads_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product is left to PyTorch: every weight of integers is a tensor of a token program."""
    whole = fused_graph(quantised(wrapped), monkeypatch)
    graph = whole.graph
    assert not graph.find_nodes(op="call_function", target=linear_q)
    programs = graph.find_nodes(op="call_function", target=torch.ops.attngraph.token_program.default)
    given = [g for node in programs for g in parse(str(node.args[1])).given]
    assert sum(g.dtype == "int8" for g in given) == 9
    assert {i.name for i in whole.inputs if "head" in i.name} == {
        "model.head.weight.integers", "model.head.weight.scales"
    }  # fmt: skip


@pytest.mark.parametrize("convert", [packed, in_halves, words])
def test_c_reads_packed_integers(convert: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they lie: nothing is unpacked, and no byte is copied to another tensor."""
    model = quantised(convert)
    graph = fused_graph(model, monkeypatch).graph
    assert not graph.find_nodes(op="call_function", target=linear_q)
    assert not graph.find_nodes(op="call_function", target=unpack)
    programs = graph.find_nodes(op="call_function", target=torch.ops.attngraph.token_program.default)
    given = [pair for n in programs for pair in zip(n.args[0], parse(str(n.args[1])).given, strict=True)]
    packed = [node for node, about in given if about.packed is not None]
    assert len(packed) == 9 and all(node.op == "placeholder" for node in packed)
