"""pair: cast once, multiply at twice the rate. One launch rounds everything to scaled fp16, a second is the fused GEMM on it.

fp16 has tf32's 10 bits of mantissa at twice its rate and half its bytes, but 5 exponent bits. So every row of
hidden_states and of the weights is scaled by a power of two that brings its largest element just below 2^15; the
epilogue undoes both scales exactly, before eps is added. Rounding is then relative to the row's largest element, at any
scale: where one element is a billion times the others of its row, the others lose bits, and count for less than it.

Ledger: 2 launches; the same FLOPs. The cast reads every input once and writes half of it: 12.6 MB + 4 KiB a token read,
6.3 MB + 2 KiB a token written; the GEMM finds those in the L2. It saves what fused spends on rounding inside the main
loop, where every tile of hidden_states is converted 24 times.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..problem import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, QKV_OUT_SIZE, WEIGHT_ROWS, operation
from .launch import Config, capability, launch_together, meta, needs_tma, prepare, tiles_per_sm
from .tile import rms_norm, store_tile

LADDER = (
    Config(BLOCK_M=64, BLOCK_K=64, num_warps=4, num_stages=6),
    Config(BLOCK_M=128, BLOCK_K=64, num_warps=8, num_stages=4),
)
TWO_A_MULTIPROCESSOR = Config(BLOCK_M=128, BLOCK_K=64, num_warps=8, num_stages=3)


def heuristic(M, device):
    """M, torch.device -> the smallest tile of the ladder that has every tile running at once; beyond, two CTAs a multiprocessor.

    With buffers that leave no room for a second CTA where one is enough: two would share a multiprocessor, presumably, while others
    stand idle. On an H200 (2026-12-01, Triton 3.7.1, CUPTI medians): at M = 128 six buffers take 14.5 µs, three 19.5; at 512 tiles
    of 128 take 18.5 with four buffers, 23.7 with three, and at 2048, two to a multiprocessor, 35.6 with three. In the interpreter
    the largest.
    """
    if device.type == "cpu":
        return Config(BLOCK_M=128, BLOCK_K=256, num_warps=4, num_stages=1)
    one_wave = (config for config in LADDER if tiles_per_sm(M, config.BLOCK_M, 3 * NUM_HEADS, device) <= 1)
    return next(one_wave, TWO_A_MULTIPROCESSOR)


@triton.jit(do_not_specialize=["M"])
def cast_kernel(
    x, q_weight, k_weight, v_weight, cast, unscale,
    M,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, LOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """cast [3 * N + M, K] fp16, unscale [3 * N + M] fp32: the rows of the weights, then those of x, each scaled.

    LOW: what the rounding lost goes to a second such matrix behind the first, so that high + low is the row to 22 bits.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.program_id(0)
    o_row = i * ROWS + tl.arange(0, ROWS).to(tl.int64)
    if i < N // ROWS:
        source, o_source, rows = q_weight, o_row, N
    elif i < 2 * N // ROWS:
        source, o_source, rows = k_weight, o_row - N, N
    elif i < 3 * N // ROWS:
        source, o_source, rows = v_weight, o_row - 2 * N, N
    else:
        source, o_source, rows = x, o_row - 3 * N, M
    o_k = tl.arange(0, K)
    m_row = o_source < rows
    b_row = tl.load(source + o_source[:, None] * K + o_k[None, :], mask=m_row[:, None], other=0.0)
    # The exponent of the row's largest finite element is brought to 14; from 15 on both powers of two are normal numbers.
    b_size = tl.abs(b_row)
    b_exponent = tl.max(tl.where(b_size < float("inf"), b_size, 0.0), axis=1).to(tl.int32, bitcast=True) >> 23
    b_exponent = tl.maximum(b_exponent, 15)
    b_scaled = b_row * ((268 - b_exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    b_high = b_scaled.to(tl.float16)
    p_cast = cast + o_row[:, None] * K + o_k[None, :]
    tl.store(p_cast, b_high, mask=m_row[:, None])
    if LOW:
        b_low = tl.where(b_size < float("inf"), b_scaled - b_high, 0.0).to(tl.float16)  # inf - inf would be NaN
        tl.store(p_cast + (3 * N + tl.cast(M, tl.int64)) * K, b_low, mask=m_row[:, None])
    tl.store(unscale + o_row, ((b_exponent - 14) << 23).to(tl.float32, bitcast=True), mask=m_row)


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    x_desc, w_desc, unscale, q_norm_weight, k_norm_weight, q, k, v,
    M, eps,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, LOW: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q, k, v [M, HEADS * D] fp32 from what cast_kernel wrote; program (i, i_m) makes one head of one projection.

    x_desc, w_desc: cast, as tiles of BLOCK_M and of D rows. LOW: from high and low parts, three products (see exact.py).
    """
    N: tl.constexpr = HEADS * D
    i_proj, i_head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    i_m = tl.program_id(1)
    if i_proj == 0:
        norm_weight, out = q_norm_weight, q
    elif i_proj == 1:
        norm_weight, out = k_norm_weight, k
    else:
        norm_weight, out = k_norm_weight, v
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.program_id(0) * D + tl.arange(0, D)
    tl.static_assert(K % BLOCK_K == 0)
    # Rows behind the last of x are others', or zeros behind them all; what comes of them is never stored.
    i_x, i_w = 3 * N + i_m * BLOCK_M, tl.program_id(0) * D
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    low = 3 * N + M
    for i_k in range(0, K, BLOCK_K):
        b_x, b_w = x_desc.load([i_x, i_k]), w_desc.load([i_w, i_k]).T
        if LOW:
            # The small products first; each chunk starts from zero, and the sum over chunks is taken in fp32 registers.
            b_chunk = tl.dot(x_desc.load([low + i_x, i_k]), b_w)
            b_chunk = tl.dot(b_x, w_desc.load([low + i_w, i_k]).T, b_chunk)
            b_acc += tl.dot(b_x, b_w, b_chunk)
        else:
            b_acc = tl.dot(b_x, b_w, b_acc)
    b_x_scale = tl.load(unscale + 3 * N + o_m, mask=o_m < M, other=0.0)
    b_w_scale = tl.load(unscale + o_n)
    # The smaller factor first: the product of the two may leave fp32's range where the result does not.
    b_small = tl.minimum(b_x_scale[:, None], b_w_scale[None, :])
    b_out = b_acc * b_small * tl.maximum(b_x_scale[:, None], b_w_scale[None, :])
    if i_proj < 2:
        b_out = rms_norm(b_out, tl.load(norm_weight + tl.arange(0, D)), eps)
    store_tile(out, b_out, i_m, i_head, M, N, BLOCK_M, D)


@operation
def pair(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises.

    Raises UnsupportedError on a GPU without TMA (before compute capability 9.0).
    """
    cast_and_multiply(inputs, out, config or heuristic(inputs.M, inputs.hidden_states.device), low=False)


def cast_and_multiply(inputs, out, config, *, low):
    """Both launches; low: with the low parts too."""
    states, M = inputs.hidden_states, inputs.M
    needs_tma(states.device)
    # Allocated by the call, so two calls in flight never share it.
    cast = states.new_empty((1 + low) * (WEIGHT_ROWS + M), HIDDEN_SIZE, dtype=torch.float16)
    unscale = states.new_empty(WEIGHT_ROWS + M)
    cast_rows = 256 if states.device.type == "cpu" else 4  # the interpreter's time goes with the number of programs
    # Programmatic dependent launch, but in the interpreter: the second grid is set up while the first runs, and waits inside.
    pdl = capability(states.device) is not None
    first = partial(
        prepare, cast_kernel, (triton.cdiv(WEIGHT_ROWS + M, cast_rows),),
        *inputs[:4], cast, unscale, M,
        K=HIDDEN_SIZE, N=QKV_OUT_SIZE, ROWS=cast_rows, LOW=low, PDL=pdl,
    )  # fmt: skip
    second = partial(
        prepare, gemm_kernel, (3 * NUM_HEADS, triton.cdiv(M, config.BLOCK_M)),
        TensorDescriptor.from_tensor(cast, [config.BLOCK_M, config.BLOCK_K]),
        TensorDescriptor.from_tensor(cast, [HEAD_DIM, config.BLOCK_K]),
        unscale, *inputs[4:6], *out, M, inputs.eps,
        K=HIDDEN_SIZE, HEADS=NUM_HEADS, D=HEAD_DIM, LOW=low, PDL=pdl, **meta(config), launch_pdl=pdl,
    )  # fmt: skip
    launch_together(states.device, first, second)
