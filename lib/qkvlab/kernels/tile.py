"""What naive, split and fused share: a tile of hidden_states @ weight^T on the tensor cores, and the norm of one head.

The products are tf32: 8 exponent bits as fp32 has, so any scale is right, and 10 bits of mantissa. Hopper's wgmma
truncates an fp32 operand to tf32, and truncation leans one way: with both operands truncated 6 of the 16 cases fail the
board's rule. So hidden_states are rounded here, in registers, on their way to the tensor cores. The weights are left to
truncation: they would have to go from registers back to shared memory, which costs half as much again at M = 8192 (H200,
2026-11-30, Triton 3.6.0, CUPTI medians: 325 µs with both rounded, 219 µs with one), and one rounded operand is enough to pass.
"""

import triton
import triton.language as tl

from .launch import Config


def heuristic(M, device):
    """M, torch.device -> Config of a BLOCK_M x 128 tile: one for naive, split and fused, so that they differ in what they launch alone.

    From 16 configurations on an H200 (2026-11-30, Triton 3.6.0, CUPTI medians in µs): at M = 128 and 256 the best take
    16.4 and 16.7, at 586 and 1024 24.7 and 31.1 (BLOCK_M = 128: 23.8 and 38.0), from 2048 on BLOCK_M = 128 leads
    with 58.4 against 60.8. In the interpreter time goes with the number of programs and steps, so the largest tile.
    """
    if device.type == "cpu":
        return Config(BLOCK_M=128, BLOCK_K=256, num_warps=4, num_stages=1)
    if M <= 256:
        return Config(BLOCK_M=64, BLOCK_K=32, num_warps=4, num_stages=4)
    if M <= 1024:
        return Config(BLOCK_M=64, BLOCK_K=32, num_warps=4, num_stages=3)
    return Config(BLOCK_M=128, BLOCK_K=32, num_warps=8, num_stages=4)


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
    tl.static_assert(K % BLOCK_K == 0)
    m_m = o_m[:, None] < M
    p_x = x + o_m[:, None] * K + o_k[None, :]
    p_w = w + o_n[None, :] * K + o_k[:, None]
    b_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        b_x = tl.load(p_x + i_k, mask=m_m, other=0.0)
        b_w = tl.load(p_w + i_k)
        b_acc = tl.dot(round_tf32(b_x), b_w, b_acc, input_precision="tf32")
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


@triton.jit
def norm_rows(x, weight, i, ROWS, eps, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Block i of BLOCK_M rows of x [ROWS, D] fp32, normalised in place, each row times weight [D]; a row is one head of one token."""
    o_m = i.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D)
    m_m = o_m[:, None] < ROWS
    p_x = x + o_m[:, None] * D + o_d[None, :]
    b_x = tl.load(p_x, mask=m_m, other=0.0)
    tl.store(p_x, rms_norm(b_x, tl.load(weight + o_d), eps), mask=m_m)
