"""What reduced operands do to the result, on any machine: the reference on operands that were rounded as a GPU would.

A product of two 11-bit mantissas is exact in fp32, so what a tensor core loses is lost when its operands are made (and,
less, in accumulation). Rounding the operands and multiplying in float64 shows that loss alone.
"""

import torch

from .reference import reference


def tf32_truncated(x):
    """fp32 without its last 13 bits, as Hopper's wgmma reads an operand: towards zero."""
    return (x.view(torch.int32) & -0x2000).view(torch.float32)


def tf32_rounded(x):
    """fp32 to 10 bits of mantissa, to nearest."""
    return tf32_truncated((x.view(torch.int32) + 0x1000).view(torch.float32))


def fp16(x):
    """Through fp16: 10 bits of mantissa, 5 of exponent."""
    return x.half().float()


def bf16(x):
    """Through bf16: 7 bits of mantissa, fp32's exponent."""
    return x.bfloat16().float()


def fp16_scaled(x):
    """Through fp16, each row times the power of two that brings its largest element below 2^15, and back."""
    return _scaled(x, fp16)


def fp16_twice(x):
    """Through a sum of two fp16: what the first rounding lost is the second."""
    return _scaled(x, lambda row: fp16(row) + fp16(row - fp16(row)))


def _scaled(x, through):
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
    return torch.ldexp(through(torch.ldexp(x, 15 - exponent)), exponent - 15)


OPERANDS = {function.__name__: function for function in (tf32_truncated, tf32_rounded, fp16, bf16, fp16_scaled, fp16_twice)}


def on_operands(through):
    """The reference, its hidden_states and projection weights passed through `through` first, its products in float64."""

    def call(hidden_states, q_weight, k_weight, v_weight, q_norm_weight, k_norm_weight, eps):
        operands = (through(tensor).double() for tensor in (hidden_states, q_weight, k_weight, v_weight))
        norms = q_norm_weight.double(), k_norm_weight.double()
        return tuple(out.float() for out in reference(*operands, *norms, eps))

    call.__name__ = through.__name__
    return call
