"""Products with weights of integers: found however they are written, and left alone where they are others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.capture.trace import capture
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.ops.quantised import linear_q
from attngraph.passes.canonicalize import Canonicalize
from attngraph.passes.quantised_linear import QuantisedLinear

OUT, IN, GROUP = 48, 64, 32
GROUPS = IN // GROUP


class Product(nn.Module):
    """x @ weight, by an expression of its buffers."""

    def __init__(self, formula: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.formula = compile(formula, formula, "eval")

        def integers(
            *shape: int, low: int = -128, high: int = 128, dtype: torch.dtype = torch.int8
        ) -> Tensor:
            return torch.randint(low, high, shape, dtype=dtype, generator=generator)

        self.register_buffer("w", integers(OUT, IN))
        self.register_buffer("u", integers(OUT, IN, low=0, high=256, dtype=torch.uint8))
        self.register_buffer("i64", integers(OUT, IN, dtype=torch.int64))
        self.register_buffer("turned", integers(IN, OUT))
        self.register_buffer("s", torch.rand(OUT, generator=generator) / 100)
        self.register_buffer("s_in", torch.rand(IN, generator=generator) / 100)
        self.register_buffer("s_group", torch.rand(OUT, GROUPS, generator=generator) / 100)
        self.register_buffer("z", integers(OUT, low=-9, high=9))
        self.register_buffer("z_group", integers(OUT, GROUPS, low=-9, high=9))
        self.register_buffer("one", torch.rand((), generator=generator))
        self.bias = nn.Parameter(torch.rand(OUT, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        names = {**dict(self.named_buffers()), "bias": self.bias, "x": x, "F": F, "torch": torch}
        return eval(self.formula, names)  # type: ignore[no-any-return]


def rewritten(formula: str) -> tuple[Product, ProgramGraph, list[str]]:
    model = Product(formula).eval()
    with torch.no_grad():
        graph = capture(model, (torch.randn(3, 5, IN),), {}).graph
    Canonicalize().run(graph)
    step = QuantisedLinear(requires=graph.level, yields=graph.level)
    return model, graph, step.run(graph).notes


def products(graph: ProgramGraph) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=linear_q))


SPELLINGS = {
    "plain integers": "F.linear(x, w.float())",
    "scaled after": "F.linear(x, w.to(x.dtype)) * s + bias",
    "scaled before": "F.linear(x, w.to(x.dtype) * s[:, None], bias)",
    "columns": "x @ (w.t().float() * s)",
    "a matrix [in, out]": "torch.matmul(x, turned.float()) * s",
    "unsigned": "F.linear(x, u.float() * s[:, None])",
    "one scale": "F.linear(x, w.float() * one)",
    "zeros": "F.linear(x, (w.float() - z[:, None].float()) * s[:, None])",
    "zeros in integers": "F.linear(x, (w.to(torch.int32) - z[:, None]) * s[:, None], bias)",
    "groups": "F.linear(x, (w.float().view(48, 2, 32) * s_group[..., None]).view(48, 64))",
    "scales repeated": "F.linear(x, w * s_group.repeat_interleave(32, 1))",
    "groups with zeros":
        "F.linear(x, ((w.view(48, 2, 32).float() - z_group[..., None]) * s_group[..., None]).flatten(1))",
    "einsum": "torch.einsum('btd,od->bto', x, w.float() * s[:, None])",
}  # fmt: skip
OTHERS = {
    "a scale for each input": "F.linear(x, w.float() * s_in)",
    "an offset": "F.linear(x, w.float() * s[:, None] + bias[:, None])",
    "a sum with zeros": "F.linear(x, (w.float() + z[:, None]) * s[:, None])",
    "two scales": "F.linear(x, w.float() * s[:, None] * s_group.repeat_interleave(32, 1))",
    "integers that are computed": "F.linear(x, (w + w).float() * s[:, None])",
    "64-bit integers": "F.linear(x, i64.float() * s[:, None])",
    "a weight in 16 bits": "F.linear(x, (w.to(torch.bfloat16) * s.to(torch.bfloat16)[:, None]).float())",
    "a rounded weight": "F.linear(x, (w.float() * s[:, None]).round())",
    "integers chosen by the input": "F.linear(x, torch.where(x.sum() > 0, w, -w).float())",
    "double": "F.linear(x.double(), w.double())",
    "floating weights": "F.linear(x, s[:, None] * s_in, bias)",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_product_with_integers_is_found(name: str) -> None:
    model, graph, notes = rewritten(SPELLINGS[name])
    assert products(graph) == 1 and notes == ["1 product(s) read the weight's integers"], notes
    x = torch.randn(2, 7, IN)
    with torch.no_grad():
        inputs = [x if i.kind == "argument" else model.get_parameter("bias") if i.kind == "parameter"
                  else model.get_buffer(i.name.rpartition(".")[2]) for i in graph.inputs]  # fmt: skip
        (found,) = graph.module(*inputs)
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_another_product_is_left_alone(name: str) -> None:
    _, graph, notes = rewritten(OTHERS[name])
    assert products(graph) == 0 and not notes


def test_a_false_claim_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numerical check does not depend on the rule that it checks."""
    monkeypatch.setattr("attngraph.passes.quantised_linear._subtracted", lambda term: term)
    _, graph, notes = rewritten(OTHERS["a sum with zeros"])
    assert products(graph) == 0 and "differs" in notes[0]


def test_the_op_has_derivatives_with_respect_to_activations() -> None:
    x = torch.randn(3, IN, dtype=torch.float64, requires_grad=True)
    w, scales = torch.randint(-8, 8, (5, IN), dtype=torch.int8), torch.rand(5, 2, dtype=torch.float64)
    zeros = torch.randint(-3, 3, (5, 2), dtype=torch.int8)

    def by_hand(x: Tensor) -> Tensor:
        whole = (w.double().view(5, 2, -1) - zeros[..., None]) * scales[..., None]
        return F.linear(x, whole.flatten(1))

    def by_op(x: Tensor) -> Tensor:
        return linear_q(x, w, scales, zeros, None)  # type: ignore[no-any-return]

    torch.testing.assert_close(by_op(x), by_hand(x))
    (grad,), (wanted,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (by_op, by_hand))
    torch.testing.assert_close(grad, wanted)
    tangent = torch.randn_like(x)
    for found, expected in zip(
        torch.func.jvp(by_op, (x,), (tangent,)), torch.func.jvp(by_hand, (x,), (tangent,)), strict=True
    ):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.vmap(by_op)(x), by_hand(x))


def test_it_can_be_disabled() -> None:
    from attngraph.passes import pass_named

    assert pass_named("quantised-linear") == QuantisedLinear()
    assert attngraph  # the public package registers the op
