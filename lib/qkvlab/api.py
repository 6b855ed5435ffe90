"""qkv_rmsnorm and IMPLEMENTATIONS: the one place that knows all stages, and picks one."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from . import tuned
from .kernels.exact import exact
from .kernels.fused import fused
from .kernels.launch import Config
from .kernels.naive import naive
from .kernels.pair import pair
from .kernels.split import split
from .kernels.tma import tma
from .problem import EPS


@dataclass(frozen=True)
class Stage:
    """One way to compute the operation. `function` has the reference's signature; `precision` is that of the products."""

    name: str
    about: str
    function: object
    launches: int | None
    precision: str
    runs: str

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


_ANYWHERE = "interpreter, sm_80 and newer"
_TMA = "interpreter, sm_90 and newer"

IMPLEMENTATIONS = {
    stage.name: stage
    for stage in (
        Stage("naive", "a matmul launched three times, a norm launched twice", naive, 5, "tf32", _ANYWHERE),
        Stage("split", "one launch for the projections, one for the norms", split, 2, "tf32", _ANYWHERE),
        Stage("fused", "the norm in the GEMM's epilogue", fused, 1, "tf32", _ANYWHERE),
        Stage("tma", "the copy engine loads and rounds the tiles", tma, 1, "tf32", _TMA),
        Stage("pair", "everything cast to scaled fp16, then the fused GEMM", pair, 2, "fp16", _ANYWHERE),
        Stage("exact", "three products of high and low fp16 parts", exact, 2, "3xfp16", _ANYWHERE),
    )
}


def qkv_rmsnorm(
    hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps=EPS, *, impl="auto", out=None
):
    """The operation, by the stage named `impl` or, with "auto", by the one that `chosen` names for this shape and device.

    Shapes and dtypes as in problem.Inputs; returns problem.QKV (`out`, if given). Raises ValueError for an unknown
    impl, what problem.check_arguments raises for arguments, UnsupportedError where the stage cannot run.
    """
    config = None
    if impl == "auto":
        impl = "fused"  # if hidden_states are no tensor, to say so
        if isinstance(hidden_states, torch.Tensor):
            impl, config, _ = chosen(hidden_states.shape[:-1].numel(), hidden_states.device)
    elif impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")
    inputs = hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps
    return IMPLEMENTATIONS[impl].function(*inputs, out=out, config=config)


class Choice(NamedTuple):
    """What "auto" runs: a stage's name, its configuration (None: the stage's own heuristic), and why."""

    stage: str
    config: Config | None
    why: str


@cache
def chosen(M, device):
    """M = batch_size * seq_len, torch.device -> Choice.

    On a GPU that was tuned for, the smallest tuned M that is not below this one decides, the largest beyond them all.
    Elsewhere a heuristic: tma up to M = 1024, fused above and where there is no TMA. pair and exact wait for `make tune`:
    what has not passed its rounds of checks on a GPU is not picked there.
    """
    if device.type != "cuda":
        return Choice("fused", None, "no GPU")
    classes = tuned.classes(device)
    if classes:
        tuned_m, stage, config = next((entry for entry in classes if entry[0] >= M), classes[-1])
        return Choice(stage, Config(**config), f"tuned at M = {tuned_m}")
    has_tma = torch.cuda.get_device_capability(device) >= (9, 0)
    return Choice("tma" if M <= 1024 and has_tma else "fused", None, "heuristic: nobody tuned for this GPU")


def contenders():
    """All stages, in the order of the story, and "auto" last, for timing.bench."""
    auto = Stage("auto", "the stage that fits the shape", qkv_rmsnorm, None, "tf32 or fp16", _ANYWHERE)
    return [*IMPLEMENTATIONS.values(), auto]
