"""The candidates that run in PyTorch: eager, torch.compile, and attngraph.

Eager keeps transformers' own dynamic cache, torch.compile its static cache, whose sizes do not change, so
that each size is compiled once.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attngraph


class Eager:
    """The model as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache: Any = None
        self.past: dict[str, Any] = {}

    def begin(self, rows: int, room: int) -> None:
        from transformers import DynamicCache

        from attngraph.hf import CACHE

        self.cache = DynamicCache(config=self.model.config)
        self.past = {CACHE: self.cache}

    def advance(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids, **self.past, use_cache=True).logits
        return found

    def rewind(self, kept: int) -> None:
        more = self.cache.get_seq_length() - kept
        if more:
            self.cache.crop(-more)


class Compiled:
    """torch.compile with its weights frozen, which lets it pack them. Sizes that are not timed, those of the
    parts of a prompt that fills a cache, are left to eager: each would be compiled anew."""

    backend = "inductor"

    def __init__(self, model: Any) -> None:
        from torch._inductor import config

        config.freezing = True
        self.model = model
        self.compiled = torch.compile(model, backend=self.backend, dynamic=False)
        self.cache: Any = None
        self.past: dict[str, Any] = {}
        self.size: tuple[int, int] | None = None

    def begin(self, rows: int, room: int) -> None:
        from transformers import StaticCache

        from attngraph.hf import CACHE

        if self.size == (rows, room):
            self.cache.reset()
        else:
            self.size, self.cache = (rows, room), StaticCache(config=self.model.config, max_cache_len=room)
            self.past = {CACHE: self.cache}

    def advance(self, ids: Tensor) -> Tensor:
        run = self.compiled if ids.shape[1] in (1, self.cache.layers[0].max_cache_len) else self.model
        found: Tensor = run(ids, **self.past, use_cache=True).logits
        return found

    def rewind(self, kept: int) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(kept)


class Zen(Compiled):
    """torch.compile with AMD's plugin, which is made for processors with AVX-512."""

    backend = "zentorch"

    def __init__(self, model: Any) -> None:
        if "avx512f" not in Path("/proc/cpuinfo").read_text():
            raise RuntimeError("this processor has no AVX-512")
        importlib.import_module("zentorch")
        super().__init__(model)


class Ours:
    """attngraph's derived decoder."""

    freeze = False

    def __init__(self, model: Any) -> None:
        self.decoder = attngraph.compile(model, cache=True, freeze=self.freeze)
        self.state: attngraph.KVCache | None = None

    def begin(self, rows: int, room: int) -> None:
        self.state = None

    def advance(self, ids: Tensor) -> Tensor:
        logits: Tensor
        if self.state is None:
            logits, self.state = self.decoder.prefill(ids)
        else:
            logits = self.decoder.decode(ids, self.state)
        return logits

    def rewind(self, kept: int) -> None:
        assert self.state is not None
        self.state.crop(kept)


class Frozen(Ours):
    """The same with weights that are laid out once, as the other engines have them."""

    freeze = True
