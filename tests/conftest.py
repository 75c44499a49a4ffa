"""What the tests of attngraph's own packages share: one thread, which combinations run by default, what is
compiled once for many tests, hypothesis settings, golden files, random score programs, and the meaning of
expressions in plain Python, written apart from attngraph's evaluators.

Everything is handed out as fixtures, so that no test imports from another file of the tests.
"""

import collections
import functools
import gc
import itertools
import json
import math
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._logging._internal import trace_log

import attngraph.api.compile  # noqa: F401  (registers the kernels)
from attngraph.api import saving
from attngraph.codegen.cpu import toolchain
from attngraph.ir import budgets
from attngraph.ir.language import expr as E
from attngraph.ir.language import score as S
from attngraph.ir.language.expr import Expr
from attngraph.ir.language.parser import operation
from attngraph.ir.language.score import Keep, Score, ScoreProgram, Sink, Weight
from attngraph.saved.disk import Disk

settings.register_profile(
    "attngraph",
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("attngraph")

trace_log.propagate = True
"""So that pytest does not listen to it: for a listener, torch writes a record with a stack trace, and often
with a graph, for each symbol and each stage of each trace."""


@pytest.fixture(autouse=True)
def one_thread_and_the_same_random_numbers() -> Iterator[None]:
    """Tiny tensors on many threads spend their time waiting for each other. A test that sets another number
    of threads need not set it back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def graphs_run_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests use small tensors, at which a compiled model would run the model itself."""
    monkeypatch.setattr(budgets, "FUSED_SCORES", 0)


@pytest.fixture(autouse=True)
def nothing_from_the_cache_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test compiles what it compiles, whatever was compiled before. Tests of the cache turn it on."""
    monkeypatch.setenv("ATTNGRAPH_CACHE", "0")


# --- what runs by default, and what is compiled once ---------------------------------------------


def _values(item: pytest.Function) -> frozenset[tuple[str, tuple[int, ...]]]:
    """The values that a test has of its parameters; those that are given together are one parameter."""
    given = item.callspec.params
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [re.split(r",\s*", n) if isinstance(n, str) else list(n) for n in together]
    names += [[name] for name in given if name not in itertools.chain(*names)]  # of fixtures
    return frozenset((",".join(group), tuple(id(given[name]) for name in group)) for group in names)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What importing and collecting makes lives until the end: no garbage collection looks through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what is frozen when Python exits is reported as leaked by nanobind


COSTS = Path(__file__).with_name("costs.json")
"""Seconds of the processor that one case of a test takes, in the mean, its processes included; tests that
take less than 0.05 are left out. Measured by `pytest --measure-costs`, which writes what it ran. (The clock
would also measure what else the machine does.)"""
SECONDS, LONGEST = 0.7, 3.0
"""Of all cases of one test in a default run, and of one case that runs by default at all."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with many cases so many run by default as take `SECONDS`, one at least: first such that each
    value of each parameter comes once. The others are slow tests, and so is one whose cases are too long."""
    costs = json.loads(COSTS.read_text("utf-8"))
    tests: dict[str, list[pytest.Function]] = collections.defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, several in tests.items():
        cost = costs.get(name, 0.05)
        most = 0 if cost > LONGEST else max(1, int(SECONDS / cost))
        if most < len(several):
            first = _covering(several)[:most] if most and hasattr(several[0], "callspec") else several[:most]
            for item in set(several).difference(first):
                item.add_marker(pytest.mark.slow)


def _covering(items: Sequence[pytest.Function]) -> list[pytest.Function]:
    """So few of them that each value of each parameter comes at least once, about equally often."""
    left, found = {item: _values(item) for item in items}, []
    uses: collections.Counter[Any] = collections.Counter()
    while missing := frozenset().union(*left.values()) - uses.keys():
        best = min(left, key=lambda i: (-len(left[i] & missing), sum(uses[v] for v in left[i])))
        uses.update(left.pop(best))
        found.append(best)
    return found


_spent: dict[str, list[float]] = collections.defaultdict(list)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        item.user_properties.append(("seconds of the processor", sum(os.times()[:4]) - before))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        spent = dict(report.user_properties)["seconds of the processor"]
        _spent[report.nodeid.partition("[")[0]].append(float(spent))  # type: ignore[arg-type]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("measure_costs") and "PYTEST_XDIST_WORKER" not in os.environ:
        costs = json.loads(COSTS.read_text("utf-8")) | {
            name: sum(times) / len(times) for name, times in _spent.items()
        }
        kept = {name: float(f"{seconds:.2g}") for name, seconds in sorted(costs.items()) if seconds >= 0.05}
        COSTS.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True, scope="session")
def kernels_are_compiled_quickly() -> Iterator[None]:
    """The C compiler is told to be quick: tests ask what the source means. -Og takes half as long as -O1 and
    no longer than -O0. `optimised` in `codegen` and processes of their own have the flags that users have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "FLAGS", tuple("-Og" if f == "-O3" else f for f in toolchain.FLAGS))
        patch.setattr(toolchain, "ENTRIES", 4096)
        toolchain._identity.cache_clear()
        yield
    toolchain._identity.cache_clear()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests, which its worker processes share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def graphs_of_this_run(shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal models with equal options are compiled once in a run of the tests: for tests of what compiled
    models do. Those of how they are compiled leave it out."""
    monkeypatch.setattr(saving, "the_disk", lambda: Disk(shared_folder))


# --- golden files -------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measure-costs", action="store_true", help="write what each test costs to costs.json")
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files of these tests anew instead of comparing with them",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden("causal.txt", text)` asserts that a text is the one in `golden/causal.txt` beside the test.

    `pytest --update-golden` writes every golden file anew: emitted sources, tables of what kernels use,
    dumped graphs, and the generated parts of the docs. With `-m "slow or not slow"` it also runs the slow
    tests, to which some lines of the tables belong. Then read what changed in `git diff`.

    An absolute path is that file itself. `ignoring` takes from both texts what may differ; a file that
    differs in nothing else is not written.
    """

    def check(path: str | Path, text: str, ignoring: Callable[[str], str] = str) -> None:
        file = request.path.parent / "golden" / path
        known = file.read_text(encoding="utf-8") if file.exists() else None
        same = known is not None and ignoring(text) == ignoring(known)
        if request.config.getoption("update_golden") and not same:
            file.write_text(text, encoding="utf-8")
            return
        assert known is not None, f"there is no {file}; pytest --update-golden writes it"
        assert ignoring(text) == ignoring(known), f"{file} differs; pytest --update-golden writes it anew"

    return check


COMPARISONS = ("eq", "ne", "le", "lt", "ge", "gt")


# --- what an expression means, in plain Python ------------------------------------------------


def _nan_if_any(choose: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *a: math.nan if any(x != x for x in a) else choose(a)


def _guarded(function: Callable[..., Any], otherwise: Callable[..., float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (ValueError, OverflowError, ZeroDivisionError):
            return otherwise(*args)

    return call


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def _rounded(function: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: x if not math.isfinite(x) else function(x) if isinstance(x, int) else float(function(x))


_log = _guarded(math.log, lambda x: -math.inf if x == 0 else math.nan)
_PYTHON: dict[str, Callable[..., Any]] = {
    "add": lambda *a: sum(a[1:], a[0] + 0),
    "sub": lambda a, b: a - b,
    "neg": lambda a: -a,
    "mul": lambda *a: math.prod(a),
    "div": _quotient,
    "recip": lambda x: _quotient(1, x),
    "floordiv": _guarded(lambda a, b: a // b, lambda *_: math.nan),
    "mod": _guarded(lambda a, b: a % b, lambda *_: math.nan),
    "pow": _guarded(
        lambda a, b: math.pow(a, b) if isinstance(a, float) or b < 0 else a**b,
        lambda a, _: math.nan if a else math.inf,
    ),
    "min": _nan_if_any(min),
    "max": _nan_if_any(max),
    "abs": abs,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "le": lambda a, b: a <= b,
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "gt": lambda a, b: a > b,
    "and": lambda *a: all(a),
    "or": lambda *a: any(a),
    "not": lambda a: not a,
    "exp": _guarded(math.exp, lambda _: math.inf),
    "exp2": _guarded(lambda x: 2.0**x, lambda _: math.inf),
    "log": _log,
    "log2": lambda x: _log(x) / math.log(2),
    "tanh": math.tanh,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0,
    "sqrt": _guarded(math.sqrt, lambda _: math.nan),
    "rsqrt": lambda x: _quotient(1, math.sqrt(x)),
    "sin": math.sin,
    "cos": math.cos,
    "erf": math.erf,
    "atan": math.atan,
    "sign": lambda x: (x > 0) - (x < 0),
    "floor": _rounded(math.floor),
    "ceil": _rounded(math.ceil),
    "trunc": _rounded(math.trunc),
    "round": _rounded(round),
    "isnan": lambda x: x != x,
    "float": float,
    "int": lambda x: math.trunc(x),
}


def value_of(
    node: Expr,
    names: Mapping[Any, Any],
    read: Callable[[Any, tuple[int, ...]], Any],
    random: Callable[..., float] | None = None,
) -> Any:
    """The number that an expression stands for.

    Args:
        names: a number for each variable (by object or by name), size (by name), "dot", "s", "p".
        read: the element of a read tensor at given indices.
        random: the number that a `random` node stands for.
    """
    op = node.op
    if op == "const":
        return math.nan if node.value == "nan" else node.value
    if op == "var":
        return names[node] if node in names else names[node.value]
    if op == "size":
        return names[node.value]
    if op in ("dot", "s", "p"):
        return names[op]
    if op in ("sum", "amax", "amin"):
        variable, body = node.args
        extent = value_of(variable.args[0], names, read, random)
        items = [value_of(body, {**names, variable: i}, read, random) for i in range(extent)]
        fold = {"sum": lambda x: math.fsum(x) if any(isinstance(i, float) for i in x) else sum(x),
                "amax": lambda x: _PYTHON["max"](*x), "amin": lambda x: _PYTHON["min"](*x)}[op]  # fmt: skip
        if op == "sum" and not all(math.isfinite(i) for i in items):
            return sum(items)
        return fold(items)
    if op == "where":
        condition, a, b = node.args
        return value_of(a if value_of(condition, names, read, random) else b, names, read, random)
    args = [value_of(a, names, read, random) for a in node.args]
    if op == "read":
        return read(node.value, tuple(args))
    if op == "random":
        assert random is not None
        return random(*args)
    return _PYTHON[node.value if op == "raw" else op](*args)


def attend_by_loops(
    program: ScoreProgram, q: Tensor, k: Tensor, v: Tensor, reads: Sequence[Tensor] = (),
    sizes: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """The op's definition, element by element: `[B, Hq, Sq, Dv]` in float64."""
    B, Hq, Sq, D = q.shape
    group = Hq // k.shape[1]
    out = torch.zeros(B, Hq, Sq, v.shape[3], dtype=torch.float64)
    qs, ks, vs, tables = q.tolist(), k.tolist(), v.tolist(), [r.tolist() for r in reads]

    def read(number: int, at: tuple[int, ...]) -> Any:
        found = tables[number]
        for place in at:
            found = found[place]
        return found

    for b, h, i in itertools.product(range(B), range(Hq), range(Sq)):
        scores, dots, names = [], [], {f"n{n}": s for n, s in enumerate(sizes)} | {"b": b, "h": h, "q": i}
        for j in range(k.shape[2]):
            dot = math.fsum(qs[b][h][i][d] * ks[b][h // group][j][d] for d in range(D))
            score = dot
            for statement in program.statements:
                here = {**names, "k": j, "dot": dot, "s": score}
                if isinstance(statement, Score):
                    score = value_of(statement.value, here, read)
                elif isinstance(statement, Keep) and not value_of(statement.predicate, here, read):
                    score = value_of(statement.fill, here, read)
            scores.append(float(score))
            dots.append(dot)
        sink = -math.inf if program.sink is None else float(value_of(program.sink, names, read))
        top = max([*scores, sink]) if not any(s != s for s in scores) else math.nan
        weights = [math.exp(s - top) if s - top == s - top else math.nan for s in scores]
        mass = sum(weights) + (math.exp(sink - top) if sink > -math.inf else 0.0)
        for j, weight in enumerate(weights):
            p = weight / mass
            for statement in program.statements:
                if isinstance(statement, Weight):
                    p = value_of(statement.value, {**names, "k": j, "dot": dots[j], "p": p}, read)
            for d in range(v.shape[3]):
                out[b, h, i, d] += p * vs[b][h // group][j][d]
    return out


# --- random expressions and programs ------------------------------------------------------------


@functools.cache
def _integers(names: tuple[str, ...], depth: int) -> st.SearchStrategy[Expr]:
    """Integer expressions over index variables, n0 and n1."""
    leaves = st.one_of(
        st.sampled_from([S.index(n) for n in names]),
        st.integers(-3, 9).map(E.const),
        st.sampled_from([E.size("n0"), E.size("n1")]),
    )
    if depth == 0:
        return leaves
    inner = _integers(names, depth - 1)
    positive = st.integers(1, 5).map(E.const)
    return st.one_of(
        leaves,
        st.builds(operation, st.sampled_from(["add", "sub", "mul", "min", "max"]), inner, inner),
        st.builds(operation, st.sampled_from(["neg", "abs", "sign", "floor"]), inner),
        st.builds(operation, st.sampled_from(["floordiv", "mod"]), inner, positive),
        st.builds(operation, st.just("where"), _booleans(names, depth - 1), inner, inner),
    )


@functools.cache
def _booleans(names: tuple[str, ...], depth: int, data: bool = True) -> st.SearchStrategy[Expr]:
    integers = _integers(names, max(depth - 1, 0))
    compare = st.builds(operation, st.sampled_from(COMPARISONS), integers, integers)
    leaves = [compare]
    if data and {"b", "k"} <= set(names):
        leaves.append(st.just(E.read(1, (S.index("b"), S.index("k")))))
        leaves.append(st.just(operation("gt", E.read(2, tuple(map(S.index, S.INDICES))), E.const(0.1))))
    if depth <= 0:
        return st.one_of(*leaves)
    inner = _booleans(names, depth - 1, data)
    return st.one_of(
        *leaves,
        st.builds(operation, st.sampled_from(["and", "or"]), inner, inner),
        st.builds(operation, st.just("not"), inner),
    )


@functools.cache
def _floats(names: tuple[str, ...], own: tuple[Expr, ...], depth: int) -> st.SearchStrategy[Expr]:
    """Floating expressions that stay finite and small."""
    constants = st.sampled_from([0.5, -1.25, 3.0, 0.1, 1e-3]).map(E.const)
    picks = [*own, E.read(0, (S.index("h"),)), E.read(4, ()), E.read(3, (S.index("q"),))]
    if "k" in names:
        picks.append(E.read(2, tuple(map(S.index, S.INDICES))))
    computed = _integers(names, 1).map(lambda i: E.read(0, (operation("mod", i, E.const(2)),)))
    leaves = st.one_of(st.sampled_from(picks), constants, computed)
    if depth == 0:
        return leaves
    inner, integers = _floats(names, own, depth - 1), _integers(names, depth - 1)

    def above(low: float) -> st.SearchStrategy[Expr]:
        return inner.map(lambda x: operation("add", operation("abs", x), E.const(low)))

    bounded = inner.map(lambda x: operation("tanh", x))
    return st.one_of(
        leaves,
        bounded,
        integers,
        st.builds(operation, st.sampled_from(["add", "sub", "min", "max"]), inner, inner),
        st.builds(operation, st.just("mul"), inner, constants),
        st.builds(
            operation, st.just("div"), st.one_of(inner, integers), st.sampled_from([E.const(7), E.const(0.3)])
        ),
        st.builds(
            operation,
            st.sampled_from(["neg", "abs", "sigmoid", "sin", "cos", "erf"]),
            st.one_of(inner, integers),
        ),
        st.builds(operation, st.sampled_from(["exp", "exp2"]), bounded),
        st.builds(operation, st.sampled_from(["log", "log2", "sqrt", "rsqrt"]), above(1.0)),
        st.builds(
            operation, st.sampled_from(["sqrt", "rsqrt", "log"]), st.sampled_from([E.size("n0"), E.const(3)])
        ),
        st.builds(
            operation, st.just("pow"), above(1.0), st.sampled_from([E.const(2), E.const(-1), E.const(0.5)])
        ),
        st.builds(operation, st.just("where"), _booleans(names, depth - 1), inner, inner),
    )


SCORES = ("b", "h", "q", "k")


@functools.cache
def _fills() -> st.SearchStrategy[Expr]:
    fixed = [E.NEG_INF, E.const(-5.0), E.const(-1e9), operation("add", S.SCORE, E.const(-2.0)), E.const(0)]
    return st.sampled_from(fixed)


@functools.cache
def _programs(depth: int = 2, weights: bool = True, masks: bool = False) -> st.SearchStrategy[ScoreProgram]:
    """With `masks`, predicates are often such that whole tiles of (q, k) are decided."""
    scores = _floats(SCORES, (S.DOT, S.SCORE), depth).map(Score)
    predicates = _booleans(SCORES, depth)
    if masks:
        predicates = st.one_of(_booleans(("q", "k"), depth, data=False), predicates, _integers(("q", "k"), 1))
    keeps = st.builds(Keep, predicates, _fills())
    sinks = _floats(("b", "h", "q"), (), 1).map(Sink)
    after = _floats(SCORES, (S.WEIGHT,), 1).map(Weight)
    guard = Weight(operation("where", operation("isnan", S.WEIGHT), E.const(0.0), S.WEIGHT))
    last = st.one_of(st.just([]), st.just([guard]), st.lists(after, max_size=1)) if weights else st.just([])
    return st.builds(
        lambda body, sink, tail: ScoreProgram((*body, *sink, *tail)),
        st.lists(st.one_of(scores, keeps), max_size=3),
        st.lists(sinks, max_size=1),
        last,
    )


def make_reads(
    B: int, Hq: int, Sq: int, Skv: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """The tensors r0 .. r4 that the random programs read, and what sizes n0, n1 go with them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        drawn(Hq),
        torch.rand(B, Skv, generator=generator) < 0.7,
        drawn(B, Hq, Sq, Skv),
        torch.randint(-3, 9, (Sq,), generator=generator),
        drawn(),
    ]


@pytest.fixture(scope="session")
def language() -> types.SimpleNamespace:
    """Random expressions and programs of the score language. `integers`, `booleans` and `floats` give
    a strategy for names and a depth; programs read the tensors of `reads` and the sizes n0, n1."""
    return types.SimpleNamespace(
        integers=_integers, booleans=_booleans, floats=_floats, programs=_programs, reads=make_reads
    )


@pytest.fixture(scope="session")
def number() -> Callable[..., Any]:
    return value_of


@pytest.fixture(scope="session")
def by_loops() -> Callable[..., Tensor]:
    return attend_by_loops
