"""The graphs over a cache that are derived for a model: one for each kind of call, at the first such call.

Calls are of one kind if their keys are equal, as for graphs of whole sequences, and their sizes on one side
of every branch that the model takes (`step.py`). A state belongs to the decoder that made it, and to
the model as it was then."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.guards import call_key, run_past
from attngraph.capture.instead import LOCK
from attngraph.capture.state.scope import Scope
from attngraph.capture.structure import flatten, taken_apart, whole_name
from attngraph.errors import AttnGraphError, CacheError, DisagreementError, NoDecoderError, SavedError
from attngraph.ir import budgets
from attngraph.runtime.examples import Derive, Examples, Size
from attngraph.runtime.generation_options import DECODER_IDS
from attngraph.runtime.graphs import Fingerprints
from attngraph.runtime.kv_cache import Call, KVCache
from attngraph.runtime.packing import Packed
from attngraph.runtime.step import Step
from attngraph.runtime.verify import tensors_of

MASK = "attention_mask"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a state belongs to: the graphs of one decoder, one of them, and its model: the key of what a trace
    depends on, its weights, and how often each had been written to."""

    steps: "DerivedSteps"
    step: Step
    key: Any
    weights: list[Any]
    versions: list[int | None]


class DerivedSteps:
    """The derived graphs of one decoder.

    Args:
        derive: derives a graph from an example.
        tokens: the model's argument that takes the tokens, if the user has named it.
    """

    def __init__(self, model: Callable[..., Any], derive: Derive, tokens: str | None) -> None:
        self._model, self._tokens = model, tokens
        self.signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
        self._derive = derive
        self._fingerprints = Fingerprints(model)
        self._kept: list[tuple[Any, Step]] = []
        self._embeddings: dict[str, nn.Embedding | None] = {}

    @property
    def latest(self) -> Step | None:
        """The graph that was derived last."""
        return self._kept[-1][1] if self._kept else None

    def all(self) -> tuple[Step, ...]:
        return tuple(dict.fromkeys(step for _, step in self._kept))

    def of_state(self, state: KVCache) -> Step:
        """The graph that goes on with a state. It is a CacheError if that is another decoder's or rank's, if
        the model has changed since the prompt, or if it was loaded and no graph is for it."""
        if state.origin is None:
            state.origin = self._origin_of_loaded(state)
        origin: Origin = state.origin
        if origin.steps is not self:
            raise CacheError(
                "this state belongs to another decoder, whose model computed what is kept of the prompt.\n"
                "What to do: go on with that decoder, or call prefill of this one."
            )
        changed = self._changed(origin)
        if changed:
            raise CacheError(
                f"{changed} has changed since the prompt, so what is kept of the prompt does not go with "
                "it. Nothing was written.\nWhat to do: call prefill again."
            )
        return origin.step

    def origin(self, step: Step) -> Origin:
        """What a state of this step belongs to: this decoder, and its model as it is now."""
        weights, versions = step.weights()
        return Origin(self, step, self._key(step.scope), weights, versions)

    def _key(self, scope: Scope) -> Any:
        """All that a graph depends on but what is given to a call."""
        with torch.no_grad():
            return call_key((), None, self._fingerprints, scope)

    def _changed(self, origin: Origin) -> str:
        """What has changed since a state was made; "" if nothing has."""
        if isinstance(self._model, nn.Module) and self._model.training:
            return "the model is in training mode, and that"
        if around := run_past():
            return f"{around} is around this call, and that"
        with LOCK.call():
            if self._key(origin.step.scope) != origin.key:
                return "the model (a layer, a hook, an attribute that its forward reads, a mode of torch)"
            weights, versions = origin.step.weights()
            same = versions == origin.versions and [*map(id, weights)] == [*map(id, origin.weights)]
            return "" if same else "a weight of the model"

    def _origin_of_loaded(self, state: KVCache) -> Origin:
        """The graph for a state that was loaded from a file: one that keeps the same."""
        known = [s for s in self.all() if s.plan == state.plan]
        if not known:
            raise CacheError(
                "this state was loaded, and the decoder has not been derived for it yet: call prefill "
                "with a prompt of the same kind once."
            )
        known[-1].ranks.require_own(state.rank)
        # Graphs for other sizes may keep the same: the one that was right for what is kept.
        kept = Call(1 if state.alone else state.rows, frozenset(n for n in state.lengths if n), state.sizes)
        return self.origin(next((s for s in reversed(known) if not s.sizes.fault(kept)), known[-1]))

    def argument(self, inputs: Mapping[str, Any]) -> str:
        """The model's argument that takes the tokens."""
        names, asked = list(self.signature.parameters), self._tokens
        if asked is not None and asked not in names:
            raise ValueError(f"the model has no argument {asked!r}; it has {', '.join(names)}.")
        left = (n for n in names if n not in inputs and n not in ("args", "kwargs"))
        found = asked or (DECODER_IDS if DECODER_IDS in names else next(left, None))
        if found is None:
            raise ValueError(
                "the model has no argument left for the tokens; CacheConfig(tokens=...) names it."
            )
        return found

    def embedding(self, name: str) -> nn.Embedding:
        """The layer whose embeddings of tokens, given by `name`, the model takes for the tokens themselves.
        CacheError if it has none."""
        if name not in self._embeddings:
            every = self._model.modules() if isinstance(self._model, nn.Module) else ()
            tables = (m for m in every if isinstance(m, nn.Embedding))
            with torch.no_grad():
                self._embeddings[name] = next((m for m in tables if self._is_of_tokens(m, name)), None)
        if (layer := self._embeddings[name]) is None:
            raise CacheError(
                f"these tokens are ids, and those of the prompt were embeddings, given by {name}. The model "
                "has no embedding whose results it takes there for the ids themselves. Nothing was written.\n"
                "What to do: go on with embeddings of the new tokens."
            )
        return layer

    def _is_of_tokens(self, layer: nn.Embedding, name: str) -> bool:
        off = {"use_cache": False} if "use_cache" in self.signature.parameters else {}
        ids = torch.arange(min(layer.num_embeddings, 5), device=layer.weight.device).unsqueeze(0)
        first = next(iter(self.signature.parameters))
        try:
            ways = ({first: ids, **off}, {name: layer(ids), **off})
            pairs = zip(*(tensors_of(self._model(**way)) for way in ways), strict=True)
            return all(torch.allclose(a, b) for a, b in pairs)
        except Exception:  # another layer's table, with numbers of another width
            return False

    def of_call(self, packed: Packed, inputs: Mapping[str, Any], alone: bool = False) -> Step:
        """The derived graph for calls like this one, or a new one. `alone`: each row is a call of its own."""
        model = self._model
        if isinstance(model, nn.Module) and model.training:
            raise NoDecoderError("the model is in training mode. Call model.eval() first.")
        if around := run_past():
            raise NoDecoderError(f"{around} is around this call, and a decoder would run past it.")
        name = packed.name or self.argument(inputs)
        inputs = taken_apart(inputs)
        unknown = set(map(whole_name, inputs)) - set(self.signature.parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values())
        if unknown and not takes_any:
            raise TypeError(f"the model's forward takes no {', '.join(sorted(unknown))}.")
        if MASK not in inputs and self._requires(MASK):
            inputs = {**inputs, MASK: self._all_real(packed)}
        self._require_arguments({name, *map(whole_name, inputs)})
        leaves, spec = flatten({name: packed.ids, **dict(sorted(inputs.items()))})
        width = tuple(packed.ids.shape[2:])

        def key(scope: Scope) -> Any:
            return scope, call_key(leaves, spec, self._fingerprints, scope), width

        rows = 1 if alone else len(packed.counts)
        call = Examples(model, self._derive, self.signature, name, packed, inputs, rows)
        with LOCK.call():
            found = self._valid(key, call)
        if found is not None:
            return found
        with LOCK.trace():
            found = self._valid(key, call)  # another thread may have derived it meanwhile
            if found is None:
                steps = self._derived(call, self._known(key))
                with torch.no_grad():
                    self._kept += [(key(step.scope), step) for step in steps]
                del self._kept[: -budgets.GRAPHS_KEPT]
                found = steps[-1]
            return found

    def _all_real(self, packed: Packed) -> Tensor:
        """A mask with a flag for every token: padding is removed before. Raises TypeError if the caller's has
        numbers, of which nobody says what they do with a token that is there."""
        given = packed.given
        if given is not None and given.is_floating_point():
            raise TypeError(
                f"the model's forward needs {MASK}, and this one has numbers of {given.dtype}. Padding is "
                "removed before, so a decoder gives it a flag for every token: give flags (bool, or 0 and "
                f"1), or let forward do without ({MASK}=None)."
            )
        like = packed.ids.new_empty(packed.shape, dtype=torch.int64) if given is None else given
        return torch.ones_like(like)

    def _requires(self, name: str) -> bool:
        """Whether the model's forward cannot be called without this argument."""
        parameter = self.signature.parameters.get(name)
        return parameter is not None and parameter.kind in _NAMED and parameter.default is parameter.empty

    def _require_arguments(self, given: Collection[str]) -> None:
        """Raise TypeError if the model's forward needs arguments that are not given."""
        missing = [name for name in self.signature.parameters if name not in given and self._requires(name)]
        if missing:
            raise TypeError(
                f"the model's forward needs {', '.join(missing)} as well: give it by name ({missing[0]}=...)."
            )

    def _known(self, key: Callable[[Scope], Any]) -> list[Step]:
        """The steps that were derived for calls like this one, whatever their sizes, the latest first, if the
        buffers that they rely on are unchanged. `key`: of the call, in a scope."""
        kept = tuple(reversed(self._kept))
        keys = {scope: key(scope) for scope in {step.scope for _, step in kept}}
        return [step for known, step in kept if known == keys[step.scope] and step.is_valid()]

    def _valid(self, key: Callable[[Scope], Any], call: Examples) -> Step | None:
        """A step that was derived for this call."""
        return next((step for step in self._known(key) if not call.fault(step)), None)

    def _derived(self, call: Examples, known: Sequence[Step]) -> list[Step]:
        """New steps, of which the last one is right for the call. The first is derived from an example of a
        few tokens; where the model does something else with this call, the next from one of its size.

        Args:
            known: steps for such calls, but for other sizes, the latest first.
        """
        made, seen, problems = list[Step](), list(known), list[AttnGraphError]()
        waiting = call.towards(known[0], Size()) if known else [Size()]
        tried = set[Size]()
        while waiting:
            too_long = [s for s in seen if call.is_too_long(s)]
            if too_long:
                return [*made, too_long[0]]  # which says how many tokens fit
            size = waiting.pop(0)
            if size in tried:
                continue
            tried.add(size)
            try:
                step = call.derived(size)
            except (DisagreementError, SavedError):
                raise
            except AttnGraphError as other:
                if isinstance(other, NoDecoderError) and other.longer:
                    waiting = [size._replace(tokens=other.longer), size._replace(as_is=True), *waiting]
                    continue
                problems.append(other)
                if len(problems) == 1 and not seen:
                    waiting += [*call.others(), *call.own_size(other)]
                elif isinstance(other, NoDecoderError) and not seen:
                    break  # another number of tokens would not change that
                continue
            made.append(step)
            if not call.fault(step):
                return made
            seen.append(step)
            waiting = [*call.towards(step, size), *waiting]
        short = next((s for s in seen if s.limit is not None and s.limit < call.longest), None)
        if short is not None:
            return [*made, short]
        if not seen:
            raise problems[-1]
        raise CacheError(call.refusal(seen[-1], problems)) from (problems[-1] if problems else None)
