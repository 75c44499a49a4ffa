"""attngraph: a compiler for attention.

compiled = attngraph.compile(model)      # nothing is traced yet
y = compiled(x)                          # traced on the first call; same answer as model(x)
print(compiled.report)                   # what was fused, what was not, and why not
"""

from attngraph.compile import CompiledModule, compile, explain
from attngraph.convert import ConvertedModel, HeadsReport, convert_heads
from attngraph.entries import AttentionEntry
from attngraph.errors import (
    AttnGraphError,
    CacheError,
    CaptureError,
    ConversionError,
    DumpError,
    NoDecoderError,
    NotFusedError,
    VerificationError,
)
from attngraph.ir.ops import attention
from attngraph.ir.parser import parse
from attngraph.ir.score import ProgramError, ScoreProgram
from attngraph.report import CompileReport
from attngraph.runtime.decoder import Decoder
from attngraph.runtime.engine import Engine, Request
from attngraph.runtime.kv_cache import CacheConfig, KVCache

__version__ = "0.1.0"
__all__ = [
    "AttentionEntry",
    "AttnGraphError",
    "CacheConfig",
    "CacheError",
    "CaptureError",
    "CompileReport",
    "CompiledModule",
    "ConversionError",
    "ConvertedModel",
    "Decoder",
    "DumpError",
    "Engine",
    "HeadsReport",
    "KVCache",
    "NoDecoderError",
    "NotFusedError",
    "ProgramError",
    "Request",
    "ScoreProgram",
    "VerificationError",
    "attention",
    "compile",
    "convert_heads",
    "explain",
    "parse",
]
