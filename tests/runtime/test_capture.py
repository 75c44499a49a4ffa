"""What capture takes whole, what it refuses by name and line, and where sizes become numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.capture.first_call import settles
from attngraph.errors import CaptureError

Same = Callable[..., None]
Attend = Callable[..., Tensor]


class Shared(nn.Module):
    """One activation that is registered in three places, one of them within another module."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.act = attend, nn.GELU()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), self.act) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.attend(layer(x))
        return self.act(x)


def test_a_module_registered_twice_is_captured_whole(same: Same, attention: Attend) -> None:
    model, x = Shared(attention), torch.randn(2, 5, 8)
    compiled = attngraph.compile(model, strict=True)
    same(compiled(x), model(x))
    assert len(compiled.report.attention) == 2
    x = torch.randn(3, 7, 8)
    same(compiled(x), model(x))
    assert compiled.report.graphs == 1


def test_a_shared_module_that_counts_is_still_refused(attention: Attend) -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    model = Shared(attention)
    model.act = model.layers[0][1] = Counting()
    with pytest.raises(CaptureError, match=r"the attribute (act|layers\.0\.1)\.calls of the model at .*:\d+"):
        attngraph.compile(model, strict=True)(torch.randn(2, 5, 8))


@torch.amp.autocast("cpu", enabled=False)
def scores_in_float32(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def test_a_helper_under_autocasts_decorator_changes_nothing(same: Same) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scores_in_float32(x, x).softmax(-1) @ x

    model, x = Model(), torch.randn(2, 5, 8)
    same(attngraph.compile(model, strict=True)(x), model(x))


COUNT = 0


class Changing(nn.Module):
    """Changes one of its surroundings, which `what` names, in each forward."""

    total: ClassVar[int] = 0

    def __init__(self, what: str, attend: Attend) -> None:
        super().__init__()
        self.what, self.attend = what, attend
        self.count, self.seen, self.table = 0, [0], {"n": 0}

    def forward(self, x: Tensor) -> Tensor:
        global COUNT
        match self.what:
            case "count":
                self.count += 1
            case "seen":
                self.seen.append(1)
            case "table":
                self.table["n"] += 1
            case "total":
                Changing.total += 1
            case "COUNT":
                COUNT += 1
        return self.attend(x)


@pytest.mark.parametrize(
    ("what", "words", "line"),
    [
        ("count", "the attribute 0.count of the model", "self.count += 1"),
        ("seen", "the attribute 0.seen of the model", "self.seen.append(1)"),
        ("table", "the attribute 0.table of the model", 'self.table["n"] += 1'),
        ("total", "the attribute total of the class Changing", "Changing.total += 1"),
        ("COUNT", "the global variable COUNT", "COUNT += 1"),
    ],
)
def test_a_change_is_named_with_its_line_and_undone(
    what: str, words: str, line: str, attention: Attend
) -> None:
    model = nn.Sequential(Changing(what, attention))
    before = COUNT, Changing.total
    with pytest.raises(CaptureError) as raised:
        attngraph.compile(model, strict=True)(torch.randn(2, 5, 8))
    assert raised.value.reason == f"forward() changes {words}"
    lines, first = inspect.getsourcelines(Changing.forward)
    place = next(n for n, text in enumerate(lines, first) if line in text)
    assert raised.value.source == f"tests/runtime/test_capture.py:{place}"
    assert before == (COUNT, Changing.total)
    inner: Any = model[0]
    assert (inner.count, inner.seen, inner.table) == (0, [0], {"n": 0})


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_before_attention_is_captured(kind: Any, same: Same, attention: Attend) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = kind(8, 4, num_layers=2, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.recurrent(x)
            return attention(hidden)

    model = Model()
    compiled = attngraph.compile(model, strict=True)
    for shape in ((2, 6, 8), (3, 6, 8), (2, 7, 8)):
        x = torch.randn(shape)
        same(compiled(x), model(x))
    assert len(compiled.report.attention) == 1
    assert compiled.report.graphs == 2  # the batch is symbolic, the number of steps is not
    with torch.no_grad():
        model.recurrent.weight_hh_l0.add_(1.0)
    same(compiled(x), model(x))


@pytest.mark.parametrize(
    ("function", "graphs"),
    [
        (np.sqrt, 1),
        (lambda n: 1 / np.sqrt(n), 1),
        (lambda n: np.exp(n / 10), 1),
        (lambda n: np.ceil(n / 3), 1),
        (lambda n: np.floor(n / 3), 1),
        (np.log, 2),
        (np.tanh, 2),
        (lambda n: float(np.arange(n)[-1]), 2),
        (lambda n: {(5, (1,)): 2.0}.get((n, (1,)), 3.0), 2),
    ],
    ids=["sqrt", "rsqrt", "exp", "ceil", "floor", "log", "tanh", "arange", "nested key"],
)
def test_numpy_and_keys_of_sizes(function: Any, graphs: int, same: Same, attention: Attend) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attention(x) * function(x.shape[1])

    model = Model()
    compiled = attngraph.compile(model, strict=True)
    for tokens in (5, 9):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), model(x))
    assert compiled.report.graphs == graphs


@pytest.mark.parametrize("length", [len, lambda x: len(list(range(x.shape[0])))], ids=["len", "range"])
def test_a_size_whose_number_the_code_asks_for_is_told_with_its_line(
    length: Callable[[Tensor], int], same: Same
) -> None:
    def f(x: Tensor) -> Tensor:
        tokens = length(x)
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        return (x @ x.mT).masked_fill(later, -torch.inf).softmax(-1) @ x

    compiled = attngraph.compile(f, min_scores=0)
    for tokens in (5, 7):
        x = torch.randn(tokens, 16)
        same(compiled(x), f(x))
    (told,) = compiled.report.numbers
    assert "asks for the number itself of dimension 0 of tensor argument 0" in told.reason
    assert told.source.startswith("tests/runtime/test_capture.py:")


def test_sizes_that_became_numbers_are_told(attention: Attend) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attention(x) * {(5, (1,)): 2.0}[x.shape[1], (1,)]

    compiled = attngraph.compile(Model(), strict=True)
    compiled(torch.randn(2, 5, 8))
    (told,) = compiled.report.numbers
    assert told.source.startswith("tests/runtime/test_capture.py:")
    assert "compiled again for other sizes" in str(compiled.report)


class Table(nn.Module):
    """Keeps its mask for each length, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}
        self.made = 0

    def forward(self, x: Tensor) -> Tensor:
        tokens = int(x.shape[1])
        if tokens not in self.masks:
            self.masks[tokens] = torch.ones(tokens, tokens, dtype=torch.bool).tril()
            self.made += 1
        scores = (x @ x.mT).masked_fill(~self.masks[tokens], -torch.inf)
        return scores.softmax(-1) @ x


def test_a_table_for_later_calls_is_filled_once_and_the_model_captured_whole(same: Same) -> None:
    model, reference = Table(), Table()
    compiled = attngraph.compile(model, strict=True)
    for tokens in (5, 5, 6, 5):
        x = torch.randn(2, tokens, 8)
        same(compiled(x), reference(x))
    assert (model.made, set(model.masks)) == (2, {5, 6})
    assert all(type(mask) is Tensor for mask in model.masks.values())
    assert "causal" in {entry.mask for entry in compiled.report.attention}
    assert not compiled.report.breaks


def test_weights_of_a_model_that_fills_a_table_are_shown_before_its_first_call(same: Same) -> None:
    x = torch.randn(2, 5, 8)
    weights = attngraph.compile(Table()).weights(x, at="attention")
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    same(weights[:, 0], (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1))


def test_whether_a_model_settles_is_found_without_touching_its_tensors() -> None:
    class Writing(nn.Module):
        """Fills a table once, and writes to tensors wherever they are."""

        def __init__(self, tuples: bool) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.numbers, self.held, self.tuples = [torch.zeros(())], (torch.zeros(()),), tuples
            self.table: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.table.setdefault("x", torch.ones(3))
            self.steps += 1
            self.numbers[0].add_(1)
            if self.tuples:
                self.held[0].add_(1)
            return x

    for tuples in (False, True):
        model = Writing(tuples)
        assert settles(model, (torch.randn(2, 3),), {}) is not tuples
        assert [float(t) for t in (model.steps, *model.numbers, *model.held)] == [0, 0, 0]
        assert model.table == {}


@pytest.mark.slow
def test_a_model_that_goes_on_changing_runs_each_call_once(same: Same, attention: Attend) -> None:
    model, reference = Changing("count", attention), Changing("count", attention)
    compiled = attngraph.compile(model)
    for calls in (1, 2, 3):
        x = torch.randn(2, 5, 8)
        same(compiled(x), reference(x))
        assert model.count == calls
    assert compiled.report.breaks


@pytest.mark.slow
def test_sides_of_a_window_partition_become_numbers(same: Same) -> None:
    class Windows(nn.Module):
        """Attention within windows of 3 x 3, of an image that is padded and halved twice."""

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                height, width = x.shape[1], x.shape[2]
                x = F.pad(x, (0, 0, 0, (3 - width % 3) % 3, 0, (3 - height % 3) % 3))
                rows, columns = x.shape[1] // 3, x.shape[2] // 3
                w = x.view(x.shape[0], rows, 3, columns, 3, -1).transpose(2, 3).reshape(-1, 9, x.shape[-1])
                w = (w @ w.mT).softmax(-1) @ w
                w = w.view(x.shape[0], rows, columns, 3, 3, -1).transpose(2, 3)
                x = w.reshape(x.shape[0], 3 * rows, 3 * columns, -1)[:, :height, :width]
                x = x[:, : height // 2 * 2, : width // 2 * 2]
                x = x[:, 0::2, 0::2] + x[:, 1::2, 1::2]
            return x

    model, x = Windows(), torch.randn(2, 25, 22, 4)
    compiled = attngraph.compile(model, strict=True)
    same(compiled(x), model(x))
    assert len(compiled.report.attention) == 3
    assert [stop.reason for stop in compiled.report.numbers] == ["formulas of its sizes become too long"]
    x = torch.randn(3, 25, 22, 4)
    same(compiled(x), model(x))
    assert compiled.report.graphs == 1


def test_only_what_torch_vmap_batches_is_traced_again(same: Same) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[2])
            keep = torch.vmap(torch.vmap(lambda q, k: k <= q, (None, 0)), (0, None))(place, place)
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=keep)
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model, x = Model(), torch.randn(2, 3, 5, 8)
    compiled = attngraph.compile(model, strict=True)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            same(compiled(x), model(x))
            assert [entry.mask for entry in compiled.report.attention] == ["causal", "causal"]
            assert "flash" not in compiled.report.captured


class ByValue(nn.Module):
    """Leaves a mask out where it masks nothing, as libraries do."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.any():
            return F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x, ~mask[:, None])


def test_python_that_depends_on_values_is_told_with_its_line(same: Same) -> None:
    model, x = ByValue(), torch.randn(2, 5, 8)
    compiled = attngraph.compile(model)
    for mask in (torch.zeros(2, 5, dtype=torch.bool), torch.arange(5).expand(2, 5) > 3):
        same(compiled(x, mask), model(x, mask))
    assert [stop.reason for stop in compiled.report.breaks] == [
        "what Python does depends on the values of a tensor: if not mask.any():"
    ]
    with pytest.raises(CaptureError, match="depends on the values of a tensor: if not mask"):
        attngraph.compile(model, strict=True)(x, mask)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_hook_of_the_backward_pass_matters_where_gradients_are_recorded(
    register: str, same: Same, attention: Attend
) -> None:
    model, x, seen = Shared(attention), torch.randn(2, 5, 8), []
    getattr(model.layers[0][0], register)(lambda *grads: seen.append(1))
    compiled = attngraph.compile(model)
    with torch.no_grad():
        same(compiled(x), model(x))
    assert not compiled.report.breaks
    compiled(x).sum().backward()
    assert len(seen) == 1
    (stop,) = compiled.report.breaks
    assert "the backward hook" in stop.reason
    assert "<lambda> of the module layers.0.0 would not run" in stop.reason
    forward = attngraph.compile(Shared(attention))
    forward._orig_mod.act.register_forward_hook(lambda *_: seen.append(2))
    with torch.no_grad():
        forward(x)
    assert seen.count(2) == 3
    (stop,) = forward.report.breaks
    assert "forward() changes the local variable seen" in stop.reason


class CausalFromTwoOn(nn.Module):
    """The usual spelling: one token needs no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.logits = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, None]
        found = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=x.shape[2] > 1)
        logits: Tensor = self.logits(found[:, 0])
        return logits


def test_a_flag_of_torchs_attention_may_follow_from_sizes(same: Same) -> None:
    model = CausalFromTwoOn().eval()
    compiled = attngraph.compile(model, min_scores=0)
    for tokens in (5, 6, 2):
        ids = torch.randint(0, 9, (2, tokens))
        same(compiled(ids), model(ids))
    assert (compiled.report.graphs, compiled.report.numbers) == (1, ())
    assert compiled.report.attention[0].mask == "causal"
    same(compiled(ids[:, :1]), model(ids[:, :1]))
    logits, _ = attngraph.compile(model, cache=True).prefill(ids)
    same(logits, model(ids).detach())


@pytest.mark.parametrize("place", [0, 1, 2, -1])
def test_heads_that_vmap_puts_in_any_dimension_are_captured_whole(place: int, same: Same) -> None:
    def heads(x: Tensor, weights: Tensor) -> Tensor:
        def head(weight: Tensor) -> Tensor:
            return torch.softmax(x @ weight @ x.mT, -1) @ x

        return torch.vmap(head, out_dims=place)(weights)

    x, weights = torch.randn(2, 5, 8), torch.randn(3, 8, 8)
    compiled = attngraph.compile(heads, strict=True, min_scores=0)
    same(compiled(x, weights), heads(x, weights))
    assert len(compiled.report.attention) == 1
