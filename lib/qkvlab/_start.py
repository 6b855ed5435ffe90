"""Where kernels run in this process: on the GPU, or in Triton's interpreter. Decided on import, before Triton is imported."""

import os
import sys
from pathlib import Path

import torch

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    if any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidiactl").exists():
        raise RuntimeError(
            f"there is an NVIDIA device here, but torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it: install a CUDA "
            "build of torch and a driver that is new enough for it (580 or newer for CUDA 13), or set TRITON_INTERPRET=1 to do without"
        )
    if "triton" in sys.modules:
        raise RuntimeError(
            "no GPU, and Triton is imported already: import qkvlab before triton, or set TRITON_INTERPRET=1 in the environment"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    print(
        "qkvlab: no NVIDIA GPU, so kernels run in Triton's interpreter (TRITON_INTERPRET=1): a wrong index or mask shows; a race, the tensor cores' rounding and speed do not"
    )
