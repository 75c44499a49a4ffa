"""The options of `attngraph.compile`, and the passes that they select."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from attngraph.errors import meant
from attngraph.ir import budgets
from attngraph.ir.choices import ABSORB, BACKENDS, backends
from attngraph.ir.graph.program_graph import RESULTS
from attngraph.ir.ops.kernels import KERNELS
from attngraph.passes import PASSES, order, pass_named, waiting_at_most
from attngraph.passes.absorb_mla.absorb import AbsorbMLA
from attngraph.passes.fuse_token_wise.fuse import FuseTokenWise
from attngraph.passes.insert_kv_cache.insert import InsertKVCache
from attngraph.passes.skip_padding import SkipPadding
from attngraph.pipeline import Pass, without
from attngraph.runtime.devices import ONE, OneDevice
from attngraph.runtime.parallel.mesh import ShardConfig
from attngraph.runtime.parallel.several import devices_of

__all__ = ["ABSORB", "BACKENDS", "CompileOptions", "Options", "make_options"]


PADDING = "computed", "unused"
"""What forward returns of tokens that a mask hides from all."""
FREEZE = "keep", "release"
"""The model's own weights, once there are others that are laid out for the machine."""
Change = Callable[[tuple[Pass, ...]], Sequence[Pass | str]]
"""Makes an order of passes of the default one, for whole sequences or for a decoder."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Compile options; see `attngraph.compile`. `later`: the kinds of results that may wait until somebody
    looks at them, where what is compiled is called by whoever uses its results."""

    backend: str = "auto"
    inductor: bool = False
    strict: bool = False
    dump: Path | None = None
    passes: tuple[Pass, ...] | Change | None = None
    progress: Callable[[str], None] | None = None
    absorb: str = "auto"
    disable: tuple[str, ...] = ()
    min_scores: int | None = None
    consistent: bool = False
    freeze: str = ""
    padding: str = "computed"
    devices: OneDevice = ONE
    later: tuple[str, ...] = RESULTS

    @property
    def fused_from(self) -> int:
        """The fewest scores per attention with which a call runs the graph and not the model itself. Ranks
        have only a part of the model, and one whose weights were given up cannot run."""
        if not self.devices.is_one or self.freeze == "release":
            return 0
        if self.min_scores is not None:
            return self.min_scores
        chosen = self.backend != "auto" or self.inductor or self.consistent or self.passes is not None
        return 0 if chosen or self.freeze else budgets.FUSED_SCORES

    def __post_init__(self) -> None:
        AbsorbMLA(self.absorb)  # raises if the value is invalid
        of_others = backends()
        if of_others.get(self.backend) is not None:
            of_others[self.backend].load()  # which registers its kernels
        there = dict.fromkeys((*of_others, *(kernel.partition(".")[0] for kernel in KERNELS)))
        if self.backend not in there:
            raise ValueError(f"backend must be one of {', '.join(there)}, found {self.backend!r}.")
        own = self.passes if isinstance(self.passes, tuple) else ()
        known = [step.name for step in (*own, *PASSES)]
        least = self.min_scores
        if least is not None and (not isinstance(least, int) or least < 0):
            raise ValueError(f"min_scores counts scores, so it is a whole number from 0 on; found {least!r}.")
        for name in () if callable(self.passes) else self.disable:
            if name not in known:
                raise ValueError(f"there is no pass {name!r} to disable; {meant(name, known)}")

    def pipeline(self) -> tuple[Pass, ...]:
        """The passes for a model without a cache."""
        steps = self.passes
        if not isinstance(steps, tuple):
            made: dict[str, Any] = {
                "consistent": self.consistent,
                "freeze": self.freeze,
                "padding": self.padding,
            }
            steps = self._changed(order(self.backend, self.absorb, **made, **self.devices.passes()))
        own = (SkipPadding.name, FuseTokenWise.name) if self.inductor and self.passes is None else ()
        return without(waiting_at_most(steps, self.later), (*self.disable, *own))

    def decoder_pipeline(self, rounded: str = "") -> tuple[Pass, ...]:
        """The passes for a decoder; the argument and the result of `InsertKVCache` are filled in later.
        `rounded`: the dtype of 8 bits of its cache, if it has one. ValueError where an order of passes for
        whole sequences was given, or `InsertKVCache` is disabled."""
        if isinstance(self.passes, tuple):
            raise ValueError(
                "a decoder has an order of passes of its own. Give a function that changes it, as in "
                "passes=lambda order: placed(order, Mine(), before='select-kernels') (attngraph.pipeline)."
            )
        if InsertKVCache.name in self.disable:
            raise ValueError(f"cache asks for what {InsertKVCache.name} does; it cannot be disabled.")
        divided = self.devices.passes(decoder=True, rounded=rounded)
        steps = self._changed(order(
            self.backend, self.absorb, decoder=True, rounded=rounded, consistent=self.consistent,
            freeze=self.freeze, **divided
        ))  # fmt: skip
        return without(steps, self.disable)

    def _changed(self, steps: tuple[Pass, ...]) -> tuple[Pass, ...]:
        """The default order, as a function of the user's changes it."""
        return tuple(map(as_pass, self.passes(steps))) if callable(self.passes) else steps


def as_pass(step: Any) -> Pass:
    """A pass, given itself or by its name."""
    if isinstance(step, str):
        return pass_named(step)
    missing = [name for name in ("name", "requires", "yields", "run") if not hasattr(step, name)]
    if missing:
        raise TypeError(f"passes takes names and passes; {step!r} has no {missing[0]!r}, so it is none.")
    found: Pass = step
    return found


class CompileOptions(TypedDict, total=False):
    """The options of `attngraph.compile`, which describes them."""

    backend: str
    inductor: bool
    strict: bool
    dump: str | Path | None
    passes: Sequence[Pass | str] | Change | None
    absorb: str
    disable: Sequence[str]
    min_scores: int | None
    consistent: bool
    freeze: bool | str
    padding: str
    mesh: Any
    shard: ShardConfig | None


def make_options(
    progress: Callable[[str], None] | None = None, /, **asked: Unpack[CompileOptions]
) -> Options:
    """Options from the arguments of `attngraph.compile`. ValueError where a backend, a pass or a value of
    `absorb` is unknown, or a mesh has not the axis; TypeError where there is no such option, or it is of
    another type."""
    for name in asked:
        if name not in CompileOptions.__annotations__:
            known = [*CompileOptions.__annotations__, "cache"]
            raise TypeError(f"compile() got an unexpected keyword argument {name!r}; {meant(name, known)}")
    given: dict[str, Any] = {"progress": progress, **asked}
    freeze = given.get("freeze", False)
    if freeze not in (False, True, "", *FREEZE):
        raise ValueError(f"freeze must be False, True or 'release', found {freeze!r}.")
    if given.get("padding", PADDING[0]) not in PADDING:
        raise ValueError(f"padding must be {' or '.join(map(repr, PADDING))}, found {given['padding']!r}.")
    given["freeze"] = "keep" if freeze is True else freeze or ""
    mesh, shard = given.pop("mesh", None), given.pop("shard", None)
    folder = given.get("dump") or os.environ.get("ATTNGRAPH_DUMP")
    passes, disable = given.get("passes"), given.get("disable", ())
    if isinstance(passes, str):
        raise ValueError(f"passes takes a sequence, as in passes=({passes!r},).")
    if not isinstance(passes, Iterable | None) and not callable(passes):
        raise TypeError(f"passes takes a sequence of passes or their names, found {type(passes).__name__}.")
    chosen = tuple(map(as_pass, passes)) if isinstance(passes, Iterable) else passes
    if isinstance(disable, str):
        raise ValueError(f"disable takes names of passes, as in disable=({disable!r},).")
    if not isinstance(disable, Iterable) or not all(isinstance(name, str) for name in disable):
        raise TypeError(f"disable takes names of passes, as in disable=('merge-heads',), found {disable!r}.")
    if mesh is None and shard is not None:
        raise ValueError("shard says what is divided along the axes of a mesh; give the mesh too.")
    devices = ONE if mesh is None else devices_of(mesh, shard)
    if given.get("consistent") and (
        mesh is not None or given.get("backend", "auto") not in ("auto", "cpu", "triton")
    ):
        raise ValueError(
            "consistent=True is for one device: leave mesh out, and backend is auto, cpu or triton."
        )
    if given.get("freeze") and (mesh is not None or given.get("inductor") or isinstance(chosen, tuple)):
        raise ValueError(
            "freeze lays weights out for products on one device that attngraph compiles: leave out mesh and "
            "inductor, and give passes as a function that changes their order."
        )
    if not devices.is_one and isinstance(chosen, tuple):
        raise ValueError("passes and mesh do not go together: what ranks divide is decided by a pass.")
    dump = Path(folder) if folder else None
    return Options(**given | {"dump": dump, "passes": chosen, "disable": tuple(disable), "devices": devices})
