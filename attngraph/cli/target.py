"""What a name on a command line stands for: `package.module:NAME` or `path/file.py:NAME`.

A TARGET is a function that returns a model and example inputs; or a model, a class, or a folder of a
checkpoint, for which an example is made. Passes are named in lists.
"""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from attngraph.api.options import as_pass
from attngraph.api.verify.sides import is_file_of_a_side, side_in
from attngraph.cli.terminal import TargetError, told
from attngraph.errors import AttnGraphError, SavedError, meant, told_as
from attngraph.ir.graph.literals import split
from attngraph.models.targets import import_transformers, seeded
from attngraph.passes import pass_named
from attngraph.passes.select_kernels import SelectKernels
from attngraph.pipeline import Pass, placed

_FORMS = "package.module:NAME, path/file.py:NAME or hf:FOLDER"
SIZES = ("batch", "tokens")
TOKENS = 128
"""Of an example, where nobody says how many."""


def shapes_of(inputs: tuple[Any, ...]) -> str:
    """The shapes of a target's inputs, in words."""
    return ", ".join(str(list(t.shape)) for t in inputs if isinstance(t, Tensor))


def load_target(name: str, **sizes: int | None) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model that a target names, and example inputs: those that its function returns, or else made.
    TargetError as from `load_side`."""
    made, inputs = load_side(name, **sizes)
    if inputs is None:
        return made, _example(made, name, sizes.get("batch") or 1, sizes.get("tokens") or TOKENS)
    return made, inputs if isinstance(inputs, tuple) else (inputs,)


def load_side(name: str, **sizes: int | None) -> tuple[Any, Any]:
    """The model that a target names, and the inputs that its function returns; None where it returns none.
    TargetError where it cannot be imported, does not exist, or is something else."""
    given = {k: v for k, v in sizes.items() if v is not None}
    if is_file_of_a_side(name):
        with told_as(TargetError, SavedError):
            return side_in(name), None
    where, _, attribute = name.partition("(")[0].rpartition(":")
    if not where or not attribute:
        raise TargetError(f"a target is {_FORMS}, found {name!r}.{_names_in(Path(name))}")
    found, unknown = None, list[str]()
    if where == "hf":
        made = _checkpoint(Path(attribute))
    else:
        found = object_named(f"{where}:{attribute}")
        made, unknown = _made(name, found, given)
    if isinstance(made, nn.Module) or made is found:
        return made, None
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TargetError(f"{name} must return a model, or (model, inputs); it returned {_kind(made)}.")
    if unknown:
        raise TargetError(f"{name} takes no {' and no '.join(unknown)}, and returns inputs of its own.")
    return made


def load_inputs(name: str, **sizes: int | None) -> Any:
    """The arguments that a function of this name returns, as `attngraph.verify` takes them; one tensor is one
    argument. TargetError where it cannot be imported, does not exist, or fails."""
    given = {k: v for k, v in sizes.items() if v is not None}
    made, unknown = _made(name, object_named(name.partition("(")[0]), given)
    if unknown:
        raise TargetError(f"{name} takes no {' and no '.join(unknown)}.")
    if not isinstance(made, tuple | dict | list | Tensor):
        said = "arguments: a tuple, a dict or a list of such"
        raise TargetError(f"{name} must return {said}; it returned {_kind(made)}.")
    return (made,) if isinstance(made, Tensor) else made


def _is_itself(found: Any) -> bool:
    """Whether a function cannot be called without arguments: it makes no model then, but is one."""
    if inspect.isclass(found):
        return False
    try:
        parameters = inspect.signature(found).parameters.items()
    except ValueError:  # one that is written in C
        return True
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in free and n not in SIZES for n, p in parameters)


def _made(name: str, found: Any, sizes: dict[str, int]) -> tuple[Any, list[str]]:
    """What a function or a class makes of the options that the name gives in brackets and of those sizes that
    it takes, and the other sizes; a model as it is, and a function that makes none."""
    if isinstance(found, nn.Module) or (callable(found) and "(" not in name and _is_itself(found)):
        return found, []
    if not callable(found):
        raise TargetError(f"{name} is no function and no model: its type is {type(found).__name__}.")
    _, bracket, options = name.partition("(")
    with told_as(TargetError, Exception, SystemExit, before=f"{name} failed: ", words=told):
        call: Any = ast.parse(f"f({options if bracket else ')'}", mode="eval").body
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        accepted = inspect.signature(found).parameters
        given |= {k: v for k, v in sizes.items() if k in accepted}
        with seeded():
            made = found(**given)
    is_new = inspect.isclass(found) and isinstance(made, nn.Module)
    return made.eval() if is_new else made, [k for k in sizes if k not in accepted]


def _checkpoint(folder: Path) -> nn.Module:
    """The model of a checkpoint of transformers, by the class that its configuration names."""
    if not (folder / "config.json").is_file():
        raise TargetError(f"hf:{folder} is no checkpoint: there is no file {folder / 'config.json'}.")
    with told_as(TargetError, Exception, before=f"hf:{folder}: ", words=told):
        transformers = import_transformers()
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        made = kind.from_pretrained(folder).eval()
    made.config.use_cache = False
    return made  # type: ignore[no-any-return]


def _names_in(path: Path) -> str:
    """What a file of Python has that may be a target, as a sentence."""
    if path.suffix != ".py" or not path.is_file():
        return ""
    try:
        body = ast.parse(path.read_text("utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return ""
    names = [n.name for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name[0] != "_"]
    return f" {path} has {', '.join(names)}." if names else ""


def _example(model: nn.Module, name: str, batch: int, tokens: int) -> tuple[Any, ...]:
    """Arguments for the parameters of forward that have no default (of a model of transformers, for its main
    inputs): what the first layer takes, and masks that hide nothing."""
    config = getattr(model, "config", None)
    with seeded():
        value = _for_the_first_layer(model, batch, tokens, config) if isinstance(model, nn.Module) else None
    if value is None:
        raise TargetError(
            f"{name} is a model whose inputs cannot be guessed. What to do: name a function that returns "
            "(model, inputs); of `attngraph verify`, name one that returns the inputs with --inputs."
        )
    every = inspect.signature(model.forward).parameters.items()
    parameters = {n: p for n, p in every if p.kind < p.VAR_POSITIONAL}
    main = [getattr(model, "main_input_name", "")]
    main += ["decoder_input_ids"] * bool(getattr(config, "is_encoder_decoder", 0))
    wanted = [n for n, p in parameters.items() if p.default is p.empty or n in main] or list(parameters)[:1]
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    values = {n: mask if "mask" in n else value for n in wanted}
    last = max(list(parameters).index(n) for n in wanted)
    return tuple(values.get(n, p.default) for n, p in list(parameters.items())[: last + 1])


def _for_the_first_layer(model: nn.Module, batch: int, tokens: int, config: Any) -> Tensor | None:
    """Ids for an embedding, vectors for a product, an image for a convolution; None where it is another."""
    for layer in model.modules():
        if isinstance(layer, nn.Embedding):
            return torch.randint(layer.num_embeddings, (batch, tokens))
        if isinstance(layer, nn.Linear):
            return torch.randn(batch, tokens, layer.in_features)
        if isinstance(layer, nn.Conv2d):
            size = getattr(config, "image_size", 224)
            return torch.randn(batch, layer.in_channels, size, size)
    return None


def _kind(made: Any) -> str:
    """What a target returned, by types: of a tuple, those of its parts."""
    if not isinstance(made, tuple):
        return type(made).__name__
    return f"({', '.join(type(part).__name__ for part in made)})"


def run_as_given(
    run: Callable[..., Any], model: Callable[..., Any], inputs: tuple[Any, ...], name: str
) -> Any:
    """What `run(*inputs)` gives; TargetError where the model itself cannot be run on its inputs."""
    try:
        return run(*inputs)
    except AttnGraphError:
        raise
    except Exception:
        try:
            model(*inputs)
        except Exception as problem:
            said = f"the model cannot be run on the inputs of the target: {told(problem)}"
            raise TargetError(f"{name}: {said}") from problem
        raise


def object_named(name: str) -> Any:
    """What `package.module:NAME` or `path/file.py:NAME` names; TargetError where the module cannot be
    imported, or has no such name."""
    module_name, _, attribute = name.rpartition(":")
    module = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        kinds = {n: v for n, v in vars(module).items() if inspect.isfunction(v) or inspect.isclass(v)}
        own = [n for n, v in kinds.items() if n[0] != "_" and v.__module__ == module.__name__]
        raise TargetError(f"{module_name} has no {attribute!r}; {meant(attribute, own)}")
    return found


def _module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    with told_as(TargetError, Exception, SystemExit, before=f"cannot import {name}: ", words=told):
        return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    """A file as a module, with what lies beside it to be imported, as if it were run."""
    if not path.is_file():
        raise TargetError(f"there is no file {path}.")
    sys.path.insert(0, str(path.resolve().parent))
    name = f"{path.stem} (a file)"  # no module that can be imported has this name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with told_as(TargetError, Exception, SystemExit, before=f"cannot run {path}: ", words=told):
        spec.loader.exec_module(module)
    return module


def passes_named(text: str, option: str) -> list[Pass]:
    """The passes of a list such as `merge-heads,mine.py:DropOnes(least=2)`. TargetError where there is no
    such pass, or it has no such option."""
    with told_as(TargetError, TypeError, ValueError, before=f"{option} {text}: "):
        parts = split(text)
        names = [name for name in (part.partition("(")[0].strip() for part in parts) if ":" in name]
        own = {name: object_named(name) for name in names}
        return [as_pass(pass_named(part, own)) for part in parts]


def changed_by(added: Sequence[str]) -> Callable[[tuple[Pass, ...]], tuple[Pass, ...]] | None:
    """The function that puts passes such as `mine.py:DropOnes@merge-heads` into an order; None without any.
    TargetError where there is no such pass."""
    parts = [text.rpartition("@") if "@" in text else (text, "@", SelectKernels.name) for text in added]
    steps = [(passes_named(text, "--add")[0], before.strip()) for text, _, before in parts]

    def change(order: tuple[Pass, ...]) -> tuple[Pass, ...]:
        for step, before in steps:
            order = placed(order, step, before)
        return order

    return change if steps else None
