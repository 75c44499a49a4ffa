"""Faults of configurations: one number, flag or word of it is another, with the same weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from workshop.bench.stock.shrink import role

if TYPE_CHECKING:
    from workshop.faults.targets import Target

FUNCTIONS = {
    "gelu": "gelu_new",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "silu": "gelu",
    "relu": "gelu",
    "swish": "relu",
    "gelu_fast": "relu",
    "quick_gelu": "gelu",
    "relu2": "relu",
}
"""Functions of activation, and what is taken for them."""
FAR = 4096
"""A window that no short call can show."""
Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One changed setting: its `rule`, its path, its value before and after. `first`: a value that the
    reference gets, too, if it is not as it was."""

    rule: str
    path: Path
    before: str
    after: str
    value: Any = dataclasses.field(repr=False)
    first: Any = None

    @property
    def name(self) -> str:
        """The name of the setting, without those of tables that it is in."""
        return str(next(part for part in reversed(self.path) if isinstance(part, str)))

    def models(self, made: Target) -> tuple[Target, nn.Module]:
        """The reference and a model with this setting."""
        if self.first is not None:
            made = dataclasses.replace(
                made, reference=made.candidate(_with(made.config, self.path, self.first))
            )
        return made, made.candidate(_with(made.config, self.path, self.value))


def settings(config: Any, most: int) -> Iterator[Setting]:
    """Faults of a configuration; of each rule in turn, at most so many."""
    found = list(_faults(config)) if config is not None else []
    rules = list(dict.fromkeys(one.rule for one in found))
    turns = sorted(
        (sum(o.rule == one.rule for o in found[:n]), rules.index(one.rule), n) for n, one in enumerate(found)
    )
    yield from (found[n] for *_, n in turns[:most])


def _faults(config: Any) -> Iterator[Setting]:
    values = config.to_dict() if hasattr(config, "to_dict") else dataclasses.asdict(config)
    for path, value in _leaves(values):
        name = str(path[-1])
        if name in _NOT_READ or any(part in _NOT_READ for part in path):
            continue
        if isinstance(value, bool):
            yield _made("a flag is another", path, value, not value)
        elif isinstance(value, float) and value:
            yield _made("number 1 % larger", path, value, value * 1.01)
        elif isinstance(value, int) and role(name) == "window" and len(path) == 1:
            yield _made("window one longer", path, value, value + 1)
            yield dataclasses.replace(_made("window of 4,096 one longer", path, FAR, FAR + 1), first=FAR)
        elif (
            isinstance(value, int)
            and value
            and role(name) not in ("vocabulary", "token", "layers", "positions")
        ):
            yield _made("number one larger", path, value, value + 1)
        elif isinstance(value, str) and value in FUNCTIONS:
            yield _made("another function", path, value, FUNCTIONS[value])
        elif value in ("full_attention", "sliding_attention"):
            other = {"full_attention": "sliding_attention"}.get(str(value), "full_attention")
            yield _made("another kind of layer", path, value, other)


_NOT_READ = {
    "initializer_range",
    "initializer_factor",
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "attention_dropout",
    "hidden_dropout",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
    "router_aux_loss_coef",
    "classifier_dropout",
    "problem_type",
    "chunk_size_feed_forward",
    "tie_word_embeddings",
    "is_encoder_decoder",
    "gradient_checkpointing",
    "temperature",
    "top_p",
}
"""Settings of training, generation and of what a call returns."""


def _leaves(values: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    inner = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else None
    )
    if inner is None:
        yield at, values
        return
    for name, value in inner:
        if "dropout" not in str(name) and "drop" not in str(name).split("_"):
            yield from _leaves(value, (*at, name))


def _made(rule: str, path: Path, before: Any, after: Any) -> Setting:
    where = ".".join(map(str, path))
    return Setting(rule, path, f"{where} = {before!r}", f"{where} = {after!r}", after)


def _with(config: Any, path: Path, value: Any) -> Any:
    """A copy of a configuration with another value at a path."""
    if dataclasses.is_dataclass(config) and not hasattr(config, "to_dict"):
        return dataclasses.replace(config, **{path[0]: value})  # type: ignore[type-var]
    found = copy.deepcopy(config)
    inner = found
    for part in path[:-1]:
        inner = inner[part] if isinstance(inner, (dict, list)) else getattr(inner, part)
    if isinstance(inner, (dict, list)):
        inner[path[-1]] = value
    else:
        setattr(inner, path[-1], value)
    return found
