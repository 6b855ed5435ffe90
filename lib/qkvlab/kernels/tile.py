"""What every stage computes: a tile of hidden_states @ weight^T on the tensor cores, and the norm of one head.

The products are tf32: 8 exponent bits as fp32 has, so any scale is right, and 10 bits of mantissa. The operands are
rounded to tf32 here, in registers, because Hopper's wgmma would truncate them, and truncation leans one way: its errors
add up over the 1024 products where rounding errors cancel (6 of the 16 cases fail then; notebook 05).
"""

import triton
import triton.language as tl


@triton.jit
def round_tf32(b_x):
    """fp32 block -> the same rounded to tf32 (to nearest, ties away from zero); NaN and inf stay what they are."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_rounded = ((b_bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(b_x == b_x, b_rounded, b_x)


@triton.jit
def project_tile(
    x, w,
    i_m, i_n, M,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile (i_m, i_n), [BLOCK_M, BLOCK_N] fp32, of x @ w^T. x: fp32 [M, K]; w: fp32 [N, K]; both row-major; K % BLOCK_K = 0."""
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_k = tl.arange(0, BLOCK_K)
    m_m = o_m[:, None] < M
    p_x = x + o_m[:, None] * K + o_k[None, :]
    p_w = w + o_n[None, :] * K + o_k[:, None]
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        b_x = tl.load(p_x + i_k, mask=m_m, other=0.0)
        b_w = tl.load(p_w + i_k)
        b_acc = tl.dot(round_tf32(b_x), round_tf32(b_w), b_acc, input_precision="tf32")
    return b_acc


@triton.jit
def rms_norm(b_x, b_weight, eps):
    """Each row of b_x [BLOCK_M, 128], one head of one token, over its root mean square, times b_weight [128]. All fp32."""
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / b_x.shape[1] + eps)
    return b_x * b_rstd[:, None] * b_weight[None, :]


@triton.jit
def store_tile(
    out, b_out,
    i_m, i_n, M,
    N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write tile (i_m, i_n), b_out [BLOCK_M, BLOCK_N], of out [M, N], row-major fp32."""
    o_m = i_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(out + o_m[:, None] * N + o_n[None, :], b_out, mask=o_m[:, None] < M)
