"""What a call of a compiled model costs before its graph runs: finding out that nothing has changed.

    python -m workshop call-checks --json call_checks.json

Stock models of transformers with twelve layers. "check" looks up the graph of a call, state and all; "walk"
takes a fingerprint of the state anew, as after a change. Beside them stands a loop of Python that looks at
each parameter once, so that figures of different machines can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import attngraph
from attngraph.capture.guards import call_key
from attngraph.capture.state.fingerprint import fingerprint
from attngraph.capture.structure import flatten
from workshop.harness import Cell, Options, Row, Suite, times

LAYERS = 12


def models(layers: int) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

    wide: dict[str, Any] = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1}
    llama = LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, **wide,
    )  # fmt: skip
    gpt = GPT2Config(n_layer=layers, n_embd=64, n_head=4, **wide)
    return {"GPT-2": GPT2Model(gpt).eval(), "Llama": LlamaModel(llama).eval()}


def measured(model: nn.Module) -> dict[str, Row]:
    ids = torch.randint(0, 100, (1, 8))
    compiled: Any = attngraph.compile(model, min_scores=0)
    for _ in range(3):
        compiled(ids, use_cache=False)
    leaves, spec = flatten(((ids,), {"use_cache": False}))
    key_of = functools.partial(call_key, leaves, spec, compiled._fingerprints)
    graph = compiled._graphs.find(key_of, [ids])
    assert graph is not None, "the call is not served"
    parameters = list(model.parameters())
    work = {
        "check": lambda: compiled._graphs.find(key_of, [ids]),
        "walk": lambda: fingerprint([model], graph.scope),
        "loop": lambda: [(p.dtype, p.device, p.shape) for p in parameters],
    }
    return times(work, rounds=200)


def cells(options: Options) -> Iterator[Cell]:
    for name, model in models(2 if options.small else LAYERS).items():
        yield Cell(f"{name}, {model.config.num_hidden_layers} layers", functools.partial(measured, model))


SUITE = Suite("call-checks", __doc__, cells, base="walk")
MAIN = SUITE.main
