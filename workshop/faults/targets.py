"""The models that get faults: stock classes of transformers and those of attngraph.models, all of them tiny.

A candidate is made anew, from a source or a configuration that has a fault, and gets the reference's weights;
what its constructor computes besides stays its own.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.models.targets import seeded
from workshop.bench.stock.decoders import build as build_stock
from workshop.bench.stock.exported import DECODERS, ENCODERS

OURS = "attngraph.models"
_CORE = {"width": 32, "heads": 4, "key_width": 8, "value_width": 10}
_LM = {"layers": 1, "width": 32, "heads": 4}
_STACK = {**_LM, "vocab_size": 60, "max_tokens": 160}
STOCK = (
    *DECODERS, *ENCODERS, "MixtralForCausalLM", "Olmo3ForCausalLM", "SmolLM3ForCausalLM",
    "Glm4ForCausalLM", "Exaone4ForCausalLM", "Ministral3ForCausalLM",
)  # fmt: skip


def _ids(tokens: int = 9) -> Tensor:
    return torch.randint(3, 60, (2, tokens))


def _states(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 9, 32)))


def _all(tokens: int = 9) -> Tensor:
    return torch.ones(2, tokens, dtype=torch.bool)


@dataclasses.dataclass(frozen=True)
class Own:
    """A class of attngraph.models: its `home`, the class of its configuration ("": none), its sizes, the
    arguments of a call, and the other files that get faults."""

    home: str
    config: str
    sizes: dict[str, Any]
    call: Callable[[], tuple[Tensor, ...]]
    others: tuple[str, ...] = ()


OWN: dict[str, Own] = {
    "ModernDecoder": Own(
        "modern_decoder",
        "ModernDecoderConfig",
        {**_LM, "kv_heads": 2, "head_width": 8, "hidden": 48},
        lambda: (_ids(),),
        ("positions",),
    ),
    "DecoderLM": Own(
        "decoder_lm", "DecoderLMConfig", _STACK, lambda: (_ids(),), ("masked_attention", "attention")
    ),
    "Encoder": Own(
        "encoder",
        "EncoderConfig",
        {**_STACK, "hidden": 48},
        lambda: (_ids(), _all()),
        ("masked_attention", "attention"),
    ),
    "MLADecoder": Own(
        "mla",
        "MLAConfig",
        {**_LM, "heads": 2, "latent": 16, "nope": 8, "rope": 8, "value": 8, "query_rank": 12},
        lambda: (_ids(),),
    ),
    "PostNormDecoder": Own(
        "post_norm_decoder", "decoder_lm:DecoderLMConfig", _STACK, lambda: (_ids(),), ("positions",)
    ),
    "SparseTransformer": Own(
        "sparse_transformer",
        "SparseTransformerConfig",
        {**_STACK, "stride": 4, "summary": 2},
        lambda: (_ids(),),
        ("sparse_attention", "attention"),
    ),
    "LinearTransformer": Own(
        "linear_transformer",
        "LinearTransformerConfig",
        _STACK,
        lambda: (_ids(),),
        ("linear_attention", "decoder_lm"),
    ),
    "Longformer": Own(
        "longformer",
        "LongformerConfig",
        {**_STACK, "hidden": 48, "window": 4},
        lambda: (_ids(), _all() & (torch.arange(9) == 0), _all()),
        ("windowed_attention",),
    ),
    "ViT": Own(
        "vit",
        "ViTConfig",
        {"image": (8, 12), "patch": 4, "classes": 5, **_LM, "hidden": 48},
        lambda: (_states(2, 3, 8, 12),),
        ("attention",),
    ),
    "EncoderDecoder": Own(
        "encoder_decoder",
        "EncoderDecoderConfig",
        {**_LM, "source_vocab_size": 60, "target_vocab_size": 60, "hidden": 48, "max_tokens": 160},
        lambda: (_ids(), _ids(7), ~_all(), ~_all(7)),
        ("attention",),
    ),
    "RelativeBiasAttention": Own(
        "relative_bias",
        "RelativeBiasConfig",
        {**_CORE, "buckets": 8, "max_distance": 8},
        lambda: (_states(),),
        ("attention",),
    ),
    "DilatedWindowAttention": Own(
        "windowed_attention",
        "DilatedWindowConfig",
        {**_CORE, "window": 4, "dilations": (1, 1, 2, 3)},
        lambda: (_states(),),
        ("masked_attention", "attention"),
    ),
    "GroupedQueryAttention": Own(
        "grouped_attention",
        "GroupedQueryConfig",
        {**_CORE, "kv_heads": 2},
        lambda: (_states(),),
        ("attention",),
    ),
    "FlashAttention": Own(
        "online_softmax",
        "",
        {"block": 4},
        lambda: (_states(2, 4, 9, 8), _states(2, 4, 9, 8), _states(2, 4, 9, 10)),
    ),
    "GatedLinearAttention": Own("recurrent_mixers", "MixerConfig", {"width": 32}, lambda: (_states(),)),
    "LuongSeq2Seq": Own(
        "rnn_seq2seq", "Seq2SeqConfig", {"width": 32}, lambda: (_ids(), _ids(7), torch.tensor([9, 6]))
    ),
}
NAMES = (*OWN, *dict.fromkeys(STOCK))


@dataclasses.dataclass
class Target:
    """A model with faults to come: `reference`, the arguments of a call, and the modules that get them."""

    name: str
    reference: nn.Module
    inputs: Any
    modules: tuple[str, ...]

    @property
    def config(self) -> Any:
        """The configuration of the reference; None if it has none."""
        return getattr(self.reference, "config", None)

    def candidate(self, config: Any = None) -> nn.Module:
        """The same model made anew, of the class that is there now. `config`: another configuration."""
        own = OWN.get(self.name)
        made = getattr(importlib.import_module(self.modules[0]), self.name)
        with seeded():
            if own is not None:
                model = made(config or _configured(own)) if own.config else made(**own.sizes)
            else:
                model = made(config or copy.deepcopy(self.config))
        given = dict(self.reference.named_parameters())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in given:
                    if given[name].shape != weight.shape:
                        raise ValueError(f"{name} is {list(weight.shape)}, not {list(given[name].shape)}")
                    weight.copy_(given[name])
        found: nn.Module = model.eval()
        return found


def target(name: str) -> Target:
    """A tiny model, with weights that leave no bias at 0 and no norm's at 1, and the arguments of a call.

    Raises:
        NotBuilt, AttributeError: there is no such model here.
    """
    own = OWN.get(name)
    with seeded():
        if own is None:
            kind = getattr(importlib.import_module("transformers"), name)
            model, _ = build_stock(kind)
            call: Any = {"input_ids": torch.randint(3, 40, (2, 9))}
            if "attention_mask" in inspect.signature(kind.forward).parameters:
                call["attention_mask"] = torch.ones(2, 9, dtype=torch.int64)
            return Target(name, model, call, (kind.__module__,))
        kind = getattr(importlib.import_module(f"{OURS}.{own.home}"), name)
        model = (kind(_configured(own)) if own.config else kind(**own.sizes)).eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.randn_like(weight)
        modules = tuple(f"{OURS}.{file}" for file in (own.home, *own.others))
        return Target(name, model, own.call(), modules)


def _configured(own: Own) -> Any:
    home, _, name = own.config.rpartition(":")
    return getattr(importlib.import_module(f"{OURS}.{home or own.home}"), name)(**own.sizes)


def source(module: str) -> str:
    """The text of a module."""
    return Path(_file(module)).read_text(encoding="utf-8")


def _file(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return spec.origin


@contextmanager
def changed(module: str, text: str) -> Iterator[None]:
    """Within, a module has another source, and those that import it are made anew."""
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
def ran(modules: Sequence[str]) -> Iterator[set[tuple[str, int]]]:
    """Notes which lines of modules run."""
    files, met = {_file(module): module for module in modules}, set[tuple[str, int]]()

    def trace(frame: Any, event: str, _: Any) -> Any:
        module = files.get(frame.f_code.co_filename)
        if module is None:
            return None
        if event == "line":
            met.add((module, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield met
    finally:
        sys.settrace(before)
