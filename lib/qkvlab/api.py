"""qkv_rmsnorm and IMPLEMENTATIONS: the one place that knows all stages, and picks one."""

from functools import cache
from typing import NamedTuple

import torch

from . import tuned
from .kernels.exact import exact
from .kernels.fused import fused
from .kernels.launch import Config, needs_tma, needs_wgmma
from .kernels.naive import naive
from .kernels.pair import pair
from .kernels.persistent import persistent
from .kernels.split import split
from .kernels.tma import tma
from .kernels.wide import saves_a_wave, wide
from .problem import EPS, Stage, UnsupportedError

_ANYWHERE = "interpreter, sm_80 and newer"
_TMA = "interpreter, sm_90 and newer"
_WGMMA = "sm_90, Triton 3.7 and newer"

IMPLEMENTATIONS = {
    stage.name: stage
    for stage in (
        Stage("naive", naive, "tf32", 5, "a matmul launched three times, a norm launched twice", _ANYWHERE),
        Stage("split", split, "tf32", 2, "one launch for the projections, one for the norms", _ANYWHERE),
        Stage("fused", fused, "tf32", 1, "the norm in the GEMM's epilogue", _ANYWHERE),
        Stage("tma", tma, "tf32", 1, "the copy engine loads and rounds the tiles", _TMA, needs_tma),
        Stage("wide", wide, "tf32", 1, "half a head of value_states beside each head of the others", _TMA, needs_tma),
        Stage("pair", pair, "fp16", 2, "everything cast to scaled fp16, then the fused GEMM", _TMA, needs_tma),
        Stage("persistent", persistent, "fp16", 2, "cast, epilogue and stores beside the products", _WGMMA, needs_wgmma),
        Stage("exact", exact, "3xfp16", 2, "three products of high and low fp16 parts", _TMA, needs_tma),
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


def tuned_for(M, classes):
    """(tuned M, its stages from the best) of tuned.classes that decides for M: the smallest not below it, the largest beyond them all."""
    return next((entry for entry in classes if entry[0] >= M), classes[-1])


@cache
def chosen(M, device):
    """M = batch_size * seq_len, torch.device or its name -> Choice.

    On a GPU that was tuned for, tuned_for decides; where its winner does not run (an older Triton), the runner-up does.
    Elsewhere a heuristic: up to M = 1024 tma, or wide where that saves a wave; above it persistent, or pair where that does not
    run; and fused on a GPU without TMA.
    Raises UnsupportedError for a CUDA device where there is none.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return Choice("fused", None, "no GPU")
    if not torch.cuda.is_available():
        raise UnsupportedError("there is no NVIDIA GPU here")

    def runs(stage):
        return not IMPLEMENTATIONS[stage].unsupported(device)

    classes = tuned.classes(device)
    if classes:
        tuned_m, ranked = tuned_for(M, classes)
        for stage, config in ranked:
            if runs(stage):
                return Choice(stage, Config(**config), f"tuned at M = {tuned_m}")
    ranked = ("wide" if saves_a_wave(M, device) else "tma",) if M <= 1024 else ("persistent", "pair")
    return Choice(next(filter(runs, (*ranked, "fused"))), None, "heuristic: nobody tuned for this GPU")


def contenders():
    """All stages, in the order of the story, and "auto" last, for timing.bench."""
    auto = Stage("auto", qkv_rmsnorm, "tf32 or fp16", None, "the stage that fits the shape", _ANYWHERE)
    return [*IMPLEMENTATIONS.values(), auto]
