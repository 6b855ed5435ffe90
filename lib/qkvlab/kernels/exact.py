"""exact: fp32's accuracy on tensor cores. Every operand is two fp16, high + low, and three of the four products are kept.

x = high + low to 22 bits, so high * high + high * low + low * high misses only low * low, below fp32's own rounding. The
rows are scaled as in pair. Tensor cores truncate when they add to an accumulator: summed there over all of K, an error
of 5.4e-6 was left where PyTorch's fp32 has 5.7e-7 (H200, 2026-11-30, Triton 3.6.0, worst of the 16 cases). So a chunk of
K is summed in the tensor cores, and chunks are summed in fp32 registers, which round.

Ledger: 2 launches; three times the FLOPs, at fp16's rate; the cast writes twice what pair's does.
"""

from dataclasses import replace

import triton
import triton.language as tl

from ..problem import operation
from . import pair
from .pair import multiply, unscaled
from .tile import rms_norm, store_tile


def heuristic(M, device):
    """M, torch.device -> pair's Config with two buffers, each of which holds high and low: what fits on Hopper and Blackwell."""
    return replace(pair.heuristic(M, device), num_stages=2)


@triton.jit(do_not_specialize=["M"])
def exact_kernel(
    cast, unscale, q_norm_weight, k_norm_weight, q, k, v,
    M, eps,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As pair.gemm_kernel, with the low parts 3 * N + M rows behind the high ones."""
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
    o_k = tl.arange(0, BLOCK_K)
    p_x = cast + (3 * N + tl.minimum(o_m, M - 1))[:, None] * K + o_k[None, :]
    p_w = cast + o_n[None, :] * K + o_k[:, None]
    low = (3 * N + tl.cast(M, tl.int64)) * K
    b_acc = tl.zeros((BLOCK_M, D), dtype=tl.float32)
    for i_k in range(0, K, BLOCK_K):
        b_x, b_w = tl.load(p_x + i_k), tl.load(p_w + i_k)
        # The small products first; each chunk starts from zero, and the sum over chunks is taken in fp32.
        b_chunk = tl.dot(tl.load(p_x + low + i_k), b_w)
        b_chunk = tl.dot(b_x, tl.load(p_w + low + i_k), b_chunk)
        b_acc += tl.dot(b_x, b_w, b_chunk)
    b_out = unscaled(b_acc, unscale, o_m, o_n, M, N)
    if i_proj < 2:
        b_out = rms_norm(b_out, tl.load(norm_weight + tl.arange(0, D)), eps)
    store_tile(out, b_out, i_m, i_head, M, N, BLOCK_M, D)


@operation
def exact(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises."""
    multiply(exact_kernel, inputs, out, config or heuristic(inputs.M, inputs.hidden_states.device), parts=2)
