"""Which GPU this is, what it can do at best, and the state it was in: rates from data/devices.yaml, state from NVML."""

import subprocess
from dataclasses import dataclass, field
from functools import cache

import torch
import yaml

from . import tables


@dataclass(frozen=True)
class Gpu:
    """Peak dense rates of one GPU: TFLOP/s by precision, TB/s of DRAM. `measured` holds the rates that a trial reached."""

    name: str
    sm_count: int
    dram_tb_s: float
    tflops: dict[str, float]
    measured: dict[str, float] = field(default_factory=dict)
    board: dict[str, float] = field(default_factory=dict)


@cache
def _devices():
    path = tables.existing(tables.DATA / "devices.yaml")
    return yaml.safe_load(path.read_text())


@cache
def gpus():
    """name -> Gpu, for every GPU in data/devices.yaml. Raises TableError, naming the key, where one is missing."""
    found = {}
    for name, entry in _devices().items():
        if name == "limits":
            continue
        try:
            found[name] = Gpu(
                name=name,
                sm_count=entry["sm_count"],
                dram_tb_s=entry["dram_tb_s"],
                tflops=_by_precision(entry),
                measured={"dram_tb_s": entry["measured"]["dram_tb_s"], **_by_precision(entry["measured"])}
                if "measured" in entry
                else {},
                board={key: value for key, value in entry.get("board", {}).items() if key != "source"},
            )
        except KeyError as missing:
            raise tables.TableError(f"data/devices.yaml: {name} has no {missing}") from None
    return found


def _by_precision(entry):
    return {key.removesuffix("_tflops"): value for key, value in entry.items() if key.endswith("_tflops")}


def shared_memory_limit():
    """Bytes of shared memory that one CTA can use, on Hopper and on Blackwell."""
    return _devices()["limits"]["shared_memory_bytes"]


def device():
    """Where kernels run in this process: 'cuda', or 'cpu' through Triton's interpreter. RuntimeError where neither can be."""
    import triton

    if triton.knobs.runtime.interpret:
        return "cpu"
    if not torch.cuda.is_available():
        raise RuntimeError("TRITON_INTERPRET is set, and not to 1, which asks for a GPU; there is none: unset it")
    return "cuda"


def gpu_name():
    """The name in data/devices.yaml of the current CUDA device; NVIDIA's own name if it has none there."""
    full = torch.cuda.get_device_name()
    return next((name for name in gpus() if name in full.split()), full)


def state():
    """What a row says of the machine: gpu, driver (None without NVML), torch, triton, commit."""
    import triton

    return {
        "gpu": gpu_name(),
        "driver": _nvml()[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit(),
    }


def sm_clock_mhz():
    """The SM clock now, MHz; NaN without NVML."""
    return _nvml()[1]


def _nvml():
    """(driver version, SM clock in MHz) of the current device, or (None, NaN)."""
    try:
        import pynvml
    except ImportError:
        return None, float("nan")
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(None).uuid}")
        return pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    finally:
        pynvml.nvmlShutdown()


def commit():
    """The checkout's commit, short, with '+' where the tree differs from it; 'unknown' outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=9", "--exclude=*"],
            cwd=tables.DATA.parent,
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
