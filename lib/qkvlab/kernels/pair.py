"""pair: cast once, multiply at twice the rate. One launch rounds everything to scaled fp16, a second is a persistent GEMM.

fp16 has tf32's 10 bits of mantissa at twice its rate and half its bytes, but 5 exponent bits. So every row of
hidden_states and of the weights is scaled by a power of two that brings its largest element just below 2^15; the
epilogue undoes both scales exactly, before eps is added. Rounding is then relative to the row, at any scale.

Ledger: 2 launches; the same FLOPs. The cast reads every input once and writes half of it: 12.6 MB + 4 KiB a token read,
6.3 MB + 2 KiB a token written; the GEMM finds those in the L2. It saves what fused spends on rounding inside the main
loop, where every tile of hidden_states is converted 24 times, and it lets the copy engine (TMA) feed the tensor cores.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..problem import HEAD_DIM, HIDDEN_SIZE, QKV_OUT_SIZE, operation
from .launch import Config, launch, meta, needs_hopper, sm_count
from .tile import rms_norm

CAST_ROWS = 4
WEIGHT_ROWS = 3 * QKV_OUT_SIZE


def heuristic(M, device):
    """M, torch.device -> Config of a BLOCK_M x 256 tile, two heads wide. In the interpreter the largest."""
    if device.type == "cpu":
        return Config(BLOCK_M=128, BLOCK_K=256, num_warps=4, num_stages=1)
    return Config(BLOCK_M=128, BLOCK_K=64, num_warps=8, num_stages=4)


@triton.jit(do_not_specialize=["M"])
def cast_kernel(
    x, q_weight, k_weight, v_weight, cast, unscale,
    M,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """cast [3 * N + M, K] fp16, unscale [3 * N + M] fp32: the rows of the weights, then those of x, each scaled.

    EXACT: what the rounding lost goes to a second such matrix behind the first, so that high + low is the row to 22 bits.
    """
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
    # The exponent of the row's largest finite element; 2^15 is the target, and both powers of two stay normal numbers.
    b_size = tl.abs(b_row)
    b_exponent = tl.max(tl.where(b_size < float("inf"), b_size, 0.0), axis=1).to(tl.int32, bitcast=True) >> 23
    b_exponent = tl.where(b_exponent == 0, 127, tl.maximum(b_exponent, 15))
    b_scaled = b_row * ((268 - b_exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    b_high = b_scaled.to(tl.float16)
    p_cast = cast + o_row[:, None] * K + o_k[None, :]
    tl.store(p_cast, b_high, mask=m_row[:, None])
    if EXACT:
        tl.store(p_cast + (3 * N + tl.cast(M, tl.int64)) * K, (b_scaled - b_high).to(tl.float16), mask=m_row[:, None])
    tl.store(unscale + o_row, ((b_exponent - 14) << 23).to(tl.float32, bitcast=True), mask=m_row)


@triton.jit
def head_epilogue(b_acc, unscale_x, unscale_w, norm_weight, out, o_m, i_head, M, eps, NORMED, N: tl.constexpr, D: tl.constexpr):
    """One head of a tile: b_acc [BLOCK_M, D] unscaled, normalised if NORMED, and stored to out [M, N]."""
    o_d = tl.arange(0, D)
    m_m = o_m < M
    b_x, b_w = tl.load(unscale_x + o_m, mask=m_m, other=0.0), tl.load(unscale_w + i_head * D + o_d)
    b_out = b_acc * (b_x[:, None] * b_w[None, :])
    if NORMED:
        b_out = rms_norm(b_out, tl.load(norm_weight + o_d), eps)
    tl.store(out + o_m[:, None] * N + i_head * D + o_d[None, :], b_out, mask=m_m[:, None])


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    x_desc, w_desc, unscale, q_norm_weight, k_norm_weight, q, k, v,
    M, eps,
    K: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRODUCTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q, k, v [M, N] fp32 from what cast_kernel wrote; each program makes every so-many-th tile of BLOCK_M x 2 heads.

    PRODUCTS = 3: high * high + high * low + low * high, where the low matrix lies 3 * N + M rows further down.
    """
    tiles_n: tl.constexpr = 3 * N // (2 * D)
    rows = 3 * N + M
    for i_tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_n, tl.num_programs(0)):
        i_m, i_n = i_tile // tiles_n, i_tile % tiles_n
        b_acc = tl.zeros((BLOCK_M, 2 * D), dtype=tl.float32)
        for i_k in range(0, PRODUCTS * K, BLOCK_K):
            i_product = i_k // K
            b_x = x_desc.load([3 * N + i_m * BLOCK_M + tl.where(i_product == 2, rows, 0), i_k % K])
            b_w = w_desc.load([i_n * 2 * D + tl.where(i_product == 1, rows, 0), i_k % K])
            b_acc = tl.dot(b_x, b_w.T, b_acc)
        i_proj, i_head = i_n * 2 * D // N, i_n * 2 % (N // D)
        if i_proj == 0:
            norm_weight, out = q_norm_weight, q
        elif i_proj == 1:
            norm_weight, out = k_norm_weight, k
        else:
            norm_weight, out = k_norm_weight, v
        o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        b_first, b_second = tl.split(b_acc.reshape(BLOCK_M, 2, D).permute(0, 2, 1))
        unscale_w = unscale + i_proj * N
        head_epilogue(b_first, unscale + 3 * N, unscale_w, norm_weight, out, o_m, i_head, M, eps, i_proj < 2, N, D)
        head_epilogue(b_second, unscale + 3 * N, unscale_w, norm_weight, out, o_m, i_head + 1, M, eps, i_proj < 2, N, D)


@operation
def pair(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises."""
    _run(inputs, out, config, exact=False)


@operation
def exact(inputs, out, config=None):
    """As pair, from high + low fp16 operands and three products, so that it errs no more than fp32: problem.Inputs to problem.QKV."""
    _run(inputs, out, config, exact=True)


def _run(inputs, out, config, *, exact):
    states = inputs.hidden_states
    needs_hopper(states.device)
    M = states.shape[0] * states.shape[1]
    config = config or heuristic(M, states.device)
    # Allocated by the call, so two calls in flight never share it.
    cast = states.new_empty((1 + exact) * (WEIGHT_ROWS + M), HIDDEN_SIZE, dtype=torch.float16)
    unscale = states.new_empty(WEIGHT_ROWS + M)
    x_desc = TensorDescriptor.from_tensor(cast, [config.BLOCK_M, config.BLOCK_K])
    w_desc = TensorDescriptor.from_tensor(cast, [2 * HEAD_DIM, config.BLOCK_K])
    launch(
        cast_kernel, (triton.cdiv(WEIGHT_ROWS + M, CAST_ROWS),),
        *inputs[:4], cast, unscale, M,
        K=HIDDEN_SIZE, N=QKV_OUT_SIZE, ROWS=CAST_ROWS, EXACT=exact,
    )  # fmt: skip
    tiles = triton.cdiv(M, config.BLOCK_M) * (WEIGHT_ROWS // (2 * HEAD_DIM))
    launch(
        gemm_kernel, (min(sm_count(states.device), tiles),),
        x_desc, w_desc, unscale, *inputs[4:6], *out, M, float(inputs.eps),
        K=HIDDEN_SIZE, N=QKV_OUT_SIZE, D=HEAD_DIM, PRODUCTS=3 if exact else 1, **meta(config),
    )  # fmt: skip
