"""What a graph computes in float64, whatever its dtypes are: the exact answer for every comparison.

Tensors are widened where they are used, so weights are never widened all at once. Our own ops are computed by
the reference. Of equal numbers, sorts and choices of the largest few take the first; torch leaves open which
one, and its choice follows from how many numbers there are. Nothing depends on torch's default dtype, which
the whole process shares.

A model's own random draws are replaced by those of the fused program, `random(seed, indices)`, so both drop
the same elements, and a claim about a model that drops weights can be checked element by element.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from attngraph.ir.exactly import from_integers, is_of_integers
from attngraph.ir.graph.call import argument
from attngraph.ir.in_order import IN_ORDER
from attngraph.ir.ops import nodes
from attngraph.ir.ops.others import dropout, kept_elements
from attngraph.ir.walk import computed
from attngraph.meaning.check.comparison import compare, elementwise
from attngraph.meaning.rules.reduction import LOG_SOFTMAX, SOFTMAX

aten = torch.ops.aten

EQUAL_ORDERS = elementwise(1e-8)
"""The rule by which both orders of multiplication of a latent attention count as equal."""
_CONVERTING = frozenset(
    f"aten.{n}"
    for n in ("_to_copy.default", "to.dtype", "to.dtype_layout", "type_as.default", *SOFTMAX, *LOG_SOFTMAX)
)


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Computes nodes with every floating dtype replaced by one.

    Args:
        device: where everything is computed; None: where the graph says.
        turn: which of the reference's ways to compute an op of ours is used (modulo their number); None: all,
            and the result is infinite if they do not agree, so that no comparison holds.
    """

    dtype: torch.dtype = torch.float64
    device: torch.device | None = None
    turn: int | None = None

    def evaluate(
        self, order: Sequence[fx.Node], given: Mapping[fx.Node, Any], wanted: Sequence[fx.Node]
    ) -> list[Any]:
        """The values of `wanted`, computed from those of `given`, each freed after its last use.

        Args:
            order: the nodes in between, operands first.
        """

        def compute(node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
            return self.compute(node, *fx.map_arg((node.args, node.kwargs), found.__getitem__))

        return computed(order, operator.attrgetter("all_input_nodes"), compute, wanted, given)

    def compute(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The value of one operation."""
        if str(node.target).startswith("aten._assert_tensor_metadata"):
            return None  # it asserts the original dtypes
        args, kwargs = pytree.tree_map(self.widened, (list(args), dict(kwargs)))
        drawn = draws(node)
        if drawn is not None:
            return drawn(*args, **kwargs)
        attention = nodes.called(node.target, args, kwargs)
        if attention is not None:
            return self.by_reference(attention)
        kwargs.pop("pin_memory", None)
        if str(node.target) in _CONVERTING:
            args[0] = _narrowed(node, args[0])
        return pytree.tree_map(self.widened, self._call(node, args, kwargs))

    def widened(self, value: Any) -> Any:
        """A tensor, dtype or device converted to this oracle's; anything else unchanged."""
        if isinstance(value, torch.device):
            return self.device or value
        if isinstance(value, torch.dtype):
            return self.dtype if value.is_floating_point else value
        if isinstance(value, Tensor):
            return value.to(self.device or value.device, self.widened(value.dtype))
        return value

    def by_reference(self, attention: nodes.AttentionOp) -> Any:
        """One of our own ops."""
        ways = attention.references()
        if self.turn is not None:
            ways = (ways[self.turn % len(ways)],)
        one, *others = (attention.target(*way.args) for way in ways)
        same = all(compare(other, one, EQUAL_ORDERS).holds for other in others)
        return one if same else torch.full_like(one, math.inf)

    def _call(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The operation itself, with a stable order of equal numbers."""
        target: Any = node.target
        if target in IN_ORDER:
            return IN_ORDER[target](*args, **kwargs)
        value = node.meta.get("val")
        is_op = isinstance(target, torch._ops.OpOverload)
        if not is_op or not isinstance(value, Tensor) or not is_of_integers((args, kwargs)):
            return target(*args, **kwargs)
        if value.is_floating_point():
            return from_integers(target, args, kwargs, self.dtype)
        try:
            return target(*args, **kwargs)
        except NotImplementedError:  # the model's device has it for integers, this one for floats alone
            return from_integers(target, args, kwargs, self.dtype).to(value.dtype)


class Exact(fx.Interpreter):
    """A whole graph by the oracle."""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        return Oracle().compute(n, *self.fetch_args_kwargs_from_env(n))


def _narrowed(node: fx.Node, value: Tensor) -> Tensor:
    """The operand of a conversion, infinite where it is beyond the range of the model's own dtype."""
    source: Any = node.args[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    if not (before.is_floating_point and after.is_floating_point):
        return value
    limit = torch.finfo(after).max
    if torch.finfo(before).max <= limit:
        return value
    return value.masked_fill(value > limit, math.inf).masked_fill(value < -limit, -math.inf)


SEED = 2**31 + 12345


def draws(node: fx.Node) -> Callable[..., Any] | None:
    """A function of the operands that computes a node with random draws; None for other nodes."""
    match str(node.target):
        case "attngraph.seed.default":
            return lambda *_: torch.tensor(SEED)
        case "aten.dropout.default" | "aten.native_dropout.default":
            return lambda value, *_, **__: drop(node, value, value.shape)
        case "aten.scaled_dot_product_attention.default" if argument(node, "dropout_p"):
            return _attention
    return None


def drop(
    node: fx.Node, value: Tensor, shape: Sequence[int], box: Sequence[Sequence[int] | None] | None = None
) -> Any:
    """What a dropout leaves of its operand.

    Args:
        shape: that of the whole operand.
        box: the indices that `value` has of each dimension; None: all.
    """
    parts = "native" in str(node.target)
    rate = float(argument(node, "p"))
    if argument(node, "train") is False or rate == 0:
        return (value, torch.ones_like(value, dtype=torch.bool)) if parts else value
    kept = kept_elements(SEED, shape, rate, value.device, box)
    result = dropout(value, SEED, rate, kept)
    return (result, kept) if parts else result


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """torch's attention by its definition, with the dropout of the fused program."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
        shown = 0.0 if attn_mask.dtype == torch.bool else attn_mask.masked_fill(hidden, 0.0)
        scores = (scores + shown).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    weights = torch.where(weights.isnan(), 0.0, weights)
    return dropout(weights, SEED, dropout_p) @ v
