"""`attngraph.convert_heads`: converts a model to fewer key/value heads, and measures how its results change.

The converted model is a separate module: a copy of the model with pooled key and value projections, and the
rewritten graph as its forward. It can be trained further, which recovers most of the lost quality (Ainslie et
al. 2023, section 3), compiled, and given a cache, which shrinks by the same factor as the heads.
"""

import copy
import dataclasses
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.arguments import by_name
from attngraph.api.methods import with_signature_of
from attngraph.capture.captured import Captured
from attngraph.capture.first_call import once_settled
from attngraph.capture.instead import LOCK
from attngraph.capture.trace import capture
from attngraph.errors import ConversionError
from attngraph.ir.graph.program_graph import Input, ProgramGraph, Rate
from attngraph.ir.ops import nodes
from attngraph.passes import order, waiting_at_most
from attngraph.passes.absorb_mla.absorb import AbsorbMLA
from attngraph.passes.convert_heads import ConvertHeads
from attngraph.pipeline import run as run_passes
from attngraph.pipeline import split_at
from attngraph.runtime.executable import Executable
from attngraph.runtime.machine import Machine

SAMPLE_ROWS, SAMPLE_TOKENS = 2, 32


@dataclasses.dataclass(frozen=True)
class HeadsReport:
    """What a conversion did. Pairs are (before, after).

    `heads`: key/value heads of each attention before, in order; `kv_heads`: after. `cache_bytes`: size of one
    token's keys and values. On the sample: `kl`, the mean Kullback-Leibler divergence of the converted
    model's distribution from the model's, in nats, and `top1`, the share of positions where both have the
    same most likely token; None if the result is not a tensor of logits.
    """

    heads: tuple[int, ...]
    kv_heads: int
    parameters: tuple[int, int]
    cache_bytes: tuple[int, int]
    kl: float | None
    top1: float | None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        (p, q), (a, b) = self.parameters, self.cache_bytes
        heads = "/".join(map(str, dict.fromkeys(self.heads)))
        lines = [
            f"attngraph: {len(self.heads)} attention(s) from {heads} to {self.kv_heads} key/value heads",
            f"  parameters        {p:,} -> {q:,}",
            f"  cache per token   {a:,} -> {b:,} bytes ({a / b:.1f} times less)",
        ]
        if self.kl is not None and self.top1 is not None:
            lines.append(f"  on the sample     KL {self.kl:.3g} nats, first rank equal at {self.top1:.1%}")
        return "\n".join(lines)


class ConvertedModel(nn.Module):
    """What `convert_heads` returns. It takes the same arguments as the sample call, of any size.

    Attributes:
        report: what was done.
        model: the copy that holds the weights; its own forward is not used.
    """

    report: HeadsReport

    def __init__(
        self, model: nn.Module, captured: Captured, names: Sequence[str], fixed: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.model = model
        self._names, self._fixed = list(names), dict(fixed)
        self._call = Executable(captured, self)
        run = functools.partial(self._run, inspect.signature(model.forward))
        self.forward = with_signature_of(model, run)  # type: ignore[method-assign]
        self.train(model.training)

    def _run(self, signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> Any:
        given, tensors = by_name(signature, args, kwargs), []
        for name in self._names:
            value = given.get(name)
            if not isinstance(value, Tensor):
                raise ConversionError(f"the model was converted for calls with the tensor {name!r}.")
            tensors.append(value)
        for name in given.keys() - set(self._names):
            value, known = given[name], self._fixed.get(name)
            if value is not known and value != known:
                raise ConversionError(
                    f"the model was converted for calls with {name}={known!r}, found {value!r}. "
                    "Give convert_heads a sample call of that kind."
                )
        if not torch.compiler.is_exporting() and not self._call.fits(tensors):
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise ConversionError(
                f"the converted graph does not hold for shapes {shapes}; convert with a sample of such sizes."
            )
        return self._call(tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ConvertedModel":
        made = ConvertedModel(copy.deepcopy(self.model, memo), self._call.captured, self._names, self._fixed)
        made.report = self.report
        return made


@LOCK.trace()
def convert_heads(
    model: nn.Module, *inputs: Any, kv_heads: int | None = None,
    groups: Sequence[Sequence[int]] | None = None, **named: Any,
) -> ConvertedModel:  # fmt: skip
    """Convert every attention to fewer key/value heads: the mean of each group's projections.

    Args:
        model: any module whose attentions are all recognised; it is not modified. It is converted in its
            current mode (train or eval).
        inputs, named: a sample call; the converted model takes calls of this kind. Without one, random token
            ids `[2, 32]` of the model's first embedding are used.
        kv_heads: how many there will be, each of a group of neighbours; must divide the number of key/value
            heads of every attention.
        groups: instead: the numbers of the heads that become one, such as `[[0, 3], [1, 2]]`; every head is
            in one group. Groups may be of unequal size. (Attention itself reads fewer heads only where groups
            are neighbours and equally large; parameters and a cache shrink in any case.)

    Returns:
        A module with its own weights, and `.report`.

    Raises:
        ConversionError: something cannot be converted; says what, and where. CaptureError: torch.export
            cannot capture the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_heads takes an nn.Module, found {type(model).__name__}.")
    if (kv_heads is None) == (groups is None):
        raise ValueError("convert_heads takes either kv_heads or groups.")
    if kv_heads is not None and not isinstance(kv_heads, int):
        raise TypeError(f"kv_heads is a number of heads, found {kv_heads!r}.")
    chosen = tuple(sorted(tuple(sorted(map(int, group))) for group in groups or ()))
    kv_heads = len(chosen) if kv_heads is None else kv_heads
    if kv_heads < 1 or not all(chosen):
        what = groups or kv_heads
        raise ValueError(f"there must be at least 1 key/value head, and no empty group: {what}.")
    given = _sample(model, inputs, named)
    names = [name for name, value in given.items() if isinstance(value, Tensor)]
    captured = once_settled(lambda: capture(model, (), given), model, (), given)
    graph = captured.graph
    result = run_passes(graph, split_at(waiting_at_most(order()), AbsorbMLA.name)[0])
    if result.missed:
        first = result.missed[0]
        told = f"the softmax at {first.source} is not recognised as attention: {first.reason}."
        raise ConversionError(told)
    before = [node.meta["attention"] for node in graph.attentions()]
    run_passes(graph, (ConvertHeads(kv_heads, chosen),))
    written = [o for o in graph.outputs if o.kind != "value"]
    if written:
        raise ConversionError(f"the model writes to a {written[0].kind} ({written[0].name}) in its forward.")
    copied = copy.deepcopy(model)
    _pool_weights(copied, graph)
    fixed = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
    converted = ConvertedModel(copied, captured, names, fixed)
    converted.report = _report(model, converted, graph, before, given, kv_heads)
    return converted


def _sample(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(model.forward)
    if not inputs and not named:
        embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
        if embedding is None:
            raise ConversionError("the model has no embedding to draw token ids for: give a sample call.")
        generator = torch.Generator().manual_seed(0)
        shape = (SAMPLE_ROWS, SAMPLE_TOKENS)
        ids = torch.randint(0, embedding.num_embeddings, shape, generator=generator)
        inputs = (ids.to(embedding.weight.device),)
    given = by_name(signature, inputs, named)
    for name in given.keys() & signature.parameters.keys():
        if not isinstance(given[name], (Tensor, int, float, str, bool, type(None))):
            raise ConversionError(f"argument {name!r} of the sample call is a {type(given[name]).__name__}.")
    if "use_cache" in signature.parameters:
        given.setdefault("use_cache", False)
    return given


def _pool_weights(model: nn.Module, graph: ProgramGraph) -> None:
    """Replace the weights stage, which computes the pooled weights, by new parameters of the model with its
    results."""
    stage = graph.stages.pop(Rate.WEIGHTS, None)
    if stage is None:
        return
    holder = nn.Module()
    holder.model = model
    with torch.no_grad():
        pooled = dict(zip((o.name for o in stage.outputs), Machine(stage, holder)(()), strict=True))
    for name, value in pooled.items():
        path, _, last = name.rpartition(".")
        module = holder.get_submodule(path)
        wanted = module.get_parameter(last).requires_grad
        setattr(module, last, nn.Parameter(value, requires_grad=wanted))
    graph.inputs = tuple(
        Input("parameter", i.name) if i.kind == Rate.WEIGHTS.value else i for i in graph.inputs
    )


def _report(
    model: nn.Module, converted: ConvertedModel, graph: ProgramGraph, before: Sequence[Any],
    given: Mapping[str, Any], kv_heads: int,
) -> HeadsReport:  # fmt: skip
    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    itemsize = nodes.AttentionOp.of(graph.attentions()[0]).q.meta["val"].dtype.itemsize
    widths = [(entry.kv_heads, entry.head_dim + entry.value_dim) for entry in before]
    cache = (sum(h * w for h, w in widths) * itemsize, sum(kv_heads * w for _, w in widths) * itemsize)
    kl = top1 = None
    with torch.no_grad():
        old, new = _logits(model(**given)), _logits(converted(**given))
    if old is not None and new is not None and old.shape == new.shape and old.ndim >= 2:
        p, q = (t.double().log_softmax(-1) for t in (old, new))
        kl = float((p.exp() * (p - q)).sum(-1).mean())
        top1 = float((old.argmax(-1) == new.argmax(-1)).double().mean())
    heads, parameters = tuple(h for h, _ in widths), (count(model), count(converted))
    return HeadsReport(heads, kv_heads, parameters, cache, kl, top1)


def _logits(result: Any) -> Tensor | None:
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    found = getattr(result, "logits", None)
    found = first if found is None else found
    return found if isinstance(found, Tensor) and found.is_floating_point() else None
