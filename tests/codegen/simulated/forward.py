"""A small forward kernel, persistent, for the simulator's tests: a producer, two groups that take turns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, qs, ks, vs, q_full, q_empty, full, empty, blocks, tiles, STAGES: gl.constexpr
):
    done = 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        mbarrier.wait(q_empty, (done & 1) ^ 1)
        mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
        tma.async_load(q_desc, [block * 128, 0], q_full, qs.index(0))
        tma.async_load(q_desc, [block * 128 + 64, 0], q_full, qs.index(1))
        for i in range(tiles):
            turn = done * tiles + i
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            tma.async_load(k_desc, [i * 64, 0], full.index(slot), ks.index(slot))
            tma.async_load(v_desc, [i * 64, 0], full.index(slot), vs.index(slot))
        done = done + 1


@gluon.jit
def consume(
    W: gl.constexpr, o_desc, qs, ks, vs, os, q_full, q_empty, full, empty, blocks, keys, RATE,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    blank = gl.zeros([64, 64], gl.float32, SCORES)
    tiles = gl.cdiv(keys, 64)
    k_at = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    done = 0
    for block in range(gl.program_id(0), blocks, gl.num_programs(0)):
        m = gl.full([64], -1e38, gl.float32, gl.SliceLayout(1, SCORES))
        l = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, D], gl.float32, SUMS)
        mbarrier.wait(q_full, done & 1)
        for i in range(tiles):
            turn = done * tiles + i
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), turn // STAGES & 1)
            k = ks.index(slot).permute((1, 0))
            s = hopper.warpgroup_mma(qs.index(W), k, blank, use_acc=False, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=(s,))
            s = gl.where(gl.expand_dims(k_at, 0) + i * 64 < keys, s, float("-inf"))
            top = gl.maximum(m, gl.max(s, 1) * RATE)
            shrink = gl.exp2(m - top)
            p = gl.exp2(gl.fma(s, blank + RATE, blank - gl.expand_dims(top, 1)))
            l = l * shrink + gl.sum(p, 1)
            m = top
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, SUMS)), 1)
            p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, SUMS, 2))
            acc = hopper.warpgroup_mma(p, vs.index(slot), acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(slot))
        mbarrier.arrive(q_empty)
        acc = acc / gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, SUMS)), 1)
        tma.store_wait(0)
        os.index(W).store(acc.to(gl.bfloat16))
        hopper.fence_async_shared()
        tma.async_store(o_desc, [block * 128 + W * 64, 0], os.index(W))
        done = done + 1
    tma.store_wait(0)


@gluon.jit
def forward(q_desc, k_desc, v_desc, o_desc, blocks, keys, RATE, D: gl.constexpr, STAGES: gl.constexpr):
    qs = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], q_desc.layout)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], k_desc.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], v_desc.layout)
    os = gl.allocate_shared_memory(gl.bfloat16, [2, 64, D], o_desc.layout)
    q_full = mbarrier.allocate_mbarrier()
    q_empty = mbarrier.allocate_mbarrier()
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    tiles = gl.cdiv(keys, 64)
    gl.warp_specialize([
        (consume, (0, o_desc, qs, ks, vs, os, q_full, q_empty, full, empty, blocks, keys, RATE, D, STAGES)),
        (consume, (1, o_desc, qs, ks, vs, os, q_full, q_empty, full, empty, blocks, keys, RATE, D, STAGES)),
        (produce, (q_desc, k_desc, v_desc, qs, ks, vs, q_full, q_empty, full, empty, blocks, tiles, STAGES)),
    ], [4, 1], [240, 24])  # fmt: skip
