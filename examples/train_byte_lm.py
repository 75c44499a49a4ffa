"""Train a byte-level language model twice, eager and compiled, and compare.

    python examples/train_byte_lm.py --steps 300 --out runs/byte_lm

The model is the plain decoder of `attngraph.models.decoder_lm`; the text is Python's own help. Both
runs start from the same weights and read the same bytes in the same order, in float32 and without
dropout, so their losses differ by rounding only. Written to the folder --out: `figures.json` with both
curves, the largest difference, time per step and peak memory, and `loss.svg` with the curves. A bar on
standard error shows progress; the summary goes to standard output.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import nn

import attngraph
from attngraph.models.decoder_lm import DecoderLM, DecoderLMConfig
from attngraph.models.text import byte_batch
from attngraph.runtime.measure import Measurement, measure

HEAD_WIDTH = 32
LEARNING_RATE = 1e-3
COLOURS = {"eager": "#1f77b4", "attngraph": "#d62728"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    options = parse(argv)
    eager = new_model(options)
    model = copy.deepcopy(eager)
    compiled = attngraph.compile(model)
    steps = {
        "eager": training_step(eager, eager, options),
        "attngraph": training_step(compiled, model, options),
    }
    curves = {name: train(step, options.steps, label=name) for name, step in steps.items()}
    print(f"measuring one step of each, batches of {options.batch} x {options.tokens}", file=sys.stderr)
    measured = measure({name: partial(step, 0) for name, step in steps.items()}, rounds=5)

    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    found = figures(options, curves, measured, fused=len(compiled.report.attention))
    (out / "figures.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (out / "loss.svg").write_text(loss_plot(curves), encoding="utf-8")
    print(summary(found))
    print(f"written: {out / 'figures.json'}, {out / 'loss.svg'}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program with a message where they make no sense."""
    parser = argparse.ArgumentParser(
        "train_byte_lm", description="Train a byte-level model eager and compiled."
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default 300)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a sequence (default 256)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a batch (default 4)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (default 4)")
    parser.add_argument(
        "--width", type=int, default=128, help=f"model width, a multiple of {HEAD_WIDTH} (default 128)"
    )
    parser.add_argument("--out", default="byte_lm", help="folder for the results (default byte_lm)")
    options = parser.parse_args(argv)
    for name in ("steps", "tokens", "batch", "layers", "width"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, found {getattr(options, name)}")
    if options.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, found {options.width}")
    return options


def new_model(options: argparse.Namespace) -> DecoderLM:
    """The model with its first weights, the same at every call."""
    config = DecoderLMConfig(
        layers=options.layers,
        width=options.width,
        heads=options.width // HEAD_WIDTH,
        max_tokens=options.tokens,
    )
    torch.manual_seed(0)
    return DecoderLM(config)


def training_step(runner: nn.Module, model: nn.Module, options: argparse.Namespace) -> Callable[[int], float]:
    """A function that does the optimizer step of a given number and returns the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(number: int) -> float:
        window = byte_batch(options.batch, options.tokens + 1, seed=number)
        _, loss = runner(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def train(step: Callable[[int], float], steps: int, *, label: str) -> list[float]:
    """The loss at each step, with a bar on standard error."""
    losses: list[float] = []
    start = time.perf_counter()
    for number in range(steps):
        losses.append(step(number))
        show_progress(label, number + 1, steps, losses[-1], time.perf_counter() - start)
    return losses


def show_progress(label: str, done: int, total: int, loss: float, seconds: float) -> None:
    """Redraw the bar; where standard error is no terminal, a line for each tenth of the way."""
    live = sys.stderr.isatty()
    if not live and done != total and done * 10 // total == (done - 1) * 10 // total:
        return
    filled = 30 * done // total
    left = seconds / done * (total - done)
    text = (
        f"{label:<10} |{'#' * filled}{'.' * (30 - filled)}| {done}/{total}  loss {loss:.4f}  "
        f"{seconds:.0f} s, {left:.0f} s left"
    )
    end = "" if live and done < total else "\n"
    print(f"\r\x1b[K{text}" if live else text, end=end, file=sys.stderr, flush=True)


def figures(
    options: argparse.Namespace,
    curves: Mapping[str, Sequence[float]],
    measured: Mapping[str, Measurement],
    *,
    fused: int,
) -> dict[str, object]:
    """Everything that was found, as it goes into the JSON file."""
    distance = max(abs(a - b) for a, b in zip(curves["eager"], curves["attngraph"], strict=True))
    return {
        "settings": vars(options) | {"torch": torch.__version__, "threads": torch.get_num_threads()},
        "fused_attentions": fused,
        "largest_loss_difference": distance,
        "final_loss": {name: losses[-1] for name, losses in curves.items()},
        "step": {name: asdict(m) for name, m in measured.items()},
        "losses": {name: list(losses) for name, losses in curves.items()},
    }


def summary(found: Mapping[str, object]) -> str:
    """A few lines for people."""
    step, final = found["step"], found["final_loss"]
    assert isinstance(step, dict)
    assert isinstance(final, dict)
    lines = [f"{'':<12}{'last loss':>10}{'time per step':>16}{'peak memory of a step':>24}"]
    for name, m in step.items():
        milliseconds, mebibytes = m["seconds"] * 1000, m["peak_bytes"] / 2**20
        lines.append(f"{name:<12}{final[name]:>10.4f}{milliseconds:>13.1f} ms{mebibytes:>20.1f} MiB")
    lines.append(
        f"largest difference of the losses {found['largest_loss_difference']:.2g}, "
        f"{found['fused_attentions']} attentions fused"
    )
    return "\n".join(lines)


def loss_plot(curves: Mapping[str, Sequence[float]], *, width: int = 720, height: int = 420) -> str:
    """The curves as an SVG picture: steps to the right, loss (nats a byte) upwards."""
    left, right, top, bottom = 60, 20, 20, 45
    most = max(len(losses) for losses in curves.values())
    finite = [loss for losses in curves.values() for loss in losses if math.isfinite(loss)]
    ticks = round_numbers(min(finite, default=0.0), max(finite, default=1.0))
    low, high = ticks[0], ticks[-1]

    def x(step: float) -> float:
        return left + (width - left - right) * step / max(most - 1, 1)

    def y(loss: float) -> float:
        return top + (height - top - bottom) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tick in ticks:
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
            f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for step in sorted({0, (most - 1) // 2, most - 1}):
        parts.append(f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 8}" text-anchor="middle">step</text>')
    parts.append(
        f'<text transform="translate(16 {height / 2}) rotate(-90)" text-anchor="middle">'
        "loss (nats per byte)</text>"
    )
    for row, (name, losses) in enumerate(curves.items()):
        # The first curve is drawn wide and pale, so that it shows under an equal second one.
        stroke = 'stroke-width="5" stroke-opacity="0.4"' if row == 0 else 'stroke-width="1.5"'
        colour = COLOURS.get(name, "#333")
        points = " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(losses) if math.isfinite(loss))
        place = f'x="{width - right - 110}" y="{top + 16 + 18 * row}"'
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" {stroke}/>')
        parts.append(f'<text {place} fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def round_numbers(low: float, high: float, *, about: int = 6) -> list[float]:
    """Evenly spaced round numbers from at or below `low` to at or above `high`, two at least."""
    rough = max(high - low, 1e-9) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * i for i in range(first, max(last, first + 1) + 1)]


if __name__ == "__main__":
    sys.exit(main())
