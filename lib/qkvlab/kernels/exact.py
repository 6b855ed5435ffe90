"""exact: fp32's accuracy on tensor cores. Every operand is two fp16, high + low, and three of the four products are kept.

x = high + low to 22 bits, so high * high + high * low + low * high misses only low * low, well below what fp32 loses in a
sum. The rows are scaled as in pair. Tensor cores truncate when they add to an accumulator: summed there over all of K, an
error of 5.4e-6 was left where PyTorch's fp32 has 5.7e-7 (H200, 2026-11-30, Triton 3.6.0, worst of the 16 cases). So a chunk of
K is summed in the tensor cores, and chunks are summed in fp32 registers, which round: 1.5e-7 is left (data/errors).

The kernels are pair's, with LOW. Ledger: 2 launches; three times the FLOPs, at fp16's rate; the cast writes twice as much.
"""

from dataclasses import replace

from ..problem import operation
from . import pair
from .launch import Config


def heuristic(M, device):
    """M, torch.device -> pair's Config with two buffers, each of which holds high and low: what fits on Hopper and Blackwell.

    Up to M = 2164 with tiles of 64, of which two fit on a multiprocessor.
    """
    if device.type != "cpu" and M <= 2164:
        return Config(BLOCK_M=64, BLOCK_K=64, num_warps=4, num_stages=2)
    return replace(pair.heuristic(M, device), num_stages=2)


@operation
def exact(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises.

    Raises UnsupportedError on a GPU without TMA (before compute capability 9.0).
    """
    pair.cast_and_multiply(inputs, out, config or heuristic(inputs.M, inputs.hidden_states.device), low=True)
