"""Launching with little host time, since a second launch that comes late is a gap that the board counts.

Triton's JIT dispatch binds and specialises the arguments of every call anew: 15 to 90 µs on the H200 before a second
launch (2026-11-30, Triton 3.6.0). A kernel that was compiled once can be launched as it is. That is only right where no
argument is specialised by value: pointers are multiples of 16 bytes (problem.check_arguments), and every size is in the
kernel's do_not_specialize.

Even so, the host takes a few µs from one launch to the next, and a short first kernel has ended by then: up to 6 µs of a
call (data/trials, "queued together"). So such launches are queued by one call, as a CUDA graph (launch_together).
"""

import threading
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
import triton
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.tools.tensor_descriptor import TensorDescriptor

from ..problem import UnsupportedError

_compiled = {}
_graphs = {}
_making = threading.Lock()
recorder = None  # while qkvlab.aot plans launches, called in their place; it has the target's `capability`
_RUNS_ON = "cpu" if triton.knobs.runtime.interpret else "cuda"  # decided when the kernels are defined
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
    prepare(kernel, grid, *args, **meta)()


def launch_together(device, *plans):
    """Queue several launches on a device's current stream, by one call to the driver: the host cannot come late with the second.

    plans: partial(prepare, kernel, grid, *args, **meta) each. What a stream keeps is executable graphs, one for the same
    grids and meta; each call captures anew, updates that one with what was captured, or makes it, and launches it. Where the
    stream itself is being captured, where kernels run on the CPU or are only planned, and before Triton 3.7, they are queued one
    after the other.
    """
    if device.type == _RUNS_ON == "cuda" and not recorder and hasattr(triton.runtime.driver.active.utils, "launch"):
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return launch_together(device, *plans)
        if not torch.cuda.is_current_stream_capturing():
            _bind_context(device.index)
            key = (device.index, torch.cuda.current_stream(device).cuda_stream, *(plan.args[0].fn for plan in plans))
            with _making:  # of several first calls at once each would make a stream
                graph = _graphs[key] = _graphs.get(key) or _Graph()
            return graph.launch(key[1], tuple((*plan.args[1], *plan.keywords.values()) for plan in plans), plans)
    for queue in [plan() for plan in plans]:
        queue()


class _Graph:
    """Launches of the same kernels on the same stream: the executable graphs, and the stream on which the next is captured.

    One that was updated to other grids stays slower, by 0.3 µs (pair) to 1.4 (persistent; data/trials, "executable graphs"). So
    launches of one form, the same grids and meta, have their own, up to MOST; then the one that was used longest ago is updated.
    """

    MOST = 32

    def __init__(self):
        from cuda.bindings import driver  # comes with PyTorch for CUDA

        self.driver, self.executables, self.lock = driver, {}, threading.Lock()
        # Of its own, so that nothing else is captured; torch's streams are shared.
        self.apart = self.ask(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def ask(self, function, *args):
        error, *answer = function(*args)
        if error:
            raise RuntimeError(f"{function.__name__}: {error.name}")
        return answer[0] if answer else None

    def launch(self, stream, form, plans):
        driver, ask = self.driver, self.ask
        queues = [plan(stream=int(self.apart)) for plan in plans]
        with self.lock:
            graph = self.capture(queues)
            try:
                executable = self.executables.pop(form, None)
                if len(self.executables) == self.MOST:
                    executable = self.executables.pop(next(iter(self.executables)))
                if executable and driver.cuGraphExecUpdate(executable, graph)[0]:
                    ask(driver.cuGraphExecDestroy, executable)
                    executable = None
                self.executables[form] = executable or ask(driver.cuGraphInstantiate, graph, 0)
            finally:
                ask(driver.cuGraphDestroy, graph)
            ask(driver.cuGraphLaunch, self.executables[form], stream)

    def capture(self, queues):
        """The graph of what they queue. Relaxed: garbage may be collected meanwhile, and memory freed, which has no part in it."""
        driver = self.driver
        try:
            self.ask(driver.cuStreamBeginCapture, self.apart, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            for queue in queues:
                queue()
            return self.ask(driver.cuStreamEndCapture, self.apart)
        except BaseException:  # an interrupt too must not leave the stream capturing
            error, graph = driver.cuStreamEndCapture(self.apart)
            if not error:
                driver.cuGraphDestroy(graph)
            raise


def prepare(kernel, grid, *args, stream=None, **meta):
    """As launch, up to the launch itself: a function without arguments that queues it.

    stream: a handle other than 0, from Triton 3.7 on; without it, the stream that is current now. The arguments' tensors must
    live until it is queued.
    """
    if recorder:
        _refuse_specialised(kernel, args)
        recorder(kernel, grid, args, meta)
        return lambda: None
    device = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    if device.type not in (_RUNS_ON, "cuda"):
        raise UnsupportedError(f"in this process kernels run on {_RUNS_ON}, and the tensors are on {device}")
    if _RUNS_ON == "cpu":
        _refuse_specialised(kernel, args)
        return partial(kernel[grid], *args, **meta)
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return partial(_on_its_device, device, prepare(kernel, grid, *args, stream=stream, **meta))
    key = (kernel.fn, device.index, *meta.items())
    found = _compiled.get(key)
    if found is None:
        _refuse_specialised(kernel, args)
        compiled = kernel.warmup(*args, grid=grid, **meta)
        compiled._init_handles()
        _tell_what_rounds(compiled, args)
        constexprs = tuple(value for name, value in meta.items() if name in kernel.arg_names)
        found = _compiled[key] = (compiled, constexprs)
    compiled, constexprs = found
    grid = (*grid, 1, 1)[:3]
    driver = triton.runtime.driver.active
    if not hasattr(driver.utils, "launch"):  # before Triton 3.7
        return partial(compiled[grid], *args, *constexprs)
    # What compiled[grid](...) comes to, with the tensor maps made now and not between two launches.
    launcher, tensor_maps = compiled.run, iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    expanded = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            expanded.append(arg.data_ptr())  # of a tensor the launcher would ask the driver whose memory it is
        elif hasattr(arg, "block_shape"):
            _bind_context(device.index)
            expanded += make_tensordesc_arg(arg, next(tensor_maps, None))
        else:
            expanded.append(arg)
    return partial(
        driver.utils.launch, *grid, stream or driver.get_current_stream(device.index), compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl,
        compiled.packed_metadata, None, None, None, None, None, launcher.arg_annotations, launcher.kernel_signature,
        (*expanded, *constexprs),
    )  # fmt: skip


_thread = threading.local()


def _bind_context(index):
    """Have the device's context current in this thread, which making a tensor map needs and a new thread lacks; once a thread."""
    bound = _thread.__dict__.setdefault("bound", set())
    if index not in bound:
        torch.cuda.current_stream(index).record_event()
        bound.add(index)


def _on_its_device(device, queue):
    with torch.cuda.device(device):
        queue()


def _refuse_specialised(kernel, args):
    """Raise TypeError if a size would be compiled into the kernel by its value, which another call may not share."""
    if hasattr(kernel, "params"):
        general = {param.name for param in kernel.params if param.do_not_specialize}
    else:  # the interpreter's, which specialises nothing, and only keeps what the decorator was told
        told = kernel.kwargs.get("do_not_specialize") or ()
        general = {kernel.arg_names[name] if isinstance(name, int) else name for name in told}
    for name, arg in zip(kernel.arg_names, args):
        if isinstance(arg, int) and name not in general:
            raise TypeError(
                f"{kernel.fn.__name__}: write @triton.jit(do_not_specialize=[{name!r}]), as a compiled kernel is reused"
            )


def compiled_with(config):
    """[(kernel's name, compiled kernel)] of what was launched here with a configuration."""
    return [
        (kernel.__name__, compiled)
        for (kernel, _, *found), (compiled, _) in _compiled.items()
        if meta(config).items() <= dict(found).items()
    ]


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


def tiles_per_sm(M, block_m, row, device):
    """How many tiles a multiprocessor has, with `row` of them for every block_m tokens: up to 1, all run at once."""
    return triton.cdiv(M, block_m) * row / sm_count(device)


def capability(device):
    """(major, minor) of the GPU that a launch on this device is for; while qkvlab.aot plans one, of its target. None on the CPU."""
    if recorder:
        return recorder.capability
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def needs_tma(device):
    """Raise UnsupportedError on a GPU without TMA, which came with compute capability 9.0."""
    found = capability(device)
    if found and found < (9, 0):
        raise UnsupportedError(f"this stage loads by TMA, which needs compute capability 9.0 or newer, not {found[0]}.{found[1]}")


def needs_wgmma(device):
    """Raise UnsupportedError where a Gluon kernel for Hopper does not run: other GPUs, the interpreter, Triton before 3.7."""
    found = capability(device)
    if found is None:
        raise UnsupportedError("this stage is written in Gluon for Hopper GPUs, and Triton's interpreter does not run it")
    if found[0] != 9:
        raise UnsupportedError(
            f"this stage multiplies by wgmma, which compute capability 9.0 alone has, not {found[0]}.{found[1]}"
        )
    if not hasattr(TensorDescriptor, "round_f32_to_tf32"):
        raise UnsupportedError(f"this stage needs Triton 3.7 or newer; this is {triton.__version__}")
