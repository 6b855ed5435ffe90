"""exact: fp32's accuracy on tensor cores. Every operand is two fp16, high + low, and three of the four products are kept.

x = high + low to 22 bits, so high * high + high * low + low * high misses only low * low, well below what fp32 loses in a
sum. The rows are scaled as in pair. Tensor cores truncate when they add to an accumulator: summed there over all of K, an
error of 5.4e-6 was left where PyTorch's fp32 has 5.7e-7 (H200, 2026-11-30, Triton 3.6.0, worst of the 16 cases). So a chunk of
K is summed in the tensor cores, and chunks are summed in fp32 registers, which round: 1.5e-7 is left (data/errors).

The kernels are pair's, with LOW. Ledger: 2 launches; three times the FLOPs, at fp16's rate; the cast writes twice as much.
"""

from ..problem import NUM_HEADS, operation
from . import pair
from .launch import Config, tiles_per_sm


def heuristic(M, device):
    """M, torch.device -> Config of tiles of 64 tokens, one, two or three to a multiprocessor of Hopper; each buffer holds high and low.

    On an H200 (2026-12-01, Triton 3.7.1, CUPTI medians): at M = 128, one to a multiprocessor, three buffers of 64 columns take
    22.8 µs, two 30.8; at 512, two to one, 38.0 and 32.6; at 6184, three to one, three buffers of 32 columns take 224, two of 64
    248. Tiles of 128 tokens take longer at 128, 512 and 1024. In the interpreter as pair.
    """
    if device.type == "cpu":
        return pair.heuristic(M, device)
    tiles = tiles_per_sm(M, 64, 3 * NUM_HEADS, device)
    if tiles <= 2:
        return Config(BLOCK_M=64, BLOCK_K=64, num_warps=4, num_stages=3 if tiles <= 1 else 2)
    return Config(BLOCK_M=64, BLOCK_K=32, num_warps=4, num_stages=3)


@operation
def exact(inputs, out, config=None):
    """The operation in two launches: shapes and dtypes as in problem.Inputs and problem.QKV, errors as problem.check_arguments raises.

    Raises UnsupportedError on a GPU without TMA (before compute capability 9.0).
    """
    pair.cast_and_multiply(inputs, out, config or heuristic(inputs.M, inputs.hidden_states.device), low=True)
