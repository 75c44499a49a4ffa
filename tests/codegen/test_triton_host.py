"""What the host does around the Triton kernels, with tensors that hold nothing and launches that do nothing:
nothing is asked of the device, and what follows from the shapes of a call is found once."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attngraph
from attngraph.codegen.cpu.operands import OverCache
from attngraph.codegen.triton import attempts, decode, device, launch, store, tuned, visits
from attngraph.codegen.triton.decode import Decode
from attngraph.codegen.triton.emit import OF_KEYS, OF_QUERIES
from attngraph.codegen.triton.launch import Forward
from attngraph.codegen.triton.plan import Blocks, DecodePlan
from attngraph.ir.language import expr as E
from attngraph.ir.language.parser import parse
from attngraph.ir.ops.cached_attention import CachePlan, Counts, Rows, Store, counts, numbers_of, tell, told
from attngraph.models.modern_decoder import ModernDecoder, ModernDecoderConfig
from attngraph.runtime.cache_config import CacheConfig
from attngraph.runtime.kv_cache import KVCache

pytestmark = pytest.mark.skipif(device.no_triton() is not None, reason="needs triton")
CUDA = torch.device("cuda", 0)
Launch = tuple[tuple[int, ...], tuple[Any, ...]]


class Recorded:
    """A kernel that is not launched: its grid and arguments are recorded."""

    def __init__(self, launches: list[Launch]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launches.append((grid, args))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    found: list[Launch] = []
    monkeypatch.setattr(decode, "load", lambda plan: (Recorded(found), Recorded(found)))
    monkeypatch.setattr(device, "multiprocessors", lambda where: 132)
    monkeypatch.setattr(store, "on", lambda where: contextlib.nullcontext())
    monkeypatch.setattr(store, "_specialised", lambda argument: None)  # there are no addresses
    return found


@pytest.fixture
def on_cuda() -> Iterator[None]:
    """Tensors hold nothing: asking for a value of one is an error."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


# --- launches ---------------------------------------------------------------------------------------------


class Compiling:
    """A Triton function that notes what it is compiled for, and what its compiled code is launched with."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[Launch] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def compile_and_launch(*arguments: Any, **options: Any) -> Any:
            self.compiled.append(arguments)
            return _Code(self)

        return compile_and_launch


class _Code:
    def __init__(self, kernel: Compiling) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: self.kernel.launched.append((grid, arguments))


def test_compiled_code_is_found_by_what_it_follows_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "on", lambda where: contextlib.nullcontext())
    monkeypatch.setattr(store, "_compiled", {})
    kernel, other = Compiling(), Compiling()
    a, b = torch.zeros(64, dtype=torch.float16), torch.ones(64, dtype=torch.float16)

    def run(which: Compiling, *arguments: Any, device: int = 0, warps: int = 4) -> int:
        store.launch_kernel(which, (3,), arguments, {"num_warps": warps}, torch.device("cuda", device))
        return len(which.compiled)

    assert [run(kernel, a, 5, None), run(kernel, b, 5, None)] == [1, 1]
    assert kernel.launched == [((3, 1, 1), (b, 5, None))]
    assert run(kernel, a[1:], 5, None) == 2  # an address that is no multiple of 16
    assert (
        run(kernel, a, 1, None) == 3 and run(kernel, a, 5, b) == 4 and run(kernel, a, 5, None, device=1) == 5
    )
    assert run(other, a, 5, None) == 1
    assert run(kernel, a, 5, None, warps=8) == 6
    assert run(other, a.bfloat16(), 5, None) == 2 and run(other, a.view(torch.int16), 5, None) == 3
    assert run(kernel, a[8:], 5, None) == 6 and len(kernel.launched) == 2


# --- attention over a cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("new", [[1, 1, 1], [5, 0, 2]], ids=str)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.usefixtures("on_cuda")
def test_a_step_over_a_cache_asks_nothing_of_the_device(
    new: list[int], window: int | None, launches: list[Launch]
) -> None:
    store = Store("k", (0, 2, 0, 16), 0, 2, torch.float16, window, "keys")
    state = KVCache(CachePlan((store,)), 3, CacheConfig(), CUDA)
    tokens = sum(new)
    q, k = (torch.empty(1, heads, tokens, 16, dtype=torch.float16, device=CUDA) for heads in (4, 2))
    for _ in range(3):
        state.reserve(new)
        given = state.inputs(new)
        (pages,) = state.stores().values()
        rows = Rows(given[f"table.{window or 'all'}"], given["starts"], given["first"], given["first"])
        out = Decode().attend(parse("keep k <= q"), q, (k, k), (pages, pages), [], (), rows)
        assert out is not None and out.shape == q.shape and out.device == CUDA
        state.write({"k": k}, given, new)
    assert len(launches) == 6 and state.lengths == [3 * n for n in new]


def test_a_step_of_a_decoder_asks_nothing_of_the_device() -> None:
    config = ModernDecoderConfig(layers=2, width=16, heads=4, kv_heads=2, head_width=4, hidden=32)
    model = ModernDecoder(config).eval()
    step = attngraph.compile(model, cache=True).prefill(torch.zeros(3, 6, dtype=torch.int64))[1].origin.step
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for module in model.modules():
            for kept in (module._parameters, module._buffers):
                for name, value in kept.items():
                    if value is not None:
                        kept[name] = nn.Parameter(torch.empty_like(value, device=CUDA), requires_grad=False)
        state = KVCache(step.plan, 3, CacheConfig(), CUDA, step.limit)
        for new in ([5, 2, 1], [1, 1, 1], [1, 1, 1]):
            ids = torch.zeros(1, sum(new), dtype=torch.int64, device=CUDA)
            assert step.advance(state, new, {step.name: ids}).shape[1] == sum(new)
        assert state.lengths == [7, 4, 3]


def test_a_state_without_data_leaves_nothing_to_others() -> None:
    plan = CachePlan((Store("k", (0, 2, 0, 16), 0, 2, torch.float16, None, "keys"),))
    with FakeTensorMode():
        KVCache(plan, 3, CacheConfig(), CUDA).inputs([1, 1, 1])
    given = KVCache(plan, 3, CacheConfig(), torch.device("cpu")).inputs([1, 1, 1])
    assert type(given["starts"]) is Tensor and given["starts"].tolist() == [0, 1, 2, 3]
    assert type(given["row"]) is Tensor and given["row"].tolist() == [0, 1, 2]


def test_what_was_told_of_a_tensor_holds_until_it_is_written_to() -> None:
    starts = tell(torch.tensor([0, 2, 3]), [0, 2, 3])
    assert told(starts) == numbers_of(starts) == [0, 2, 3]
    starts += 1
    assert told(starts) is None and numbers_of(starts) == [1, 3, 4]
    held = torch.tensor([7, 8])
    assert counts(Rows(torch.zeros(2, 1), starts, held, held)) == Counts([2, 1], [7, 8], [7, 8])


def plan_of(text: str, held: list[int], rows: int, **kernel: Any) -> tuple[DecodePlan, int]:
    with FakeTensorMode():
        q = torch.empty(1, 32, rows, 128, dtype=torch.float16, device=CUDA)
        k = torch.empty(1, 8, rows, 128, dtype=torch.float16, device=CUDA)
        pages = torch.empty(rows, 8, max(held), 128, dtype=torch.float16, device=CUDA)
        about, starts = Counts([1] * rows, held, held), torch.zeros(rows + 1)
        of_rows = Rows(starts[1:, None], starts, starts[1:], starts[1:])
        call = OverCache(parse(text), q, (k, k), (pages, pages), [], (), of_rows)
        found = Decode(**kernel).prepare(call, about)
        return found.plan, found.parts(about, 8)


def test_keys_are_split_into_as_many_parts_as_fill_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "multiprocessors", lambda where: 132)
    monkeypatch.setattr(device, "shared_memory", lambda where: 232_448)
    monkeypatch.setattr(device, "shared_of_multiprocessor", lambda where: 233_472)
    causal, window = "keep k <= q", "keep k <= q and q - k < 512"
    plan, parts = plan_of(causal, [1 << 15], 1)
    places = 132 * decode.programs_in(plan, 233_472)
    assert 0.8 * places <= 8 * parts <= places  # 8 key heads: one round of programs
    assert plan_of(causal, [1 << 15] * 64, 64)[1] == 1
    assert plan_of(causal, [300], 1)[1] == 1 and plan_of(causal, [1300], 1)[1] == 5
    assert plan_of(window, [1 << 15], 1)[1] == plan_of(causal, [512], 1)[1] == 2
    assert plan_of(causal, [1 << 15], 1, programs=2)[1] == 2 * 132 // 8
    assert plan_of(causal, [1 << 15], 1, splits=7)[1] == 7


def test_fewer_programs_of_larger_tiles_share_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "shared_of_multiprocessor", lambda where: 233_472)

    def at_once(D: int, blocks: Blocks, shared: bool = False) -> int:
        plan = DecodePlan(parse(""), torch.bfloat16, D, 512 if shared else D, 16, (), blocks, shared=shared)
        return decode.programs_in(plan, 233_472)

    assert at_once(128, Blocks(16, 64, 4, 3)) == at_once(128, Blocks(16, 128, 4, 2)) == 2  # 64 KiB each
    assert at_once(128, Blocks(16, 64, 4, 2)) == at_once(64, Blocks(16, 64, 4, 3)) == 4
    assert at_once(576, Blocks(16, 32, 4, 3), shared=True) == 2
    assert at_once(576, Blocks(64, 64, 8, 2), shared=True) == 1
    assert at_once(64, Blocks(16, 16, 16, 1)) <= 2048 // (32 * 16)


@pytest.mark.parametrize(
    ("items", "places", "most"), [(8, 264, 128), (7, 264, 99), (100, 132, 64), (1, 132, 3)]
)
def test_the_number_of_parts_leaves_few_places_idle(items: int, places: int, most: int) -> None:
    def busy(parts: int) -> float:
        rounds = items * parts / places
        return rounds / -(-rounds // 1)

    found = decode.parts_for(items, places, most)
    best = max(busy(n) for n in range(1, most + 1))
    assert 1 <= found <= most and busy(found) >= 0.85 * best
    assert all(busy(n) < 0.85 * best for n in range(1, found))
    assert decode.parts_for(places, places, most) == 1


def test_during_a_capture_nothing_is_concluded_from_the_lengths_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "is_captured", lambda where: True)
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: pytest.fail("asked the device"))
    starts, held = tell(torch.tensor([0, 1, 2]), [0, 1, 2]), torch.tensor([5, 9])
    q, pages = torch.empty(1, 4, 2, 16), torch.empty(6, 2, 8, 16)
    rows = Rows(torch.zeros(2, 3, dtype=torch.int64), starts, held, held)
    call = OverCache(parse(""), q, (q, q), (pages, pages), [], (), rows)
    assert decode.counts_for(call) == Counts([1, 1], [24, 24], [24, 24])
    unknown = rows._replace(starts=torch.tensor([0, 1, 2]))
    assert decode.counts_for(call._replace(rows=unknown)).new == [2, 2]


# --- plans --------------------------------------------------------------------------------------------


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> Forward:
    """The forward kernel on the CPU, where nothing is launched."""
    monkeypatch.setattr(device, "no_device", lambda tensor: None)
    monkeypatch.setattr(device, "is_interpreted", lambda: True)
    monkeypatch.setattr(launch, "load", lambda plan: Recorded([]))
    monkeypatch.setattr(launch, "load_backward", lambda plan: types.SimpleNamespace(
        **dict.fromkeys((OF_QUERIES, OF_KEYS), Recorded([]))
    ))  # fmt: skip
    return Forward()


WALKS = (
    (launch, "plan_forward"), (launch, "plan_call"), (launch, "unsupported"), (launch, "_check_reads"),
    (tuned, "key"), (attempts, "smaller"), (E, "walk"),
)  # fmt: skip


def called_again(name: str) -> Callable[..., None]:
    return lambda *_: pytest.fail(f"{name} is called again")


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("s = 0.125 * dot; keep k <= q", ()),
        ("s = dot + r0[h, k - q + n0]; keep r1[b, q] == r1[b, k]", ((2, 31), (2, 16))),
    ],
)
def test_what_follows_from_the_shapes_of_a_call_is_found_once(
    text: str, reads: tuple[tuple[int, ...], ...], on_any_device: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, tensors = parse(text), tuple(torch.randn(2, 2, 16, 8) for _ in "qkv")
    read = [torch.randn(shape) if n == 0 else torch.zeros(shape).long() for n, shape in enumerate(reads)]
    kernel = on_any_device

    def run() -> None:
        results = kernel.forward(program, tensors, read, (15,))  # type: ignore[arg-type]
        if not reads:
            kernel.backward(program, tensors, read, (15,), results, results)  # type: ignore[arg-type]

    run()
    with monkeypatch.context() as context:
        for module, name in WALKS:
            context.setattr(module, name, called_again(name))
        run()


class Launched(TorchDispatchMode):
    """PyTorch's operations that launch something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "text", ["s = 0.125 * dot; keep k <= q", "s = 20.0 * tanh(dot / 20.0); keep q - k < 3 and k <= q"]
)
def test_pytorch_adds_one_launch_to_the_kernels_of_a_call_and_its_gradients(
    text: str, on_any_device: Forward
) -> None:
    """A launch takes microseconds; where rows are short, that is as long as a kernel."""
    program, tensors = parse(text), tuple(torch.randn(2, 4, 16, 8) for _ in "qkv")

    def run() -> None:
        results = on_any_device.forward(program, tensors, [], ())  # type: ignore[arg-type]
        on_any_device.backward(program, tensors, [], (), results, results)  # type: ignore[arg-type]

    run()  # lists of tiles are made once
    with Launched() as found:
        run()
    assert found.names == ["aten::zeros"]


def test_a_plan_is_made_anew_where_it_follows_from_something_else(
    on_any_device: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    real = launch.plan_forward
    monkeypatch.setattr(launch, "plan_forward", lambda *a: (made.append(a), real(*a))[1])
    program, q = parse("s = dot + r0[k] * n0"), torch.randn(1, 2, 16, 8)

    def plans(q: Tensor = q, bias: Tensor | None = None, sizes: tuple[int, ...] = (3,)) -> int:
        made.clear()
        on_any_device.forward(program, (q, q, q), [torch.zeros(16) if bias is None else bias], sizes)
        return len(made)

    assert plans() == 1 and plans() == 0 and plans(q.clone(), torch.ones(16), (4,)) == 0
    assert plans(q.half()) == 1 and plans(torch.randn(1, 2, 17, 8), torch.zeros(17)) == 1
    assert plans(q.transpose(2, 3).contiguous().transpose(2, 3)) == 1
    assert plans(bias=torch.zeros(16, dtype=torch.int64)) == 1 and plans(sizes=(1 << 40,)) == 1
    monkeypatch.setattr(tuned, "changes", lambda: 1 << 20)
    assert plans() == 1 and plans() == 0
    with pytest.raises(ValueError, match="needs 16 elements"):
        plans(bias=torch.zeros(15))
    with pytest.raises(ValueError, match="needs 16 elements"):
        plans(bias=torch.zeros(15))


@pytest.mark.usefixtures("cache")
def test_a_table_that_is_written_changes_plans() -> None:
    before = tuned.changes()
    tuned.add("A GPU", {"forward, a": Blocks(64, 32, 4, 2)})
    assert tuned.changes() > before


# --- lists of tiles -----------------------------------------------------------------------------------


class OneDevice(TorchDispatchMode):
    """Every operation has tensors of one device, single numbers of the host included."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        assert len(devices) <= 1, f"{func} has tensors of {devices}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("keep k < r0[b]", (2,)), ("keep r0[b, q] == r0[b, k]; keep k <= q", (2, 300)),
        ("keep k <= q and (r0[b, k] > 1 or k < 9); keep q - k < r0[b, q]", (2, 300)),
        ("keep max(r0[b], 7) * 2 - k > 0 else -1e9", (2,)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_lists_that_follow_from_data_are_made_on_the_device_alone(
    text: str, shape: tuple[int, ...], turned: bool
) -> None:
    operands = tuple(torch.empty(2, 4, 300, 16, device="meta") for _ in "qkv")
    reads = [torch.empty(shape, dtype=torch.int64, device="meta")]
    with OneDevice():
        found = visits.find(parse(text), Blocks(64, 32), operands, reads, (), turned)  # type: ignore[arg-type]
    assert found.tiles.device.type == found.counts.device.type == "meta"
    assert found.tiles.shape == ((2 * 10, 5) if turned else (2 * 5, 10))
