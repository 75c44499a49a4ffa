"""A small forward kernel of sm_100 for the simulator's tests: products in tensor memory, no maximum."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma


@gluon.jit
def produce(q_desc, k_desc, v_desc, qs, ks, vs, full, empty, tiles, STAGES: gl.constexpr):
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
        if i == 0:
            mbarrier.expect(full.index(slot), q_desc.nbytes_per_cta + 2 * k_desc.nbytes_per_cta)
            tma.async_load(q_desc, [gl.program_id(0) * 128, 0], full.index(slot), qs)
        else:
            mbarrier.expect(full.index(slot), 2 * k_desc.nbytes_per_cta)
        tma.async_load(k_desc, [i * 64, 0], full.index(slot), ks.index(slot))
        tma.async_load(v_desc, [i * 64, 0], full.index(slot), vs.index(slot))


@gluon.jit
def multiply(
    qs, ks, vs, s_mem, p_mem, o_mem, full, empty, s_full, p_full, o_full, tiles, STAGES: gl.constexpr
):
    for i in range(tiles):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        blackwell.tcgen05_mma(qs, ks.index(slot).permute((1, 0)), s_mem, use_acc=False)
        blackwell.tcgen05_commit(s_full)
        mbarrier.wait(p_full, i & 1)
        blackwell.tcgen05_mma(p_mem, vs.index(slot), o_mem, use_acc=i > 0)
        blackwell.tcgen05_commit(empty.index(slot))
    blackwell.tcgen05_commit(o_full)


@gluon.jit
def weigh(out, s_mem, p_mem, o_mem, s_full, p_full, o_full, tiles, RATE, D: gl.constexpr):
    ROWS: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [4, 1], [0, 1])
    SUMS: gl.constexpr = gl.BlockedLayout([1, D], [32, 1], [4, 1], [0, 1])
    l = gl.zeros([128], gl.float32, gl.SliceLayout(1, ROWS))
    for i in range(tiles):
        mbarrier.wait(s_full, i & 1)
        p = gl.exp2(s_mem.load(ROWS) * RATE)
        l += gl.sum(p, 1)
        p_mem.store(p.to(gl.bfloat16))
        mbarrier.arrive(p_full)
    mbarrier.wait(o_full, 0)
    o = o_mem.load(SUMS) / gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, SUMS)), 1)
    rows = gl.program_id(0) * 128 + gl.arange(0, 128, gl.SliceLayout(1, SUMS))
    columns = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    gl.store(out + gl.expand_dims(rows, 1) * D + gl.expand_dims(columns, 0), o)


@gluon.jit
def forward(q_desc, k_desc, v_desc, out, tiles, RATE, D: gl.constexpr, STAGES: gl.constexpr):
    qs = gl.allocate_shared_memory(gl.bfloat16, [128, D], q_desc.layout)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], k_desc.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, D], v_desc.layout)
    TILE: gl.constexpr = blackwell.TensorMemoryLayout((128, 64), 1)
    s_mem = blackwell.allocate_tensor_memory(gl.float32, [128, 64], TILE)
    WIDER: gl.constexpr = blackwell.TensorMemoryLayout((128, 128), 1)
    p_mem = s_mem._reinterpret(gl.bfloat16, [128, 128], WIDER).slice(0, 64)  # over half of the scores
    o_mem = blackwell.allocate_tensor_memory(gl.float32, [128, D], blackwell.TensorMemoryLayout((128, D), 1))
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    s_full = mbarrier.allocate_mbarrier()
    p_full = mbarrier.allocate_mbarrier()
    o_full = mbarrier.allocate_mbarrier()
    mbarrier.init(s_full, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(o_full, count=1)
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    gl.warp_specialize([
        (weigh, (out, s_mem, p_mem, o_mem, s_full, p_full, o_full, tiles, RATE, D)),
        (multiply, (qs, ks, vs, s_mem, p_mem, o_mem, full, empty, s_full, p_full, o_full, tiles, STAGES)),
        (produce, (q_desc, k_desc, v_desc, qs, ks, vs, full, empty, tiles, STAGES)),
    ], [1, 1], [24, 24])  # fmt: skip
