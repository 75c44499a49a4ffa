"""Tensors that are computed when somebody looks at them. What computes them is in `looks.py`.

Such a result is an `Unseen`, a tensor that knows its shape, dtype and device, and whether gradients flow
through it. The first operation on it computes it, from values that the call kept, under the call's grad mode;
from then on it *is* the computed tensor, a plain one.

Python's functions ask a tensor on their way (`__torch_function__`); code in C does not, such as the autograd
engine. There an `Unseen` is one operation, whose values are computed below autograd (`__torch_dispatch__`),
and stays it as long as C holds it."""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from attngraph.ir.ops.declare import autograd_inside

_METHODS = (
    "dim", "ndimension", "numel", "nelement", "size", "element_size", "is_floating_point", "is_complex",
)  # fmt: skip
_PROPERTIES = (
    "shape", "ndim", "dtype", "device", "layout", "is_cuda", "itemsize", "_version", "requires_grad",
    "is_leaf",
)  # fmt: skip
_KNOWN_BEFORE = {getattr(Tensor, n) for n in _METHODS} | {getattr(Tensor, n).__get__ for n in _PROPERTIES}
"""What is asked of a tensor without its values."""
_NUMBERS = itertools.count()
_ONE_AT_A_TIME = threading.Lock()
"""Held while tensors become the computed ones."""


class Unseen(Tensor):
    """A tensor that is computed when it is first used."""

    look: "Look"
    value_name: str
    serial_number: tuple[str, int]
    """Tells it from all others in fingerprints (`capture/state/`): another one may get its address."""

    @staticmethod
    def of(look: "Look", name: str, example: Tensor, shape: Sequence[int]) -> "Unseen":
        """A tensor of this shape, like the example in the rest, whose values the look has by this name."""
        made: Unseen = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Unseen, shape, dtype=example.dtype, device=example.device
        )
        made.look, made.value_name = look, name
        made.serial_number = "unseen", next(_NUMBERS)
        look.tensors[name] = weakref.ref(made)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        if func not in _KNOWN_BEFORE:
            show(*leaves)
        if not any(type(tensor) is Unseen for tensor in leaves):
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = {
            id(t.look.values()[t.value_name]): t for t in tree_leaves((args, kwargs)) if type(t) is Unseen
        }
        args, kwargs = tree_map_only(Unseen, lambda t: t.look.values()[t.value_name], (args, kwargs or {}))
        result = func(*args, **kwargs)
        return found.get(id(result), result)  # what writes to a tensor returns it


def show(*results: Any) -> None:
    """Compute what waits among tensors."""
    for tensor in results:
        if type(tensor) is Unseen:
            tensor.look.show()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Compute as if nothing were going on around: the modes and transformations in which a result is looked
    at are not those of the call that it is a result of."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        temporarily_clear_interpreter_stack(),
        autograd_inside(),
    ):
        yield


def _hooks() -> Any:
    """What is called with tensors that are saved for gradients, as where parts of a model are recomputed."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def same(tensor: Tensor) -> Tensor:
    return tensor


class Seen:
    """Whether somebody has looked at tensors that waited, and whether they are plain ones now."""

    __slots__ = ("is_plain", "is_seen")

    def __init__(self) -> None:
        self.is_seen = self.is_plain = False


class Look:
    """Tensors of one call that are computed together.

    Args:
        compute: gives them by name, with gradients or below autograd.

    Attributes:
        tensors: those that wait, by the names of their values. nodes: the operations that they are results
            of, where gradients flow through them.
    """

    def __init__(self, compute: Callable[[bool], dict[str, Tensor]]) -> None:
        self.compute = compute
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.hooks = _hooks()
        self.seen = Seen()
        self.tensors: dict[str, weakref.ref[Unseen]] = {}
        self.nodes: dict[str, Any] = {}
        self._values: dict[str, Tensor] | None = None

    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    def show(self) -> None:
        """Let the tensors become the computed ones; where code in C holds one of them, or says that it is its
        own result, none does."""
        self.seen.is_seen = True
        if self._values is not None:
            return
        found = self._computed(self.grad)
        with _ONE_AT_A_TIME:
            waiting = {name: tensor for name, ref in self.tensors.items() if (tensor := ref()) is not None}
            if self._values is not None or any(type(t) is not Unseen for t in waiting.values()):
                return  # another thread was faster
            if any(_uses(t) > 1 or _node(t) is not self.nodes.get(n) for n, t in waiting.items()):
                return
            for name, tensor in waiting.items():
                _become(tensor, found[name])
            self.seen.is_plain = True

    def values(self) -> dict[str, Tensor]:
        """The values below autograd, of tensors that wait for good."""
        self.seen.is_seen = True
        if self._values is None:
            self._values = self._computed(False)
        return self._values

    def _computed(self, grad: bool) -> dict[str, Tensor]:
        ours = saved_tensors_hooks(same, same) if _hooks() != self.hooks else contextlib.nullcontext()
        with (
            undisturbed(),
            ours,
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(grad),  # made last: it sets the mode when it is made
        ):
            return self.compute(grad)


def _uses(tensor: Tensor) -> int:
    """How many references to the tensor there are in C, that of its Python object included."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor._use_count())  # type: ignore[attr-defined]


def _node(tensor: Tensor) -> Any:
    """The operation that the tensor is a result of."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.grad_fn


def of_operation(tensor: Tensor) -> Tensor:
    """Note the operation of a tensor that waits."""
    if isinstance(tensor, Unseen):
        tensor.look.nodes[tensor.value_name] = _node(tensor)
    return tensor


def _become(unseen: Unseen, computed: Tensor) -> None:
    """Let the object be the computed tensor."""
    del unseen.look, unseen.value_name, unseen.serial_number
    if _uses(computed) > 1:  # its gradient needs it
        computed = torch.ops.aten.alias.default(computed)
    torch._C._swap_tensor_impl(unseen, computed)  # type: ignore[attr-defined]
    unseen.__class__ = Tensor  # type: ignore[assignment]
