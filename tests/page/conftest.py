"""Reports to show: of real models, and one whose every name tries to be markup."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.ir.graph.literals import format_name
from attngraph.report.entries import (
    AttentionEntry,
    Break,
    CacheEntry,
    KernelEntry,
    LatentEntry,
    Missed,
    PassRecord,
    TracedCall,
)
from attngraph.report.report import CompileReport
from attngraph.report.user_code import Reached, Stretch, UserCode, like

EVIL = "</script><img src=x onerror=document.body.dataset.owned=1>\"'&`ünï\u202ecode\ud800\x00"
"""A name that would run a script, end an element, turn text around or break UTF-8, if it were let."""


class Misses(nn.Module):
    """One attention, one whose weights are added to the result, and one softmax that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.query(x) @ x.mT).softmax(-1)
        fused = ((self.query(x) @ x.mT) / 4).softmax(-1) @ x
        found: Tensor = weights @ x + fused + x.softmax(-1) + weights.log().sum()
        return found


class Pieces(nn.Module):
    """A model that prints, which a graph of it would lose."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.query(x) @ x.mT).softmax(-1) @ x
        print("between")
        return (self.query(y) @ y.mT).softmax(-1) @ y


def compiled(model: nn.Module, *inputs: Tensor) -> CompileReport:
    made = attngraph.compile(model)
    with torch.no_grad():
        made(*inputs)
    return made.report


@pytest.fixture(scope="session")
def missed() -> CompileReport:
    """Of a call with gradients: without them, a softmax that is no attention is a part of a token program."""
    made = attngraph.compile(Misses())
    made(torch.randn(2, 8, 16))
    return made.report


@pytest.fixture(scope="session")
def pieces() -> CompileReport:
    return compiled(Pieces(), torch.randn(2, 8, 16))


@pytest.fixture(scope="session")
def decoder() -> CompileReport:
    from attngraph.models.targets import tiny_decoder_lm

    model, (ids,) = tiny_decoder_lm(tokens=12)
    made = attngraph.compile(model, cache=True)
    made.prefill(ids)
    return made.report


def layers(count: int, fused: bool, name: Callable[[int], str] = "blocks.{}".format) -> str:
    """The text of a model of equal layers, before or after its attentions are fused."""
    lines = ["graph(", "  %arg0: f32[1, s0, 64],", ") {"]
    numbers = itertools.count()

    def add(text: str) -> str:
        value = f"%{next(numbers)}"
        lines.append(f"  {value} = {text}".ljust(78) + "  # model.py:7")
        return value

    last = "%arg0"
    for number in range(count):
        module = name(number)
        lines.append(f"  [{format_name('', module + '.attn')}]")
        q = add(f"linear({last}, {format_name('$', module + '.qkv.weight')}) : f32[1, s0, 64]")
        if fused:
            y = add(f"attention({q}, {q}, {q}) : f32[1, 1, s0, 64]")
            lines += ["          s = 0.125 * dot", "          keep k <= q"]
        else:
            s = add(f"matmul({q}, {q}) : f32[1, s0, s0]")
            p = add(f"softmax({s}, -1) : f32[1, s0, s0]")
            y = add(f"matmul({p}, {q}) : f32[1, s0, 64]")
        lines.append(f"  [{format_name('', module)}]")
        last = add(f"add({last}, {y}) : f32[1, s0, 64]")
        lines.append(f"  [{format_name('', module + '.mlp')}]")
        for _ in range(12):
            last = add(f"gelu({last}) : f32[1, s0, 64]")
    return "\n".join([*lines, f"  return [{last}]", "}"])


def report_of(count: int, name: Callable[[int], str] = "blocks.{}".format, word: str = "") -> CompileReport:
    """A report as of a model of equal layers; `word` stands wherever a model can put a word."""
    before, after = layers(count, False, name), layers(count, True, name)
    kernel = KernelEntry(f"cpu.compiled {word}".strip(), f"// kernel {word}\nint main;\n")
    entry = AttentionEntry(
        name(0) + ".attn", "s = 0.125 * dot\nkeep k <= q", 4, 4, 16, 16, f"causal {word}",
        f"model.py:7 {word}", kernel, 3e-16,
        latent=LatentEntry(reason=f"left {word}"), call=TracedCall(1, 64, 64, "float32"),
    )  # fmt: skip
    led_by = f"main.py {word}:2", "model.py:7"
    code = UserCode(
        (
            Stretch("model.py", 5, f"def attend(x):  # {word}\n    y = x\n    return attention(y)\n"),
            Stretch(f"main.py {word}", 1, f"def main(x):\n    return attend(x)  # {word}"),
        ),
        tuple(Reached(at, like(name(0) + ".attn"), led_by, 1) for at in ("model.py:7", f"model.py:7 {word}")),
    )
    passes = (
        PassRecord("canonicalize", False, 0.02, 17 * count, 17 * count, ()),
        PassRecord(
            "fuse-attention", True, 0.3, 17 * count, 15 * count, (f"fused {word}",), f"x={word!r}", after
        ),
        PassRecord("merge-heads", False, 0.01, 15 * count, 15 * count, ()),
    )  # fmt: skip
    return CompileReport(
        tuple(dataclasses.replace(entry, name=f"{name(n)}.attn") for n in range(count)),
        (Missed(f"its weights are used {word}", f"model.py:9 {word}", f"head {word}"),),
        passes, (Break(f"forward() prints {word}", f"model.py:3 {word}"),), 1.5,
        cache=CacheEntry(1024, 2048, 4, ((f"kept {word}", 512, None, 1),)), captured=before, code=code,
    )  # fmt: skip


@pytest.fixture
def equal_layers() -> Callable[..., CompileReport]:
    return report_of


@pytest.fixture
def evil() -> CompileReport:
    return report_of(4, lambda n: f"{EVIL}.layers.{n}", EVIL)
