"""split: the three projections in one launch, both norms in another.

Ledger: 2 launches instead of 5; the same FLOPs. A row block of hidden_states is now pulled once for all 24 heads while
it is in the L2. The norms still read and write query and key once more: 16 KiB a token.
"""

import triton
import triton.language as tl

from ..problem import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, operation
from .launch import launch, meta
from .tile import heuristic, norm_rows, project_tile, store_tile


@triton.jit(do_not_specialize=["M"])
def project_kernel(
    x, q_weight, k_weight, v_weight, q, k, v,
    M,
    K: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """q, k, v [M, HEADS * D] = x [M, K] @ each weight^T, fp32; program (i, i_m) makes one head of one projection."""
    i_proj, i_head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    i_m = tl.program_id(1)
    if i_proj == 0:
        w, out = q_weight, q
    elif i_proj == 1:
        w, out = k_weight, k
    else:
        w, out = v_weight, v
    b_out = project_tile(x, w, i_m, i_head, M, K, BLOCK_M, D, BLOCK_K)
    store_tile(out, b_out, i_m, i_head, M, HEADS * D, BLOCK_M, D)


@triton.jit(do_not_specialize=["ROWS"])
def norms_kernel(
    q, k, q_norm_weight, k_norm_weight,
    ROWS, eps,
    D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Normalise q and k, each [ROWS, D] fp32, in place; program axis 1 says which of the two."""
    if tl.program_id(1) == 0:
        x, weight = q, q_norm_weight
    else:
        x, weight = k, k_norm_weight
    norm_rows(x, weight, tl.program_id(0), ROWS, eps, D, BLOCK_M)


@operation
def split(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises."""
    M = inputs.M
    config = config or heuristic(M, inputs.hidden_states.device)
    launch(
        project_kernel, (3 * NUM_HEADS, triton.cdiv(M, config.BLOCK_M)),
        *inputs[:4], *out, M,
        K=HIDDEN_SIZE, HEADS=NUM_HEADS, D=HEAD_DIM, **meta(config),
    )  # fmt: skip
    normalise(*out[:2], *inputs[4:6], inputs.eps)


def normalise(query, key, q_norm_weight, k_norm_weight, eps):
    """Normalise query and key, each fp32 and contiguous with heads of 128 last, in place, in one launch."""
    rows = query.numel() // HEAD_DIM
    launch(
        norms_kernel, (triton.cdiv(rows, 32), 2),
        query, key, q_norm_weight, k_norm_weight, rows, float(eps),
        D=HEAD_DIM, BLOCK_M=32,
    )  # fmt: skip
