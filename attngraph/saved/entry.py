"""One compiled graph as files, and the graph from the files: for a call of a module, or for a decoder.

    graph.txt     the lowered graph and its stages, as dumps have them
    graph.json    what is not in the text, and how results are put together
    guards.json   what the trace depended on
    report.json   the report, with the graph after each pass and the proof's result
    kernel-*.c    the sources of kernels, to be read: kernels are made anew from the graph

Nothing of it is executed. The code of kernels is what this attngraph writes for the graph, from the user's
own cache of compiled kernels or from the compiler.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from attngraph.capture.captured import Attribute, Captured
from attngraph.capture.sides import Decision, Same, Sides
from attngraph.capture.state.content import Content, tensor_digest
from attngraph.capture.state.scope import Scope
from attngraph.capture.structure import Layout
from attngraph.errors import SavedError, told_as
from attngraph.ir.graph.formula import size_of, size_text
from attngraph.ir.graph.printer import parts_of
from attngraph.ir.graph.program_graph import ProgramGraph, Rate
from attngraph.ir.records import made, plain
from attngraph.report.dump import kernel_file
from attngraph.report.report import CompileReport
from attngraph.report.user_code import UserCode
from attngraph.runtime.executable import Executable
from attngraph.runtime.machine import Run, own_tensor, require_own
from attngraph.runtime.step import Step, StepSizes
from attngraph.saved import graphs
from attngraph.saved.folder import as_bytes
from attngraph.saved.guards import Traced
from attngraph.saved.structure import read_structure, write_structure

Files = Mapping[str, bytes]
P = ParamSpec("P")
T = TypeVar("T")


# --- to files ---


def files_of(
    found: Executable | Step, traced: Traced, content: Content, owner: nn.Module, code: bool
) -> dict[str, bytes]:
    """The files of a graph. `content`: the model's state, for the paths of its objects. `owner`: the module
    in which names of weights are looked up. `code`: keep the text of the user's code in the report; a folder
    that is given away has none. A SavedError says why it has no form in files."""
    graph = found.captured.graph if isinstance(found, Executable) else found.graph
    if isinstance(found, Executable) and found.captured.changes:
        raise SavedError("its forward changes objects among its arguments")
    live = _live(graph, content)
    text, beside, names = graphs.write(graph, live)
    attributes = found.captured.attributes if isinstance(found, Executable) else ()
    beside["attributes"] = [_attribute(a, content, names) for a in attributes]
    if isinstance(found, Executable):
        beside |= {
            "structure": write_structure(found.captured.structure, names),
            "shapes": [[size_text(n, names) for n in shape] for shape in found.captured.shapes],
            "checks": list(found.captured.checks),
            "small": found.captured.serves_small,
        }
        left_out = [f"{path}.{name}" for path, name, *_, read in beside["attributes"] if not read]
    else:
        beside |= {
            "name": found.name, "names": found.names,
            "layouts": {name: layout.axes for name, layout in sorted(found.sizes.layouts.items())},
            "shapes": [[size_text(n, names) for n in shape] for shape in found.sizes.shapes],
            "sides": _sides(found.sizes.sides, names), "single": found.sizes.single,
        }  # fmt: skip
        left_out = _left_out(found, content)
    contents = {
        f"{given.kind} {given.name}": tensor_digest(own_tensor(given, owner, graph.constants)(None))
        for given in graphs.contents(graph)
    }
    guards = plain(dataclasses.replace(traced, left_out=tuple(left_out), contents=contents))
    del guards["doubts"]
    report = dataclasses.replace(found.report, parts=(), code=found.report.code if code else UserCode())
    kernels = {a.kernel.source: a.kernel for a in report.attention if a.kernel.source}
    return {
        "graph.txt": text.encode(), "graph.json": as_bytes(beside), "guards.json": as_bytes(guards),
        "report.json": as_bytes(plain(report)),
        **{kernel_file(n, kernel): source.encode() for n, (source, kernel) in enumerate(kernels.items())},
    }  # fmt: skip


def _live(graph: ProgramGraph, content: Content) -> dict[str, str]:
    """The constants that are the user's own tensors, by path."""
    tensors = {path: value for path, value in content.objects.items() if isinstance(value, Tensor)}
    found: dict[str, str] = {}
    for name, constant in graph.constants.items():
        for path, tensor in tensors.items():
            memories = {t.untyped_storage().data_ptr() for t in (tensor, constant)}
            if len(memories) > 1 or not constant.numel():
                continue
            if len({(t.shape, t.stride(), t.dtype) for t in (tensor, constant)}) > 1:
                raise SavedError(f"a part of the tensor {path} is in its graph; register it as a buffer")
            found.setdefault(name, path)
    return found


def _attribute(attribute: Attribute, content: Content, names: Mapping[str, str]) -> list[Any]:
    path = content.paths().get(id(attribute.owner))
    if path is None:
        raise SavedError(f"the object whose {attribute.name} its forward sets cannot be found again")
    written = None if attribute.structure is None else write_structure(attribute.structure, names)
    return [path, attribute.name, attribute.label, written, attribute.read]


def _sides(sides: Sides, names: Mapping[str, str]) -> dict[str, Any]:
    decisions = [[size_text(d.relation, names), d.line, d.raises] for d in sides.decisions]
    same = [
        [sorted((names.get(n, n), size) for n, size in s.at), [size_text(r, names) for r in s.relations]]
        for s in sides.same
    ]
    return {"decisions": decisions, "same": same}


def _sides_from(about: Mapping[str, Any], names: Mapping[str, str]) -> Sides:
    decisions = (Decision(size_of(text, names), line, raises) for text, line, raises in about["decisions"])
    same = (
        Same(frozenset((names.get(n, n), size) for n, size in at), tuple(size_of(r, names) for r in told))
        for at, told in about["same"]
    )
    return Sides(tuple(decisions), tuple(same))


def _left_out(step: Step, content: Content) -> list[str]:
    paths = content.paths()
    if any(owner not in paths for owner, _ in step.scope.left_out):
        raise SavedError("an object of which its forward sets an attribute cannot be found again")
    return sorted(f"{paths[owner]}.{name}" for owner, name in step.scope.left_out)


# --- from files ---


def of_files(read: Callable[P, T]) -> Callable[P, T]:
    """For what reads files: whatever fails in it is a SavedError, as the files may be anybody's."""

    before = "the files of a graph do not go together: "
    return told_as(SavedError, Exception, before=before, words="{!r:.300}".format)(read)


@dataclasses.dataclass(frozen=True)
class Known:
    """What a graph is put in place with: the objects of the model by path, where its weights are, and what of
    the state counts."""

    objects: Mapping[str, Any]
    owner: nn.Module
    scope: Scope


@of_files
def unfit_contents(files: Files, known: Known) -> str:
    """The first buffer that does not hold what the graph relies on; "" if all do. SavedError where the files
    do not go together."""
    graph_file = json.loads(files["graph.json"])
    for label, digest in describe(files).contents.items():
        kind, _, name = label.partition(" ")
        if kind == "constant" and name not in graph_file["live"]:
            continue
        is_live = kind == "constant"
        tensor = known.objects.get(graph_file["live"][name]) if is_live else _own(known.owner, kind, name)
        if not isinstance(tensor, Tensor) or tensor_digest(tensor) != digest:
            return f"the {kind} {name.removeprefix('model.')} held other values"
    return ""


def _own(owner: nn.Module, kind: str, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    try:
        module = owner.get_submodule(path)
    except AttributeError:
        return None
    return module._parameters.get(last) if kind == "parameter" else module._buffers.get(last)


@of_files
def executable_from(files: Files, known: Known, run: Callable[[ProgramGraph], Run]) -> Executable:
    """The executable that `files_of` wrote; its guards have been compared. SavedError where the files do not
    go together, or the model has not what the graph takes."""
    beside = json.loads(files["graph.json"])
    graph, names, report = _graph(files, beside, known)
    attributes = tuple(
        Attribute(
            _owner(known.objects[path], name), name, label,
            None if tree is None else read_structure(tree, names), read,
        )
        for path, name, label, tree, read in beside["attributes"]
    )  # fmt: skip
    captured = Captured(
        graph, read_structure(beside["structure"], names),
        tuple(tuple(_extent(n, names) for n in shape) for shape in beside["shapes"]),
        attributes, tuple(beside["checks"]), around=known.scope, serves_small=bool(beside["small"]),
    )  # fmt: skip
    found = Executable(captured, known.owner, run)
    found.report = report
    return found


def _owner(thing: Any, name: str) -> Any:
    """An object whose attribute a graph sets, if the attribute is its own: not what its class defines, nor
    what every module has, nor a module or a parameter of it; ValueError where it is not."""
    held = {*vars(nn.Module())}
    if isinstance(thing, nn.Module):
        held |= {*thing._modules, *thing._parameters}
    if not name.isidentifier() or hasattr(type(thing), name) or name in held:
        raise ValueError(f"{name!r:.80} of a {type(thing).__name__} is not set by any forward")
    return thing


@of_files
def step_from(files: Files, known: Known, run: Callable[[ProgramGraph], Run]) -> Step:
    """The decoder's step that `files_of` wrote; its guards have been compared. SavedError as in
    `executable_from`."""
    beside = json.loads(files["graph.json"])
    graph, names, report = _graph(files, beside, known)
    _require_state(graph)
    split = (path.rpartition(".") for path in describe(files).left_out)
    left_out = frozenset((id(known.objects[path]), name) for path, _, name in split if path in known.objects)
    shapes = tuple(tuple(_extent(n, names) for n in shape) for shape in beside["shapes"])
    sizes = StepSizes(
        graph, beside["names"], shapes, beside["name"],
        {name: Layout(axes) for name, axes in beside["layouts"].items()},
        _sides_from(beside["sides"], names), beside["single"],
    )  # fmt: skip
    step = Step(graph, known.owner, run, sizes, dataclasses.replace(known.scope, left_out=left_out))
    step.report = report
    return step


def _graph(
    files: Files, beside: Mapping[str, Any], known: Known
) -> tuple[ProgramGraph, graphs.Names, CompileReport]:
    live = {name: known.objects[path] for name, path in beside["live"].items()}
    graph, names = graphs.read(files["graph.txt"].decode(), beside, live)
    for part in parts_of(graph).values():
        for node, given in part.given().items():
            if given.kind in ("parameter", "buffer", "constant"):
                require_own(given, known.owner, graph.constants, node.meta.get("val"))
    report: CompileReport = made(CompileReport, json.loads(files["report.json"]))
    graphs.give_entries(graph, report.attention)
    return graph, names, report


def _require_state(graph: ProgramGraph) -> None:
    """Raise ValueError unless a decoder's state has what its graphs take and give, by name."""
    plan = graph.state
    if plan is None:
        raise ValueError("a decoder without a plan of its cache")
    known = {
        "pages": {store.name for store in plan.stores}, "carried": {about.name for about in plan.carried},
        Rate.PROMPT.value: {about.name for about in plan.fixed},
        "rows": {"starts", "first", "row", "positions", "picked", *(store.table for store in plan.stores)},
    }  # fmt: skip
    for part in parts_of(graph).values():
        for given in part.inputs:
            if given.kind in known and given.name not in known[given.kind]:
                raise ValueError(f"a decoder's state has no {given.kind} {given.name!r:.80}")
    given_on = [(o.kind, o.name) for o in graph.outputs if o.kind in ("pages", "carried")]
    wanted = [("pages", store.name) for store in plan.stores] + [("carried", c.name) for c in plan.carried]
    others = sum(o.kind != "shown" for o in graph.outputs)
    if given_on != wanted or others != 1 + len(wanted):
        raise ValueError("a decoder's graph gives other values to its state than its plan says")


def _extent(text: Any, names: Mapping[str, str]) -> Any:
    found = size_of(text, names)
    return int(found) if getattr(found, "is_Integer", False) else found


@of_files
def describe(files: Files) -> Traced:
    """The guards among the files; SavedError where there are none."""
    return made(Traced, json.loads(files["guards.json"]), "guards")  # type: ignore[no-any-return]
