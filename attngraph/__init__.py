"""attngraph: a compiler for attention.

compiled = attngraph.compile(model)      # nothing is traced yet
y = compiled(x)                          # traced on the first call; same answer as model(x)
print(compiled.report)                   # what was fused, what was not, and why not

Importing this package alone does not import torch, so that tools which import it (pytest, which loads
attngraph's plugin in every run) start fast. The first use of a public name imports everything and registers
attngraph's ops and kernels with torch. Programs that only need the ops can `import attngraph.api`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngraph import hf as hf
    from attngraph import testing as testing
    from attngraph.api.bisect import bisect as bisect
    from attngraph.api.compile import compile as compile
    from attngraph.api.compile import explain as explain
    from attngraph.api.compile import load as load
    from attngraph.api.compiled import CompiledModule as CompiledModule
    from attngraph.api.convert import ConvertedModel as ConvertedModel
    from attngraph.api.convert import HeadsReport as HeadsReport
    from attngraph.api.convert import convert_heads as convert_heads
    from attngraph.api.plan import plan as plan
    from attngraph.errors import AttnGraphError as AttnGraphError
    from attngraph.errors import BackendError as BackendError
    from attngraph.errors import CacheError as CacheError
    from attngraph.errors import CaptureError as CaptureError
    from attngraph.errors import ConversionError as ConversionError
    from attngraph.errors import DisagreementError as DisagreementError
    from attngraph.errors import DumpError as DumpError
    from attngraph.errors import ExportError as ExportError
    from attngraph.errors import NoDecoderError as NoDecoderError
    from attngraph.errors import NotFusedError as NotFusedError
    from attngraph.errors import PassError as PassError
    from attngraph.errors import PlacementError as PlacementError
    from attngraph.errors import SavedError as SavedError
    from attngraph.errors import TextError as TextError
    from attngraph.errors import VerificationError as VerificationError
    from attngraph.exporter.export import export as export
    from attngraph.exporter.report import ExportReport as ExportReport
    from attngraph.ir.language.parser import parse as parse
    from attngraph.ir.language.score import ProgramError as ProgramError
    from attngraph.ir.language.score import ScoreProgram as ScoreProgram
    from attngraph.ir.ops.attention import attention as attention
    from attngraph.report.entries import AttentionEntry as AttentionEntry
    from attngraph.report.plan import Machine as Machine
    from attngraph.report.plan import Plan as Plan
    from attngraph.report.report import CompileReport as CompileReport
    from attngraph.runtime.cache_config import CacheConfig as CacheConfig
    from attngraph.runtime.decoder import Decoder as Decoder
    from attngraph.runtime.engine import Engine as Engine
    from attngraph.runtime.engine import Request as Request
    from attngraph.runtime.kv_cache import KVCache as KVCache
    from attngraph.runtime.parallel.loading import load_weights as load_weights
    from attngraph.runtime.parallel.mesh import ShardConfig as ShardConfig
    from attngraph.runtime.parallel.mesh import SimulatedMesh as SimulatedMesh

__version__ = "0.1.0"

_ROOT = f"{__name__}.api"
_WHERE = {
    "api.bisect": ("bisect",),
    "api.compile": ("compile", "explain"),
    "api.compiled": ("CompiledModule",),
    "api.convert": ("ConvertedModel", "HeadsReport", "convert_heads"),
    "api.load": ("load",),
    "api.plan": ("plan",),
    "report.entries": ("AttentionEntry",),
    "errors": (
        "AttnGraphError", "BackendError", "CacheError", "CaptureError", "ConversionError",
        "DisagreementError", "DumpError", "ExportError", "NoDecoderError", "NotFusedError", "PassError",
        "PlacementError", "SavedError", "TextError", "VerificationError",
    ),
    "exporter.export": ("export",),
    "exporter.report": ("ExportReport",),
    "ir.ops.attention": ("attention",),
    "ir.language.parser": ("parse",),
    "ir.language.score": ("ProgramError", "ScoreProgram"),
    "report.plan": ("Machine", "Plan"),
    "report.report": ("CompileReport",),
    "runtime.decoder": ("Decoder",),
    "runtime.engine": ("Engine", "Request"),
    "runtime.cache_config": ("CacheConfig",),
    "runtime.kv_cache": ("KVCache",),
    "runtime.parallel.loading": ("load_weights",),
    "runtime.parallel.mesh": ("ShardConfig", "SimulatedMesh"),
}  # fmt: skip
"""The module of each public name: the imports above, as data for lazy loading."""
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _WHERE.items() for name in names}
_MODULES = ("hf", "testing")
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
