"""The suite: the 16 cases that the board times, and inputs for them."""

from dataclasses import dataclass
from functools import cache

import torch

from . import tables
from .problem import EPS, HEAD_DIM, HIDDEN_SIZE, QKV_OUT_SIZE, Inputs


@dataclass(frozen=True)
class Case:
    """One workload of the suite. Times in µs, as published for the B200 (NaN for a shape outside the suite)."""

    index: int
    uuid: str
    batch_size: int
    seq_len: int
    max_atol: float
    max_rtol: float
    required_matched_ratio: float
    eps: float
    b200_baseline_us: float
    b200_sol_us: float

    @property
    def m(self):
        """Rows of the GEMM: M = batch_size * seq_len."""
        return self.batch_size * self.seq_len

    def __str__(self):
        return f"{self.batch_size}x{self.seq_len}"


@cache
def cases():
    """The 16 cases in the board's own order (data/cases.csv)."""
    columns = {name: field.type for name, field in Case.__dataclass_fields__.items()}
    return tuple(Case(*row) for row in tables.read(tables.DATA / "cases.csv", columns).itertuples(index=False))


def case(batch_size, seq_len):
    """The suite's case of this shape; for any other shape one with the suite's tightest tolerance."""
    for known in cases():
        if (known.batch_size, known.seq_len) == (batch_size, seq_len):
            return known
    atol = min(known.max_atol for known in cases())
    return Case(-1, f"{batch_size}x{seq_len}", batch_size, seq_len, atol, 1e-5, 0.99, EPS, float("nan"), float("nan"))


def as_cases(shapes):
    """Cases from a Case or a (batch_size, seq_len), or from several of either; TypeError for anything else."""

    def one(shape):
        if isinstance(shape, Case):
            return shape
        if isinstance(shape, tuple) and len(shape) == 2 and all(isinstance(size, int) for size in shape):
            return case(*shape)
        raise TypeError(f"cases must be qkvlab.Case or (batch_size, seq_len) each, got {shape!r}")

    if isinstance(shapes, (list, tuple)) and not all(isinstance(size, int) for size in shapes):
        return [one(shape) for shape in shapes]
    return [one(shapes)] if shapes else []


def make_inputs(batch_size, seq_len, *, device, seed=0):
    """Random inputs as the board draws them, but for the norm weights: ±[0.5, 1.5), uniform, where the board's are ones.

    hidden_states is standard normal, the projection weights standard normal / sqrt(1024).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape):
        return 0.5 + torch.rand(*shape, generator=generator, device=device)

    weights = [normal(QKV_OUT_SIZE, HIDDEN_SIZE) / HIDDEN_SIZE**0.5 for _ in range(3)]
    norms = [uniform(HEAD_DIM) * normal(HEAD_DIM).sign() for _ in range(2)]
    return Inputs(normal(batch_size, seq_len, HIDDEN_SIZE), *weights, *norms, EPS)
