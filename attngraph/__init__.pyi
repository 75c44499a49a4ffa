"""The public names: `__init__.py` loads each from its module when it is first used."""

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

__version__: str
