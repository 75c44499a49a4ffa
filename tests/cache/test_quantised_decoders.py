"""Decoders of models with integer weights: their tokens are the quantised model's, C reads the integers, and
what changes in the model is seen at the next call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.ir.language.token_program import parse
from attngraph.ir.ops.quantised import linear_q, unpack
from attngraph.passes.fuse_token_wise.fuse import FuseTokenWise

WIDTH, VOCABULARY = 32, 61


class Int8Linear(nn.Module):
    """By hand: integers and a scale for each output."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        scale = source.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (source.weight.detach() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = source.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None], self.bias)


class GroupedLinear(Int8Linear):
    """With a scale and a zero for each group of inputs."""

    group = 16

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        parts = source.weight.detach().unflatten(1, (-1, self.group))
        low = parts.amin(-1, keepdim=True)
        scale = (parts.amax(-1, keepdim=True) - low) / 15
        self.weight = ((parts - low) / scale).round().to(torch.uint8).flatten(1)
        self.scale, self.zero = nn.Buffer(scale), nn.Buffer(-low / scale)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.weight.unflatten(1, (-1, self.group)).to(x.dtype)
        return F.linear(x, ((parts - self.zero) * self.scale).flatten(1), self.bias)


class PackedLinear(GroupedLinear):
    """The same with two integers in a byte: neighbours, the first in its low bits."""

    group = 32

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        self.weight = self.packed(self.weight)

    def packed(self, whole: Tensor) -> Tensor:
        return whole[:, ::2] | whole[:, 1::2] << 4

    def integers(self) -> Tensor:
        return torch.stack([self.weight & 15, self.weight >> 4], -1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.integers().unflatten(1, (-1, self.group)).to(x.dtype)
        return F.linear(x, ((parts - self.zero) * self.scale).flatten(1), self.bias)


class HalvesLinear(PackedLinear):
    """The second half of a row in the high bits."""

    group = 16

    def packed(self, whole: Tensor) -> Tensor:
        low, high = whole.chunk(2, 1)
        return low | high << 4

    def integers(self) -> Tensor:
        return torch.cat([self.weight & 15, self.weight >> 4], 1)


class WordsLinear(PackedLinear):
    """Eight integers in a word of 32 bits, each less 8."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        self.weight, self.zero = self.weight.view(torch.int32), nn.Buffer(torch.zeros_like(self.zero))
        self.by = nn.Buffer(torch.arange(0, 32, 4, dtype=torch.int32))

    def integers(self) -> Tensor:
        return ((self.weight[..., None] >> self.by) & 15).flatten(1) - 8


class OutputsLinear(PackedLinear):
    """Two outputs in a byte: PyTorch multiplies."""

    def packed(self, whole: Tensor) -> Tensor:
        self.odd = len(whole) % 2
        whole = F.pad(whole, (0, 0, 0, self.odd))
        return whole[::2] | whole[1::2] << 4

    def integers(self) -> Tensor:
        whole = torch.stack([self.weight & 15, self.weight >> 4], 1).flatten(0, 1)
        return whole[: len(whole) - self.odd]


class SmallGroups(GroupedLinear):
    """Groups that are no whole vectors: PyTorch multiplies."""

    group = 8


class TurnedLinear(Int8Linear):
    """With the matrix as `[in, out]`."""

    def __init__(self, source: nn.Linear) -> None:
        super().__init__(source)
        self.weight = self.weight.T.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        found = x @ self.weight.to(x.dtype) * self.scale
        return found if self.bias is None else found + self.bias


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
    by_hand = Int8Linear(source)
    source.weight = nn.Parameter(Wrapped(by_hand.weight, by_hand.scale), requires_grad=False)
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


def greedy(model: nn.Module, ids: Tensor, count: int) -> Tensor:
    """One whole sequence after the other."""
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    return ids


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


@pytest.mark.parametrize("convert", [
    Int8Linear, TurnedLinear, GroupedLinear, SmallGroups, PackedLinear, HalvesLinear, WordsLinear, wrapped,
])  # fmt: skip
def test_greedy_tokens_are_those_of_the_quantised_model(convert: Any) -> None:
    model = quantised(convert)
    ids = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(1))
    decoder = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, max_new_tokens=10), greedy(model, ids, 10))
    assert note_of(decoder) == "9 product(s) read the weight's integers"


@pytest.mark.parametrize("count", [1, 40])
def test_logits_are_those_of_the_quantised_model(count: int) -> None:
    """After few new tokens, whose products are C's, and after many, whose products are PyTorch's."""
    model = quantised(Int8Linear)
    ids = torch.randint(0, VOCABULARY, (2, 9 + count), generator=torch.Generator().manual_seed(2))
    decoder = attngraph.compile(model, cache=True)
    with torch.no_grad():
        _, state = decoder.prefill(ids[:, :9])
        found = decoder.decode(ids[:, 9:], state)
        wanted = model(ids)[:, -found.shape[1] :] if found.ndim == 3 else model(ids)[:, -1]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_new_weights_are_read_at_the_next_token() -> None:
    model = quantised(Int8Linear)
    ids = torch.randint(0, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(3))
    decoder = attngraph.compile(model, cache=True)
    before = decoder.generate(ids, max_new_tokens=8)
    model.load_state_dict(quantised(Int8Linear, seed=5).state_dict())
    after = decoder.generate(ids, max_new_tokens=8)
    assert torch.equal(after, greedy(model, ids, 8)) and not torch.equal(before, after)


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


@pytest.mark.parametrize("convert", [PackedLinear, HalvesLinear, WordsLinear])
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


def test_packed_outputs_are_left_to_pytorch() -> None:
    model = quantised(OutputsLinear)
    ids = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))
    decoder = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, max_new_tokens=6), greedy(model, ids, 6))


@pytest.mark.slow
def test_another_table_of_shifts_is_another_formula() -> None:
    """What a small table held when the decoder was made is part of its formulas."""
    model = quantised(WordsLinear)
    ids = torch.randint(0, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(3))
    decoder = attngraph.compile(model, cache=True)
    before = decoder.generate(ids, max_new_tokens=8)
    for module in model.modules():
        if isinstance(module, WordsLinear):
            module.by.copy_(module.by.flip(0))
    after = decoder.generate(ids, max_new_tokens=8)
    assert torch.equal(after, greedy(model, ids, 8)) and not torch.equal(before, after)


def test_many_equal_layers_with_wrapped_weights() -> None:
    """A trace repeats equal layers only where their weights are plain tensors."""
    model = quantised(wrapped, blocks=5)
    ids = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    decoder = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, max_new_tokens=10), greedy(model, ids, 10))
    assert note_of(decoder) == "21 product(s) read the weight's integers"


def test_torchao_intx() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    granularity = pytest.importorskip("torchao.quantization.granularity").PerGroup(16)
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    torchao.quantize_(model, torchao.IntxWeightOnlyConfig(torch.int4, granularity=granularity))
    ids = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    decoder = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, max_new_tokens=10), greedy(model, ids, 10))
    assert note_of(decoder) == "9 product(s) read the weight's integers"


def test_torchao_int8() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    ids = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    decoder = attngraph.compile(model, cache=True)
    assert torch.equal(decoder.generate(ids, max_new_tokens=10), greedy(model, ids, 10))
    assert note_of(decoder) == "9 product(s) read the weight's integers"
