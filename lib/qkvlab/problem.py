"""The operation: its sizes, its arguments and results, and what an argument must be.

fp32 QKV projection with per-head RMSNorm, from the audio attention of gemma-3n-E4B: problem 054 of
SOL-ExecBench, `054_audio_attention_qkv_projection_with_normalization`. Names are the benchmark's own.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

DEFINITION = "054_audio_attention_qkv_projection_with_normalization"
HIDDEN_SIZE = 1024
NUM_HEADS = 8
HEAD_DIM = 128
QKV_OUT_SIZE = NUM_HEADS * HEAD_DIM
WEIGHT_ROWS = 3 * QKV_OUT_SIZE
EPS = 1e-6


class UnsupportedError(RuntimeError):
    """A stage, a measurement or a GPU that cannot do this here; the message gives the reason."""


class Inputs(NamedTuple):
    """The operation's arguments, in the definition's order: `fn(*inputs)`. All tensors fp32 and contiguous."""

    hidden_states: torch.Tensor  # [B, S, 1024]
    q_proj_weight: torch.Tensor  # [1024, 1024] as [out, in]
    k_proj_weight: torch.Tensor  # [1024, 1024]
    v_proj_weight: torch.Tensor  # [1024, 1024]
    q_norm_weight: torch.Tensor  # [128]
    k_norm_weight: torch.Tensor  # [128]
    eps: float = EPS

    @property
    def M(self):
        """Rows of the GEMM: batch_size * seq_len."""
        return self.hidden_states.shape[0] * self.hidden_states.shape[1]


class QKV(NamedTuple):
    """The operation's results, each fp32 [B, S, 8, 128]; query and key are normalised head by head, value is not."""

    query_states: torch.Tensor
    key_states: torch.Tensor
    value_states: torch.Tensor


@dataclass(frozen=True)
class Stage:
    """One way to compute the operation, or a peer to time beside it. `function` has the reference's signature.

    precision: of the products. launches: kernels a call, None where it depends. runs: where it can, in words; needs: the
    same as a check of a torch.device, which raises UnsupportedError with the reason.
    """

    name: str
    function: object
    precision: str = "unstated"
    launches: int | None = None
    about: str = ""
    runs: str = ""
    needs: object = None

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def unsupported(self, device):
        """Why the stage does not run on a torch.device or its name; '' if it does."""
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            return "there is no NVIDIA GPU here"
        try:
            if self.needs:
                self.needs(device)
        except UnsupportedError as reason:
            return str(reason)
        return ""


def check_arguments(hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps):
    """Raise TypeError or ValueError, naming the argument and what was expected, unless a kernel may read these as they are."""
    tensors = Inputs(hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps)._asdict()
    del tensors["eps"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, got {tensor.dtype}")
        if tensor.device != hidden_states.device:
            raise ValueError(f"{name} must be on the device of hidden_states, {hidden_states.device}, got {tensor.device}")
        if name == "hidden_states":
            fits, expected = tensor.dim() == 3 and tensor.shape[2] == HIDDEN_SIZE, f"[batch_size, seq_len, {HIDDEN_SIZE}]"
        elif name.endswith("proj_weight"):
            fits, expected = tensor.shape == (QKV_OUT_SIZE, HIDDEN_SIZE), f"[{QKV_OUT_SIZE}, {HIDDEN_SIZE}]"
        else:
            fits, expected = tensor.shape == (HEAD_DIM,), f"[{HEAD_DIM}]"
        if not fits:
            raise ValueError(f"{name} must have shape {expected}, got {list(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}; pass {name}.contiguous()")
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes; pass {name}.clone()")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, and the kernels have no backward: call under torch.no_grad() or pass {name}.detach()"
            )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a float, got {type(eps).__name__}")


def empty_outputs(hidden_states):
    """Unwritten outputs: QKV of three [B, S, 8, 128] fp32 tensors, adjacent in one [3, B, S, 8, 128] allocation."""
    batch_size, seq_len, _ = hidden_states.shape
    return QKV(*hidden_states.new_empty(3, batch_size, seq_len, NUM_HEADS, HEAD_DIM).unbind(0))


def checked_outputs(out, inputs):
    """`out` as QKV, or TypeError / ValueError unless it is three aligned, contiguous fp32 [B, S, 8, 128] beside the inputs, each apart."""
    if not isinstance(out, (tuple, list)) or len(out) != 3 or not all(isinstance(tensor, torch.Tensor) for tensor in out):
        raise TypeError(f"out must be three tensors, {', '.join(QKV._fields)}")
    out = QKV(*out)
    device, shape = inputs.hidden_states.device, (*inputs.hidden_states.shape[:2], NUM_HEADS, HEAD_DIM)
    others = dict(zip(inputs._fields, inputs[:6]))
    for name, tensor in out._asdict().items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"out: {name} must be float32, got {tensor.dtype}")
        if tensor.shape != shape or tensor.device != device or not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"out: {name} must be a contiguous {list(shape)} on {device} that starts at a multiple of 16 bytes")
        for other in others:
            if overlap(tensor, others[other]):
                raise ValueError(f"out: {name} must not share memory with {other}")
        others[name] = tensor
    return out


def overlap(a, b):
    """Whether the extents of two tensors in memory intersect."""

    def extent(tensor):
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1
        return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()

    if not (a.numel() and b.numel()) or a.device != b.device:
        return False
    (a_start, a_end), (b_start, b_end) = extent(a), extent(b)
    return a_start < b_end and b_start < a_end


def operation(run):
    """Make `run(inputs, out, config)`, which launches a stage's kernels, a public function with the operation's signature.

    The function checks its arguments, allocates what it returns unless `out` is given, and launches nothing for an
    empty batch. `config` overrides the stage's own heuristic.
    """

    def stage(
        hidden_states,
        q_proj_weight,
        k_proj_weight,
        v_proj_weight,
        q_norm_weight,
        k_norm_weight,
        eps=EPS,
        *,
        out=None,
        config=None,
    ):
        inputs = Inputs(hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps)
        check_arguments(*inputs)
        inputs = inputs._replace(eps=float(eps))  # an int would be compiled into a kernel as an int
        out = empty_outputs(hidden_states) if out is None else checked_outputs(out, inputs)
        if hidden_states.numel():
            run(inputs, out, config)
        return out

    stage.__name__ = stage.__qualname__ = run.__name__
    stage.__module__ = run.__module__
    stage.__doc__ = run.__doc__
    stage.run = run
    return stage
