"""fused: the norm in the GEMM's epilogue, one launch.

A tile is BLOCK_M tokens by one head, so a program holds in registers all 128 values that a norm needs: it squares, sums
and scales the accumulators before they are stored. Ledger: 1 launch; the same FLOPs; the 16 KiB a token that split's
norms move is gone, and every output byte is written once.
"""

import triton
import triton.language as tl

from ..problem import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, operation
from .launch import launch, meta
from .tile import heuristic, project_tile, rms_norm, store_tile


@triton.jit(do_not_specialize=["M"])
def fused_kernel(
    x, q_weight, k_weight, v_weight, q_norm_weight, k_norm_weight, q, k, v,
    M, eps,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q, k [M, HEADS * D] = the norm of x [M, K] @ their weight^T, head by head; v the product alone. All fp32."""
    i_proj, i_head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    i_m = tl.program_id(1)
    if i_proj == 0:
        w, norm_weight, out = q_weight, q_norm_weight, q
    elif i_proj == 1:
        w, norm_weight, out = k_weight, k_norm_weight, k
    else:
        w, norm_weight, out = v_weight, k_norm_weight, v
    b_out = project_tile(x, w, i_m, i_head, M, K, BLOCK_M, D, BLOCK_K)
    if i_proj < 2:
        b_out = rms_norm(b_out, tl.load(norm_weight + tl.arange(0, D)), eps)
    store_tile(out, b_out, i_m, i_head, M, HEADS * D, BLOCK_M, D)


@operation
def fused(inputs, out, config=None):
    """The operation in one launch: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises."""
    M = inputs.M
    config = config or heuristic(M, inputs.hidden_states.device)
    launch(
        fused_kernel, (3 * NUM_HEADS, triton.cdiv(M, config.BLOCK_M)),
        *inputs[:6], *out, M, inputs.eps,
        K=HIDDEN_SIZE, HEADS=NUM_HEADS, D=HEAD_DIM, **meta(config),
    )  # fmt: skip
