"""wide: a head of query or key and half a head of value_states to a tile, so that a row of tiles is 16 and not 24.

value_states are not normalised, so their heads may be cut anywhere. A tile of 192 columns takes a whole head, whose rows can be
normalised where they are, and 64 columns of value_states beside it: 16 such tiles are all 3072 columns. That pays where tiles of
a head each need two waves and these need one: at M = 512, 128 of 132 multiprocessors have a tile of 64 x 192, where tma gives
96 of them 128 x 128.

Ledger: as tma, but from the L2 the weights come once for every BLOCK_M tokens and hidden_states 16 times. Predicted for
M = 512: 14.8 µs to 13.6, for a quarter less of products on as many bytes; measured 12.2. For 1024: 19.5; measured 21.4.
"""

import triton
import triton.language as tl

from ..problem import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, operation
from .launch import Config, launch, meta, needs_tma, rounding_descriptor, tiles_per_sm

LADDER = (
    Config(BLOCK_M=64, BLOCK_K=32, num_warps=4, num_stages=7),
    Config(BLOCK_M=128, BLOCK_K=32, num_warps=4, num_stages=5),
)
TILES = 2 * NUM_HEADS  # in a row of tiles


def heuristic(M, device):
    """M, torch.device -> the smallest tile of the ladder that has every tile running at once, or the largest.

    On an H200 (2026-12-01, Triton 3.7.1, CUPTI medians): at M = 512 seven buffers of 32 columns take 12.3 µs, six 12.7, three
    of 64 take 16.0. At 1024 four warps take 21.4 µs, eight 22.0.
    """
    return next((config for config in LADDER if tiles_per_sm(M, config.BLOCK_M, TILES, device) <= 1), LADDER[-1])


def saves_a_wave(M, device):
    """M, torch.device -> whether all tiles run at once where tma's, with as many tokens to a tile, would not."""
    block_m = heuristic(M, device).BLOCK_M
    return tiles_per_sm(M, block_m, TILES, device) <= 1 < tiles_per_sm(M, block_m, 3 * NUM_HEADS, device)


@triton.jit(do_not_specialize=["M", "tiles_m"])
def wide_kernel(
    x_desc, q_desc, k_desc, v_desc, q_norm_weight, k_norm_weight, q, k, v,
    M, tiles_m, eps,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q, k [M, HEADS * D] = the norm of x [M, K] @ their weight^T, head by head; v the product alone. All fp32.

    Program i makes tile i % tiles_m of a head of q or k, and of half a head of v. Neighbours share these weights: where they
    shared tokens instead, a call took 16.3 µs and not 12.3 (M = 512).
    """
    i_m, i_head = tl.program_id(0) % tiles_m, tl.program_id(0) // tiles_m
    if i_head < HEADS:
        w_desc, norm_weight, out = q_desc, q_norm_weight, q
    else:
        w_desc, norm_weight, out = k_desc, k_norm_weight, k
    HALF: tl.constexpr = D // 2
    o_d, o_half = tl.arange(0, D), tl.arange(0, HALF)
    b_norm_weight = tl.load(norm_weight + o_d)  # asked for now, so that it is there when the epilogue wants it
    tl.static_assert(K % BLOCK_K == 0)
    b_acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    b_value = tl.zeros((BLOCK_M, HALF), dtype=tl.float32)
    for i_k in tl.range(0, K, BLOCK_K):
        b_x = x_desc.load([i_m * BLOCK_M, i_k])
        b_w = w_desc.load([i_head % HEADS * D, i_k])
        b_w_value = v_desc.load([i_head * HALF, i_k])
        b_acc = tl.dot(b_x, b_w.T, b_acc, input_precision="tf32")
        b_value = tl.dot(b_x, b_w_value.T, b_value, input_precision="tf32")
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    p_row = o_m[:, None] * (HEADS * D)
    tl.store(v + p_row + i_head * HALF + o_half[None, :], b_value, mask=o_m[:, None] < M)
    b_rstd = tl.rsqrt(tl.sum(b_acc * b_acc, axis=1) / D + eps)
    p_out = out + p_row + i_head % HEADS * D + o_d[None, :]
    tl.store(p_out, b_acc * b_rstd[:, None] * b_norm_weight[None, :], mask=o_m[:, None] < M)


@operation
def wide(inputs, out, config=None):
    """The operation in one launch: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises.

    Raises UnsupportedError on a GPU without TMA (before compute capability 9.0).
    """
    states, M = inputs.hidden_states.flatten(0, 1), inputs.M
    needs_tma(states.device)
    config = config or heuristic(M, states.device)
    tiles_m = triton.cdiv(M, config.BLOCK_M)
    columns = (HEAD_DIM, HEAD_DIM, HEAD_DIM // 2)
    launch(
        wide_kernel, (tiles_m * TILES,),
        rounding_descriptor(states, [config.BLOCK_M, config.BLOCK_K]),
        *(rounding_descriptor(weight, [rows, config.BLOCK_K]) for weight, rows in zip(inputs[1:4], columns)),
        *inputs[4:6], *out, M, tiles_m, inputs.eps,
        K=HIDDEN_SIZE, HEADS=NUM_HEADS, D=HEAD_DIM, **meta(config),
    )  # fmt: skip
