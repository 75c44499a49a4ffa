"""What every call of a decoder does: pack prompts, find their step, give it its arguments and a state."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.capture.structure import taken_apart
from attngraph.ir.modes import serving
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.derived import MASK, DerivedSteps
from attngraph.runtime.devices import OneDevice
from attngraph.runtime.kv_cache import KVCache
from attngraph.runtime.packing import Ids, Packed, pack
from attngraph.runtime.step import Step


class Calls:
    """The steps that are derived of a model, and how they are called."""

    def __init__(
        self, model: Callable[..., Any], derived: DerivedSteps, config: CacheConfig, devices: OneDevice
    ) -> None:
        self._model, self.derived, self.config, self.devices = model, derived, config, devices

    def pack(self, ids: Ids, mask: Tensor | None, name: str = "") -> Packed:
        """All real tokens, packed. `name`: of the argument that has them, if it is not the usual one."""
        owner = self._model if isinstance(self._model, nn.Module) else nn.Module()
        found = pack(ids, mask, lambda: next((p.device for p in owner.parameters()), torch.device("cpu")))
        return dataclasses.replace(found, name=name) if name else found

    def as_in_prompt(self, step: Step, packed: Packed) -> Packed:
        """Ids behind a prompt of embeddings as the embeddings that the model has of them."""
        if packed.ids.is_floating_point() or step.takes(packed.ids):
            return packed
        return dataclasses.replace(packed, ids=self.derived.embedding(step.name)(packed.ids))

    @serving
    def new_state(self, packed: Packed, rows: int, config: CacheConfig | None = None) -> KVCache:
        """An empty state of so many rows, each a call of its own, for tokens like these."""
        step = self.derived.of_call(packed, {}, alone=True)
        state = self._empty(step, rows, config or self.config, packed)
        state.alone = True
        return state

    def step_of(self, state: KVCache) -> Step:
        """The graph that goes on with a state (`DerivedSteps.of_state`)."""
        return self.derived.of_state(state)

    def last_logits(
        self, state: KVCache, parts: Sequence[Tensor], unfinished: Collection[int] = ()
    ) -> Tensor:
        """Those of the last of each row's new tokens, `[R, V]`, for rows that get some. `parts`: the new
        tokens of each row, `[T]`. `unfinished`: as for `begin`."""
        step, packed = self.step_of(state), Packed.of_rows([part.to(state.device) for part in parts])
        given, last = {step.name: packed.ids}, packed.last()
        with state.changing():
            return step.advance(state, packed.counts, given, last, unfinished=unfinished)[0]

    def begin(
        self, step: Step, packed: Packed, inputs: Mapping[str, Any], picked: Tensor | None = None,
        config: CacheConfig | None = None, unfinished: Collection[int] = (), joined: bool = False,
    ) -> tuple[Tensor, KVCache]:  # fmt: skip
        """The logits of the prompts' tokens, or of those `picked`, and a state that holds the prompts.
        `unfinished`: rows of which more follow. `joined`: as for `Step.advance`."""
        inputs, own = taken_apart(inputs), config or self.config
        state = self._empty(step, len(packed.counts), own, packed)
        state.sizes = step.sizes.of_inputs(inputs, *packed.shape) or {}
        step.begin(state, {n: inputs[n] for n in step.prompt_arguments})
        given = self.arguments(step, packed, inputs)
        found = step.advance(state, packed.counts, given, picked, unfinished=unfinished, joined=joined)
        return found, state

    def _empty(self, step: Step, rows: int, config: CacheConfig, packed: Packed) -> KVCache:
        state = KVCache(step.plan, rows, config, packed.ids.device, step.limit)
        state.origin, state.rank = self.derived.origin(step), step.ranks.rank
        return state

    def require_rules(self, step: Step, state: KVCache, packed: Packed, inputs: Mapping[str, Any]) -> None:
        """Raise ValueError if what belongs to pairs of tokens is given for new ones, and is not what the rule
        of the prompt's makes of them, `[..., S, length + S]`."""
        for name, layout in step.sizes.layouts.items():
            given, rule = inputs.get(name), layout.pairs
            if given is None or rule is None:
                continue
            first, width = state.lengths[0], packed.shape[1]
            alike = len({*state.lengths}) == 1 and {*packed.counts} == {width}
            wanted = rule.entries(first, first + width, given.device) if alike else None
            if wanted is None or given.shape[-2:] != wanted.shape or not bool((given == wanted).all()):
                raise ValueError(
                    f"{name} follows the rule {rule.text} since the prompt, and new tokens have what it "
                    f"makes of their places: leave {name} out, or call prefill with all tokens."
                )

    def arguments(self, step: Step, packed: Packed, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The step's arguments that have an entry for every token, packed like the tokens."""
        found, inputs = dict[str, Tensor](), taken_apart(inputs)
        for name in step.arguments:
            layout = step.sizes.layouts.get(name)
            if name == step.name:
                found[name] = packed.ids
            elif layout is not None and layout.pairs is not None:  # how many there are is all that is read
                found[name] = torch.ones(packed.ids.shape[:2], dtype=torch.bool, device=packed.ids.device)
            elif name in inputs:
                value = inputs[name]
                if layout is not None and layout.fits(value):
                    value = layout.taken(value, packed.shape[0])
                if value.shape[:2] != packed.shape:
                    raise ValueError(f"{name} is {tuple(value.shape)}, the tokens {packed.shape}.")
                found[name] = value[packed.mask].unsqueeze(0)
            elif name == MASK:
                shape, device = packed.ids.shape[:2], packed.ids.device
                found[name] = torch.ones(shape, dtype=step.dtype_of(name), device=device)
            else:
                raise ValueError(f"the model needs {name} for every token; give it to decode as well.")
        return found
