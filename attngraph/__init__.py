"""attngraph: a compiler for attention.

compiled = attngraph.compile(model)      # nothing is traced yet
y = compiled(x)                          # traced on the first call; same answer as model(x)
print(compiled.report)                   # what was fused, what was not, and why not

Importing this package alone does not import torch, so that tools which import it (pytest, which loads
attngraph's plugin in every run) start fast. The first use of a public name imports everything and registers
attngraph's ops and kernels with torch. Programs that only need the ops can `import attngraph.api`.
"""

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

if (
    not Path(__file__).with_name("passes").is_dir()
):  # a clone in which links are files, as git makes on Windows
    __path__.append(str(Path(__file__).parents[1]))

_ROOT = f"{__name__}.api"
_NAMES = re.findall(r"(?m)^from (\S+) import (\w+) as", Path(__file__).with_suffix(".pyi").read_text())
_MODULE_OF = {name: module for module, name in _NAMES if module != __name__}
"""The module of each public name, from the stub beside this file, by which editors and type checkers go."""
_MODULES = tuple(name for module, name in _NAMES if module == __name__)
"""Public modules that are attributes of the package without an explicit import."""

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(_ROOT)
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))])
