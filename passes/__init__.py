"""The passes, one rewrite per file, and the order in which they run."""

import ast
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attngraph.errors import meant
from attngraph.ir.graph import RESULTS, Axis
from attngraph.ir.graph.literals import split
from attngraph.passes.absorb_mla.absorb import AbsorbMLA
from attngraph.passes.canonicalize import Canonicalize
from attngraph.passes.divide_cache import DivideCache
from attngraph.passes.freeze_weights import FreezeWeights
from attngraph.passes.fuse_attention import FuseAttention
from attngraph.passes.fuse_token_wise.fuse import FuseTokenWise
from attngraph.passes.insert_kv_cache.insert import InsertKVCache
from attngraph.passes.look_later import Kinds
from attngraph.passes.merge_heads import MergeHeads
from attngraph.passes.order_sums import OrderSums
from attngraph.passes.quantise_cache import QuantiseCache
from attngraph.passes.quantised_linear import QuantisedLinear
from attngraph.passes.reassociate_linear import ReassociateLinear
from attngraph.passes.select_kernels import SelectKernels
from attngraph.passes.shard_heads.shard import ShardHeads
from attngraph.passes.shard_tokens.shard import ShardTokens
from attngraph.passes.skip_padding import SkipPadding
from attngraph.passes.tabulate_scores import TabulateScores
from attngraph.passes.tidy import Tidy
from attngraph.pipeline import Pass


def order(
    backend: str = "auto", absorb: str = "auto", decoder: bool = False, rounded: str = "",
    heads: Axis | None = None, tokens: Axis | None = None, cache: str = "auto", parameters: str = "sharded",
    consistent: bool = False, freeze: str = "", padding: str = "computed",
) -> tuple[Pass, ...]:  # fmt: skip
    """The passes in the order in which they run, for whole sequences or for a decoder.

    The order is defined only here. `backend` names the kernels that compute attention; `absorb` as for
    `attngraph.compile`. `rounded`: the dtype of 8 bits in which a decoder keeps keys and values, if it does.
    `heads`, `tokens`: the ranks that run the graph together, dividing heads and hidden units, or tokens; of
    both, tokens of what each rank has of the heads. `cache`, `parameters`: as in `ShardConfig`.
    `consistent`: sums get one order. `freeze`: weights will not change ("keep"), and may be given up
    ("release"). `padding`: whether results of tokens that a mask hides are "computed", or "unused".
    """
    family = "" if backend == "auto" else backend
    shard: tuple[Pass, ...] = ()
    if heads is not None and heads.count > 1:
        shard += (ShardHeads(heads.count, heads.group, runs=parameters != "even"),)
    if tokens is not None and tokens.count > 1:
        shard += (ShardTokens(tokens.count, tokens.group),)
    tabulated = () if consistent else (TabulateScores(),)  # tables are PyTorch's, in an order of its own
    token_wise = (*tabulated, SkipPadding(padding == "unused"), FuseTokenWise(consistent))
    rest: tuple[Pass, ...] = (ReassociateLinear(), *(shard or token_wise))
    if decoder:
        divide = (DivideCache(cache),) if shard and cache != "heads" else ()
        rest = (*shard, InsertKVCache(), *divide, Tidy(), QuantisedLinear(), FuseTokenWise(consistent))
    rest += (OrderSums(),) if consistent else ()
    rest += (FreezeWeights(freeze == "release"),) if freeze else ()
    return (
        Canonicalize(), FuseAttention(() if shard else RESULTS, features=not decoder), MergeHeads(),
        AbsorbMLA(absorb, keeps=decoder), *rest, SelectKernels(family),
        *((QuantiseCache(rounded),) if rounded else ()),
    )  # fmt: skip


def waiting_at_most(passes: Sequence[Pass], kinds: Kinds = ()) -> tuple[Pass, ...]:
    """The passes, after which only results of these kinds may wait until somebody looks at them."""
    return tuple(
        dataclasses.replace(step, later=tuple(kind for kind in step.later if kind in kinds))
        if isinstance(step, FuseAttention) else step
        for step in passes
    )  # fmt: skip


DEFAULT_PIPELINE = order()
"""The passes of a model that is run on whole sequences."""
PASSES: tuple[Pass, ...] = (
    *DEFAULT_PIPELINE, ShardHeads(), ShardTokens(), InsertKVCache(), DivideCache(), Tidy(), QuantisedLinear(),
    OrderSums(), FreezeWeights(), QuantiseCache(),
)  # fmt: skip
"""Every pass that can be run by itself on a graph."""


def pass_named(text: str, own: Mapping[str, Any] | None = None) -> Pass:
    """The pass of a name such as `absorb-mla`, or with options, `absorb-mla(absorb='always')`. `own`: other
    passes, or their classes, by what they are called here.

    Raises:
        ValueError: there is no such pass, or it has no such option.
    """
    found = re.fullmatch(r"([^(]+)(?:\((.*)\))?", text.strip())
    known: dict[str, Any] = {step.name: step for step in PASSES} | dict(own or {})
    name = found[1] if found else text
    if found is None or name not in known:
        raise ValueError(f"there is no pass {name!r}; {meant(name, known)}")
    step = known[name]
    fields = dataclasses.fields(step) if dataclasses.is_dataclass(step) else ()
    options = [f.name for f in fields if f.name not in ("name", "requires", "yields")]
    given: dict[str, Any] = {}
    for part in split(found[2] or ""):
        option, _, value = (piece.strip() for piece in part.partition("="))
        if option not in options:
            raise ValueError(f"pass {name} has no option {option!r}; {meant(option, options)}")
        try:
            given[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError) as problem:
            raise ValueError(f"pass {name}: {value!r} is no value for {option}.") from problem
    made = step(**given) if isinstance(step, type) else dataclasses.replace(step, **given) if given else step
    return made  # type: ignore[no-any-return]
