"""A plan as the Triton source of its kernels: a module that a person can open and read.

Kernels are written in `kernels/`. Here is what a plan makes known of their names (`fold.py`), and the
comments at the head of a module. Formulas come first: which lines they need before loops is known when all
tiles are written.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from attngraph.codegen.cpu.soft import UNDERFLOW
from attngraph.codegen.scalar.read_gradients import COLUMNS, PAIRS, ROWS, ReadGradient, read_gradients
from attngraph.codegen.triton import device, fold
from attngraph.codegen.triton import plan as P
from attngraph.codegen.triton.fold import NOTHING
from attngraph.codegen.triton.formulas import Formulas, GradientTile
from attngraph.codegen.triton.plan import DTYPES, STATES, BackwardPlan, DecodePlan, Plan, SumsPlan
from attngraph.ir.language import E, Expr, Keep, Score, Sink, Weight, format_expr
from attngraph.ir.ops.kernels import TRUSTED

LOWEST = "-3.4028234663852886e+38"
"""The lowest finite float32: the maximum of a row that has no key yet. Differences from it are finite or
minus infinity, so that hidden scores weigh zero from it, too, where infinity minus itself would be NaN."""
STRIP = 1024
"""How many numbers of rows the backward kernels load at a time to find the lowest."""
JOIN = "join_parts"
"""The kernel that combines the parts of a row's keys."""
TOGETHER = 16
"""How many parts it looks at together."""
SPAN = 1024
"""Positions of a part of the keys, where sums are in order."""
WIDEST_SHARE = 512
"""The most columns of a result that one of its programs combines."""
OF_QUERIES, OF_KEYS, OF_READ = "gradient_of_queries", "gradients_of_keys", "gradient_of_read"
"""The backward kernels; the last with the number of the read in `read_gradients`."""
BLANK, BLANK_OF_GRADIENTS = (f"tl.zeros([{rows}], tl.float32)" for rows in ("BLOCK_Q, BLOCK_K", "OWN, OTHER"))
"""Tiles of zeros."""
WITHIN = "(q < Sq) & (k < Skv)"
"""Where a tile of pairs is cut off."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The source of a module, and the name of its (first) kernel."""

    source: str
    name: str


def emit(plan: Plan) -> Kernel:
    """The forward kernel of a plan. Raises UnsupportedError: the score program has an operation that cannot
    be emitted; says which."""
    blocks, name = plan.blocks, name_of(plan)
    formulas, ahead = Formulas(plan, "blank" if blocks.groups else BLANK), blocks.ahead
    whole, edge = formulas.tile(plan.keeps_of_whole_tiles, False), formulas.tile(at_the_end(plan), True)
    values = {
        **known(plan, formulas), **rows(plan, blocks.groups or (blocks.split and not ahead)),
        "KERNEL": name,
        "AHEAD": ahead,  # products are a tile ahead of weights
        "SINK": formulas.sink(),
        "WHOLE": whole, "EDGE": edge,  # the formulas of whole tiles, and of those at an edge
        "BEFORE": formulas.before,  # lines of formulas that no key changes
        **absent("behind", unless=ahead), **absent("tiles counts row_b row_h", unless=plan.listed),
    }  # fmt: skip
    if blocks.groups:
        values |= of_groups(plan)
    head = [
        f"{name}, forward, written by attngraph. For each batch b, head h, query q and key k:",
        *operands(plan),
        f"Hkv = {heads_of_keys(plan)}; out [B, Sq, Hq, {plan.Dv}] in memory, lse [B, Hq, Sq].",
        *about_lists(plan),
    ]
    file = "gluon_forward.py" if blocks.groups else "forward.py"
    return assemble(file, name, head, values, formulas.writer.calls)


def of_groups(plan: Plan) -> dict[str, Any]:
    """What kernels with groups of warps know besides. Parts are those of rows: the names of what holds them,
    their columns, where these begin, and for values what is True of those."""
    keys = [("query", "queries", "key", "keys"), ("query_rest", "queries_rest", "key_rest", "keys_rest")]
    values = [("value", "values", "acc", "SUMS"), ("value_rest", "values_rest", "acc_rest", "SUMS_REST")]
    (D, Dv), inside = (P.in_two(n) for n in (plan.D, plan.Dv)), f"column < {plan.Dv}"
    all_keys = [(*keys[n], width, n * D[0]) for n, width in enumerate(D) if width]
    all_values = [
        (*values[n], width, n * Dv[0], True if n * Dv[0] + width <= plan.Dv else inside)
        for n, width in enumerate(Dv) if width
    ]  # fmt: skip
    return {
        **in_groups(plan),
        "KEY_PARTS": all_keys, "VALUE_PARTS": all_values, "WIDTH_OF_KEYS": sum(D), "WIDTH_IN_TILES": sum(Dv),
        "TOTALS": ", ".join(total for _, _, total, *_ in all_values), "PRODUCTS_OF_VALUES": len(all_values),
        **absent("query_rest queries_rest key_rest keys_rest", unless=D[1] > 0),
        **absent("value_rest values_rest", unless=Dv[1] > 0),
        **absent("told all_told", unless=plan.fill is not None), **absent("line", unless=plan.listed),
    }  # fmt: skip


def in_groups(plan: Plan) -> dict[str, Any]:
    """What all kernels with groups of warps know."""
    version = device.triton_version()
    return {
        "TILES_IN_FLIGHT": plan.blocks.stages, "BYTES": plan.dtype.itemsize,
        "SHIFT": Formulas(plan, "").shift(),  # of sizes and numbers alone
        "REGISTERS": 240, "REGISTERS_OF_PRODUCER": 24,
        "GIVEN": ", ".join(filter(None, arguments_of_reads(plan))),  # arguments of reads
        # What Gluon has called them, from Triton 3.6 to 3.9.
        "COPY_IN": "tma.async_load" if version >= (3, 9) else "tma.async_copy_global_to_shared",
        "BARRIER": ["gl.barrier()" if version >= (3, 7) else "gl.thread_barrier()"],
    }  # fmt: skip


def emit_backward(plan: BackwardPlan) -> Kernel:
    """The backward kernels of a plan, which have the same arguments; `name` is that of the first. Raises
    UnsupportedError: the program has an operation whose derivative cannot be emitted; says which."""
    formulas, reads = Formulas(plan, BLANK_OF_GRADIENTS), read_gradients(plan.program, plan.wanted)
    at_end, whole = at_the_end(plan), plan.keeps_of_whole_tiles
    # A read's sum, where it is stored, and what is added.
    names = [(f"sum{n}", f"sums{n}", f"of_read{n}") for n in range(len(reads))]
    of_rows, of_columns, of_pairs = (
        [n for n, read in enumerate(reads) if read.kind == kind] for kind in (ROWS, COLUMNS, PAIRS)
    )

    def tile(
        skipped: Sequence[Keep], wanted: Sequence[int],
        within: str = "", turned: bool = False, alone: bool = True,
    ) -> GradientTile:  # fmt: skip
        if alone:
            formulas.writer.forget()  # what stands before another loop or kernel
        return formulas.gradients(reads, skipped, wanted, within, turned)

    is_trusted = P.stays_trusted(plan.program)
    # Rows beyond the end are not stored.
    within = "across <= last_key - start" if at_end else "across < Skv - start"
    over_keys = {"whole": tile(whole, of_rows), "edge": tile(at_end, of_rows, within, alone=False)}
    far = [] if is_trusted else formulas.scores(plan.statements)
    sink, before = NOTHING if is_trusted else formulas.sink(), formulas.before
    within = "inside" if at_end else "across < Sq - start"
    values = {
        **known(plan, formulas), **rows(plan, split=False), "SINK": sink,
        "OVER_KEYS": SimpleNamespace(**over_keys, far=far, before=before),
        "OVER_QUERIES": SimpleNamespace(
            whole=tile(whole, of_columns, turned=True),
            edge=tile(at_end, of_columns, within, turned=True),
        ),
        "PAIRS": [(f"{OF_READ}{n}", pair(reads[n], n, tile((), [n], WITHIN))) for n in of_pairs],
        "OF_ROWS": [names[n] for n in of_rows], "OF_COLUMNS": [names[n] for n in of_columns],
        "SUMS": ", ".join(sums for _, sums, _ in names),
        "DIAGONAL": plan.diagonal is not None,
        **dict(zip(("QUERIES", "KEYS", "VALUES"), plan.operands, strict=True)),  # whose gradients are wanted
        "TRUSTED": is_trusted,  # every row's log-sum-exp is
        "LARGEST_TRUSTED": TRUSTED, "STRIP": STRIP,
        "TO_BITS": "RATE" if plan.is_linear else "LOG2E",
        "SCALE": plan.program.scale,
        "NARROW": P.padded(plan.Dv) <= 64,
        **absent("tops totals", unless=not is_trusted),
        **absent("B batch first_row sums_owner sums_row", unless=bool(of_pairs)),
        **absent("tiles counts row_b row_h column_tiles column_counts column_b column_h", unless=plan.listed),
    }  # fmt: skip
    values["COUNTS"] = [*(["batch", "first_row"] if of_pairs else []), *values["COUNTS"]]
    head = [
        *about_gradients(plan),
        *about_lists(plan),
        "A tile has OWN queries and OTHER keys; in the kernel of keys, OWN keys and OTHER queries.",
    ]
    return assemble("backward.py", OF_QUERIES, head, values, formulas.writer.calls)


def emit_backward_by_groups(plan: BackwardPlan) -> Kernel:
    """The backward kernel of a plan whose `blocks` have groups of warps. Raises as `emit_backward`."""
    formulas = Formulas(plan, "blank")
    masks = P.lasting_masks(P.conjuncts(plan.program)) if plan.listed else ()
    kept = formulas.kept(masks)
    is_trusted = P.stays_trusted(plan.program)
    values = {
        **known(plan, formulas), **in_groups(plan), "KERNEL": "gradients",
        "D": plan.D, "DV": plan.Dv, "WIDTH": plan.D, "WIDTH_OF_VALUES": plan.Dv, "SCALE": plan.program.scale,
        "DTYPE": f"tl.{DTYPES[plan.dtype]}",
        "MASK": kept[0], "KEPT": kept[1] or True,  # which pairs lists of tiles leave
        "TILE": formulas.gradients((), masks or at_the_end(plan), (), turned=True),
        "TRUSTED": is_trusted, "TO_BITS": "RATE" if plan.is_linear else "LOG2E", "ORDERED": plan.ordered,
        "NUMBERS": 1 if is_trusted else 2,  # of rows, by which weights are computed
        **absent("tops totals all_tops all_totals row_top row_total", unless=not is_trusted),
        **absent("lse all_lse row_lse", unless=is_trusted),
        **absent("turns", unless=plan.ordered), **absent("ranks", unless=plan.ordered and plan.listed),
        **absent("column_tiles column_counts column_b column_h", unless=plan.listed),
        **absent("unseen", unless=formulas.change.keeps_nan),
    }  # fmt: skip
    head = [*about_gradients(plan), "A tile has OWN keys and OTHER queries."]
    return assemble("gluon_backward.py", "gradients", head, values, formulas.writer.calls)


def pair(read: ReadGradient, number: int, tile: GradientTile) -> SimpleNamespace:
    """A read's own kernel: each program sums one tile over the batches and heads by which the read is not
    indexed. The grid has those by which it is, blocks of keys and blocks of queries."""
    b, h, members = {
        (True, True): ("batch + owner // Hq", "owner % Hq", "1"),
        (True, False): ("batch + owner", "member", "Hq"),
        (False, True): ("member", "owner", "B"),
        (False, False): ("member // Hq", "member % Hq", "B * Hq"),
    }[read.owned]
    words = f"Gradient of `{format_expr(read.node)}`, of a tile of pairs of a query and a key."
    sums, gradient = f"sums{number}", f"of_read{number}"
    return SimpleNamespace(words=words, b=b, h=h, members=members, sums=sums, gradient=gradient, tile=tile)


def emit_decode(plan: DecodePlan) -> Kernel:
    """The two kernels of attention over a cache; `name` is that of the first, the other is JOIN. Raises
    UnsupportedError: the score program has an operation that cannot be emitted; says which."""
    formulas, name = Formulas(plan, BLANK), f"decode_{name_of(plan)}"
    held, new = formulas.tile((), True), formulas.tile((), True)
    keys, Dv = plan.Dv if plan.shared else plan.D, P.padded(plan.Dv)  # `keys`: elements in a key's first tile
    dv, kept, share = "d" if plan.Dv == keys else "dv", plan.kept, min(WIDEST_SHARE, Dv)
    values = {
        **known(plan, formulas), "KERNEL": name, "SINK": formulas.sink(), "HELD": held, "NEW": new,
        "BEFORE": formulas.before, "PAGED": plan.page, "WINDOW": plan.window, "OLDER": plan.window - 1,
        "D": P.padded(keys), "IN_D": True if P.padded(keys) == keys else f"d < {keys}",
        "D_REST": P.padded(plan.rest) if plan.rest else 0,
        "IN_D_REST": True if P.padded(plan.rest or 1) == plan.rest else f"rest < {plan.D}",
        "DV": Dv, "dv": dv, "IN_DV": True if Dv == plan.Dv else f"{dv} < {plan.Dv}",
        "WIDTH_OF_VALUES": plan.Dv, "VALUES_APART": dv != "d",
        "VALUE_TILE": "key_tile" if plan.shared else "value_tile",
        # A tile has fewer rows than warp groups multiply, so its columns must be shared out.
        "IN_ORDER": plan.program.in_order, "SPAN": SPAN,
        "SHARED_OUT": plan.blocks.q >= 64 and 16 * plan.blocks.warps > plan.blocks.q,
        "KEPT": NOTHING if kept is None else "float" if kept.is_floating_point else "int",
        "TOGETHER": TOGETHER, "SHARE": share, "UNEVEN": plan.Dv % share != 0,
        **absent("rest query_rest key_rest", unless=plan.rest > 0),
        **absent("key_by value_by key_scale value_scale", "key_scale value_scale", "phs", unless=bool(kept)),
    }  # fmt: skip
    if plan.shared:
        values |= absent("value new_value value_scale value_rows new_value_rows value_by", "value", "phsd")
        values |= absent("", "new_value value_scale", "phsd")
    value = f"value its first {plan.Dv}" if plan.shared else f"value [pages, Hkv, page, {plan.Dv}]"
    head = [
        f"{name}, written by attngraph. For each row b, head h, query at q and key at k:",
        *program(plan),
        f"query [Hq, tokens, {plan.D}], key [pages, Hkv, page, {plan.D}], {value};",
        f"{DTYPES[plan.dtype]}, Hkv = {heads_of_keys(plan)}; out [tokens, Hq, {plan.Dv}] in memory.",
    ]
    if kept:
        words = str(kept).removeprefix("torch.")
        head.append(f"Pages are {words}; their scales [pages, Hkv, page] are float32.")
    widening = {"from_float8"} if values["KEPT"] == "float" else set()
    return assemble("decode.py", name, head, values, formulas.writer.calls | widening)


def emit_sums(plan: SumsPlan) -> Kernel:
    """The kernel of sums that are carried from token to token."""
    missing = " ".join({"q", "k", "decay", "left", "right"} - plan.operands.keys())
    values = {
        "ELEMENTS": plan.depth, "ROWS": plan.rows, "COLUMNS_AT_ONCE": plan.columns, "DELTAS": plan.vectors,
        "KEYS": plan.has_keys, "QUERIES": plan.has_queries, "SUMS": f"tl.{plan.sums}", "DECAY": plan.decay,
        "LESS_ONE": plan.less_one, "INCLUSIVE": plan.inclusive, **absent(missing, missing, "thmd"),
    }  # fmt: skip
    before = "S" if not plan.decay else "decay S"
    key = " + k v^T" if plan.has_keys else " + v"
    delta = " + left^T (right S)" if plan.vectors else ""
    read = ("q S" if plan.has_queries else "S") + ("" if plan.inclusive else ", with S before the token")
    dtypes = f"{STATES[plan.state]} in memory, the operands {DTYPES[plan.dtype]}; sums are {plan.sums}."
    head = [
        "running_sum, written by attngraph. For each row, head and token, with a matrix S that is carried:",
        f"    S = {before}{delta}{key}        out = {read}",
        f"S [rows, heads, {plan.depth}, width] is {dtypes}",
    ]
    return assemble("sums.py", "running_sum", head, values)


# --- what is known ---


def known(plan: Plan, formulas: Formulas) -> dict[str, Any]:
    """What kernels of attention know."""
    return {
        "ROWS": plan.blocks.q, "COLUMNS": plan.blocks.k,
        "LINEAR": plan.is_linear,  # scores are a multiple of dots, so exponents of 2 are
        "SCALE_IN_BITS": plan.rate,
        "COUNTS": [f"n{i}" for i in range(plan.program.sizes)],  # Triton must not specialise on them
        "READS": "\n".join(filter(None, arguments_of_reads(plan))),
        "LISTED": plan.listed,  # lists say which tiles are visited
        "WIDE": plan.wide,  # integers need 64 bits
        "GROUP": plan.group,
        "CAUSAL": plan.offset is not None,  # no query sees keys behind its own place plus SHIFT
        "SHIFT": formulas.shift(),
        "LAST_KEYS": bool(at_the_end(plan)),  # the causal mask is a comparison with each query's last key
        "FILL": plan.fill is not None,  # tiles behind a finite fill are visited if no score is above LOW
        "LOW": (plan.fill or 0.0) + UNDERFLOW[torch.float32], "LOWEST": LOWEST,
        "KEEPS": NOTHING if plan.blocks.groups else "True",  # numbers of rows are columns
        "KEEPS_NAN": formulas.change.keeps_nan,  # of rows without keys
        "EXACT": '"ieee"' if DTYPES[plan.dtype] == "float32" and plan.exact else NOTHING,
        **absent("multiple", unless=not formulas.change.is_plain),
        **absent("every", unless=plan.fill is not None),
    }  # fmt: skip


def rows(plan: Plan, split: bool) -> dict[str, Any]:
    """Rows of queries, keys and values in tiles: their columns d and dv, and what is True of those (IN_D,
    IN_DV).

    The extents of a tile are powers of two. Rows of another width lie in a wider tile, whose last columns are
    masked and multiplied for nothing, or (`split`) in two tiles: the largest power of two below their width,
    and the rest. Rows of 80 then take 64 + 16 columns instead of 128."""
    dv = "dv" if plan.Dv != plan.D else "d"
    values: dict[str, Any] = {"VALUES_APART": dv != "d", "WIDTH": plan.D, "WIDTH_OF_VALUES": plan.Dv}
    values |= {"dv": dv, "dv_rest": f"{dv}_rest"}
    for name, columns, width, of_rest in (
        ("D", "d", plan.D, "query_beside query_rest key_beside key_rest d_rest"),
        ("DV", dv, plan.Dv, "value_beside value_rest acc_rest out_rest dv_rest"),
    ):
        tile, rest = P.in_two(width) if split else (P.padded(width), 0)
        values |= {
            name: tile, f"IN_{name}": True if rest or width == tile else f"{columns} < {width}",
            f"{name}_REST": rest,
            f"IN_{name}_REST": True if width == tile + rest else f"{columns}_rest < {width}",
            **absent(of_rest, unless=rest > 0),
        }  # fmt: skip
    return values


def absent(names: str, tensors: str = "", axes: str = "", unless: bool = False) -> dict[str, str]:
    """Names of what a plan does not have, and those of strides of tensors."""
    strides = [f"{tensor}_{axis}" for tensor in tensors.split() for axis in axes]
    return {} if unless else dict.fromkeys((*names.split(), *strides), NOTHING)


def at_the_end(plan: Plan) -> tuple[Keep, ...]:
    """The causal mask, where it is one comparison with the end of the keys. Where tiles are listed it stands
    beside other masks, and a last key of each query is one more number to hold: two comparisons take fewer
    registers there, but for kernels without a pipeline."""
    apart = plan.listed and plan.blocks.stages > 1
    return () if plan.diagonal is None or apart else (plan.diagonal[0],)


def arguments_of_reads(plan: Plan) -> list[str]:
    """The last arguments of any kernel, a line for each read: its tensor, strides and the extents that its
    indices are checked against; then the sizes."""
    found = []
    for read in plan.reads:
        name, guarded = f"r{read.number}", plan.guarded_axes(read.number)
        strides = (f"{name}_stride{axis}" for axis in range(read.rank))
        found.append(", ".join([name, *strides, *(f"{name}_size{axis}" for axis in guarded)]))
    return [*found, ", ".join(f"n{i}" for i in range(plan.program.sizes))]


# --- the module ---


def assemble(
    file: str, name: str, head: Sequence[str], values: fold.Values, calls: Iterable[str] = ()
) -> Kernel:
    """The kernel called `name`: comments, imports and constants, the functions that are called, and the
    kernels."""
    functions = fold.read("functions.py").functions
    wanted = {*calls, *(["stir"] if "uniform" in calls else [])}
    constants, _, kernels = fold.read(file).fold(values).partition("\n\n\n")
    before = [f"# {line}\n" for line in head]
    called = [source for function, source in functions.items() if function in wanted]
    return Kernel("\n\n\n".join(["".join(before) + "\n" + constants, *called, kernels]), name)


def operands(plan: Plan) -> list[str]:
    D, Dv = plan.D, plan.Dv
    shapes = f"query [B, Hq, Sq, {D}], key [B, Hkv, Skv, {D}], value [B, Hkv, Skv, {Dv}]"
    return [*program(plan), f"{shapes}, {DTYPES[plan.dtype]};"]


def about_gradients(plan: Plan) -> list[str]:
    return [
        f"{name_of(plan)}, backward, written by attngraph. For each batch b, head h, query q and key k:",
        *operands(plan),
        f"Hkv = {heads_of_keys(plan)}; grad like out, numbers of rows [B, Hq, Sq]; results dense.",
    ]


def program(plan: Plan) -> list[str]:
    return [f"    {line}" for line in (str(plan.program) or "s = dot").split("\n")]


def heads_of_keys(plan: Plan) -> str:
    return "Hq" if plan.group == 1 else f"Hq // {plan.group}"


def about_lists(plan: Plan) -> list[str]:
    tiles, counts = "which blocks of keys a block of queries visits", "how many keep all, how many are seen"
    return [f"tiles: {tiles}; counts: {counts}, and how many."] if plan.listed else []


def name_of(plan: Plan) -> str:
    """What a kernel computes, in words: "causal_window_softcap_attention"."""
    program, own = plan.program, plan.diagonal and plan.diagonal[0]
    scores = [s.value for s in plan.statements if isinstance(s, Score)]
    others = [s for s in plan.statements if isinstance(s, Keep) and s != own]
    has_softcap, has_reads = _have("tanh", scores), _have("read", scores)
    words = {
        "causal": plan.diagonal is not None, "window": bool(P.window_of(program)),
        "masked": len(others) > bool(P.window_of(program)), "softcap": has_softcap, "biased": has_reads,
        "scored": bool(scores) and not (plan.is_linear or has_softcap or has_reads),
        "sink": any(isinstance(s, Sink) for s in program.statements),
        "dropout": _have("random", (s.value for s in program.statements if isinstance(s, Weight))),
    }  # fmt: skip
    return "_".join([*(word for word, is_said in words.items() if is_said), "attention"])


def _have(op: str, formulas: Iterable[Expr]) -> bool:
    return any(n.op == op for formula in formulas for n in E.walk(formula))
