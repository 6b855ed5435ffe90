"""tma: the copy engine loads the tiles, and rounds them to tf32 on their way.

A tensor map of type TFLOAT32 makes TMA round fp32 to tf32 (to nearest even) as it fills shared memory, and the tensor
cores take both operands from there. fused spends registers on rounding one operand; here both are rounded for nothing,
tf32's 8 exponent bits are right at any scale, and no register stands between memory and the tensor cores. A tile is as
small as lets all of them run at once: where M is small, how many multiprocessors pull the weights is what counts.

Ledger: 1 launch; the same FLOPs; inputs once from DRAM, outputs once to it. From the L2 the weights come once for every
BLOCK_M tokens and hidden_states 24 times, so a multiprocessor takes in BLOCK_M + 128 rows of 4 KiB a tile.
Split-K loses to this at every M where both were timed: the reduction alone costs 1.8 µs (notebook 06).
"""

import triton
import triton.language as tl

from ..problem import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, operation
from .launch import Config, launch, meta, needs_tma, rounding_descriptor, tiles_per_sm

LADDER = (
    Config(BLOCK_M=16, BLOCK_K=64, num_warps=4, num_stages=5),
    Config(BLOCK_M=32, BLOCK_K=64, num_warps=4, num_stages=5),
    Config(BLOCK_M=64, BLOCK_K=32, num_warps=4, num_stages=9),
    Config(BLOCK_M=128, BLOCK_K=32, num_warps=8, num_stages=6),
)
TWO_A_MULTIPROCESSOR = Config(BLOCK_M=128, BLOCK_K=32, num_warps=8, num_stages=3)


def heuristic(M, device):
    """M, torch.device -> the smallest tile of the ladder that has every tile running at once; beyond, two CTAs a multiprocessor.

    On an H200 (2026-11-30, Triton 3.6.0, CUPTI medians): at M = 128 tiles of 32 take 9.2 µs where 64 take 9.5; at 256
    tiles of 64 take 9.9; at 512 tiles of 128 take 15.0 and tiles of 64, two waves, 15.6. Nearly all shared memory is
    buffers: at M = 256 tiles of 64 take 11.1 µs with 6 of them, 9.9 with 9. Fewer, wider buffers cost fewer barriers:
    tiles of 32 take 9.6 µs and not 9.2 with 10 buffers of 32 columns. At M = 1024, two to a multiprocessor: 25.5 µs.
    """
    one_wave = (config for config in LADDER if tiles_per_sm(M, config.BLOCK_M, 3 * NUM_HEADS, device) <= 1)
    return next(one_wave, TWO_A_MULTIPROCESSOR)


@triton.jit(do_not_specialize=["M", "tiles_m"])
def tma_kernel(
    x_desc, q_desc, k_desc, v_desc, q_norm_weight, k_norm_weight, q, k, v,
    M, tiles_m, eps,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q, k [M, HEADS * D] = the norm of x [M, K] @ their weight^T, head by head; v the product alone. All fp32.

    Program i makes tile i % tiles_m of one head, so neighbours share that head's weights.
    """
    i_m = tl.program_id(0) % tiles_m
    i_proj, i_head = tl.program_id(0) // tiles_m // HEADS, tl.program_id(0) // tiles_m % HEADS
    if i_proj == 0:
        w_desc, norm_weight, out = q_desc, q_norm_weight, q
    elif i_proj == 1:
        w_desc, norm_weight, out = k_desc, k_norm_weight, k
    else:
        w_desc, norm_weight, out = v_desc, k_norm_weight, v
    o_d = tl.arange(0, D)
    b_norm_weight = tl.load(norm_weight + o_d)  # asked for now, so that it is there when the epilogue wants it
    tl.static_assert(K % BLOCK_K == 0)
    # wgmma's first operand has at least 64 rows: where the tile has fewer tokens, the weights take its place.
    SWAPPED: tl.constexpr = BLOCK_M < 64
    b_acc = tl.zeros((D, BLOCK_M) if SWAPPED else (BLOCK_M, D), dtype=tl.float32)
    for i_k in tl.range(0, K, BLOCK_K):
        b_w = w_desc.load([i_head * D, i_k])
        b_x = x_desc.load([i_m * BLOCK_M, i_k])
        if SWAPPED:
            b_acc = tl.dot(b_w, b_x.T, b_acc, input_precision="tf32")
        else:
            b_acc = tl.dot(b_x, b_w.T, b_acc, input_precision="tf32")
    b_out = b_acc.T if SWAPPED else b_acc
    b_rstd = tl.where(i_proj == 2, 1.0, tl.rsqrt(tl.sum(b_out * b_out, axis=1) / D + eps))
    b_scale = tl.where(i_proj == 2, 1.0, b_norm_weight)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    p_out = out + o_m[:, None] * (HEADS * D) + i_head * D + o_d[None, :]
    tl.store(p_out, b_out * b_rstd[:, None] * b_scale[None, :], mask=o_m[:, None] < M)


@operation
def tma(inputs, out, config=None):
    """The operation in one launch: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises.

    Raises UnsupportedError on a GPU without TMA (before compute capability 9.0).
    """
    states, M = inputs.hidden_states.flatten(0, 1), inputs.M
    needs_tma(states.device)
    config = config or heuristic(M, states.device)
    tiles_m = triton.cdiv(M, config.BLOCK_M)
    launch(
        tma_kernel, (tiles_m * 3 * NUM_HEADS,),
        rounding_descriptor(states, [config.BLOCK_M, config.BLOCK_K]),
        *(rounding_descriptor(weight, [HEAD_DIM, config.BLOCK_K]) for weight in inputs[1:4]),
        *inputs[4:6], *out, M, tiles_m, inputs.eps,
        K=HIDDEN_SIZE, HEADS=NUM_HEADS, D=HEAD_DIM, **meta(config),
    )  # fmt: skip
