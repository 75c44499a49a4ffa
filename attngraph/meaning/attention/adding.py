"""Which operations add up what they are given. Used by `recogniser.py`."""

from torch import fx


def _is_mean_of_stack(node: fx.Node) -> bool:
    """Whether a node is the mean of a few tensors that were stacked."""
    stack = node.args[0]
    is_mean = str(node.target).startswith("aten.mean.") and isinstance(stack, fx.Node)
    return is_mean and str(stack.target).startswith(("aten.stack.", "aten.cat."))  # type: ignore[union-attr]


def adds_up(node: fx.Node) -> bool:
    """Whether a reduction is a sum, for weights that are never negative."""
    is_norm = str(node.target).startswith("aten.linalg_vector_norm.") and node.args[1:2] == (1,)
    return "sum" in str(node.target) or _is_mean_of_stack(node) or is_norm


def is_sum(node: fx.Node) -> bool:
    """Whether a node adds up tensors, which may be the results of parts of the keys."""
    return node.op == "call_function" and str(node.target).startswith("aten.add.")
