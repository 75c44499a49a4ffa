"""`python -m workshop faults`: write faults into models by rule, verify each, and count what is noticed."""

from __future__ import annotations

import argparse
import collections
import importlib
import importlib.util
import inspect
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attngraph
from attngraph.models.targets import seeded
from workshop.faults.rules import Fault, faults
from workshop.processes import quietly

Row = dict[str, Any]
OURS, THEIRS = "attngraph.models", "transformers.models"
_LM = {"layers": 1, "width": 32, "heads": 4}
_STOCK = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 256, "attn_implementation": "eager",
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TARGETS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "ModernDecoder": (f"{OURS}.modern_decoder", {**_LM, "kv_heads": 2, "head_width": 8, "hidden": 48},
                      (f"{OURS}.modern_decoder", f"{OURS}.positions")),
    "DecoderLM": (f"{OURS}.decoder_lm", _LM, (f"{OURS}.decoder_lm", f"{OURS}.masked_attention")),
    "Encoder": (f"{OURS}.encoder", {**_LM, "hidden": 48}, (f"{OURS}.encoder", f"{OURS}.masked_attention")),
    "MLADecoder": (f"{OURS}.mla", {**_LM, "heads": 2, "latent": 16, "nope": 8, "rope": 8, "value": 8,
                                   "query_rank": 12}, (f"{OURS}.mla",)),
    "LlamaForCausalLM": (f"{THEIRS}.llama.modeling_llama", {**_STOCK, "num_key_value_heads": 2}, ()),
    "Gemma2ForCausalLM": (f"{THEIRS}.gemma2.modeling_gemma2", {
        **_STOCK, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 5}, ()),
    "BertModel": (f"{THEIRS}.bert.modeling_bert", _STOCK, ()),
    "GPTNeoXForCausalLM": (f"{THEIRS}.gpt_neox.modeling_gpt_neox", _STOCK, ()),
}  # fmt: skip
"""Of a class: its module, the sizes of its configuration, and the modules that get faults (none: its own)."""


def main(argv: Sequence[str]) -> int:
    """The command; the exit code is 0."""
    parser = argparse.ArgumentParser("python -m workshop faults", description=__doc__)
    parser.add_argument("--only", nargs="*", choices=TARGETS, default=list(TARGETS), help="classes")
    parser.add_argument("--count", type=int, default=30, help="faults of a class (default 30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=10, help="seconds of a verification (default 10)")
    parser.add_argument("--minutes", type=float, default=60, help="after which nothing new is begun")
    parser.add_argument("--json", type=Path, required=True, help="the file that is written")
    given = parser.parse_args(argv)
    quietly()
    rows: list[Row] = []
    end = time.monotonic() + 60 * given.minutes
    turns = [(name, turn) for name in given.only for turn in enumerate(drawn(name, given.seed, given.count))]
    for name, (_, (module, fault)) in sorted(turns, key=lambda turn: turn[1][0]):  # each class in turn
        if time.monotonic() > end:
            break
        rows.append(row_of(name, module, fault, given.budget))
        print(*rows[-1].values(), sep=" | ", flush=True)
        about = {"seed": given.seed, "budget": given.budget, "counts": counts(rows)}
        given.json.write_text(_text({"about": about, "rows": rows}))
    print(counts(rows))
    return 0


def _text(found: Row) -> str:
    lines = ",\n  ".join(json.dumps(row) for row in found["rows"])
    return f'{{"about": {json.dumps(found["about"])},\n "rows": [\n  {lines}\n ]}}\n'


def drawn(name: str, seed: int, count: int) -> list[tuple[str, Fault]]:
    """Faults of a class, by its module: of each rule in turn, in an order that the seed decides."""
    module, _, others = TARGETS[name]
    chosen, by_rule = random.Random(f"{seed} {name}"), collections.defaultdict(list)
    for file in others or (module,):
        for fault in faults(_source(file)):
            by_rule[fault.rule].append((file, fault))
    for rule in by_rule.values():
        chosen.shuffle(rule)
    turns = [(n, rule, one) for rule, of in by_rule.items() for n, one in enumerate(of)]
    return [one for _, _, one in sorted(turns, key=lambda turn: turn[:2])][:count]


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return Path(spec.origin).read_text(encoding="utf-8")


def row_of(name: str, module: str, fault: Fault, budget: float) -> Row:
    """What comes of a fault: "noticed", "not noticed", "refused" (the changed model cannot be built, called
    or compared), "no fault", or "not run" (the call does not come to its line). `names`: as `_named` says."""
    row = {"class": name, "module": module, "rule": fault.rule, "line": fault.line, "before": fault.before,
           "after": fault.after}  # fmt: skip
    reference, inputs = build(name)
    try:
        with ran(module, fault.line) as met, changed(name, module, fault.text):
            candidate, _ = build(name)
        with torch.no_grad(), seeded(), ran(module, fault.line) as also:
            candidate(*inputs)
    except Exception as problem:
        return {**row, "verdict": "refused", "names": "", "about": str(problem).split("\n")[0][:100]}
    if fault.rule == "no bias" and candidate.state_dict().keys() == reference.state_dict().keys():
        return {**row, "verdict": "no fault", "names": "", "about": "it has none"}
    if not met + also:
        return {**row, "verdict": "not run", "names": "", "about": ""}
    try:
        verdict = attngraph.verify(reference, candidate, inputs, budget=budget)
    except Exception as problem:
        return {**row, "verdict": "failed", "names": "", "about": repr(problem)[:200]}
    about = verdict.differences[0].about[:100] if verdict.differences else ""
    word = {"equal": "not noticed", "differs": "noticed"}.get(verdict.status, "refused")
    return {**row, "verdict": word, "names": _named(verdict, module, fault, reference), "about": about}


def _named(verdict: attngraph.Verdict, module: str, fault: Fault, model: nn.Module) -> str:
    """What is named: "line"; "function" where another line of it, or the module whose code it is, is;
    "module" where another module is, which may call it; or ""."""
    file = f"{module.rpartition('.')[2]}.py:"
    lines = [
        int(source.rpartition(":")[2]) for d in verdict.differences for source in (d.reference, d.candidate)
        if file in source
    ]  # fmt: skip
    if fault.line in lines:
        return "line"
    within = any(fault.function[0] <= line <= fault.function[1] for line in lines)
    modules = [type(model.get_submodule(d.enters)).forward for d in verdict.differences if d.enters]
    code = [inspect.unwrap(forward).__code__ for forward in modules]
    own = any(fault.function[0] <= c.co_firstlineno <= fault.function[1] and
              c.co_filename.endswith(file[:-1]) for c in code)  # fmt: skip
    return "function" if within or own else "module" if modules else ""


def build(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A tiny model, with weights that leave no bias at 0 and no norm's at 1, and the arguments of a call."""
    module, sizes, _ = TARGETS[name]
    home: Any = importlib.import_module(module)
    made: Callable[..., Any] = getattr(home, name)
    with seeded():
        if module.startswith(OURS):
            kind = next(v for k, v in vars(home).items() if k == f"{name.removesuffix('Decoder')}Config"
                        or k == f"{name}Config")  # fmt: skip
            model = made(kind(**sizes)).eval()
        else:
            model = made(made.config_class(**sizes)).eval()  # type: ignore[attr-defined]
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.randn_like(weight)
        ids = torch.randint(3, 60, (2, 9))
    masked = name == "Encoder", not module.startswith(OURS)
    mask = [torch.ones(2, 9, dtype=torch.bool)] * masked[0] + [torch.ones(2, 9, dtype=torch.int64)] * masked[
        1
    ]
    return model, (ids, *mask)


@contextmanager
def changed(name: str, module: str, text: str) -> Iterator[None]:
    """Within, the class is of a copy of its modules, of which one has another source."""
    prefix = OURS if module.startswith(OURS) else module
    kept = {n: m for n, m in sys.modules.items() if n == module or n.startswith(f"{prefix}.")}
    for one in kept:
        del sys.modules[one]
    try:
        spec = importlib.util.find_spec(module)
        assert spec and spec.origin
        made = sys.modules[module] = importlib.util.module_from_spec(spec)
        exec(compile(text, spec.origin, "exec", dont_inherit=True), made.__dict__)
        yield
    finally:
        for one in [n for n in sys.modules if n == module or n.startswith(f"{prefix}.")]:
            del sys.modules[one]
        sys.modules.update(kept)


@contextmanager
def ran(module: str, line: int) -> Iterator[list[int]]:
    """Notes whether a line of a module runs."""
    spec, met = importlib.util.find_spec(module), list[int]()
    file = spec.origin if spec else ""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != file:
            return None
        if event == "line" and frame.f_lineno == line:
            met.append(line)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield met
    finally:
        sys.settrace(before)


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many faults there are of each verdict, and of those noticed how many are named how."""
    found = collections.Counter(row["verdict"] for row in rows)
    named = collections.Counter(
        f"names {row['names'] or 'nothing'}" for row in rows if row["verdict"] == "noticed"
    )
    return {**found, **named}
