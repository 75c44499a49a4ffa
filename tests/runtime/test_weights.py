"""`compiled.weights`: the weights of a fused node equal eager's softmax, whatever the program; in tiles."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import attngraph
from attngraph.errors import CaptureError
from attngraph.ir.ops import weights as computing
from tests.runtime.small import Of, agree, attend


class Attention(nn.Module):
    """Attention of several forms; `kept` holds the weights of the latest eager call."""

    def __init__(self, form: str, heads: int = 4, groups: int = 4) -> None:
        super().__init__()
        self.form, self.heads, self.groups = form, heads, groups
        self.q, self.k, self.v = (nn.Linear(16, n * 4) for n in (heads, groups, groups))
        self.out = nn.Linear(heads * 4, 16)
        self.bias = nn.Parameter(torch.randn(heads, 1, 1))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        k, v = (f(x).unflatten(-1, (self.groups, 4)).transpose(1, 2) for f in (self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scores = q @ k.mT / 2
        i = torch.arange(x.shape[1])
        if self.form == "causal":
            scores = scores.masked_fill(i > i[:, None], -math.inf)
        elif self.form == "filled":
            scores = scores.masked_fill(i > i[:, None], -3.0)
        elif self.form == "alibi":
            scores = scores - self.bias * (i - i[:, None]).abs()
        elif self.form == "padding" and mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -math.inf)
        elif self.form == "sees nothing":
            scores = scores.masked_fill(i >= i[:, None], -math.inf)
        if self.form == "sink":
            sink = self.bias.expand(len(x), -1, x.shape[1], 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if self.form == "dropout":
            weights = nn.functional.dropout(weights, 0.5, self.training)
        if self.form == "gated":
            weights = weights * self.bias.sigmoid()
        if self.form == "signed":
            weights = weights * scores.sign()
        self.seen(weights)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def seen(self, weights: Tensor) -> None:
        """For a test to look at the weights."""


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.h = nn.ModuleList([nn.ModuleDict({"attn": Attention(**options)}) for _ in range(3)])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.h:
            x = x + layer["attn"](x, mask)
        return x


def eager_weights(model: Model, *args: Tensor) -> list[Tensor]:
    """What the model itself sums its values with, layer by layer."""
    found: list[Tensor] = []
    for layer in model.h:
        layer["attn"].seen = found.append
    with torch.no_grad():
        model(*args)
    for layer in model.h:
        del layer["attn"].seen
    return found


FORMS = (
    *("plain", "causal", "filled", "alibi", "padding", "sees nothing", "sink", "dropout", "gated", "signed"),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_weights_are_those_of_eagers_softmax(form: str, groups: int) -> None:
    model, x = Model(form=form, groups=groups).eval(), torch.randn(2, 9, 16)
    mask = torch.arange(9) < torch.tensor([[5], [9]])
    args = (x, mask) if form == "padding" else (x,)
    compiled = attngraph.compile(model)
    found = compiled.weights(*args)
    assert list(found) == ["h.0.attn", "h.1.attn", "h.2.attn"]
    expected = eager_weights(model, *args)
    wide_args = (x.double(), *args[1:])
    exact = eager_weights(model.double(), *wide_args)
    for weights, eager, wide in zip(found.values(), expected, exact, strict=True):
        assert weights.dtype == eager.dtype
        torch.testing.assert_close(weights, eager, equal_nan=True)
        torch.testing.assert_close(weights.double(), wide, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_in_float64_they_are_equal_to_rounding() -> None:
    model, x = Model(form="causal").double().eval(), torch.randn(2, 9, 16, dtype=torch.float64)
    found = attngraph.compile(model).weights(x, at="h.2.attn")
    torch.testing.assert_close(found, eager_weights(model, x)[2], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scores", [1, 40, 300])
def test_rows_and_queries_can_be_selected(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "SCORES", scores)
    model, x = Model(form="causal").eval(), torch.randn(3, 9, 16)
    compiled = attngraph.compile(model)
    whole = eager_weights(model, x)[1]
    torch.testing.assert_close(compiled.weights(x, at="h.1.attn"), whole)
    for rows, queries, expected in (
        (None, -1, whole[:, :, -1:]),
        (0, slice(2, 7), whole[:1, :, 2:7]),
        ([2, 0], [8, 3, 4, 4], whole[[2, 0]][:, :, [8, 3, 4, 4]]),
        (slice(None, None, 2), torch.tensor([1, 2]), whole[::2, :, 1:3]),
        ([], None, whole[:0]),
    ):
        found = compiled.weights(x, at="h.1.attn", rows=rows, queries=queries)
        torch.testing.assert_close(found, expected)
    for wrong in ({"rows": 3}, {"rows": [-4]}, {"queries": [2, 9]}):
        with pytest.raises(IndexError, match=r"there is no (row|query) -?\d: the attention has \d"):
            compiled.weights(x, at="h.1.attn", **wrong)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.numel())
        return result


def test_a_long_sequence_is_cheap_where_few_queries_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "SCORES", 1 << 14)
    model, x = Model(form="causal").eval(), torch.randn(1, 3000, 16)
    compiled = attngraph.compile(model)
    compiled(x)
    with Largest() as largest:
        found = compiled.weights(x, at="h.0.attn", queries=slice(1000, 1003))
    assert found.shape == (1, 4, 3, 3000)
    assert largest.size < 10 * 3000 * 16  # nothing of the size of the scores, which are 36 million


def test_names_that_there_are_not_or_that_are_several_list_those_that_there_are() -> None:
    def twice(m: Any, x: Tensor) -> Any:
        return m.attn(m.attn(x))

    x = torch.randn(1, 4, 16)
    compiled = attngraph.compile(Model(form="plain").eval())
    with pytest.raises(ValueError, match=r"'h.3.attn' is no fused attention.*h.0.attn, h.1.attn, h.2.attn"):
        compiled.weights(x, at="h.3.attn")
    assert list(compiled.weights(x, at=["h.2.attn", "h.0.attn"])) == ["h.2.attn", "h.0.attn"]
    compiled = attngraph.compile(Of(twice, attn=Attention("plain")).eval())
    assert list(compiled.weights(x)) == ["attn#0", "attn#1"]
    with pytest.raises(ValueError, match="'attn' is several attentions; there are: attn#0, attn#1"):
        compiled.weights(x, at="attn")
    plain = attngraph.compile(attend)
    q = torch.randn(1, 2, 5, 4)
    torch.testing.assert_close(plain.weights(q, q, q, at="attention"), (q @ q.mT).softmax(-1))


def test_looking_changes_nothing() -> None:
    def counting(m: Any, x: Tensor) -> Any:
        m.calls += 1
        return m.attn(x)

    model: Any = Of(counting, attn=Attention("dropout"), calls=nn.Buffer(torch.zeros(()))).train()
    compiled, x = attngraph.compile(model), torch.randn(2, 5, 16)
    compiled(x)
    before = torch.get_rng_state()
    found = compiled.weights(x, at="attn")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.calls == 1
    assert not found.requires_grad
    assert (found == 0).any()
    shown = found != 0
    torch.testing.assert_close(found[shown], 2 * eager_plain(model.attn, x)[shown])
    model.eval()
    assert not (compiled.weights(x, at="attn") == 0).any()


def eager_plain(attn: Attention, x: Tensor) -> Tensor:
    with torch.no_grad():
        q, k = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (attn.q, attn.k))
        return (q @ k.mT / 2).softmax(-1)


@pytest.mark.slow
def test_autocast_weights_are_those_of_the_cast_operands() -> None:
    model, x = Model(form="causal").eval(), torch.randn(2, 9, 16)
    compiled = attngraph.compile(model)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found = compiled.weights(x, at="h.0.attn")
        expected = eager_weights(model, x)[0]
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.03, atol=0.01)


@pytest.mark.parametrize("absorb", ["auto", "always", "never"])
def test_latent_attention_has_weights_too(absorb: str) -> None:
    def latent(m: Any, x: Tensor) -> Tensor:
        c = m.down(x)
        return heads_joined(
            *(t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (m.q(x), m.up_k(c), m.up_v(c)))
        )

    up_k, up_v = (nn.Linear(6, 4 * 8, bias=False) for _ in range(2))
    model: Any = Of(latent, q=nn.Linear(16, 4 * 8), down=nn.Linear(16, 6), up_k=up_k, up_v=up_v).eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        found = attngraph.compile(model, absorb=absorb).weights(x, at="attention")
        q, k = (f.unflatten(-1, (4, 8)).transpose(1, 2) for f in (model.q(x), up_k(model.down(x))))
        torch.testing.assert_close(found, (q @ k.mT / 8**0.5).softmax(-1))


def test_a_model_in_pieces_says_why_it_has_no_weights_to_show() -> None:
    model = Of(lambda m, x: m.attn(x) if x.sum() > 0 else x, attn=Attention("plain")).eval()
    with pytest.raises(CaptureError, match="of a model that is one graph, not of pieces: "):
        attngraph.compile(model).weights(torch.ones(1, 3, 16), at="attn")


def heads_joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (((q @ k.mT) / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Returning(nn.Module):
    """Attention that returns its weights, in a model that does with them as `use` says."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.project = use, nn.Linear(16, 48)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        weights = (q @ k.mT / 8**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), weights

    def forward(self, x: Tensor) -> Any:
        y, _ = self.attend(x)
        z, weights = self.attend(y)
        found = {
            "all": (z, weights), "mean": (z, weights.mean(1)), "none": z,
            "one result": z.sum() - weights.log().mean(),
        }  # fmt: skip
        return found[self.use]


@pytest.mark.parametrize("use", ["none", "all", "mean"])
def test_a_model_that_returns_its_weights_is_told_what_that_costs(use: str) -> None:
    compiled = agree(Returning(use).eval(), torch.randn(2, 70, 16), fused=2)
    later = [(entry.names, entry.bytes, entry.multiplications) for entry in compiled.report.later]
    told = [(("result[1]",), 2 * 2 * 70 * 70 * 4, 2 * 2 * 70 * 70 * 8)]
    assert (later, compiled.report.missed) == ([] if use == "none" else told, ())
    text = "computed when somebody looks at it\n      result[1]\n        weights of 76.6 KiB, "
    assert (text in str(compiled.report)) == (use != "none")


def test_a_result_that_is_computed_from_weights_and_values_does_not_wait() -> None:
    """Nothing would be left that the call computes."""
    compiled = agree(Returning("one result").eval(), torch.randn(2, 70, 16), fused=1)
    (missed,) = compiled.report.missed
    assert compiled.report.later == () and "used in the model's results" in missed.reason
    assert f"{2 * 2 * 70 * 70 * 4 / 1024:.1f} KiB in the call that was compiled" in missed.reason
