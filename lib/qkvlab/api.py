"""qkv_rmsnorm and IMPLEMENTATIONS: the one place that knows all stages, and picks one."""

from dataclasses import dataclass

from .kernels.fused import fused
from .kernels.naive import naive
from .kernels.split import split
from .problem import EPS


@dataclass(frozen=True)
class Stage:
    """One way to compute the operation. `function` has the reference's signature; `precision` is that of the products."""

    name: str
    about: str
    function: object
    launches: int
    precision: str
    runs: str


_ANYWHERE = "interpreter, sm_80 and newer"

IMPLEMENTATIONS = {
    stage.name: stage
    for stage in (
        Stage("naive", "a matmul launched three times, a norm launched twice", naive, 5, "tf32", _ANYWHERE),
        Stage("split", "one launch for the projections, one for the norms", split, 2, "tf32", _ANYWHERE),
        Stage("fused", "the norm in the GEMM's epilogue", fused, 1, "tf32", _ANYWHERE),
    )
}


def qkv_rmsnorm(
    hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps=EPS, *, impl="auto", out=None
):
    """The operation, by the stage named `impl` or, with "auto", by the one that `chosen` names for this shape and device.

    Shapes and dtypes as in problem.Inputs; returns problem.QKV (`out`, if given). Raises ValueError for an unknown
    impl, what problem.check_arguments raises for arguments, UnsupportedError where the stage cannot run.
    """
    if impl == "auto":
        impl = chosen(hidden_states)
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")
    function = IMPLEMENTATIONS[impl].function
    return function(hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps, out=out)


def contenders():
    """All stages, in the order of the story, and "auto" last, for bench."""
    stages = list(IMPLEMENTATIONS.values())
    return [
        *stages,
        Stage("auto", "the stage that fits the shape", qkv_rmsnorm, stages[-1].launches, stages[-1].precision, stages[-1].runs),
    ]


def chosen(hidden_states):
    """The name of the stage that "auto" runs on these hidden_states."""
    return "fused"
