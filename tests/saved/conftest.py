"""What the tests of saved models share: small models, whose classes are in a file that can be changed."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attngraph
from attngraph.api import build, derive

Models = Callable[..., types.ModuleType]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])

SOURCE = """
    import torch
    from torch import nn

    SCALE = 0.5
    TABLE = {"slope": 0.25}

    def scores(q, k):
        return q @ k.mT * SCALE

    def helper(x):
        return scores(x, x) - TABLE["slope"]

    class Layer(nn.Module):
        kind = "plain"

        def __init__(self, width=8, window=3):
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width)
            self.window = window
            self.register_buffer("order", torch.ones(64, 64).tril().bool())

        def scores(self, q, k):
            return scores(q, k)

        def forward(self, x):
            x = x if self.kind == "plain" else 2 * x
            q, k, v = self.qkv(x).chunk(3, -1)
            t = x.shape[1]
            i = torch.arange(t)
            seen = self.order[:t, :t] & (i > i[:, None] - self.window)
            return self.scores(q, k).masked_fill(~seen, float("-inf")).softmax(-1) @ v

    class Model(nn.Module):
        def __init__(self, layers=2, width=8, vocabulary=11):
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)
"""


def _module(folder: Path, *changes: tuple[str, str]) -> types.ModuleType:
    text = textwrap.dedent(SOURCE)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "saved_models.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("saved_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["saved_models"] = module
    exec(compile(text, str(path), "exec"), module.__dict__)  # no stale bytecode of the same second
    return module


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    """Makes the module of the models above; called with replacements, one whose source differs."""
    yield functools.partial(_module, tmp_path)
    sys.modules.pop("saved_models", None)


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A folder with the first of these models, compiled with gradients and without, and saved with its
    weights; and its answer."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGRAPH_CACHE", "0")
        compiled = attngraph.compile(_module(folder).Model().eval(), min_scores=0)
        compiled(IDS)
        with torch.no_grad():
            answer = compiled(IDS)
    sys.modules.pop("saved_models")
    return compiled.save(folder / "m", weights=True), answer


@pytest.fixture
def saved(saved_once: tuple[Path, torch.Tensor], tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved_once[0], tmp_path / "m"))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets the name of each function that traces a model, whenever it is called."""
    found: list[str] = []
    for module, name in ((build, "compile_graph"), (derive, "derive_decoder")):
        trace = getattr(module, name)

        def counted(*args: Any, trace: Any = trace, name: str = name, **kwargs: Any) -> Any:
            found.append(name)
            return trace(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)
    return found
