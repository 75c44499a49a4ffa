"""Cells of recurrent networks, which PyTorch has as one operation each, as what they consist of.

tanh, relu   Elman 1990                                      h' = tanh(W x + b + U h + c)
LSTM         Hochreiter & Schmidhuber 1997; gates in the order of PyTorch: input, forget, new, output
GRU          Cho et al. 2014; gates reset, update, new       h' = n + z (h - n), n = tanh(x_n + r h_n)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from attngraph.passes.build import Builder

aten = torch.ops.aten


def _projected(builder: Builder, x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    return builder.call(aten.linear.default, x, weight, bias)


def _parts(builder: Builder, value: fx.Node, count: int) -> list[fx.Node]:
    size = value.meta["val"].shape[-1] // count
    return [builder.call(aten.narrow.default, value, -1, size * n, size) for n in range(count)]


def _both(builder: Builder, x: Any, h: Any, weights: tuple[Any, ...]) -> tuple[fx.Node, fx.Node]:
    """What the token's and the carried vector give."""
    own, handed, *biases = (*weights, None, None)[:4]
    return _projected(builder, x, own, biases[0]), _projected(builder, h, handed, biases[1])


def _lstm(builder: Builder, x: Any, state: Any, *weights: Any) -> tuple[fx.Node, ...]:
    call, (h, c) = builder.call, state
    gates = call(aten.add.Tensor, *_both(builder, x, h, weights))
    enter, forget, new, leave = _parts(builder, gates, 4)
    kept = call(aten.mul.Tensor, call(aten.sigmoid.default, forget), c)
    added = call(aten.mul.Tensor, call(aten.sigmoid.default, enter), call(aten.tanh.default, new))
    c = call(aten.add.Tensor, kept, added)
    return call(aten.mul.Tensor, call(aten.sigmoid.default, leave), call(aten.tanh.default, c)), c


def _gru(builder: Builder, x: Any, h: Any, *weights: Any) -> fx.Node:
    call = builder.call
    own, handed = (_parts(builder, value, 3) for value in _both(builder, x, h, weights))
    reset, update = (
        call(aten.sigmoid.default, call(aten.add.Tensor, a, b))
        for a, b in zip(own[:2], handed[:2], strict=True)
    )
    new = call(aten.tanh.default, call(aten.add.Tensor, own[2], call(aten.mul.Tensor, reset, handed[2])))
    apart = call(aten.sub.Tensor, h, new)
    return call(aten.add.Tensor, call(aten.mul.Tensor, apart, update), new)


def _elman(function: Any) -> Callable[..., fx.Node]:
    def cell(builder: Builder, x: Any, h: Any, *weights: Any) -> fx.Node:
        return builder.call(function, builder.call(aten.add.Tensor, *_both(builder, x, h, weights)))

    return cell


_CELLS: dict[Any, Callable[..., Any]] = {
    aten.lstm_cell.default: _lstm,
    aten.gru_cell.default: _gru,
    aten.rnn_tanh_cell.default: _elman(aten.tanh.default),
    aten.rnn_relu_cell.default: _elman(aten.relu.default),
}


def computed(builder: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call, or what it gives if it gives several values: a cell by its operations, another as it is."""
    if target is operator.getitem and isinstance(args[0], tuple):
        return args[0][args[1]]
    cell = _CELLS.get(target)
    return builder.call(target, *args, **kwargs) if cell is None else cell(builder, *args, **kwargs)
