"""What capture takes whole, what it refuses by name and line, and where sizes become numbers."""

import inspect
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.capture.first_call import settles
from attngraph.errors import CaptureError
from tests.runtime.small import Of, agree, attend, same, sequence


class Shared(nn.Module):
    """One activation that is registered in three places, one of them within another module."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), self.act) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = attend(layer(x))
        return self.act(x)


def test_a_module_registered_twice_is_captured_whole() -> None:
    agree(Shared(), sequence(5), sequence(7, 3), strict=True, fused=2, graphs=1)


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_shared_module_that_counts_is_still_refused(x: Tensor) -> None:
    model = Shared()
    model.act = model.layers[0][1] = Counting()
    with pytest.raises(CaptureError, match=r"the attribute (act|layers\.0\.1)\.calls of the model at .*:\d+"):
        attngraph.compile(model, strict=True)(x)


@torch.amp.autocast("cpu", enabled=False)
def scores_in_float32(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def test_a_helper_under_autocasts_decorator_changes_nothing(x: Tensor) -> None:
    agree(lambda x: scores_in_float32(x, x).softmax(-1) @ x, x, strict=True)


COUNT = 0


class Changing(nn.Module):
    """Changes one of its surroundings, which `what` names, in each forward."""

    total: ClassVar[int] = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.count, self.seen, self.table = what, 0, [0], {"n": 0}

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
        return attend(x)


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
def test_a_change_is_named_with_its_line_and_undone(what: str, words: str, line: str, x: Tensor) -> None:
    model = nn.Sequential(Changing(what))
    before = COUNT, Changing.total
    with pytest.raises(CaptureError) as raised:
        attngraph.compile(model, strict=True)(x)
    assert raised.value.reason == f"forward() changes {words}"
    lines, first = inspect.getsourcelines(Changing.forward)
    place = next(n for n, text in enumerate(lines, first) if line in text)
    assert raised.value.source == f"tests/runtime/test_capture.py:{place}"
    assert before == (COUNT, Changing.total)
    inner: Any = model[0]
    assert (inner.count, inner.seen, inner.table) == (0, [0], {"n": 0})


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_before_attention_is_captured(kind: Any) -> None:
    recurrent = kind(8, 4, batch_first=True, bidirectional=True)
    model = Of(lambda m, x: attend(m.recurrent(x)[0]), recurrent=recurrent)
    shapes = (sequence(3), sequence(3, 3), last := sequence(4))
    compiled = agree(model, *shapes, strict=True, fused=1, graphs=2)  # the number of steps is not symbolic
    with torch.no_grad():
        recurrent.weight_hh_l0.add_(1.0)
    same(compiled(last), model(last))


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
def test_numpy_and_keys_of_sizes(function: Any, graphs: int) -> None:
    agree(lambda x: attend(x) * function(x.shape[1]), sequence(5), sequence(9), strict=True, graphs=graphs)


def _as_number(x: Tensor) -> Tensor:
    tokens = int(x.shape[0])
    return attend(x) * torch.ones(tokens, 1)


def test_len_of_a_tensor_is_a_size() -> None:
    def scaled(x: Tensor) -> Tensor:
        return attend(x) * torch.ones(len(x), 1) / len(x)

    agree(scaled, torch.randn(5, 16), torch.randn(9, 16), graphs=1)


def _in_a_range(x: Tensor) -> Tensor:
    return attend(x) * len(list(range(x.shape[0])))


def _in_a_key(x: Tensor) -> Tensor:
    return attend(x) * {(5, (1,)): 2.0}.get((x.shape[0], (1,)), 3.0)


@pytest.mark.parametrize("function", [_as_number, _in_a_range, _in_a_key])
def test_a_size_whose_number_the_code_asks_for_is_told_with_its_line(function: Any) -> None:
    compiled = agree(function, torch.randn(5, 16), torch.randn(7, 16), min_scores=0)
    (told,) = compiled.report.numbers
    asked = "asks for the number itself of dimension 0 of tensor argument 0"
    assert ("a size is a key of a dict" if function is _in_a_key else asked) in told.reason
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


def test_a_table_for_later_calls_is_filled_once_and_the_model_captured_whole() -> None:
    model = Table()
    calls = [sequence(n) for n in (5, 5, 6, 5)]
    compiled = agree(model, *calls, apart=True, reason="", strict=True)
    assert (model.made, set(model.masks)) == (2, {5, 6})
    assert all(type(mask) is Tensor for mask in model.masks.values())
    assert "causal" in {entry.mask for entry in compiled.report.attention}


def test_weights_of_a_model_that_fills_a_table_are_shown_before_its_first_call(x: Tensor) -> None:
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
def test_a_model_that_goes_on_changing_runs_each_call_once() -> None:
    model = Changing("count")
    agree(model, *(sequence() for _ in range(3)), apart=True, reason="forward() changes")
    assert model.count == 3


@pytest.mark.slow
def test_sides_of_a_window_partition_become_numbers() -> None:
    def windows(x: Tensor) -> Tensor:
        """Attention within windows of 3 x 3, of an image that is padded and halved twice."""
        for _ in range(3):
            height, width = x.shape[1], x.shape[2]
            x = F.pad(x, (0, 0, 0, (3 - width % 3) % 3, 0, (3 - height % 3) % 3))
            rows, columns = x.shape[1] // 3, x.shape[2] // 3
            w = x.view(x.shape[0], rows, 3, columns, 3, -1).transpose(2, 3).reshape(-1, 9, x.shape[-1])
            w = attend(w).view(x.shape[0], rows, columns, 3, 3, -1).transpose(2, 3)
            x = w.reshape(x.shape[0], 3 * rows, 3 * columns, -1)[:, :height, :width]
            x = x[:, : height // 2 * 2, : width // 2 * 2]
            x = x[:, 0::2, 0::2] + x[:, 1::2, 1::2]
        return x

    calls = torch.randn(2, 25, 22, 4), torch.randn(3, 25, 22, 4)
    compiled = agree(windows, *calls, strict=True, fused=3, graphs=1)
    assert [stop.reason for stop in compiled.report.numbers] == ["formulas of its sizes become too long"]


def test_only_what_torch_vmap_batches_is_traced_again() -> None:
    def model(x: Tensor) -> Tensor:
        place = torch.arange(x.shape[2])
        keep = torch.vmap(torch.vmap(lambda q, k: k <= q, (None, 0)), (0, None))(place, place)
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=keep)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 3, 5, 8)
    compiled = attngraph.compile(model, strict=True)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            same(compiled(x), model(x))
            assert [entry.mask for entry in compiled.report.attention] == ["causal", "causal"]
            assert "flash" not in compiled.report.captured


def by_value(x: Tensor, mask: Tensor) -> Tensor:
    """Leaves a mask out where it masks nothing, as libraries do."""
    if not mask.any():
        return F.scaled_dot_product_attention(x, x, x)
    return F.scaled_dot_product_attention(x, x, x, ~mask[:, None])


def test_python_that_depends_on_values_is_told_with_its_line(x: Tensor) -> None:
    masks = torch.zeros(2, 5, dtype=torch.bool), torch.arange(5).expand(2, 5) > 3
    told = "what Python does depends on the values of a tensor: if not mask.any():"
    agree(by_value, *((x, mask) for mask in masks), reason=told)
    with pytest.raises(CaptureError, match="depends on the values of a tensor: if not mask"):
        attngraph.compile(by_value, strict=True)(x, masks[1])


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


def test_a_flag_of_torchs_attention_may_follow_from_sizes() -> None:
    model = CausalFromTwoOn().eval()
    calls = [torch.randint(0, 9, (2, tokens)) for tokens in (5, 6, 2)]
    compiled = agree(model, *calls, min_scores=0, graphs=1)
    assert compiled.report.numbers == () and compiled.report.attention[0].mask == "causal"
    same(compiled(calls[0][:, :1]), model(calls[0][:, :1]))
    logits, _ = attngraph.compile(model, cache=True).prefill(calls[0])
    same(logits, model(calls[0]).detach())


@pytest.mark.parametrize("place", [0, 1, 2, -1])
def test_heads_that_vmap_puts_in_any_dimension_are_captured_whole(place: int, x: Tensor) -> None:
    def heads(x: Tensor, weights: Tensor) -> Tensor:
        return torch.vmap(lambda weight: attend(x @ weight, x), out_dims=place)(weights)

    agree(heads, (x, torch.randn(3, 8, 8)), strict=True, min_scores=0, fused=1)
