"""Launching with little host time, since a second launch that comes late is a gap that the board counts.

Triton's JIT dispatch binds and specialises the arguments of every call anew: 15 to 90 µs on the H200 before a second
launch (shared/facts, measured 2026-11-30). A kernel that was compiled once can be launched as it is, about 10 µs sooner
than the flushed L2 lets the first one end. That is only right where no argument is specialised by value: pointers are
multiples of 16 bytes (problem.check_arguments) and sizes are marked do_not_specialize.
"""

from functools import cache

import torch
import triton

_compiled = {}
recorder = None  # while qkvlab.aot plans a launch, called in its place


def launch(kernel, grid, *args, **meta):
    """Launch `kernel` on the device and current stream of the first tensor in `args`.

    args: the kernel's runtime arguments, in order, before all constexprs. meta: its constexprs, in order, then the
    compiler's options (num_warps, num_stages, ...).
    """
    if recorder:
        recorder(kernel, grid, args, meta)
        return
    if triton.knobs.runtime.interpret:
        kernel[grid](*args, **meta)
        return
    device = args[0].device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, *args, **meta)
    key = (kernel.fn, device, *meta.values())
    found = _compiled.get(key)
    if found is None:
        compiled = kernel.warmup(*args, grid=grid, **meta)
        constexprs = tuple(value for name, value in meta.items() if name in kernel.arg_names)
        found = _compiled[key] = (compiled, constexprs)
    compiled, constexprs = found
    compiled[(*grid, 1, 1)[:3]](*args, *constexprs)


@cache
def sm_count(device):
    """Multiprocessors of a CUDA device; an H200's where there is none, so that a launch can be planned anywhere."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
