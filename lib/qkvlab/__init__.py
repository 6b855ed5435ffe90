"""A lab for one operation: fp32 QKV projection with per-head RMSNorm, from the reference to the speed of light."""

from . import _start  # noqa: F401, I001  first: it decides, before Triton is imported, where kernels run
from .api import IMPLEMENTATIONS, chosen, qkv_rmsnorm
from .timing import bench, host_time, measure, peers, ratio, summarise
from .problem import QKV, Inputs, Stage, UnsupportedError
from .reference import oracle, reference
from .suite import Case, case, cases, make_inputs
from .verification import verify

__all__ = [
    "IMPLEMENTATIONS", "Stage", "chosen", "qkv_rmsnorm",
    "bench", "host_time", "measure", "peers", "ratio", "summarise",
    "Case", "Inputs", "QKV", "UnsupportedError", "case", "cases", "make_inputs",
    "oracle", "reference", "verify",
]  # fmt: skip
