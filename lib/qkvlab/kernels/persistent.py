"""persistent: casts, epilogue and stores beside the products. One CTA a multiprocessor, whose warps divide the work. Hopper, in Gluon.

As in pair, everything is cast to scaled fp16 first, but of hidden_states only what two tiles of each CTA need. The second
launch, queued behind it by programmatic dependent launch, has one CTA on each multiprocessor and divides its warps:
one fetches tiles by TMA, eight (two warpgroups) multiply 128 x 128, two cast the rows of hidden_states beyond those,
if there are any, before their turn comes. There are two sets of accumulators: while the tensor cores fill one, the warps
finish the other: they sum squares in four pieces, every second step of K, then normalise and store in eight, one a step, so
that stores are spread over the second half of a tile's time. Each instruction of it counts: three multiplications less for
every element are a microsecond at M = 4096. So weights of usual size all have one scale, and what undoes the scales goes with
a row's root mean square and a column's norm weight. Results leave from registers, 16 bytes a thread: a tensor map deals the
columns so that a thread has neighbours.

Fewer bytes for the same products make large M faster. So all but a few CTAs stay with one head, and go through K forth in one
tile and back in the next: the weights of the last steps are the first of the next tile, and are still there. No more CTAs
multiply than the waves need; the others, if there are rows to cast, only cast.

The code must stay small (tests/test_aot.py): beyond some size a call takes 2 to 4 microseconds more, whether what was
added runs or not.

No CTA waits for one that may not be running: whatever is to be cast, a warp that runs will take. The counters and the cast
rows belong to the call. tests/test_persistent.py runs this source, its warps in any order, without a GPU.

Ledger: 2 launches; the FLOPs at fp16's rate; fp32 inputs once, outputs once; 6.3 MB + 2 KiB a token of fp16 written
and read again from the L2, where a tile of 128 x 128 takes in 512 KiB, a later one less 16 for each step whose weights are
kept. What that brings is in notebook 06.
"""

from functools import cache, partial
from typing import NamedTuple

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
from .launch import Config, launch_together, needs_wgmma, prepare, sm_count

WARPS = gl.constexpr(8)  # that multiply: two warpgroups
CASTING_WARPS = gl.constexpr(2)
CASTING_ROWS = gl.constexpr(2)  # that a casting warp takes at a time: a row is 32 registers
BUFFERS = gl.constexpr(14)  # of 16 KiB, in all: they fill the shared memory
STEPS = gl.constexpr(16)  # of a tile: one takes BLOCK_K columns of K
BARRIERS = gl.constexpr(8)  # of each kind, for the steps in turn: a tile goes round twice
USUAL_ROOT = gl.constexpr(2.0**-7)  # of what undoes the scale of weights of usual size: see store_cast
QUARTER = gl.constexpr(32)  # of the columns of a head, which the epilogue takes at a time


def heuristic(M, device):
    """M, torch.device -> Config of a tile of 128 tokens by one head, and loads that run six steps ahead: the weights of three steps are kept."""
    return Config(BLOCK_M=128, BLOCK_K=64, num_warps=WARPS.value, num_stages=6)


# --- casting ---------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def row_layout(warps):
    """A row to a warp, 8 neighbours to a thread."""
    return gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def load_rows(source, i_row, end, K: gl.constexpr, ROWS: gl.constexpr, EVICTION: gl.constexpr):
    """Rows i_row... of source [..., K] fp32; from row `end` on the one before it, which store_cast leaves out."""
    o_row = i_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, row_layout(gl.num_warps())))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, row_layout(gl.num_warps())))
    p_row = source + gl.minimum(o_row, end - 1).to(gl.int64)[:, None] * K + o_k[None, :]
    return gl.load(p_row, eviction_policy=EVICTION)


@gluon.jit
def store_cast(b_row, cast, unscale, i_row, end, weights):
    """Store b_row [ROWS, K] as rows i_row... of cast [..., K] fp16, scaled, and in unscale [...] fp32 the root of what undoes that; none from row `end` on.

    A row of `weights` whose largest element is between 2^-8 and 2 is scaled by 2^14, as all such rows. Any other row is scaled
    by a power of four, until its largest element is between 2^13 and 2^15, or by 2^126 at most. Below 2^-27 of that an element
    loses bits (of the usual weights: below 2^-28). At 2^-38 (below 2^-39) it becomes 0, and NaN where it meets an inf of the
    other operand. An inf counts as 2^128: it stays inf, and the small elements of its row become 0.
    """
    o_row = i_row + gl.arange(0, b_row.shape[0], layout=gl.SliceLayout(1, row_layout(gl.num_warps())))
    o_k = gl.arange(0, b_row.shape[1], layout=gl.SliceLayout(0, row_layout(gl.num_warps())))
    b_exponent = gl.max(gl.abs(b_row), axis=1).to(gl.int32, bitcast=True) >> 23
    b_usual = weights & (b_exponent >= 127 - 8) & (b_exponent < 127 + 1)
    b_root_exponent = gl.where(b_usual, 127 - 7, (gl.maximum(b_exponent, 15) + 114) >> 1)
    b_scaled = b_row * ((381 - 2 * b_root_exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    gl.store(
        cast + o_row.to(gl.int64)[:, None] * b_row.shape[1] + o_k[None, :], b_scaled.to(gl.float16), mask=(o_row < end)[:, None]
    )
    gl.store(unscale + o_row, (b_root_exponent << 23).to(gl.float32, bitcast=True), mask=o_row < end)


@gluon.jit(do_not_specialize=["M", "counters"])
def first_rows_kernel(
    x, q_weight, k_weight, v_weight, cast, unscale, counter,
    M, counters,
    K: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The first num_programs * ROWS rows of cast [3 * N + M, K] and unscale: the weights [N, K], then x [M, K]; counter [counters] i32: zeros.

    What is read leaves the L2 first: this call does not read it again, and an L2 full of lines that are still to be written,
    as after the flush of a timed call, has room at once. What casting_warp reads stays as usual, which was faster (notebook 06).
    """
    gdc_launch_dependents()
    i = gl.program_id(0)
    for i_counter in range(i, counters, gl.num_programs(0)):
        gl.store(counter + i_counter, 0)
    i_row = i * ROWS
    source, i_source, end = x, i_row - 3 * N, M
    if i_row < 3 * N:
        source, i_source, end = q_weight, i_row % N, N
        if i_row >= N:
            source = k_weight
        if i_row >= 2 * N:
            source = v_weight
    store_cast(load_rows(source, i_source, end, K, ROWS, "evict_first"), cast, unscale, i_row, 3 * N + M, i_row < 3 * N)


@gluon.jit
def before(counter, OPERATION: gl.constexpr):
    """What stood there before the add or exchange of 1, the same for the whole warp."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .b32 lane, before;
        mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;
        mov.u32 before, 0;
        @first atom.relaxed.gpu.global.""" + OPERATION + """ before, [$1], 1;
        shfl.sync.idx.b32 $0, before, 0, 31, 0xffffffff;
        }""", "=r,l,~{memory}", [counter], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def take(counter):
    """The counter's next value."""
    return before(counter, "add.u32")


@gluon.jit
def claim(flag):
    """Whether nobody has claimed it before."""
    return before(flag, "exch.b32") == 0


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
        @early bra again;
        fence.proxy.async.global;
        mov.u32 $0, 0;
        }""", "=r,l,r,~{memory}", [counter, n], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def idle_warp():
    """Fills up a warpgroup, without which its warps cannot be given registers."""


@gluon.jit
def casting_warp(
    x, cast, unscale, counter,
    M, first_rows,
    K: gl.constexpr, WEIGHT_ROWS: gl.constexpr, BLOCK_M: gl.constexpr, I_WARP: gl.constexpr,
):  # fmt: skip
    """Rows of x from first_rows on, in items of CASTING_ROWS.

    A warp's first item is known, and its rows are on their way before the first launch has ended. Then counter[0] hands out the
    others, and at last the first ones again: a CTA that does not run has not cast its own. They are the claimant's.
    counter[1 + i_m] counts the rows of a tile that are cast, those beyond M too; behind these is a flag for each first item.
    """
    tiles_m = gl.cdiv(M, BLOCK_M)
    items = (tiles_m * BLOCK_M - first_rows) // CASTING_ROWS
    if items > 0:
        known = gl.minimum(gl.num_programs(0) * CASTING_WARPS, items)
        claimed = counter + 1 + tiles_m
        i_item = gl.program_id(0) * CASTING_WARPS + I_WARP
        b_row = load_rows(x, first_rows + i_item * CASTING_ROWS, M, K, CASTING_ROWS, "")
        gdc_wait()
        i_item = gl.where(i_item < known, i_item, -1)  # -1: none
        if i_item >= 0:
            i_item = gl.where(claim(claimed + i_item), i_item, -1)
        i = gl.to_tensor(0)
        while i < items:
            i = take(counter)  # asked for before these are cast
            i_next = gl.where(i < items - known, known + i, i - (items - known))
            if (i < items) & (i_next < known):
                i_next = gl.where(claim(claimed + i_next), i_next, -1)
            i_next = gl.where(i < items, i_next, -1)
            i_row = first_rows + i_item * CASTING_ROWS
            if i_item >= 0:
                store_cast(b_row, cast, unscale, WEIGHT_ROWS + i_row, WEIGHT_ROWS + M, False)
            if i_next >= 0:  # on their way while publish waits for these stores
                b_row = load_rows(x, first_rows + i_next * CASTING_ROWS, M, K, CASTING_ROWS, "")
            if i_item >= 0:
                publish(counter + 1 + i_row // BLOCK_M, CASTING_ROWS)
            i_item = i_next


# --- multiplying -----------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def wgmma_layout(columns):
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, columns, 16])


@gluon.jit
def quarters(b):
    """A block's columns in four; nothing moves."""
    b_left, b_right = halves(b)
    return halves(b_left) + halves(b_right)


@gluon.jit
def halves(b):
    L: gl.constexpr = wgmma_layout(b.shape[1] // 2)
    b_left, b_right = b.reshape([b.shape[0], 2, b.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(b_left, L, assert_trivial=True), gl.convert_layout(b_right, L, assert_trivial=True)


@gluon.jit
def dealt(o):
    """The column of a head that stands in place o of a tile.

    Of each eight places wgmma leaves two neighbours to a thread. So dealt, a thread's two and two of sixteen are columns
    that follow each other, 16 bytes of fp32, and four threads have 64 bytes of a row.
    """
    return o // 16 * 16 + o // 2 % 4 * 4 + o // 8 % 2 * 2 + o % 2


@gluon.jit
def any_unusual(b_column_root):
    """Whether a column of the tile has another scale than weights of usual size."""
    return gl.max((b_column_root != USUAL_ROOT).to(gl.int32), axis=0) != 0


@gluon.jit
def unscaled(quarter, b_row_root, column_root):
    """The quarters of a tile as they would be of operands that were not scaled; column_root: a pointer to the head's.

    What undoes the scales of a row and a column may have a product that leaves fp32's range where the result does not. The
    product of the roots never does; multiplied by it twice, a sum leaves the range only where the result does.
    """
    b_quarters = ()
    for i in gl.static_range(4):
        o_column = QUARTER * i + dealt(gl.arange(0, QUARTER, layout=gl.SliceLayout(0, wgmma_layout(QUARTER))))
        b_root = b_row_root[:, None] * gl.load(column_root + o_column)[None, :]
        b_quarters += (quarter[i] * b_root * b_root,)
    return b_quarters


@gluon.jit
def sum_of_squares(b):
    return gl.sum(b * b, axis=1)


@gluon.jit
def row_factor(b_squares, b_row_root, column_root, i_proj, eps, D: gl.constexpr):
    """What a row of sums of products is multiplied by, and then by column_root and the norm's weight.

    It undoes the scales, and divides by the root mean square, but not for value_states, which are not normalised. b_squares:
    sums of squares over a head. gl.rsqrt would flush a denormal mean to zero.
    """
    b_root = b_row_root * column_root
    b_mean = b_squares / D * b_root * b_root * b_root * b_root
    b_rstd = gl.inline_asm_elementwise("rsqrt.approx.f32 $0, $1;", "=f,f", [b_mean + eps], gl.float32, True, 1)
    return b_row_root * b_root * gl.where(i_proj < 2, b_rstd, 1.0)


@gluon.jit
def norm_of(q_norm_weight, k_norm_weight, i_proj, o_column):
    """A projection's norm weights by column; ones for value_states."""
    norm_weight = q_norm_weight
    if i_proj > 0:
        norm_weight = k_norm_weight
    return gl.where(i_proj < 2, gl.load(norm_weight + o_column), 1.0)


@gluon.jit
def result_of(q, k, v, i_proj):
    """Where a projection's results go."""
    out = q
    if i_proj == 1:
        out = k
    if i_proj == 2:
        out = v
    return out


@gluon.jit
def alternated(b, b_factor, s_norm):
    """A quarter's two halves as results, IN_ORDER; odd rows of the two have changed places.

    A warp stores 64 bytes of each of eight rows at once. Were they the same half of their lines, they would meet in
    the same banks of the L1.
    """
    IN_ORDER: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [64, 0]], [], [16 * WARPS, QUARTER // 2]
    )  # fmt: skip
    b_out = b * b_factor[:, None] * s_norm.load(gl.SliceLayout(0, wgmma_layout(QUARTER)))[None, :]
    # Of a half's 16 places each of four threads has two and two, which follow each other (dealt).
    b_out = b_out.reshape([b.shape[0], 2, 2, 4, 2]).permute((0, 3, 2, 4, 1)).reshape([b.shape[0], QUARTER // 2, 2])
    b_left, b_right = b_out.split()
    b_left = gl.convert_layout(b_left, IN_ORDER, assert_trivial=True)
    b_right = gl.convert_layout(b_right, IN_ORDER, assert_trivial=True)
    odd = (gl.arange(0, b.shape[0], layout=gl.SliceLayout(1, IN_ORDER)) % 2 == 1)[:, None]
    return gl.where(odd, b_right, b_left), gl.where(odd, b_left, b_right)


@gluon.jit
def store_half(b, out, i_head, i_row, M, i_column: gl.constexpr, RIGHT: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr):
    """Store BLOCK_M rows by QUARTER // 2 columns: the left or RIGHT half of a head's quarter at i_column, in odd rows the other."""
    o_row = i_row + gl.arange(0, b.shape[0], layout=gl.SliceLayout(1, b.type.layout))
    o_column = i_head % HEADS * D + i_column + gl.arange(0, b.shape[1], layout=gl.SliceLayout(0, b.type.layout))
    p_half = out + o_row.to(gl.int64) * (HEADS * D) + b.shape[1] * (o_row % 2 ^ RIGHT)
    gl.store(p_half[:, None] + o_column[None, :], b, mask=(o_row < M)[:, None])


@gluon.constexpr_function
def weight_buffers(stages):
    return BUFFERS - stages


@gluon.constexpr_function
def kept_steps(stages):
    """How many steps' weights stay from tile to tile: as many as leave each step the buffers to be fetched `stages` steps ahead."""
    return BUFFERS - 2 * stages + 1


@gluon.jit
def first_place(rows, lone, HEADS: gl.constexpr):
    """Row of tiles and head of a CTA's first tile, and whether it is one of those that multiply.

    `rows` times 3 * HEADS CTAs share a row of tiles, and each of them has a head, which stays its own. The `lone` CTAs behind
    them share one more row, where each has 3 * HEADS // lone heads in turn: that many `turns`.
    """
    i = gl.program_id(0)
    return i // (3 * HEADS), i % (3 * HEADS), i < rows * (3 * HEADS) + lone


@gluon.jit
def next_place(i_m, i_head, turn, rows, lone, turns, HEADS: gl.constexpr):
    """Row of tiles, head and turn of a CTA's next tile. A lone CTA whose turns are over goes on behind the rows that the others do meanwhile."""
    over = turn == turns - 1
    alone = gl.program_id(0) >= rows * (3 * HEADS)
    further = gl.where(alone, gl.where(over, rows * turns + 1, 0), rows + gl.where((turn == 0) & (lone > 0), 1, 0))
    return i_m + further, i_head + gl.where(alone, gl.where(over, -lone * turn, lone), 0), gl.where(over, 0, turn + 1)


@gluon.jit
def skipped(i_w, n: gl.constexpr, STAGES: gl.constexpr):
    """The buffer of weights n after this."""
    return gl.where(i_w + n >= weight_buffers(STAGES), i_w + n - weight_buffers(STAGES), i_w + n)


@gluon.jit
def queue_products(b_acc, i_x, i_w, j: gl.constexpr, buffers, use_acc):
    """Queue the products of a tile's j-th step, once its buffers are full."""
    s_x, s_w, full, done = buffers
    mbarrier.wait(full.index(j % BARRIERS), j // BARRIERS % 2)
    return warpgroup_mma(s_x.index(i_x), s_w.index(i_w).permute((1, 0)), b_acc, use_acc=use_acc, is_async=True)


@gluon.jit
def done_before(b_acc, i_x, i_w, j: gl.constexpr, buffers, started, STAGES: gl.constexpr):
    """Wait for all products but those of the j-th step, and say so if there were any: `started`. The next step's buffers."""
    s_x, s_w, full, done = buffers
    b_acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[b_acc]))
    mbarrier.arrive(done.index((j - 1) % BARRIERS), count=1, pred=started)
    # The weights that are kept come back to front, and behind the last of them comes what is fetched.
    KEPT: gl.constexpr = kept_steps(STAGES)
    if j + 1 < KEPT:
        i_w = gl.where(i_w == 0, weight_buffers(STAGES) - 1, i_w - 1)
    elif j + 1 < STEPS:
        i_w = skipped(i_w, KEPT if j + 1 == KEPT else 1, STAGES)
    return b_acc, gl.where(i_x == STAGES - 1, 0, i_x + 1), i_w


@gluon.jit
def multiplying_warps(
    q, k, v, buffers, unscale, q_norm_weight, k_norm_weight, s_norm,
    M, rows, lone, turns, eps,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Products for each of the CTA's tiles, and between them the epilogue of the tile before."""
    ROWS: gl.constexpr = gl.SliceLayout(1, wgmma_layout(QUARTER))
    COLUMNS: gl.constexpr = gl.BlockedLayout([D // 32], [32], [WARPS], [0])
    tiles_m = gl.cdiv(M, BLOCK_M)
    one_head = gl.program_id(0) < rows * (3 * HEADS)
    i_m, i_head, some = first_place(rows, lone, HEADS)
    turn = gl.to_tensor(0)
    o_row = gl.arange(0, BLOCK_M, layout=ROWS)
    o_column = dealt(gl.arange(0, D, layout=COLUMNS))
    # Before the first tile comes one beyond the last row, of which nothing is stored.
    i_done_row, i_done_head = M, gl.to_tensor(0)
    b_root, column_root = gl.zeros([BLOCK_M], gl.float32, ROWS), gl.to_tensor(0.0)
    s_norm.store(gl.zeros([D], gl.float32, COLUMNS))
    b_done = gl.zeros([BLOCK_M, D], gl.float32, wgmma_layout(D))
    quarter = quarters(b_done)
    i_x, i_w, started = gl.to_tensor(0), gl.to_tensor(kept_steps(STAGES) - 1), gl.to_tensor(False)
    gdc_wait()
    while some & (i_m < tiles_m):
        i_row = i_m * BLOCK_M
        b_acc = warpgroup_mma_init(b_done)
        b_squares = gl.zeros([BLOCK_M], gl.float32, ROWS)
        for i_piece in gl.static_range(STEPS // 2):
            b_acc = queue_products(b_acc, i_x, i_w, 2 * i_piece, buffers, i_piece > 0)
            if i_piece == 0:
                # What this tile's operands came with can be read now, and is on its way while they are multiplied.
                b_row_root = gl.load(unscale + 3 * HEADS * D + i_row + o_row, mask=i_row + o_row < M, other=0.0)
                b_column_root = gl.load(unscale + i_head * D + o_column)
                b_norm = norm_of(q_norm_weight, k_norm_weight, i_head // HEADS, o_column)
            if i_piece == 4:
                out = result_of(q, k, v, i_done_head // HEADS)
                b_factor = row_factor(b_squares, b_root, column_root, i_done_head // HEADS, eps, D)
            if i_piece >= 4:
                b_left, b_right = alternated(quarter[i_piece - 4], b_factor, s_norm.slice(QUARTER * (i_piece - 4), QUARTER))
                store_half(b_left, out, i_done_head, i_done_row, M, QUARTER * (i_piece - 4), 0, HEADS, D)
            b_acc, i_x, i_w = done_before(b_acc, i_x, i_w, 2 * i_piece, buffers, started | (i_piece > 0), STAGES)
            b_acc = queue_products(b_acc, i_x, i_w, 2 * i_piece + 1, buffers, True)
            if i_piece < 4:
                b_squares += sum_of_squares(quarter[i_piece])
            else:
                store_half(b_right, out, i_done_head, i_done_row, M, QUARTER * (i_piece - 4), 1, HEADS, D)
            b_acc, i_x, i_w = done_before(b_acc, i_x, i_w, 2 * i_piece + 1, buffers, True, STAGES)
        unusual = any_unusual(b_column_root)
        column_root = gl.where(unusual, 1.0, USUAL_ROOT)
        s_norm.store(b_norm * column_root)
        b_root = gl.where(unusual, 1.0, b_row_root)
        i_done_row, i_done_head = i_row, i_head
        i_m, i_head, turn = next_place(i_m, i_head, turn, rows, lone, turns, HEADS)
        i_w = gl.where(one_head, i_w, skipped(i_w, kept_steps(STAGES), STAGES))
        started = gl.to_tensor(True)
        # The tensor cores idle from here on, until the next tile's first products are queued.
        b_done = warpgroup_mma_wait(0, deps=[b_acc])
        quarter = quarters(b_done)
        if unusual:
            quarter = unscaled(quarter, b_row_root, unscale + i_done_head * D)
    b_squares = gl.zeros([BLOCK_M], gl.float32, ROWS)
    for i_quarter in gl.static_range(4):
        b_squares += sum_of_squares(quarter[i_quarter])
    out = result_of(q, k, v, i_done_head // HEADS)
    b_factor = row_factor(b_squares, b_root, column_root, i_done_head // HEADS, eps, D)
    for i_quarter in gl.static_range(4):
        b_left, b_right = alternated(quarter[i_quarter], b_factor, s_norm.slice(QUARTER * i_quarter, QUARTER))
        store_half(b_left, out, i_done_head, i_done_row, M, QUARTER * i_quarter, 0, HEADS, D)
        store_half(b_right, out, i_done_head, i_done_row, M, QUARTER * i_quarter, 1, HEADS, D)


@gluon.jit
def fetching_warp(
    x_desc, w_desc, buffers, counter,
    M, first_rows, rows, lone, turns,
    HEADS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the buffers with BLOCK_K columns of BLOCK_M rows of x and of a head's weights, STAGES steps ahead of the products."""
    KEPT: gl.constexpr = kept_steps(STAGES)
    s_x, s_w, full, done = buffers
    tiles_m = gl.cdiv(M, BLOCK_M)
    one_head = gl.program_id(0) < rows * (3 * HEADS)
    i_m, i_head, some = first_place(rows, lone, HEADS)
    turn, i_step, i_first_w, back = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(False)
    gdc_wait()
    while some & (i_m < tiles_m):
        for j in range(STEPS):
            i_k = gl.where(back, STEPS - 1 - j, j) * BLOCK_K
            i_bar = i_step % BARRIERS
            i_done = i_step - STAGES + 2 * BARRIERS  # or two rounds later, and so never negative
            mbarrier.wait(done.index(i_done % BARRIERS), i_done // BARRIERS % 2)
            fresh = (j >= KEPT) | (i_step < STEPS) | (one_head == 0)
            mbarrier.expect(full.index(i_bar), (BLOCK_M + D) * BLOCK_K * 2, pred=fresh)
            mbarrier.expect(full.index(i_bar), BLOCK_M * BLOCK_K * 2, pred=fresh == 0)
            i_w = (i_first_w + gl.where(j < KEPT, KEPT - 1 - j, j)) % weight_buffers(STAGES)  # see done_before
            s_dealt = s_w.index(i_w)._reinterpret(gl.float16, w_desc.block_shape, w_desc.layout)
            tma.async_copy_global_to_shared(x_desc, [i_m * BLOCK_M, i_k], full.index(i_bar), s_x.index(i_step % STAGES))
            tma.async_copy_global_to_shared(w_desc, [i_head * (D // 16), 0, 0, 0, i_k], full.index(i_bar), s_dealt, pred=fresh)
            i_step += 1
        i_first_w = (i_first_w + gl.where(one_head, STEPS - KEPT, STEPS)) % weight_buffers(STAGES)
        back = back == 0
        i_m, i_head, turn = next_place(i_m, i_head, turn, rows, lone, turns, HEADS)
        if (i_m * BLOCK_M >= first_rows) & (i_m < tiles_m):
            wait_for(counter + 1 + i_m, BLOCK_M)


@gluon.jit(do_not_specialize=["M", "first_rows", "rows", "lone", "turns"])
def persistent_kernel(
    x_desc, w_desc,
    q, k, v, x, cast, unscale, q_norm_weight, k_norm_weight, counter,
    M, first_rows, rows, lone, turns, eps,
    K: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """q, k, v [M, HEADS * D] fp32 from what first_rows_kernel cast, and from x [M, K] where it stopped.

    Which tiles a program takes: see first_place. counter: see casting_warp.
    """
    gl.static_assert(gl.num_warps() == WARPS and BLOCK_M == 16 * WARPS and D == 4 * QUARTER)
    gl.static_assert(K // BLOCK_K == STEPS and STEPS == 2 * BARRIERS)
    # A tile's last steps, which the next one keeps, are not among those that it has kept itself.
    gl.static_assert(0 < kept_steps(STAGES) and 2 * kept_steps(STAGES) <= STEPS)
    s_x = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    s_w = gl.allocate_shared_memory(gl.float16, [weight_buffers(STAGES), D, BLOCK_K], x_desc.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_norm = gl.allocate_shared_memory(gl.float32, [D], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i_bar in gl.static_range(BARRIERS):
        mbarrier.init(full.index(i_bar), count=1)
        mbarrier.init(done.index(i_bar), count=1)
    fence_async_shared()
    buffers = (s_x, s_w, full, done)
    # Each of these waits for the first launch by itself, once it has set up what it can without.
    gl.warp_specialize([
        (multiplying_warps, (q, k, v, buffers, unscale, q_norm_weight, k_norm_weight, s_norm, M, rows, lone, turns, eps, HEADS, D, BLOCK_M, STAGES)),
        (fetching_warp, (x_desc, w_desc, buffers, counter, M, first_rows, rows, lone, turns, HEADS, D, BLOCK_M, BLOCK_K, STAGES)),
        (casting_warp, (x, cast, unscale, counter, M, first_rows, K, 3 * HEADS * D, BLOCK_M, 0)),
        (casting_warp, (x, cast, unscale, counter, M, first_rows, K, 3 * HEADS * D, BLOCK_M, 1)),
        (idle_warp, ()),
    ], [1, 1, 1, 1], [88, 88, 88, 88])  # fmt: skip


# --- host ------------------------------------------------------------------------------------------------------------


@cache
def _layout(rank):
    """How tiles of fp16 lie in shared memory, where both wgmma and TMA want them swizzled by 128 bytes."""
    return gl.NVMMASharedLayout(128, 16, rank)


class Plan(NamedTuple):
    """How tiles are divided among CTAs (see first_place), how many rows of x are cast first, how many CTAs there are, and counters."""

    rows: int
    lone: int
    turns: int
    first_rows: int
    ctas: int
    counters: int


def most_tiles(tiles_m, rows, lone, turns):
    """The most tiles that a CTA has with one head, and those that a lone one has at most."""
    bands, left = divmod(tiles_m, rows * turns + bool(lone))
    beyond = bool(lone) and left > rows  # a lone row among those that are left
    return (bands * turns - (beyond - left) // rows if rows else 0), (bands + beyond) * turns * bool(lone)


@cache
def plan(M, sms, BLOCK_M=128):
    """The Plan for M tokens on `sms` multiprocessors: as few CTAs multiply as need no more waves."""
    heads, tiles_m = 3 * NUM_HEADS, -(-M // BLOCK_M)
    divisions = [
        (rows, lone, heads // lone if lone else 1)
        for rows in range(sms // heads + 1)
        for lone in range(heads)
        if 0 < rows * heads + lone <= sms and (lone == 0 or heads % lone == 0)
    ]

    # Of equals the first, which has the fewest CTAs.
    rows, lone, turns = min(divisions, key=lambda division: max(most_tiles(tiles_m, *division)))
    # Those of each CTA's first two tiles, so that the casting warps get ahead.
    first_rows = min(tiles_m, 2 * rows + bool(lone)) * BLOCK_M
    if first_rows >= M:
        return Plan(rows, lone, turns, first_rows, rows * heads + lone, 1 + tiles_m)
    return Plan(rows, lone, turns, first_rows, sms, 1 + tiles_m + CASTING_WARPS.value * sms)


@operation
def persistent(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises.

    Raises UnsupportedError without wgmma (compute capability 9.0) or before Triton 3.7, and in the interpreter.
    """
    states, M = inputs.hidden_states, inputs.M
    needs_wgmma(states.device)
    config = config or heuristic(M, states.device)
    rows, lone, turns, first_rows, ctas, counters = plan(M, sm_count(states.device), config.BLOCK_M)
    # Allocated by the call, so two calls in flight never share it.
    cast = states.new_empty(WEIGHT_ROWS + M, HIDDEN_SIZE, dtype=torch.float16)
    unscale = states.new_empty(WEIGHT_ROWS + M)
    counter = states.new_empty(counters, dtype=torch.int32)
    # A row a warp. Not a dependent launch itself: it writes what a call before it, of which these may be the memory, still reads.
    first = partial(
        prepare, first_rows_kernel, ((WEIGHT_ROWS + first_rows) // 4,),
        *inputs[:4], cast, unscale, counter, M, counters,
        K=HIDDEN_SIZE, N=QKV_OUT_SIZE, ROWS=4, num_warps=4,
    )  # fmt: skip
    row, columns = HIDDEN_SIZE, config.BLOCK_K
    second = partial(
        prepare, persistent_kernel, (ctas,),
        TensorDescriptor(cast[WEIGHT_ROWS:], (M, row), (row, 1), (config.BLOCK_M, columns), _layout(2)),
        # The same memory from its first row on, in an order of rows that deals the tile's columns.
        TensorDescriptor(cast, (WEIGHT_ROWS // 16, 2, 4, 2, row), (16 * row, 2 * row, 4 * row, row, 1), (HEAD_DIM // 16, 2, 4, 2, columns), _layout(5)),
        *out, states, cast, unscale, *inputs[4:6], counter, M, first_rows, rows, lone, turns, inputs.eps,
        K=HIDDEN_SIZE, HEADS=NUM_HEADS, D=HEAD_DIM, BLOCK_M=config.BLOCK_M, BLOCK_K=config.BLOCK_K, STAGES=config.num_stages,
        num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=True,
    )  # fmt: skip
    launch_together(states.device, first, second)
