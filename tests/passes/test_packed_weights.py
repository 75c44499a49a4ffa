"""Products whose weight is made of digits of 4 bits: found however they are written and wherever they lie,
and left alone where no matrix of digits is what the model computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attngraph.capture.trace import capture
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.ir.language.packed import Packed
from attngraph.ir.ops.quantised import linear_q, unpack
from attngraph.passes.canonicalize import Canonicalize
from attngraph.passes.quantised_linear import QuantisedLinear

OUT, IN = 48, 64


def assigned(low: Tensor, high: Tensor) -> Tensor:
    found = torch.empty(OUT, IN, dtype=torch.uint8)
    found[:, ::2], found[:, 1::2] = low, high
    return found


class Product(nn.Module):
    """x @ weight, by an expression of its buffers."""

    def __init__(self, formula: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.formula = compile(formula, formula, "eval")

        def integers(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
            limits = torch.iinfo(dtype)
            return torch.randint(limits.min, limits.max, shape, dtype=dtype, generator=generator)

        self.register_buffer("p", integers(OUT, IN // 2))
        self.register_buffer("i8", integers(OUT, IN // 2, dtype=torch.int8))
        self.register_buffer("i32", integers(OUT, IN // 8, dtype=torch.int32))
        self.register_buffer("i64", integers(OUT, IN // 16, dtype=torch.int64))
        self.register_buffer("of_outputs", integers(OUT // 2, IN))
        self.register_buffer("blocks", integers(OUT * IN // 32 // 2, 32))
        self.register_buffer("grouped", integers(OUT, 2, 16))
        self.register_buffer("turned", integers(IN // 2, OUT))
        self.register_buffer("s", torch.rand(OUT, generator=generator) / 100)
        self.register_buffer("z", torch.rand(OUT, generator=generator))
        self.register_buffer("s_group", torch.rand(OUT, 2, generator=generator) / 100)
        self.register_buffer("z_group", torch.rand(OUT, 2, generator=generator) * 15)
        self.register_buffer("by", torch.tensor([0, 4], dtype=torch.uint8))
        self.register_buffer("by_words", torch.arange(0, 32, 4, dtype=torch.int32))
        self.register_buffer("order", torch.randperm(IN, generator=generator))
        self.register_buffer("one", torch.ones((), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        names = {**dict(self.named_buffers()), "x": x, "F": F, "torch": torch, "assigned": assigned}
        return eval(self.formula, names)  # type: ignore[no-any-return]


def rewritten(formula: str) -> tuple[Product, ProgramGraph, list[str]]:
    model = Product(formula).eval()
    with torch.no_grad():
        graph = capture(model, (torch.randn(3, 5, IN),), {}).graph
    Canonicalize().run(graph)
    step = QuantisedLinear(requires=graph.level, yields=graph.level)
    return model, graph, step.run(graph).notes


PAIRS = "torch.stack([p & 15, p >> 4], -1).flatten(1)"
JOINED = "torch.cat([p & 15, p >> 4], 1)"
SPELLINGS = {
    "shifts and masks": (f"F.linear(x, {PAIRS}.float() * s[:, None])", "low first by 1"),
    "quotients":
        ("F.linear(x, torch.stack([p % 16, p // 16], -1).view(48, 64) * s[:, None])", "low first by 1"),
    "scaled after": (f"F.linear(x, {PAIRS}.float()) * s", "low first by 1"),
    "a formula of the place":
        ("F.linear(x, (p[:, torch.arange(64) // 2] >> 4 * (torch.arange(64) % 2) & 15) * s[:, None])",
         "low first by 1"),
    "shifts that are kept":
        ("F.linear(x, ((p[..., None] >> by) & 15).flatten(1).float() * s[:, None])", "low first by 1"),
    "bytes repeated":
        ("F.linear(x, (p.repeat_interleave(2, 1) >> by.repeat(32) & 15).float() * s[:, None])",
         "low first by 1"),
    "assigned": ("F.linear(x, assigned(p & 15, p >> 4).float() * s[:, None])", "low first by 1"),
    "the high bits first":
        ("F.linear(x, (torch.stack([p >> 4, p & 15], -1).flatten(1).float() - 8) * s[:, None])",
         "high first by 1 less 8"),
    "less a number, in integers":
        (f"F.linear(x, ({PAIRS}.to(torch.int8) - 8) * s[:, None])", "low first by 1 less 8"),
    "signed, by shifts":
        ("F.linear(x, torch.stack([(i8 << 4) >> 4, i8 >> 4], -1).flatten(1) * s[:, None])",
         "low first by 1 signed"),
    "signed, by one bit":
        (f"F.linear(x, (({PAIRS} ^ 8).to(torch.int8) - 8) * s[:, None])", "low first by 1 signed"),
    "signed, by a choice":
        (f"F.linear(x, torch.where({PAIRS} > 7, {PAIRS}.to(torch.int8) - 16, {PAIRS}) * s[:, None])",
         "low first by 1 signed"),
    "halves": (f"F.linear(x, ({JOINED}.float() - 8) * s[:, None])", "low first by 32 less 8"),
    "halves of blocks":
        ("F.linear(x, ((torch.cat([grouped & 15, grouped >> 4], -1).float() - 8) * s_group[..., None])"
         ".flatten(1))", "low first by 16 less 8"),
    "zeros": (f"F.linear(x, ({PAIRS}.float() - z[:, None]) * s[:, None])", "low first by 1"),
    "groups":
        (f"F.linear(x, (({PAIRS}.view(48, 2, 32) - z_group[..., None]) * s_group[..., None]).flatten(1))",
         "low first by 1"),
    "groups of halves":
        (f"F.linear(x, (({JOINED}.view(48, 2, 32) - z_group[..., None]) * s_group[..., None]).flatten(1))",
         "low first by 32"),
    "words of 32 bits":
        ("F.linear(x, ((i32[..., None] >> by_words) & 15).flatten(1).float() * s[:, None])",
         "low first by 1"),
    "words of 64 bits":
        ("F.linear(x, ((i64[..., None] >> torch.arange(0, 64, 4)) % 16).flatten(1) * s[:, None])",
         "low first by 1"),
    "pairs of outputs":
        ("F.linear(x, torch.stack([of_outputs & 15, of_outputs >> 4], 1).flatten(0, 1) * s[:, None])",
         "low first by 1 of outputs"),
    "halves of the outputs, in blocks":
        ("F.linear(x, ((torch.cat([blocks >> 4, blocks & 15]) - z_group.view(-1, 1))"
         " * s_group.view(-1, 1)).view(48, 64))", "high first by 24 of outputs"),
}  # fmt: skip
OTHERS = {
    "another order": f"F.linear(x, {PAIRS}[:, order].float() * s[:, None])",
    "words with digits in another order":
        "F.linear(x, ((i32[..., None] >> torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])) & 15).flatten(1)"
        " * s[:, None])",
    "digits of five bits": "F.linear(x, torch.stack([p & 31, p >> 4], -1).flatten(1) * s[:, None])",
    "the same digit twice": "F.linear(x, torch.stack([p & 15, p % 16], -1).flatten(1) * s[:, None])",
    "a function of digits": f"F.linear(x, ({PAIRS} * {PAIRS}).float() * s[:, None])",
    "less something else for each half":
        "F.linear(x, torch.stack([(p & 15).to(torch.int8) - 8, (p >> 4).to(torch.int8) - 7], -1).flatten(1)"
        " * s[:, None])",
    "bytes that are computed":
        "F.linear(x, torch.stack([p & 15, (p + one) >> 4], -1).flatten(1) * s[:, None])",
    "columns of bytes":
        "F.linear(x, torch.stack([turned & 15, turned >> 4], 1).flatten(0, 1).T * s[:, None])",
    "half of the bytes":
        "F.linear(x[..., :32], torch.stack([p[:, :16] & 15, p[:, :16] >> 4], -1).flatten(1) * s[:, None])",
    "rows that lie apart": f"F.linear(x, {PAIRS}[::2].float() * s[::2, None])",
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_product_with_packed_integers_is_found(name: str) -> None:
    formula, words = SPELLINGS[name]
    model, graph, notes = rewritten(formula)
    assert notes == ["1 product(s) read the weight's integers"], notes
    (node,) = graph.graph.find_nodes(op="call_function", target=unpack)
    assert node.args[0].op == "placeholder" and node.args[1:] == (OUT, words)
    assert [n.target for n in node.users] == [linear_q]
    x = torch.randn(2, 7, IN)
    with torch.no_grad():
        inputs = [x if i.kind == "argument" else model.get_buffer(i.name.rpartition(".")[2])
                  for i in graph.inputs]  # fmt: skip
        (found,) = graph.module(*inputs)
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_another_product_is_left_alone(name: str) -> None:
    _, graph, notes = rewritten(OTHERS[name])
    assert not graph.graph.find_nodes(op="call_function", target=unpack) and not notes


def test_shifts_that_are_kept_are_taken_not_to_change() -> None:
    """The numbers of a small table are part of the formula, so they are looked at before each call."""
    assert rewritten(SPELLINGS["shifts that are kept"][0])[1].assumed == {"b_model_by"}
    assert not rewritten(SPELLINGS["shifts and masks"][0])[1].assumed


def test_a_false_claim_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numerical check does not depend on the rule that it checks."""
    wrong = Packed(1, high_first=True)
    monkeypatch.setattr("attngraph.passes.quantised_linear._packed", lambda *args: wrong)
    _, graph, notes = rewritten(SPELLINGS["shifts and masks"][0])
    assert not graph.graph.find_nodes(op="call_function", target=unpack) and "differs" in notes[0]


@pytest.mark.parametrize("packed", [
    Packed(), Packed(16, high_first=True, less=8), Packed(1, signed=True), Packed(3, True, True, -5),
    Packed(24, of_outputs=True), Packed(1, high_first=True, less=8, of_outputs=True),
])  # fmt: skip
def test_words_say_how_elements_lie(packed: Packed) -> None:
    """Each element is that of a plain loop."""
    assert Packed.of(str(packed)) == packed
    outs, depth = 48, 96
    shape = (outs // 2, depth) if packed.of_outputs else (outs, depth // 2)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = unpack(data, outs, str(packed))
    assert found.dtype == torch.int8 and found.shape == (outs, depth)
    for o, d in torch.cartesian_prod(torch.arange(0, outs, 5), torch.arange(depth)).tolist():
        index = o if packed.of_outputs else d
        half, place = index // packed.run % 2, index // (2 * packed.run) * packed.run + index % packed.run
        byte = int(data[(place, d) if packed.of_outputs else (o, place)])
        number = byte >> 4 if half != packed.high_first else byte & 15
        if packed.signed and number > 7:
            number -= 16
        assert found[o, d] == number - packed.less


@pytest.mark.parametrize("words", ["", "low first", "first by 1", "low first by 0", "low first by 1 less"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match="no way in which integers of 4 bits lie in bytes"):
        Packed.of(words)
