"""What the tests of passes share: a tiny causal attention and its captured graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from attngraph.capture.trace import capture
from attngraph.ir.graph.program_graph import ProgramGraph
from attngraph.models.masked_attention import CausalAttention, CausalAttentionConfig, CausalSelfAttention


def causal_model() -> nn.Module:
    config = CausalAttentionConfig(width=32, heads=4, key_width=8, value_width=8, max_tokens=64)
    return CausalSelfAttention(config).eval()


@pytest.fixture(scope="session")
def make_model() -> Callable[[], nn.Module]:
    return causal_model


@pytest.fixture
def captured() -> ProgramGraph:
    """Of attention alone: queries, keys and values are its arguments."""
    with torch.no_grad():
        return capture(CausalAttention(), tuple(torch.randn(3, 2, 4, 7, 8).unbind()), {}).graph
