"""The speed of light: FLOPs, bytes and the time below which a GPU cannot do the operation. Each formula once, here."""

from . import hardware
from .problem import HEAD_DIM, HIDDEN_SIZE, QKV_OUT_SIZE

# What one product of the operation costs at a precision: which rate of the GPU, and how many products it takes there.
PRODUCTS = {
    "fp32": ("fp32", 1),
    "tf32": ("tf32", 1),
    "fp16": ("fp16", 1),
    "bf16": ("bf16", 1),
    "3xtf32": ("tf32", 3),
    "3xfp16": ("fp16", 3),
}
EXACT = ("fp32", "3xtf32", "3xfp16")
BEST_OF_CLASS = {"reduced": "fp16", "exact": "3xfp16"}


def precision_class(precision):
    """'exact' for products that err no more than fp32's own, 'reduced' for all others, an unstated precision among them."""
    return "exact" if precision in EXACT else "reduced"


def flops(m):
    """Floating-point operations of the three projections for M rows; the norm's 4 an element are left out."""
    return 2 * m * HIDDEN_SIZE * 3 * QKV_OUT_SIZE


def traffic_bytes(m, *, element_bytes=4, hidden_reads=1, norm_passes=0):
    """Bytes between DRAM and the chip for M rows, if a tensor is moved once for every pass over it.

    hidden_reads: how often hidden_states are read; norm_passes: how often query and key are read and written again
    after the projection. Fused: (1, 0), the least there is; split: (1, 1); naive: (3, 1).
    """
    hidden = m * HIDDEN_SIZE * hidden_reads
    weights = 3 * QKV_OUT_SIZE * HIDDEN_SIZE + 2 * HEAD_DIM
    outputs = 3 * m * QKV_OUT_SIZE
    norms = 2 * 2 * m * QKV_OUT_SIZE * norm_passes
    return element_bytes * (hidden + weights + outputs + norms)


def intensity(m):
    """FLOPs per byte of the fused operation in fp32."""
    return flops(m) / traffic_bytes(m)


def bound_us(m, gpu, precision, *, measured=False):
    """The physical bound, µs: the later of the products at the GPU's rate for `precision` and the fp32 bytes moved once.

    gpu: a name in data/devices.yaml; precision: a key of PRODUCTS. measured: with the rates that somebody reached
    instead of the datasheet's. Raises KeyError for a GPU or rate that data/devices.yaml does not hold.
    """
    compute_us, memory_us = bound_parts_us(m, gpu, precision, measured=measured)
    return max(compute_us, memory_us)


def bound_parts_us(m, gpu, precision, *, measured=False):
    """(µs of the products, µs of the bytes): the two that bound_us takes the larger of."""
    gpu = hardware.gpus()[gpu]
    rate, products = PRODUCTS[precision]
    tflops = (gpu.measured if measured else gpu.tflops)[rate] / products
    tb_s = gpu.measured["dram_tb_s"] if measured else gpu.dram_tb_s
    return flops(m) / tflops / 1e6, traffic_bytes(m) / tb_s / 1e6


def board_sol_us(m):
    """The SOL time that the board publishes for its B200 at 1500 MHz, µs: it counts 2-byte elements and a constant."""
    board = hardware.gpus()["B200"].board
    compute_us = flops(m) / board["fp16_tflops"] / 1e6
    memory_us = traffic_bytes(m, element_bytes=board["element_bytes"]) / board["dram_tb_s"] / 1e6
    return max(compute_us, memory_us) + board["overhead_us"]


def sol_score(latency_us, sol_us, baseline_us):
    """The board's score of a latency: 0.5 at the baseline, 1 at the bound."""
    return 1 / (1 + (latency_us - sol_us) / (baseline_us - sol_us))
