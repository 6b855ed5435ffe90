"""Launching with little host time, since a second launch that comes late is a gap that the board counts.

Triton's JIT dispatch binds and specialises the arguments of every call anew: 15 to 90 µs on the H200 before a second
launch (2026-11-30, Triton 3.6.0). A kernel that was compiled once can be launched as it is. That is only right where no
argument is specialised by value: pointers are multiples of 16 bytes (problem.check_arguments), and every size is in the
kernel's do_not_specialize.
"""

from dataclasses import asdict, dataclass
from functools import cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..problem import UnsupportedError

_compiled = {}
recorder = None  # while qkvlab.aot plans a launch, called in its place
_TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 of the CUDA driver API


@dataclass(frozen=True)
class Config:
    """A launch configuration: tokens and columns of K that a tile takes, warps, and buffers that loads run ahead by."""

    BLOCK_M: int
    BLOCK_K: int
    num_warps: int
    num_stages: int


meta = cache(asdict)  # a configuration's constexprs and compiler options, for launch(..., **meta(config))


def launch(kernel, grid, *args, **meta):
    """Launch `kernel` on the current stream of its arguments' device.

    args: the kernel's runtime arguments, in order, before all constexprs. meta: its constexprs, in order, then the
    compiler's options (num_warps, num_stages, ...).
    """
    if recorder:
        _refuse_specialised(kernel, args)
        recorder(kernel, grid, args, meta)
        return
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    runs_on = "cpu" if triton.knobs.runtime.interpret else "cuda"
    if device.type not in (runs_on, "cuda"):
        raise UnsupportedError(f"in this process kernels run on {runs_on}, and the tensors are on {device}")
    if triton.knobs.runtime.interpret:
        kernel[grid](*args, **meta)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **meta)
    key = (kernel.fn, device.index, *meta.values())
    found = _compiled.get(key)
    if found is None:
        _refuse_specialised(kernel, args)
        compiled = kernel.warmup(*args, grid=grid, **meta)
        _tell_what_rounds(compiled, args)
        constexprs = tuple(value for name, value in meta.items() if name in kernel.arg_names)
        found = _compiled[key] = (compiled, constexprs)
    compiled, constexprs = found
    compiled[(*grid, 1, 1)[:3]](*args, *constexprs)


def _refuse_specialised(kernel, args):
    """Raise TypeError if a size would be compiled into the kernel by its value, which another call may not share."""
    for param, arg in zip(kernel.params, args):
        if isinstance(arg, int) and not param.do_not_specialize:
            raise TypeError(
                f"{kernel.fn.__name__}: write @triton.jit(do_not_specialize=[{param.name!r}]), as a compiled kernel is reused"
            )


def compiled_with(config):
    """[(kernel's name, compiled kernel)] of what was launched here with a configuration."""
    values = tuple(meta(config).values())
    return [(key[0].__name__, compiled) for key, (compiled, _) in _compiled.items() if key[-len(values) :] == values]


def rounding_descriptor(tensor, block_shape):
    """A descriptor of an fp32 tensor whose loads round it to tf32, to nearest even: the copy engine (TMA) does it."""
    descriptor = TensorDescriptor.from_tensor(tensor, block_shape)
    descriptor.round_f32_to_tf32 = True
    return descriptor


def _tell_what_rounds(compiled, args):
    """Triton 3.7 reads round_f32_to_tf32 off each descriptor; for 3.6 the element type stands with the compiled kernel."""
    if not hasattr(TensorDescriptor, "round_f32_to_tf32"):
        descriptors = [arg for arg in args if isinstance(arg, TensorDescriptor)]
        for tensor_map, descriptor in zip(compiled.metadata.tensordesc_meta or (), descriptors):
            if getattr(descriptor, "round_f32_to_tf32", False):
                tensor_map["elem_type"] = _TFLOAT32


@cache
def sm_count(device):
    """Multiprocessors of a CUDA device; an H200's where there is none, so that a launch can be planned anywhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def needs_hopper(device):
    """Raise UnsupportedError on a CUDA device without TMA, which came with compute capability 9.0."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise UnsupportedError(f"this stage loads by TMA, which needs compute capability 9.0 or newer; this GPU has {found}")
