"""Takes up what was compiled before, from the folder of a saved model or the cache on disk, or compiles.

`compiled.py` and `methods.py` ask here for graphs. What a saved graph is valid for is compared first
(`saved/guards.py`); nothing of a saved file is executed.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attngraph.api import build, derive
from attngraph.api.build import owner_of
from attngraph.api.options import Options
from attngraph.capture.state.content import Content
from attngraph.capture.state.kinds import TOOLS
from attngraph.capture.state.ran import collecting
from attngraph.capture.state.scope import Ran, Scope
from attngraph.capture.structure import flatten
from attngraph.codegen.cpu import toolchain
from attngraph.errors import SavedError, told_as
from attngraph.ir import cache_folder
from attngraph.ir.kept import kept
from attngraph.ir.modes import without_collections
from attngraph.ir.ops.panels import whole
from attngraph.ir.records import made, plain
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.examples import Example
from attngraph.runtime.executable import Executable
from attngraph.runtime.step import Step
from attngraph.saved import guards
from attngraph.saved.disk import Disk, register
from attngraph.saved.folder import read_file, read_manifest, write_folder
from attngraph.saved.weights import Skeleton, weights_of

from attngraph.saved.entry import (  # isort: skip
    Files, Known, describe, executable_from, files_of, of_files, step_from, unfit_contents,
)  # fmt: skip

log = logging.getLogger(__name__)
_Made = TypeVar("_Made", Executable, Step)
_TOLD = 6
"""Differences that a message names."""


@functools.cache
def versions() -> dict[str, str]:
    """What a saved graph depends on besides the model: versions, and the machine that kernels are for."""
    found = {
        "attngraph": _own_sources(), "python": platform.python_version(),
        "torch": torch.__version__, "machine": toolchain.machine(),
    }  # fmt: skip
    for name in ("triton", *TOOLS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    if torch.cuda.is_available():
        found["gpu"] = str([torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())])
    return found


def _own_sources() -> str:
    """A digest of attngraph's own files: a version may change without another number."""
    root = Path(__file__).resolve().parents[1]
    files: dict[str, str] = {}
    for folder in {os.path.realpath(place) for place in (root, root / "passes", root / "codegen")}:
        for place, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if os.path.join(place, name) != str(root / "models")]
            sources = (name for name in names if name.endswith((".py", ".h")))
            files |= {os.path.join(place, name): name for name in sources}
    found = hashlib.sha256()
    for path, name in sorted(files.items()):
        with open(path, "rb") as file:
            found.update(name.encode() + file.read())
    return found.hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class SavedOptions:
    """The options that decide what a graph becomes; passes in words."""

    backend: str
    inductor: bool
    strict: bool
    consistent: bool
    freeze: str
    padding: str
    absorb: str
    disable: tuple[str, ...]
    passes: tuple[str, ...]


def options_key(options: Options) -> dict[str, Any]:
    """`SavedOptions` as plain values."""
    found = {field.name: getattr(options, field.name) for field in dataclasses.fields(SavedOptions)}
    passes = [repr(step) for step in options.pipeline()] if options.passes is not None else []
    return {**found, "disable": sorted(options.disable), "passes": passes}


class Call:
    """One call that a graph is needed for: what it is compared by, computed when it is asked for.

    Args:
        kind: "module" or "decoder", with what belongs to it.
        checks_model: whether there is a model that could be traced, and so is compared.
    """

    def __init__(
        self, kind: Mapping[str, Any], target: Callable[..., Any], args: Any, options: Options,
        checks_model: bool = True,
    ) -> None:  # fmt: skip
        self.target, self.options, self.checks_model = target, options, checks_model
        self.leaves, spec = flatten(args)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.described = guards.describe_call(self.leaves, spec) | {
            f"{name} of the decoder": str(value) for name, value in kind.items() if name != "kind"
        }
        name = type(target) if isinstance(target, nn.Module) else target
        self.key = {
            "versions": versions(), "options": options_key(options), "kind": dict(kind),
            "call": self.described, "of": f"{name.__module__}.{getattr(name, '__qualname__', '')}",
        }  # fmt: skip
        self.owner = owner_of(target)

    @kept
    def content(self, scope: Scope) -> Content:
        """The state that counts in a scope."""
        return guards.describe_state(self.target, self.leaves, scope)

    def known(self, files: Files) -> Known:
        """What a graph in files is put in place with."""
        scope = of_files(describe(files).ran.scope)(self.content)
        return Known(self.content(scope).objects, self.owner, scope)

    def unfit(self, files: Files) -> list[str]:
        """What does not fit, by name; empty if all does."""
        found, known = describe(files), self.known(files)
        content = self.content(known.scope)
        if not self.checks_model:
            found, content = dataclasses.replace(found, state={}), Content()
        answers = of_files(guards.describe_answers)(self.tensors, found.ran)
        unlike = guards.differences(found, {**self.described, **answers}, content)
        reasons = [reason for reason, _ in zip(unlike, range(_TOLD), strict=False)]
        return reasons or [r for r in (unfit_contents(files, known),) if r]


@dataclasses.dataclass(frozen=True)
class About:
    """What the manifest of a saved model says, besides `weights.About`."""

    kind: str
    versions: dict[str, str]
    graphs: int
    options: SavedOptions
    config: CacheConfig | None
    model: str


class Folder:
    """The graphs of a saved model, all read when it is opened: no file is missing, none has changed."""

    def __init__(self, path: Path, strict: bool) -> None:
        self.path, self.strict = path, strict
        self.about = read_manifest(path)
        self.said = self._said()
        files = {name: read_file(path, self.about, name) for name in self.about["files"]}
        prefixes = [f"graph-{number}/" for number in range(self.said.graphs)]
        self.graphs = [
            {name.removeprefix(prefix): data for name, data in files.items() if name.startswith(prefix)}
            for prefix in prefixes
        ]
        self.unlike = [
            f"{name} was {was}, and is {versions().get(name, 'none')}"
            for name, was in self.said.versions.items()
            if versions().get(name, "none") != was
        ]
        if self.unlike:
            self.refuse(self.unlike)

    def _said(self) -> About:
        names = [field.name for field in dataclasses.fields(About)]
        with told_as(SavedError, ValueError, before=f"{self.path} is no saved model: ", after="."):
            found: About = made(About, {n: self.about[n] for n in names if n in self.about}, "the manifest")
            if found.kind not in ("module", "decoder") or (found.config is None) != (found.kind == "module"):
                raise ValueError(f"a {found.kind!r:.80} with the configuration {found.config}")
            if not 0 < found.graphs <= len(self.about["files"]):
                raise ValueError(f"{found.graphs} graphs in {len(self.about['files'])} files")
        return found

    def options(self) -> Options:
        """The options that it was compiled with, if there are such, and no passes of the user's own."""
        given = self.said.options
        if given.passes:
            raise SavedError(
                f"{self.path} was compiled with other passes; compile it with them: attngraph.compile."
            )
        before = f"{self.path} was compiled with options that are not there: "
        with told_as(SavedError, ValueError, before=before):
            return Options(**{**dataclasses.asdict(given), "passes": None})

    def refuse(self, reasons: Sequence[str]) -> None:
        """Say why what is saved is not used: where strict, as an error."""
        distinct = list(dict.fromkeys(reasons))
        more = len(distinct) - _TOLD
        shown = "; ".join(distinct[:_TOLD]) + (f"; and {more} more" if more > 0 else "")
        if self.strict:
            raise SavedError(f"{self.path} does not fit: {shown}.")
        log.warning("%s does not fit, the model is traced anew: %s", self.path, shown)

    def entries(self, call: Call, reasons: list[str]) -> Iterator[tuple[Files, str]]:
        """The graphs that may serve a call. `reasons` gets why others do not."""
        for files in () if self.unlike else self.graphs:
            unlike = call.unfit(files)
            reasons += unlike
            if not unlike:
                yield files, str(self.path)
        self.refuse(self.unlike or reasons or ["no graph of it takes these sizes"])


def the_disk() -> Disk | None:
    """The cache on disk; None if it is turned off."""
    return None if cache_folder.is_off() else Disk(toolchain.folder())


register(lambda: None if (disk := the_disk()) is None else disk.root)


def _disk_for(options: Options) -> Disk | None:
    """The cache for graphs with these options; None if they are not kept there."""
    return the_disk() if options.dump is None and options.passes is None else None


def _entries(call: Call, saved: Folder | None, reasons: list[str]) -> Iterator[tuple[Files, str]]:
    """The graphs that may serve a call, and where they are: of a saved model, then of the cache on disk."""
    if saved is not None:
        yield from saved.entries(call, reasons)
    disk = _disk_for(call.options)
    for path, files in () if disk is None else disk.entries(call.key):
        try:
            unlike = call.unfit(files)
        except SavedError as problem:
            unlike = [str(problem)]
        if unlike:
            log.info("%s does not fit: %s", path, "; ".join(unlike))
        else:
            disk.used(path, files)  # type: ignore[union-attr]
            yield files, str(path)


def executable_for(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options,
    saved: Folder | None = None,
) -> Executable:  # fmt: skip
    """An executable for a call, from what was compiled before (if strict, that must fit) or compiled now."""
    call = Call({"kind": "module"}, target, (args, kwargs), options, not isinstance(target, Skeleton))
    with whole(call.owner):
        return _taken_or_made(
            call, saved,
            lambda files: executable_from(files, call.known(files), build.runner_of(options)),
            lambda found: found.accepts(call.tensors),
            lambda: build.compile_graph(target, args, kwargs, options),
        )  # fmt: skip


def step_for(
    target: Callable[..., Any], options: Options, config: CacheConfig, saved: Folder | None,
    example: Example, fits: Callable[[Step], bool],
) -> Step:  # fmt: skip
    """A decoder's step, from what was compiled before and `fits`, or derived now."""
    kind = {"kind": "decoder", "tokens": example.name, "number of tokens": example.tokens}
    kind |= {"config": plain(config)}
    kind |= {"compared": True, "alone": example.alone} if example.is_compared else {}
    kind |= {"single": True} if example.single else {}
    call = Call(kind, target, example.arguments, options, not isinstance(target, Skeleton))
    with whole(call.owner):
        return _taken_or_made(
            call, saved,
            lambda files: step_from(files, call.known(files), build.step_runner_of(options)),
            lambda found: found.is_valid() and fits(found),
            lambda: derive.derive_decoder(target, options, config, example),
        )  # fmt: skip


def _taken_or_made(
    call: Call, saved: Folder | None, read: Callable[[Files], _Made], fits: Callable[[_Made], bool],
    make: Callable[[], _Made],
) -> _Made:  # fmt: skip
    """What was saved, or kept on disk, and fits the call; else what `make` gives, which is then kept."""
    with without_collections():
        taken = _taken(call, saved, read, fits)
    if taken is not None:
        return taken
    with collecting() as executed:
        found = make()
    _keep(found, call, executed)
    return found


def _taken(
    call: Call, saved: Folder | None, read: Callable[[Files], _Made], fits: Callable[[_Made], bool]
) -> _Made | None:
    reasons: list[str] = []
    for files, where in _entries(call, saved, reasons):
        try:
            found = read(files)
            fitting = of_files(fits)(found)
        except SavedError as problem:
            log.info("not used: %s", problem)
            reasons.append(str(problem).removesuffix("."))
            continue
        if fitting:
            found.traced = describe(files)
            found.report = dataclasses.replace(found.report, taken_from=where)
            return found
    return None


def _keep(found: Executable | Step, call: Call, executed: Ran) -> None:
    """Note what a trace depended on, and keep the graph on disk if it can be compared in another process."""
    try:
        state = functools.partial(guards.describe_state, call.target, call.leaves)
        found.traced, content = guards.traced(call.described, call.tensors, state, executed, found.scope)
        disk = _disk_for(call.options)
        if found.traced.doubts:
            log.info("not kept in the cache because of %s", "; ".join(found.traced.doubts[:_TOLD]))
        elif disk is not None:
            disk.keep(call.key, files_of(found, found.traced, content, call.owner, code=True))
    except Exception as problem:  # the user's own objects are looked at; what they do is not ours to stop for
        kind = "" if isinstance(problem, SavedError) else f"{type(problem).__name__}: "
        log.info("not kept in the cache: %s%s", kind, problem)


# --- saving and loading ---


def save(
    path: str | Path, target: Callable[..., Any], found: Sequence[Executable | Step], options: Options,
    config: CacheConfig | None, weights: bool,
) -> Path:  # fmt: skip
    """Write graphs as a saved model, if there are any, and all have a form in files."""
    if not found:
        raise SavedError("nothing has been compiled yet: call the model once, then save it.")
    content = Content()
    content.of("model", target)
    files: dict[str, bytes] = {}
    for number, graph in enumerate(found):
        if graph.traced is None:
            raise SavedError("this graph was not compiled by attngraph.compile, so it cannot be saved.")
        if graph.traced.doubts:
            log.warning(
                "saved, but these are not compared when it is loaded: %s", "; ".join(graph.traced.doubts)
            )
        entry = files_of(graph, graph.traced, content, owner_of(target), code=False)
        files |= {f"graph-{number}/{name}": data for name, data in entry.items()}
    about = {
        "kind": "module" if config is None else "decoder", "versions": versions(), "graphs": len(found),
        "options": options_key(options), "config": None if config is None else plain(config),
        "model": f"{type(target).__module__}.{type(target).__qualname__}",
    }  # fmt: skip
    if weights:
        with whole(owner_of(target)):
            files |= weights_of(target, about)
    write_folder(Path(path), about, files, replace=True)
    return Path(path)
