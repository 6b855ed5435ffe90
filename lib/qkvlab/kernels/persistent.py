"""persistent: the products never wait. One CTA a multiprocessor, and all that is not a product goes on beside them. Hopper, in Gluon.

As in pair, everything is cast to scaled fp16 first, but of hidden_states only the rows of two waves of tiles. The second
launch, queued behind it by programmatic dependent launch, keeps one CTA on every multiprocessor and divides its warps:
one fetches tiles by TMA, two warpgroups multiply 64 x 128 each, three warps cast the other rows of hidden_states before
their turn comes. A warpgroup has two sets of accumulators: while the tensor cores fill one, it normalises and stores the
other in eight pieces, one every second step of K, so that stores leave all the time and not from every CTA at once.

No CTA waits for one that may not be running: rows to cast are taken from a queue by whoever is there. The queue's
counters and the cast rows belong to the call.

Ledger: 2 launches; the FLOPs at fp16's rate; fp32 inputs once, outputs once; 6.3 MB + 2 KiB a token of fp16 written
and read again from the L2, where a tile of 128 x 128 takes in 512 KiB. What that brings is in notebook 06.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..problem import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, QKV_OUT_SIZE, WEIGHT_ROWS, operation
from .launch import Config, needs_wgmma, prepare, sm_count

WARPGROUPS = gl.constexpr(2)
CASTING_ROWS = gl.constexpr(2)  # that a casting warp takes at a time: a row is 32 registers
STORED = gl.constexpr(32)  # columns that are stored at a time, a quarter of a head


def heuristic(M, device):
    """M, torch.device -> Config of a tile of 128 tokens by one head. 6 buffers of 32 KiB fill the shared memory, beside 32 KiB for outputs.

    H200, 2026-11-30, Triton 3.7.1, GEMM alone at M = 8192: 5 buffers take 88.7 µs where 6 take 85.4 (data/trials).
    """
    return Config(BLOCK_M=128, BLOCK_K=64, num_warps=4, num_stages=6)


# --- casting ---------------------------------------------------------------------------------------------------------


@gluon.jit
def cast_rows(source, cast, unscale, i_source, i_row, end, K: gl.constexpr, ROWS: gl.constexpr):
    """ROWS rows of source [*, K] fp32, from i_source on, to rows i_row... of cast [*, K] fp16 that are below end, scaled as in pair."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    m_row = i_row + o_row < end
    b_row = gl.load(source + (i_source + o_row).to(gl.int64)[:, None] * K + o_k[None, :], mask=m_row[:, None], other=0.0)
    b_size = b_row.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    b_exponent = gl.maximum(gl.max(gl.where(b_size < 0x7F800000, b_size, 0), axis=1) >> 23, 15)
    b_scaled = b_row * ((268 - b_exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    gl.store(cast + (i_row + o_row).to(gl.int64)[:, None] * K + o_k[None, :], b_scaled.to(gl.float16), mask=m_row[:, None])
    gl.store(unscale + i_row + o_row, ((b_exponent - 14) << 23).to(gl.float32, bitcast=True), mask=m_row)


@gluon.jit(do_not_specialize=["end", "counters"])
def first_rows_kernel(
    x, q_weight, k_weight, v_weight, cast, unscale, counter,
    end, counters,
    K: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """cast [*, K] fp16 and unscale [*] fp32, rows below end: the weights' [N, K] three times, then those of x; counter [counters] i32: zeros."""
    gdc_launch_dependents()
    i = gl.program_id(0)
    for i_counter in range(i, counters, gl.num_programs(0)):
        gl.store(counter + i_counter, 0)
    i_row = i * ROWS
    source, i_source = x, i_row - 3 * N
    if i_row < 3 * N:
        i_source = i_row % N
        source = q_weight
        if i_row >= N:
            source = k_weight
        if i_row >= 2 * N:
            source = v_weight
    cast_rows(source, cast, unscale, i_source, i_row, end, K, ROWS)


@gluon.jit
def take(counter):
    """The counter's next value, the same for the whole warp."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .b32 lane, next;
        mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;
        mov.u32 next, 0;
        @first atom.relaxed.gpu.global.add.u32 next, [$1], 1;
        shfl.sync.idx.b32 $0, next, 0, 31, 0xffffffff;
        }""", "=r,l,~{memory}", [counter], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def publish(counter, n):
    """Add n to the counter, once what this warp wrote can be seen by every copy engine (TMA)."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .b32 lane;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.add.s32 [$1], $2;
        mov.u32 $0, 0;
        }""", "=r,l,r,~{memory}", [counter, n], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def wait_for(counter, n):
    """Wait until the counter has reached n; TMA then reads what was written before it was counted."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early; .reg .s32 count;
        again:
        ld.acquire.gpu.global.s32 count, [$1];
        setp.lt.s32 early, count, $2;
        @early bra.uni again;
        fence.proxy.async.global;
        mov.u32 $0, 0;
        }""", "=r,l,r,~{memory}", [counter, n], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def casting_warp(x, cast, unscale, counter, M, first_rows, WEIGHT_ROWS: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr):
    """Casts rows of x from first_rows on, CASTING_ROWS at a time, as counter[0] hands them out; counter[1 + i_m] counts those of a tile."""
    shares = gl.cdiv(gl.maximum(M - first_rows, 0), CASTING_ROWS)
    i_share = take(counter)
    while i_share < shares:
        i_next = take(counter)  # asked for early: the answer comes while this share is cast
        i_row = first_rows + i_share * CASTING_ROWS
        cast_rows(x, cast, unscale, i_row, WEIGHT_ROWS + i_row, WEIGHT_ROWS + M, K, CASTING_ROWS)
        publish(counter + 1 + i_row // BLOCK_M, gl.minimum(CASTING_ROWS, M - i_row))
        i_share = i_next


# --- multiplying -----------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def wgmma_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def halves(b):
    """The left and the right half of a block's columns; nothing moves."""
    L: gl.constexpr = wgmma_layout(b.shape[1] // 2)
    b_left, b_right = b.reshape([b.shape[0], 2, b.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(b_left, L, assert_trivial=True), gl.convert_layout(b_right, L, assert_trivial=True)


@gluon.jit
def times_columns(b, s_columns):
    """b [64, STORED] times a row of STORED numbers in shared memory."""
    return b * s_columns.load(gl.SliceLayout(0, wgmma_layout(STORED)))[None, :]


@gluon.jit
def inverse_rms(b_squares, i_proj, eps, D: gl.constexpr):
    """1 / root mean square of rows from their sums of squares; 1 for value_states, which are not normalised."""
    b_rstd = gl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [b_squares / D + eps], gl.float32, True, 1)
    return gl.where(i_proj < 2, b_rstd, 1.0)


@gluon.jit
def store_quarter(b, b_rstd, s_norm, s_out, out_desc, i_proj, i_row, i_column):
    """Normalise and store 64 rows by STORED columns, through s_out. Rows beyond the last are clipped."""
    tma.store_wait(1)  # the store before last has left the buffer, which is this one's too
    s_out.store(times_columns(b * b_rstd[:, None], s_norm).reshape([1, 64, STORED]))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [i_proj, i_row, i_column], s_out)


@gluon.jit
def multiplying_warpgroup(
    out_desc, buffers, unscale, s_unscales, s_norms, s_outs,
    M, eps,
    WG: gl.constexpr, K: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rows WG * 64... of each of the CTA's tiles: products for one tile, and between them the epilogue of the tile before."""
    L: gl.constexpr = wgmma_layout(D)
    ROWS: gl.constexpr = gl.SliceLayout(1, wgmma_layout(STORED))
    COLUMNS: gl.constexpr = gl.BlockedLayout([D // 32], [32], [4], [0])  # every warp has all of them: no warp waits for another
    STEPS: gl.constexpr = K // BLOCK_K
    s_x, s_w, full, empty = buffers
    tiles = gl.cdiv(M, BLOCK_M) * (3 * HEADS)
    o_row = gl.arange(0, 64, layout=ROWS)
    o_column = gl.arange(0, D, layout=COLUMNS)
    s_unscale = s_unscales.index(WG)
    s_out_0, s_out_1 = s_outs.index(2 * WG), s_outs.index(2 * WG + 1)
    # Before the first tile comes one beyond the last row, of which nothing is stored.
    i_row, i_proj, i_column = M, gl.to_tensor(0), gl.to_tensor(0)
    b_unscale = gl.zeros([64], gl.float32, ROWS)
    s_unscale.store(gl.zeros([D], gl.float32, COLUMNS))
    b_left, b_right = halves(gl.zeros([64, D], gl.float32, L))
    b_0, b_1 = halves(b_left)
    b_2, b_3 = halves(b_right)
    i_step = 0
    for i_tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        i_next_row = i_tile // (3 * HEADS) * BLOCK_M + WG * 64
        i_head = i_tile % (3 * HEADS)
        s_norm = s_norms.index(i_proj)
        b_acc = gl.zeros([64, D], gl.float32, L)
        for k in gl.static_range(STEPS):
            i_slot = i_step % STAGES
            mbarrier.wait(full.index(i_slot), i_step // STAGES & 1)
            s_w_t = s_w.index(i_slot).permute((1, 0))
            b_acc = warpgroup_mma(s_x.index(i_slot).slice(WG * 64, 64), s_w_t, b_acc, use_acc=k > 0, is_async=True)
            if k == 0:  # this tile's scales are on their way while it is multiplied
                b_next_unscale = gl.load(unscale + 3 * HEADS * D + i_next_row + o_row, mask=i_next_row + o_row < M, other=0.0)
                b_w_unscale = gl.load(unscale + i_head * D + o_column)
            else:
                b_acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[b_acc]))
                mbarrier.arrive(empty.index((i_step + STAGES - 1) % STAGES), count=1)
            if k == 1:
                b_0 = times_columns(b_0, s_unscale.slice(0, 32)) * b_unscale[:, None]
                b_squares = gl.sum(b_0 * b_0, axis=1)
            if k == 3:
                b_1 = times_columns(b_1, s_unscale.slice(32, 32)) * b_unscale[:, None]
                b_squares += gl.sum(b_1 * b_1, axis=1)
            if k == 5:
                b_2 = times_columns(b_2, s_unscale.slice(64, 32)) * b_unscale[:, None]
                b_squares += gl.sum(b_2 * b_2, axis=1)
            if k == 7:
                b_3 = times_columns(b_3, s_unscale.slice(96, 32)) * b_unscale[:, None]
                b_rstd = inverse_rms(b_squares + gl.sum(b_3 * b_3, axis=1), i_proj, eps, D)
            if k == 9:
                store_quarter(b_0, b_rstd, s_norm.slice(0, 32), s_out_0, out_desc, i_proj, i_row, i_column)
            if k == 11:
                store_quarter(b_1, b_rstd, s_norm.slice(32, 32), s_out_1, out_desc, i_proj, i_row, i_column + 32)
            if k == 13:
                store_quarter(b_2, b_rstd, s_norm.slice(64, 32), s_out_0, out_desc, i_proj, i_row, i_column + 64)
            if k == 14:
                # Times the tile, they must not leave fp32's range where the result, which is times the rows' scale too, does not.
                huge = gl.max(b_w_unscale, axis=0) > 2.0**60
                s_unscale.store(gl.where(huge, b_w_unscale * 2.0**-40, b_w_unscale))
                b_next_unscale = gl.where(huge, gl.minimum(b_next_unscale * 2.0**40, 3.4e38), b_next_unscale)
            if k == 15:
                store_quarter(b_3, b_rstd, s_norm.slice(96, 32), s_out_1, out_desc, i_proj, i_row, i_column + 96)
            i_step += 1
        b_done = warpgroup_mma_wait(0, deps=[b_acc])
        mbarrier.arrive(empty.index((i_step + STAGES - 1) % STAGES), count=1)
        b_left, b_right = halves(b_done)
        b_0, b_1 = halves(b_left)
        b_2, b_3 = halves(b_right)
        b_unscale = b_next_unscale
        i_row, i_proj, i_column = i_next_row, i_head // HEADS, i_head % HEADS * D
    b_0 = times_columns(b_0, s_unscale.slice(0, 32)) * b_unscale[:, None]
    b_1 = times_columns(b_1, s_unscale.slice(32, 32)) * b_unscale[:, None]
    b_2 = times_columns(b_2, s_unscale.slice(64, 32)) * b_unscale[:, None]
    b_3 = times_columns(b_3, s_unscale.slice(96, 32)) * b_unscale[:, None]
    b_squares = gl.sum(b_0 * b_0 + b_1 * b_1 + b_2 * b_2 + b_3 * b_3, axis=1)
    b_rstd = inverse_rms(b_squares, i_proj, eps, D)
    s_norm = s_norms.index(i_proj)
    store_quarter(b_0, b_rstd, s_norm.slice(0, 32), s_out_0, out_desc, i_proj, i_row, i_column)
    store_quarter(b_1, b_rstd, s_norm.slice(32, 32), s_out_1, out_desc, i_proj, i_row, i_column + 32)
    store_quarter(b_2, b_rstd, s_norm.slice(64, 32), s_out_0, out_desc, i_proj, i_row, i_column + 64)
    store_quarter(b_3, b_rstd, s_norm.slice(96, 32), s_out_1, out_desc, i_proj, i_row, i_column + 96)
    tma.store_wait(0)


@gluon.jit
def fetching_warp(
    cast_desc, buffers, counter,
    M, first_rows,
    K: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the buffers with BLOCK_K columns of BLOCK_M rows of x and of a head's weights, STAGES steps ahead of the products."""
    STEPS: gl.constexpr = K // BLOCK_K
    s_x, s_w, full, empty = buffers
    tiles = gl.cdiv(M, BLOCK_M) * (3 * HEADS)
    i_step = 0
    i_m = gl.program_id(0) // (3 * HEADS)
    if i_m * BLOCK_M >= first_rows:
        wait_for(counter + 1 + i_m, gl.minimum(BLOCK_M, M - i_m * BLOCK_M))
    for i_tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        i_m, i_head = i_tile // (3 * HEADS), i_tile % (3 * HEADS)
        for k in range(STEPS):
            i_slot = i_step % STAGES
            mbarrier.wait(empty.index(i_slot), (i_step // STAGES + 1) & 1)
            mbarrier.expect(full.index(i_slot), (BLOCK_M + D) * BLOCK_K * 2)
            rows = 3 * HEADS * D + i_m * BLOCK_M
            tma.async_copy_global_to_shared(cast_desc, [rows, k * BLOCK_K], full.index(i_slot), s_x.index(i_slot))
            tma.async_copy_global_to_shared(cast_desc, [i_head * D, k * BLOCK_K], full.index(i_slot), s_w.index(i_slot))
            i_step += 1
            if k == STEPS // 2:  # the next tile's rows: waited for here, where the buffers are full, and not between tiles
                i_next = (i_tile + gl.num_programs(0)) // (3 * HEADS)
                if (i_next * BLOCK_M >= first_rows) & (i_next * BLOCK_M < M):
                    wait_for(counter + 1 + i_next, gl.minimum(BLOCK_M, M - i_next * BLOCK_M))


@gluon.jit(do_not_specialize=["M", "first_rows"])
def persistent_kernel(
    cast_desc, out_desc, x, cast, unscale, q_norm_weight, k_norm_weight, counter,
    M, first_rows, eps,
    K: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out [3, M, HEADS * D] fp32: query, key and value, from what first_rows_kernel cast, and from x [M, K] where it stopped.

    A program takes every num_programs-th tile; 24 neighbours share rows of x. counter: see casting_warp.
    """
    gl.static_assert(BLOCK_M == 64 * WARPGROUPS and K // BLOCK_K == 16 and D == 4 * STORED)
    s_x = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_M, BLOCK_K], cast_desc.layout)
    s_w = gl.allocate_shared_memory(gl.float16, [STAGES, D, BLOCK_K], cast_desc.layout)
    s_outs = gl.allocate_shared_memory(gl.float32, [2 * WARPGROUPS, 1, 64, STORED], out_desc.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_unscales = gl.allocate_shared_memory(gl.float32, [WARPGROUPS, D], PLAIN)
    s_norms = gl.allocate_shared_memory(gl.float32, [3, D], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_slot in gl.static_range(STAGES):
        mbarrier.init(full.index(i_slot), count=1)
        mbarrier.init(empty.index(i_slot), count=WARPGROUPS)
    COLUMNS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_d = gl.arange(0, D, layout=COLUMNS)
    s_norms.index(0).store(gl.load(q_norm_weight + o_d))
    s_norms.index(1).store(gl.load(k_norm_weight + o_d))
    s_norms.index(2).store(gl.full([D], 1.0, gl.float32, COLUMNS))
    gdc_wait()  # all of the above ran beside the first launch; what follows reads what it wrote
    buffers = (s_x, s_w, full, empty)
    gl.warp_specialize([
        (multiplying_warpgroup, (out_desc, buffers, unscale, s_unscales, s_norms, s_outs, M, eps, 0, K, HEADS, D, BLOCK_M, BLOCK_K, STAGES)),
        (multiplying_warpgroup, (out_desc, buffers, unscale, s_unscales, s_norms, s_outs, M, eps, 1, K, HEADS, D, BLOCK_M, BLOCK_K, STAGES)),
        (fetching_warp, (cast_desc, buffers, counter, M, first_rows, K, HEADS, D, BLOCK_M, BLOCK_K, STAGES)),
        (casting_warp, (x, cast, unscale, counter, M, first_rows, 3 * HEADS * D, K, BLOCK_M)),
        (casting_warp, (x, cast, unscale, counter, M, first_rows, 3 * HEADS * D, K, BLOCK_M)),
        (casting_warp, (x, cast, unscale, counter, M, first_rows, 3 * HEADS * D, K, BLOCK_M)),
    ], [4, 1, 1, 1, 1], [208, 88, 88, 88, 88])  # fmt: skip


# --- host ------------------------------------------------------------------------------------------------------------


@cache
def _layout(bits, rank):
    """How tiles of `bits` an element lie in shared memory, where both wgmma and TMA want them swizzled by 128 bytes."""
    return gl.NVMMASharedLayout(128, bits, rank)


@operation
def persistent(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises.

    Raises UnsupportedError without wgmma (compute capability 9.0) or before Triton 3.7, and in the interpreter. Results
    that are not equally spaced in memory, which only `out` can bring about, are written elsewhere and copied.
    """
    states, M = inputs.hidden_states, inputs.M
    needs_wgmma(states.device)
    config = config or heuristic(M, states.device)
    query, key, value = (tensor.data_ptr() for tensor in out)
    if key - query != value - key or key <= query:
        for tensor, result in zip(out, persistent(*inputs, config=config)):
            tensor.copy_(result)
        return
    ctas = sm_count(states.device)
    # The first wave's rows, and as many again for the casting warps to get ahead.
    first_rows = min(M, 2 * -(-ctas // (3 * NUM_HEADS)) * config.BLOCK_M)
    tiles_m = -(-M // config.BLOCK_M)
    # Allocated by the call, so two calls in flight never share it.
    cast = states.new_empty(WEIGHT_ROWS + M, HIDDEN_SIZE, dtype=torch.float16)
    unscale = states.new_empty(WEIGHT_ROWS + M)
    counter = states.new_empty(1 + tiles_m, dtype=torch.int32)
    # Not a dependent launch itself: the second reads the norm weights before it waits, when all that went before is done.
    first = prepare(
        first_rows_kernel, (-(-(WEIGHT_ROWS + first_rows) // 8),),
        *inputs[:4], cast, unscale, counter, WEIGHT_ROWS + first_rows, 1 + tiles_m,
        K=HIDDEN_SIZE, N=QKV_OUT_SIZE, ROWS=8, num_warps=4,
    )  # fmt: skip
    step = (key - query) // 4
    second = prepare(
        persistent_kernel, (min(ctas, tiles_m * 3 * NUM_HEADS),),
        TensorDescriptor(cast, cast.shape, (HIDDEN_SIZE, 1), (config.BLOCK_M, config.BLOCK_K), _layout(16, 2)),
        TensorDescriptor(out[0], (3, M, QKV_OUT_SIZE), (step, QKV_OUT_SIZE, 1), (1, 64, STORED.value), _layout(32, 3)),
        states, cast, unscale, *inputs[4:6], counter, M, first_rows, inputs.eps,
        K=HIDDEN_SIZE, HEADS=NUM_HEADS, D=HEAD_DIM, BLOCK_M=config.BLOCK_M, BLOCK_K=config.BLOCK_K, STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=True,
    )  # fmt: skip
    first()
    second()
