"""A small gradient of queries for the simulator's tests: two groups of 64 keys each add to the same sums, a
program after the other, by turns that a counter in global memory gives."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def produce(g_desc, gs, full, empty, tiles, STAGES: gl.constexpr):
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(slot), g_desc.block_type.nbytes)
        tma.async_load(g_desc, [i * 64, 0], full.index(slot), gs.index(slot))


@gluon.jit
def consume(
    W: gl.constexpr, dq_desc, vs, ks, gs, ps, sums, full, empty, turns, weights, dv, tiles, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    keys = gl.program_id(0) * 128 + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, KEYS))
    queries = gl.arange(0, 64, gl.SliceLayout(0, KEYS))
    blank = gl.zeros([64, 64], gl.float32, KEYS)
    zero = gl.zeros([64, D], gl.float32, SUMS)
    dv_sum = gl.zeros([64, D], gl.float32, SUMS)
    for i in range(tiles):
        slot = i % STAGES
        place = gl.expand_dims(keys, 1) * (tiles * 64) + gl.expand_dims(queries, 0) + i * 64
        p = gl.load(weights + place)
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        g = gs.index(slot).permute((1, 0))
        dp = hopper.warpgroup_mma(vs.index(W), g, blank, use_acc=False, is_async=True)
        a = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
        dv_sum = hopper.warpgroup_mma(a, gs.index(slot), dv_sum, is_async=True)
        dp = hopper.warpgroup_mma_wait(1, deps=(dp,))
        ps.index(W).store((p * dp).to(gl.bfloat16))
        hopper.fence_async_shared()
        dv_sum = hopper.warpgroup_mma_wait(0, deps=(dv_sum,))
        mbarrier.arrive(empty.index(slot))
        ds = ps.index(W).permute((1, 0))
        dq = hopper.warpgroup_mma(ds, ks.index(W), zero, use_acc=False, is_async=True)
        dq = hopper.warpgroup_mma_wait(0, deps=(dq,))
        sums.index(W).store(dq)
        hopper.fence_async_shared()
        mine = gl.program_id(0) * 2 + W
        while gl.atomic_add(turns + i, 0, sem="acquire") != mine:
            pass
        tma.async_atomic_add(dq_desc, [i * 64, 0], sums.index(W))
        tma.store_wait(0, read_only=False)
        gl.atomic_add(turns + i, 1, sem="release")
    rows = gl.program_id(0) * 128 + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    gl.store(dv + gl.expand_dims(rows, 1) * D + gl.expand_dims(columns, 0), dv_sum)


@gluon.jit
def backward(
    g_desc, k_desc, v_desc, dq_desc, turns, weights, dv, tiles, D: gl.constexpr, STAGES: gl.constexpr
):
    vs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], v_desc.layout)
    ks = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], k_desc.layout)
    gs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], g_desc.layout)
    TURNED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    ps = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TURNED)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64, D], dq_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    begun = mbarrier.allocate_mbarrier()
    mbarrier.init(begun, count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=2)
    mbarrier.expect(begun, 4 * k_desc.block_type.nbytes)
    for w in gl.static_range(2):
        tma.async_load(k_desc, [gl.program_id(0) * 128 + w * 64, 0], begun, ks.index(w))
        tma.async_load(v_desc, [gl.program_id(0) * 128 + w * 64, 0], begun, vs.index(w))
    mbarrier.wait(begun, 0)
    gl.warp_specialize([
        (consume, (0, dq_desc, vs, ks, gs, ps, sums, full, empty, turns, weights, dv, tiles, D, STAGES)),
        (consume, (1, dq_desc, vs, ks, gs, ps, sums, full, empty, turns, weights, dv, tiles, D, STAGES)),
        (produce, (g_desc, gs, full, empty, tiles, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
