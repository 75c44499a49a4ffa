"""FlexAttention, in and out: its functions as our attention, and a report's attention as its functions."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attngraph
from attngraph.api import attention as by_hand
from attngraph.report.entries import AttentionEntry, KernelEntry, TracedCall
from attngraph.report.programs import WELL_KNOWN

B, H, S, D = 2, 4, 24, 8
Q, K = torch.arange(S)[:, None], torch.arange(S)
DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 2]).repeat_interleave(4).expand(B, S)


def operands(grad: bool = False, heads: int = H, tokens: int = S) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, tokens, D), (B, heads, tokens, D), (B, heads, tokens, D)
    q, k, v = (torch.randn(s, generator=generator).requires_grad_(grad) for s in shapes)
    return q, k, v


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_hand, "_COMPILED", {})


def traces() -> int:
    return sum(one.compiled.report.graphs for one in by_hand._COMPILED.values())


# --- in ---


def alibi(slopes: Tensor, documents: Tensor, window: int = S) -> dict[str, Any]:
    """Functions that capture tensors, through a helper too, and a number."""

    def bias(h: Tensor, distance: Tensor) -> Tensor:
        return slopes[h] * distance

    return {
        "score_mod": lambda score, b, h, q, k: score + bias(h, k - q),
        "mask_mod": lambda b, h, q, k: (
            (k <= q) & (q - k < window) & (documents[b, q] == documents[b, k])
        ),
    }  # fmt: skip


def alibi_written_out(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, window: int) -> Tensor:
    seen = (K <= Q) & (Q - window < K) & (DOCUMENTS[:, None, :, None] == DOCUMENTS[:, None, None])
    scores = q @ k.mT * D**-0.5 + slopes[:, None, None] * (K - Q)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def test_functions_of_one_code_are_compiled_once_and_tensors_that_they_capture_get_gradients() -> None:
    for seed, window, traced in ((0, S, 1), (1, S, 1), (2, 3, 2)):  # a number is part of the code
        slopes = torch.rand(H, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        given = (*operands(grad=True), slopes)
        out = attngraph.attention(*given[:3], **alibi(slopes, DOCUMENTS.clone(), window))
        expected = alibi_written_out(*given, window)
        torch.testing.assert_close(out, expected)
        for mine, theirs in zip(
            *(torch.autograd.grad(o.sin().sum(), given) for o in (out, expected)), strict=True
        ):
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
        assert traces() == traced


OUTSIDE = torch.linspace(0.1, 0.4, H)


def _global(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score * OUTSIDE[h]


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = nn.Parameter(torch.randn(H, S, S)), nn.Linear(2, 2)

    def score(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.table[h, q, k]


def test_tensors_of_modules_and_of_files_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    dot, module = q @ k.mT * D**-0.5, Bias()
    for _ in range(2):
        out = attngraph.attention(q, k, v, score_mod=module.score)
        torch.testing.assert_close(out, (dot + module.table).softmax(-1) @ v)
        (grad,) = torch.autograd.grad(out.square().sum(), module.table)
        assert grad.shape == (H, S, S)
        assert traces() == 1
        module.table = nn.Parameter(torch.randn(H, S, S))
    for factor in (OUTSIDE, OUTSIDE.flip(0).requires_grad_(), OUTSIDE.exp().requires_grad_()):
        monkeypatch.setitem(globals(), "OUTSIDE", factor)
        out, expected = (
            attngraph.attention(q, k, v, score_mod=_global),
            (dot * factor[:, None, None]).softmax(-1) @ v,
        )
        torch.testing.assert_close(out, expected)
    grads = [torch.autograd.grad(o.square().sum(), factor)[0] for o in (out, expected)]
    torch.testing.assert_close(*grads)


def test_scale_and_fewer_heads_are_as_in_flex_attention() -> None:
    q, k, v = operands(heads=2)
    for asked in ({"scale": 0.3}, {"mask_mod": lambda b, h, q, k: k < q}):  # the first query sees no key
        out = attngraph.attention(q, k, v, enable_gqa=True, **asked)
        mask = create_block_mask(asked["mask_mod"], B, H, S, S, "cpu") if "mask_mod" in asked else None
        expected = flex_attention(q, k, v, None, mask, asked.get("scale"), True)
        torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="enable_gqa"):
        attngraph.attention(q, k, v, scale=1.0)


def test_inside_of_a_model_it_is_a_part_of_the_model() -> None:
    given, mask = operands(), alibi(torch.rand(H), DOCUMENTS, 3)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngraph.attention(q.relu(), k, v, **mask).exp()

    compiled = attngraph.compile(model, min_scores=0, strict=True)
    torch.testing.assert_close(compiled(*given), model(*given))
    (entry,) = compiled.report.attention
    assert entry.mask.startswith("causal & window(3) & ")


def test_errors_name_what_cannot_be_expressed() -> None:
    given = operands()
    with pytest.raises(attngraph.NotFusedError, match=r"<lambda> \(.*test_flex.*special_zeta"):
        attngraph.attention(*given, score_mod=lambda s, b, h, q, k: torch.special.zeta(s, s))
    with pytest.raises(attngraph.CaptureError, match=r"test_flex.*\.item\(\)"):
        attngraph.attention(*given, score_mod=lambda s, b, h, q, k: s if s > 0 else 2 * s)
    with pytest.raises(ValueError, match="found both"):
        attngraph.attention(*given, "keep k <= q", mask_mod=lambda b, h, q, k: k <= q)


# --- out ---

PROGRAMS: dict[str, tuple[str, tuple[int, ...], tuple[Tensor, ...]]] = {
    **{name: (w.text, w.small, w.reads(S, S, w.small)) for name, w in WELL_KNOWN.items()},
    "a mask before a score": ("s = 0.1 * dot; keep k <= q; s = tanh(s) * 3", (), ()),
    "two fills": ("keep k <= q else -1e9; keep r0[b, k]", (), (torch.arange(S).expand(B, S) % 5 != 2,)),
    "words": ("s = 0.1 * dot; keep not (k > q or k == 3) or k == q", (), ()),
    "a bounded distance": ("s = dot + r0[h, min(max(k - q, -3), 3) + 3]", (), (torch.randn(8, 7),)),
    "truths are numbers": ("s = dot + (k > q) - (k == q) * 2.5; keep r0[b, k] + r0[b, q]", (),
                           (torch.arange(S).expand(B, S) % 5 != 2,)),
    "rows": ("s = 0.1 * dot * r0[q]; keep k <= q; p = p * (1 + r0[q])", (), (torch.rand(S),)),
    "functions": ("s = dot - abs(float(k) - q) ** 1.5 * log(n0); keep (q - k) // n0 < n0 / 2", (3,), ()),
    "blind rows": ("s = 0.1 * dot; keep k < q; p = where(isnan(p), 0.0, p)", (), ()),
    "blind rows beside a bias": (
        "s = 0.1 * dot + r0[h] * k; keep k < q; p = where(isnan(p), 0.0, p)", (), (torch.randn(8),)
    ),
    "a sink of rows": ("s = 0.1 * dot; keep k < q; sink r0[h] + 0.1 * q", (), (torch.randn(8),)),
    "a mask of scores": ("s = 0.1 * dot; keep dot > 0 or k == q", (), ()),
}  # fmt: skip
UNSAID = {
    ("dropout", "flex"): "weights are changed after the softmax",
    ("dropout", "sdpa"): "weights are changed after the softmax",
    ("softcap", "sdpa"): "tanh",
    ("a mask before a score", "sdpa"): "tanh",
    ("a mask of scores", "sdpa"): "which keys are seen depends on the scores",
}


@pytest.mark.parametrize("way", ["flex", "sdpa"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_as_source_for_torch_computes_the_same(name: str, way: str) -> None:
    program, sizes, reads = PROGRAMS[name]
    call = TracedCall(B, S, S, "torch.float32", sizes)
    entry = AttentionEntry("", program, 8, 2, D, D, "", "", KernelEntry(), 0.0, call=call)
    if (name, way) in UNSAID:
        with pytest.raises(ValueError, match=UNSAID[name, way]):
            getattr(entry, way)()
        return
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, heads, S, D, generator=generator) for heads in (8, 2, 2))
    reads = tuple(r.expand(B, -1) if r.ndim == 2 and len(r) == 1 else r for r in reads)
    expected = attngraph.attention(q, k, v, program, *reads, sizes=sizes)
    made: dict[str, Any] = {}
    exec(getattr(entry, way)(), made)
    torch.testing.assert_close(made["attention"](q, k, v, *reads), expected)
    if way == "flex" and "sink" not in program and "p =" not in program:  # and in again
        score, mask = made["mods"](*reads)
        scale = attngraph.parse(program).scale or 1.0
        given = {"score_mod": score, "mask_mod": mask, "scale": scale, "enable_gqa": True}
        torch.testing.assert_close(attngraph.attention(q, k, v, **given), expected)


def test_a_row_that_sees_no_key_is_told_of() -> None:
    program = "s = 0.1 * dot; keep k < q"
    entry = AttentionEntry("", program, 4, 4, D, D, "", "", KernelEntry(), 0.0)
    for source in (entry.flex(), entry.sdpa()):
        assert "NaN in the model" in source
    seen = dataclasses.replace(entry, program="s = 0.1 * dot; keep k <= q")
    assert "NaN" not in seen.flex() + seen.sdpa()
    assert "is_causal=True" in seen.sdpa()


def test_a_report_gives_its_attention_as_functions() -> None:
    table = torch.randn(2 * S - 1)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        scores = q @ k.mT * 0.5 + table[places - places[:, None] + S - 1]
        return scores.masked_fill(places > places[:, None], -torch.inf).softmax(-1) @ v

    given = operands()
    entry = attngraph.explain(model, *given).attention[0]
    made: dict[str, Any] = {}
    exec(entry.flex(), made)
    torch.testing.assert_close(made["attention"](*given, table), model(*given))


@given(data=st.data())
@settings(max_examples=40)
def test_any_program_as_source_means_the_same(language: Any, data: st.DataObject) -> None:
    """Random programs; rows that see no key are left out."""
    program = str(data.draw(language.programs()))
    q, k, v = (t.double() for t in operands(heads=2, tokens=6))
    reads, sizes = language.reads(B, H, 6, 6), (2, 3)
    call = TracedCall(B, 6, 6, "torch.float64", sizes)
    entry = AttentionEntry("", program, H, 2, D, D, "", "", KernelEntry(), 0.0, call=call)
    used = [reads[number] for number in attngraph.parse(program).reads]
    expected = attngraph.attention(q, k, v, program, *reads, sizes=sizes, kernel="reference")
    for source in (entry.flex, entry.sdpa):
        try:
            text = source()
        except ValueError:
            continue
        made: dict[str, Any] = {}
        exec(text, made)
        out = made["attention"](q, k, v, *used)
        torch.testing.assert_close(torch.where(expected.isnan(), torch.nan, out), expected, equal_nan=True)
