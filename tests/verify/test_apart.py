"""Candidates that are files, arrays, or run in a process of their own, which may end or take too long."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attngraph
from attngraph.errors import SavedError

PORT = """
import os, time, torch
from torch import nn
class Port(nn.Module):
    def __init__(self, by=1.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.by = by
    def forward(self, x):
        print("not an answer", flush=True)
        return self.layers(x) * self.by
def plain(x): return x.sin()
def dies(x): os._exit(3) if x.shape[0] > 3 else None; return x.sin()
def hangs(x): time.sleep(60)
def hungry(x): return torch.zeros(1 << 36).sum() + x
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


@pytest.fixture
def port(tmp_path: Path) -> str:
    (tmp_path / "port.py").write_text(PORT)
    return str(tmp_path / "port.py")


X = (torch.randn(2, 3, 8),)


def test_a_candidate_in_a_process_of_its_own_is_given_the_weights(port: str) -> None:
    torch.manual_seed(5)  # so that its weights are others
    verdict = attngraph.verify(Model(), f"{port}:Port", X, subprocess=True, budget=1)
    assert verdict and verdict.tried, str(verdict)
    assert "port (a file)" not in sys.modules  # nothing of it was run here
    assert "4 by name" in str(verdict) and "it runs in a process of its own" in str(verdict)
    assert "gradients are not compared" in str(verdict) and "in float64" in str(verdict)
    wrong = attngraph.verify(Model(), f"{port}:Port(by=1.01)", X, subprocess=True, budget=5)
    assert wrong.status == "differs" and wrong.differences[0].smallest == ("float32 [1, 1, 8]",)


def test_how_a_candidate_ends_is_told(port: str) -> None:
    def verdict(name: str, **limits: Any) -> Any:
        return attngraph.verify(torch.sin, f"{port}:{name}", X, subprocess=True, budget=30, **limits)

    found = verdict("dies")
    assert found.status == "differs" and found.differences[0].code == "candidate-ended", str(found)
    assert "the candidate ended with exit code 3, called with float32 [5, 3, 8]" in str(found)
    found = verdict("hangs", seconds=1)
    assert found.status == "cannot be compared" and "gave no answer within 1 s" in str(found)
    found = verdict("hungry")
    assert found.status == "differs" and "memory" in found.differences[0].about.lower(), str(found)
    found = verdict("missing")
    assert found.status == "cannot be compared" and "has no 'missing'" in str(found)
    with pytest.raises(TypeError, match="the candidate is a name"):
        attngraph.verify(torch.sin, torch.sin, X, subprocess=True)


def test_a_kernel_that_takes_no_gradients_is_compared_without() -> None:
    """Its forward refuses a call that asks for them; one whose backward fails differs."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError("no backward")

    def candidate(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("forward only")
        return by * x.sin()

    verdict = attngraph.verify(torch.sin, candidate, X, budget=3)
    assert verdict and verdict.tried, str(verdict)
    told = "gradients are not compared, as the candidate refuses a call that asks for them: forward only"
    assert told in str(verdict)
    assert attngraph.verify(torch.sin, lambda x: candidate(x, 1.01), X, budget=3).status == "differs"
    failing = attngraph.verify(torch.sin, Fails.apply, X, budget=3)
    assert failing.status == "differs" and "no backward" in str(failing)


def test_arrays_are_results_without_gradients() -> None:
    def candidate(x: Any) -> Any:
        return {"y": np.sin(np.asarray(x))}

    verdict = attngraph.verify(torch.sin, candidate, X, budget=3)
    said, told = str(verdict), "gradients are not compared, as"
    assert verdict and f"{told} the candidate refuses a call that asks for them: Can't call numpy" in said
    assert not attngraph.verify(torch.cos, candidate, X, budget=3)
    detached = attngraph.verify(torch.sin, lambda x: np.sin(x.detach().numpy()), X, budget=3)
    assert detached and f"{told} a side returns none: arrays" in str(detached)


def test_an_onnx_file_is_compared_by_number(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = Model().eval()
    attngraph.export(attngraph.compile(model), tmp_path / "model.onnx", X)
    verdict = attngraph.verify(model, tmp_path / "model.onnx", X, budget=5)
    assert verdict and "it is an ONNX file" in str(verdict), str(verdict)
    assert "in the dtypes that are given" in str(verdict)
    other = Model().eval()
    assert attngraph.verify(other, str(tmp_path / "model.onnx"), X, budget=5).status == "differs"


def test_a_saved_folder_is_compared(tmp_path: Path) -> None:
    model = Model().eval()
    compiled = attngraph.compile(model, min_scores=0)
    compiled(*X)
    compiled.save(tmp_path / "saved", weights=True)
    verdict = attngraph.verify(model, tmp_path / "saved", X, budget=5)
    assert verdict, str(verdict)


def test_names_that_are_no_files_of_a_side_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="is no ONNX file and no folder"):
        attngraph.verify(torch.sin, "port.py:LM", X)
    (tmp_path / "broken.onnx").write_text("?")
    pytest.importorskip("onnxruntime")
    for name, said in (("broken.onnx", "onnxruntime cannot read"), ("none.onnx", "there is no file")):
        with pytest.raises(SavedError, match=said):
            attngraph.verify(torch.sin, tmp_path / name, X)
