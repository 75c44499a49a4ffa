"""Attention by meaning: every spelling fuses and answers as eager does, every near miss keeps its meaning.

The spellings stand in `spellings/`. Each is called with gradients, in float64, first at one size and
then at another; results, NaN patterns and gradients are compared with eager's.
"""

import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngraph
from attngraph.api.compiled import CompiledModule
from attngraph.api.options import Options
from attngraph.ir.language.parser import parse
from attngraph.meaning.masks.words import describe


def _load(package: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(package.name, package / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module  # where its modules look for each other
    spec.loader.exec_module(module)
    return module


spellings = _load(Path(__file__).with_name("spellings"))
Compare = Callable[..., Any]

OWN_SIZES = {
    "negative_position_reads_from_the_end": "a table of that many entries is computed in the forward",
    "gumbel_like_straight_through": "one_hot wants the number of classes as a number",
}
"""Spellings of one size for another reason than that they write it."""
WITHOUT_SOFTMAX = {
    "sigmoid_attention", "linear_attention", "linear_attention_normalised",
    "a_table_divided_by_the_sum_of_its_columns", "a_triangle_that_is_not_divided",
    "a_table_with_negative_entries_over_its_sum",
}  # fmt: skip
NEAR_ANOTHER = {
    "no_scale", "scale_divides_scores", "scale_in_k", "einsum_ellipsis", "torchs_own",
    "stable_exp_over_sum", "causal_additive", "causal_equals_zero", "causal_smallest_float",
    "padding_dropped_and_causal", "cosine", "head_mask", "grouped_repeat_interleave", "grouped_tiled",
    "packed_per_head", "scale_divides_in_place", "powers_of_two", "einsum_with_output_projection",
    "axial_rows", "value_gated_after", "causal_generated_by_torch", "causal_times_a_billion",
    "dilated", "prefix_of_fixed_length", "lengths", "padding_of_ones_and_zeros",
    "padding_on_both_sides", "alibi_by_key", "learned_softmax_plus", "rotary", "loop_over_heads",
    "baddbmm", "scale_from_the_tensor", "scale_in_q", "scale_as_tensor", "single_head",
    "stable_with_max", "exp_of_log_softmax", "causal_additive_commuted", "causal_by_positions",
    "causal_one_minus_mask", "window_of_two_triangles", "bert_extended_mask", "any_boolean_mask",
    "one_key_head", "grouped_stacked", "swin_index_table", "normalised_queries_and_keys",
    "causal_flipped_twice", "blocks", "softmin_of_the_negative", "any_additive_mask",
    "bias_cut_from_a_larger_one", "alibi_with_computed_slopes", "softmax_over_queries",
    "softmax_over_heads", "sigmoid_attention", "double_softmax", "linear_attention",
    "mean_of_the_values", "softmax_over_features", "squared_weights", "distance_scores",
    "scores_returned",
}  # fmt: skip
"""Spellings and near misses that differ little from another one: run with the slow tests."""
FIRST_MUTANTS = {
    "small_fill_leaks", "scaled_after_a_finite_fill", "masked_with_one_entry_changed",
    "no_key_is_kept_finite", "keys_reshaped_not_transposed", "weights_used_twice",
    "weights_changed_in_place", "scores_changed_in_place_between", "normaliser_of_another_mask",
    "gradient_stopped_at_the_weights", "integer_division_towards_zero",
}  # fmt: skip


def slow_if(condition: bool, name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow) if condition else name


@contextmanager
def sizes(**changed: int) -> Iterator[None]:
    """The sizes that inputs are made with."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setattr(spellings.size, name, value)
        yield


def _names_in(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_names_in(c) for c in inner))


def is_of_one_size(name: str, function: Callable[..., Any]) -> bool:
    if function.__module__.endswith(".key_loops"):
        return True  # Python's loop over keys is traced for its number of keys
    return name in OWN_SIZES or bool(_names_in(function.__code__) & {"B", "T", "S"})


def check_at_two_sizes(
    name: str, function: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]], compare: Compare,
    later: bool = True,
) -> attngraph.CompiledModule:  # fmt: skip
    """Compare at one size, then at another; the second takes no new graph. `later`: results may wait."""
    compiled = attngraph.compile(function) if later else CompiledModule(function, Options(later=()))
    tolerance = spellings.TOLERANCE.get(name, 1e-10)
    first = compare(function, compiled, inputs(), tolerance=tolerance)
    assert first, first.differences
    assert compiled.report.graphs == 1
    if not is_of_one_size(name, function):
        with sizes(B=3, T=11, S=13):
            second = compare(function, compiled, inputs(), tolerance=tolerance)
        assert second, second.differences
        assert compiled.report.graphs == 1, "another size took another graph"
    return compiled


@pytest.mark.parametrize("name", [slow_if(n in NEAR_ANOTHER, n) for n in spellings.MUST_FUSE])
def test_a_spelling_of_attention_fuses_and_answers_as_eager_does(name: str, compare: Compare) -> None:
    compiled = check_at_two_sizes(name, *spellings.MUST_FUSE[name], compare)
    report = compiled.report
    assert len(report.attention) == spellings.COUNT.get(name, 1), report.missed
    assert not report.missed
    assert not report.breaks


@pytest.mark.parametrize("name", spellings.NOT_YET)
def test_what_does_not_fuse_yet_is_right_and_says_why(name: str, compare: Compare) -> None:
    report = check_at_two_sizes(name, *spellings.NOT_YET[name], compare).report
    assert not report.attention, "it fuses now: move it to MUST_FUSE"
    assert report.missed and all(m.reason for m in report.missed)


RETURNED = {
    "weights_returned", "scores_changed_after_use", "two_sets_of_which_one_is_returned",
    "values_of_pairs_beside_values_of_tokens", "one_of_two_uses_is_changed_by_a_maximum",
    "weights_of_both_directions_multiplied", "gated_and_the_total_returned",
}  # fmt: skip
"""Near misses in which all that cannot be fused is a result of its own."""


@pytest.mark.parametrize("name", sorted(RETURNED))
def test_what_is_fused_beside_a_result_that_needs_its_weights(name: str, compare: Compare) -> None:
    """That result waits until somebody looks at it, or is an attention too; the values are eager's."""
    report = check_at_two_sizes(name, *spellings.MUST_NOT[name], compare).report
    assert report.attention and (report.later or len(report.attention) > 1)


def _is_left_alone(name: str, compare: Compare) -> None:
    """Where no result may wait, as in a piece of a model."""
    function, inputs = spellings.MUST_NOT[name]
    report = check_at_two_sizes(name, function, inputs, compare, later=name not in RETURNED).report
    assert not report.attention
    if name not in WITHOUT_SOFTMAX:
        assert report.missed
        assert all(m.reason and "fusion/spellings/" in m.source for m in report.missed)


@pytest.mark.parametrize("name", [slow_if(n in NEAR_ANOTHER, n) for n in spellings.MUST_NOT])
def test_a_near_miss_is_left_alone_and_the_report_says_why(name: str, compare: Compare) -> None:
    _is_left_alone(name, compare)


def test_weights_that_are_divided_by_another_sum_are_left_alone(compare: Compare) -> None:
    _is_left_alone("renormalised_after_masking", compare)


@pytest.mark.parametrize("name", [slow_if(n not in FIRST_MUTANTS, n) for n in spellings.MUTANTS])
def test_a_mutant_keeps_its_own_meaning(name: str, compare: Compare) -> None:
    report = check_at_two_sizes(name, *spellings.MUTANTS[name], compare).report
    assert not report.breaks
    assert report.attention or report.missed


PLAIN = {"causal_masked_fill", "padding_kept", "alibi", "grouped_queries"}


@pytest.mark.parametrize("name", [slow_if(n not in PLAIN, n) for n in spellings.MUST_FUSE])
def test_a_spelling_fuses_where_no_gradients_flow(name: str, compare: Compare) -> None:
    with torch.no_grad():
        compiled = check_at_two_sizes(name, *spellings.MUST_FUSE[name], compare)
    assert len(compiled.report.attention) == spellings.COUNT.get(name, 1), compiled.report.missed


def _cast(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [slow_if(n not in PLAIN, n) for n in spellings.MUST_FUSE])
def test_the_error_is_at_most_twice_that_of_eager_in_the_same_dtype(name: str, dtype: torch.dtype) -> None:
    function, inputs = spellings.MUST_FUSE[name]
    longer = {} if is_of_one_size(name, function) else {"T": 33, "S": 40}
    with sizes(**longer), torch.no_grad():
        given = _cast(inputs(), dtype)
        try:
            eager = _results(function(*given))
        except RuntimeError as problem:
            pytest.skip(f"eager itself cannot: {problem}")
        exact = _results(function(*_cast(given, torch.float64)))
        if any(not torch.equal(e.isfinite(), x.isfinite()) for e, x in zip(eager, exact, strict=True)):
            pytest.skip("eager itself overflows in this dtype")
        mine = _results(attngraph.compile(function)(*given))
    for m, e, x in zip(mine, eager, exact, strict=True):
        assert (m.dtype, m.shape) == (e.dtype, e.shape)
        assert torch.equal(m.isfinite(), e.isfinite())
        error, allowed = ((t.double() - x.double()).nan_to_num(0, 0, 0).abs().max() for t in (m, e))
        slack = torch.finfo(dtype).eps * x.nan_to_num(0, 0, 0).abs().max()
        assert error <= 2 * allowed + slack


def _results(found: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """What a spelling returns: one tensor, or several."""
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("together", [True, False])
def test_softmaxes_under_one_dropout_lose_the_same_weights(together: bool) -> None:
    def model(a: Tensor, b: Tensor, c: Tensor, d: Tensor, v: Tensor) -> Tensor:
        first, second = (a @ b.mT).softmax(-1), (c @ d.mT).softmax(-1)
        if together:
            return F.dropout(first - second, 0.5) @ v
        return (F.dropout(first, 0.5) - F.dropout(second, 0.5)) @ v

    q, k, v = qkv(7)
    compiled = attngraph.compile(model)
    difference = compiled(q, k, q.clone(), k.clone(), v)
    assert len(compiled.report.attention) == 2, compiled.report.missed
    assert torch.equal(difference, torch.zeros_like(v)) == together


# --- masks that stand in a buffer ----------------------------------------------------------------


class Buffered(nn.Module):
    """Attention under a mask in a buffer, cut to the sequence's length."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        t = q.shape[2]
        return (q @ k.mT).masked_fill(self.mask[:t, :t] == 0, -torch.inf).softmax(-1) @ v


def qkv(tokens: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, 2, 4, tokens, 8, dtype=torch.float64).unbind())


@torch.no_grad()
def causal_without_gradients(tokens: int) -> Tensor:
    return torch.full((tokens, tokens), -torch.inf).triu(1)


def causal_in_bytes(tokens: int) -> Tensor:
    return torch.zeros(tokens, tokens).masked_fill(
        torch.triu(torch.ones(1, tokens, tokens), 1).type(torch.uint8)[0] != 0, -torch.inf
    )


def test_a_table_that_hides_keys_by_minus_infinity_is_a_mask() -> None:
    class Added(Buffered):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT + self.mask).softmax(-1) @ v

    table = torch.zeros(7, 7).masked_fill(torch.tensor([0.6]).expand(7, 7).bernoulli() > 0, -torch.inf)
    masks = []
    for mask in (table.fill_diagonal_(0), torch.randn(7, 7)):
        compiled = attngraph.compile(Added(mask.double()), min_scores=0)
        compiled(*qkv(7))
        masks.append(compiled.report.attention[0].mask)
    assert masks == ["r0[q, k] > -inf", "none"]


ADDED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "the argument": (lambda mask, table: mask, "whatever r0[q, k] adds"),
    "a view of it": (lambda mask, table: mask.T[None], "whatever r0[k, q] adds"),
    "ones where it keeps": (lambda mask, table: (1 - mask) * -1e9, "whatever r0[q, k] adds"),
    "a shift of whole rows": (lambda mask, table: mask[:, :1], "none"),
    "what is learned from it": (lambda mask, table: mask @ table, "none"),
    "a learned bias": (lambda mask, table: table, "none"),
    "as long as the argument": (lambda mask, table: torch.arange(mask.shape[0]).double() ** 0.5, "none"),
}


@pytest.mark.parametrize("name", ADDED)
def test_what_an_argument_adds_to_scores_is_told_as_a_mask(name: str) -> None:
    bias, wanted = ADDED[name]

    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, 7))

        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return (q @ k.mT + bias(mask, self.table)).softmax(-1) @ v

    compiled = attngraph.compile(Added().double(), min_scores=0)
    compiled(*qkv(7), torch.zeros(7, 7, dtype=torch.float64))
    (entry,) = compiled.report.attention
    assert entry.mask == wanted


def test_a_band_of_later_keys_is_told_with_both_of_its_ends() -> None:
    program = parse("s = dot\nkeep k >= q + 1 and k <= q + 4")
    assert describe(program) == "1 <= k - q <= 4"


@pytest.mark.parametrize("mask", [causal_without_gradients, causal_in_bytes])
def test_a_mask_of_positions_is_no_tensor_that_is_read(mask: Callable[[int], Tensor]) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT + mask(q.shape[2]).to(q)).softmax(-1) @ v

    q, k, v = (t.requires_grad_() for t in qkv(7))
    compiled = attngraph.compile(model)
    compiled(q, k, v)
    assert compiled.report.attention[0].mask == "causal"
    assert "r0" not in compiled.report.attention[0].program


def test_the_logarithm_of_the_padding_is_told_as_padding() -> None:
    function, inputs = spellings.MUST_FUSE["logarithm_of_the_padding_added"]
    compiled = attngraph.compile(function)
    compiled(*inputs())
    assert compiled.report.attention[0].mask.startswith("padding(r0)")


def test_a_mask_that_multiplies_minus_infinity_gives_nan_as_eager_does(compare: Compare) -> None:
    def times_after_infinities(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~keep[:, None, None], -torch.inf)
        causal = torch.ones(q.shape[2], k.shape[2]).tril().to(q.dtype)
        return (scores * causal - 1e9 * (1 - causal)).softmax(-1) @ v

    inputs = spellings.with_padding()
    assert not inputs[3].all()
    expected = times_after_infinities(*inputs)
    assert expected.isnan().any() and not expected.isnan().all()
    with torch.no_grad():
        same = compare(times_after_infinities, attngraph.compile(times_after_infinities), inputs)
    assert same, same.differences


MASKS: dict[str, Callable[[int, int], Tensor]] = {
    "causal & window(3)": lambda q, k: torch.ones(q, k).tril() - torch.ones(q, k).tril(-3),
    "k - q <= n0 - n1": lambda q, k: torch.ones(q, k).tril(k - q),
}


@pytest.mark.parametrize("words", list(MASKS))
def test_a_mask_is_told_in_few_words(words: str) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(MASKS[words](q.shape[2], k.shape[2]) == 0, -torch.inf).softmax(-1) @ v

    q, (k, v) = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 4, 9, 8)
    compiled = attngraph.compile(model)
    if "window" in words:
        compiled(*torch.randn(3, 2, 4, 7, 8))
    else:
        compiled(q, k, v)
    assert compiled.report.attention[0].mask == words


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("bias_of_near_keys_and_a_finite_fill_in_one_selection", "causal & window(4) (else s - 3e+38)"),
        ("two_finite_fills_one_inside_the_other", "causal & window(4) (else s - 1000000000.0)"),
    ],
)
def test_a_fill_that_a_selection_adds_beside_a_bias_is_told_as_a_mask(name: str, mask: str) -> None:
    function, inputs = spellings.MUST_FUSE[name]
    compiled = attngraph.compile(function)
    compiled(*inputs())
    assert compiled.report.attention[0].mask == mask


def test_a_causal_buffer_is_read_as_causal() -> None:
    compiled = attngraph.compile(Buffered(torch.ones(16, 16).tril()))
    compiled(*qkv(7))
    assert compiled.report.attention[0].mask == "causal"


@pytest.mark.parametrize("place", [(3, 5), (3, 1), (12, 14), (15, 0)], ids=str)
def test_a_causal_buffer_with_one_entry_changed_is_not_causal(
    place: tuple[int, int], compare: Compare
) -> None:
    mask = torch.ones(16, 16).tril()
    mask[place] = 1 - mask[place]
    model = Buffered(mask)
    compiled = attngraph.compile(model)
    for tokens in (7, 16):
        agreement = compare(model, compiled, qkv(tokens))
        assert agreement, agreement.differences
    assert compiled.report.attention[0].mask != "causal"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.mask.__setitem__((3, 1), 0),
        lambda m: setattr(m, "mask", torch.ones(16, 16)),
        lambda m: m.load_state_dict({"mask": torch.ones(16, 16)}),
        lambda m: m.load_state_dict({"mask": torch.ones(16, 16)}, assign=True),
        lambda m: m.mask.data.fill_(1),
    ],
    ids=["written in place", "replaced", "loaded", "loaded by assignment", "written through .data"],
)
def test_a_mask_that_changes_after_compiling_is_seen(
    change: Callable[[nn.Module], Any], compare: Compare
) -> None:
    model = Buffered(torch.ones(16, 16).tril())
    compiled = attngraph.compile(model)
    compiled(*qkv(7))
    with torch.no_grad():
        change(model)
    agreement = compare(model, compiled, qkv(7))
    assert agreement, agreement.differences


def test_a_buffer_that_repeats_only_up_to_the_traced_length_is_not_taken_for_a_formula(
    compare: Compare,
) -> None:
    bias = torch.arange(16, dtype=torch.float64)
    bias[9:] = 0.5

    class Biased(Buffered):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT + self.mask[: q.shape[2]]).softmax(-1) @ v

    model = Biased(bias)
    compiled = attngraph.compile(model)
    for tokens in (7, 16):
        agreement = compare(model, compiled, qkv(tokens))
        assert agreement, agreement.differences


@pytest.fixture
def recursion_as_python_has_it() -> Iterator[None]:
    """Python's own limit of recursion, which Inductor raises for the whole process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("recursion_as_python_has_it")
def test_scores_that_are_written_one_by_one_are_no_error_of_the_compiler() -> None:
    def model(x: Tensor) -> Tensor:
        scores = torch.empty(x.shape[0], x.shape[0], dtype=x.dtype)
        for i, query in enumerate(x):
            for j, key in enumerate(x):
                scores[i, j] = torch.dot(query, key)
        return scores.softmax(-1) @ x

    report = attngraph.explain(model, torch.randn(18, 3))
    assert [m.reason for m in report.missed] == [
        "too many operations follow one another between its operands and its weights to be read, as where a "
        "Python loop writes the scores one by one: compute them by one product"
    ]


@pytest.mark.parametrize("steps", [3, 16, 60])
def test_scores_that_are_used_again_and_again_are_refused_before_they_are_written_out(steps: int) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.mT
        for _ in range(steps):
            s = torch.sin(s) * s + torch.cos(s)
        return s.softmax(-1) @ v

    report = attngraph.explain(model, *torch.randn(3, 2, 2, 7, 8))
    if steps < 4:
        assert len(report.attention) == 1
    else:
        assert [m.reason for m in report.missed] == ["its scores are a formula of more than 800 words"]


def test_a_softmax_that_is_normalised_again_and_again_is_refused_before_it_is_written_out() -> None:
    """Rows and columns in turn, as Sinkhorn's iteration does: each step doubles the formula of an element."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT).softmax(-1)
        for _ in range(20):
            weights = weights / weights.sum(-2, keepdim=True)
            weights = weights / weights.sum(-1, keepdim=True)
        return weights @ v

    report = attngraph.explain(model, *torch.randn(3, 2, 2, 7, 8))
    assert len(report.missed) == 1
    assert not report.attention


def test_a_mask_of_many_regions_is_read_as_a_tensor(compare: Callable[..., Any]) -> None:
    """Shifted windows: nine regions are numbered, and pairs in two of them are masked. Compared in a formula
    they would be eighty-one comparisons."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        regions = torch.zeros(1, 8, 8, 1)
        stretches = (slice(0, -4), slice(-4, -2), slice(-2, None))
        for number, (rows, columns) in enumerate(itertools.product(stretches, stretches)):
            regions[:, rows, columns, :] = number
        windows = regions.view(1, 2, 4, 2, 4, 1).transpose(2, 3).reshape(-1, 16)
        apart = windows.unsqueeze(1) - windows.unsqueeze(2)
        mask = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
        s = (q @ k.mT).view(2, 4, 2, 16, 16) + mask.unsqueeze(1).unsqueeze(0)
        return s.view(8, 2, 16, 16).softmax(-1) @ v

    compiled = attngraph.compile(model)
    agreement = compare(model, compiled, tuple(torch.randn(3, 8, 2, 16, 8)), tolerance=2e-6)
    assert agreement, agreement.differences
    assert len(compiled.report.attention) == 1


def test_distances_that_the_model_rounds_are_rounded(compare: Callable[..., Any]) -> None:
    """bfloat16 has no 301; a program's integers have."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], dtype=torch.bfloat16)
        return (q @ k.mT - 0.5 * (place[:, None] - place).abs().float()).softmax(-1) @ v

    compiled = attngraph.compile(model)
    agreement = compare(model, compiled, tuple(torch.randn(3, 1, 1, 600, 4)), tolerance=2e-6)
    assert agreement, agreement.differences
    assert len(compiled.report.attention) == 1


def test_a_factor_of_the_weights_may_be_written_as_an_exponential(compare: Compare) -> None:
    """The algebra adds its exponent to that of the softmax."""

    def differential(q: Tensor, k: Tensor, v: Tensor, less: Tensor) -> Tensor:
        first, second = (q @ k.mT).softmax(-1), (k @ q.mT).softmax(-1)
        return (first - less.exp()[:, None, None] * second) @ v

    def inputs() -> tuple[Tensor, ...]:
        size = spellings.size
        return (*torch.randn(3, size.B, 4, size.T, 8, dtype=torch.float64).unbind(), torch.randn(4).double())

    compiled = check_at_two_sizes("differential", differential, inputs, compare)
    assert len(compiled.report.attention) == 2, compiled.report.missed
