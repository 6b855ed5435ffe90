"""naive: what one writes first. A matmul kernel launched three times, a per-head RMSNorm kernel launched twice.

Ledger: 5 launches; 2 * M * 1024 * 3072 FLOPs. Beside the operands it needs, each projection reads hidden_states again,
and each norm reads and writes its 4096 bytes a token once more: 24 KiB a token where the fused kernel moves none of it.
"""

import triton
import triton.language as tl

from ..problem import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, QKV_OUT_SIZE, operation
from .launch import launch, meta
from .tile import heuristic, norm_rows, project_tile, store_tile


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x, w, out,
    M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ w [N, K]^T, fp32; one program a tile."""
    i_n, i_m = tl.program_id(0), tl.program_id(1)
    b_out = project_tile(x, w, i_m, i_n, M, K, BLOCK_M, BLOCK_N, BLOCK_K)
    store_tile(out, b_out, i_m, i_n, M, N, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["ROWS"])
def rms_norm_kernel(x, weight, ROWS, eps, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Normalise x [ROWS, D] fp32 in place, each row times weight [D]; one program a block of rows."""
    norm_rows(x, weight, tl.program_id(0), ROWS, eps, D, BLOCK_M)


@operation
def naive(inputs, out, config=None):
    """The operation in five launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises."""
    M = inputs.M
    config = config or heuristic(M, inputs.hidden_states.device)
    for weight, projected in zip(inputs[1:4], out):
        launch(
            matmul_kernel, (NUM_HEADS, triton.cdiv(M, config.BLOCK_M)),
            inputs.hidden_states, weight, projected, M,
            N=QKV_OUT_SIZE, K=HIDDEN_SIZE, BLOCK_N=HEAD_DIM, **meta(config),
        )  # fmt: skip
    rows = M * NUM_HEADS
    for weight, projected in zip(inputs[4:6], out):
        launch(rms_norm_kernel, (triton.cdiv(rows, 32),), projected, weight, rows, inputs.eps, D=HEAD_DIM, BLOCK_M=32)
