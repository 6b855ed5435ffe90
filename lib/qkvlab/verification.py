"""verify(fn): is a callable right? Held against the float64 oracle, by the board's rule and by the lab's own.

The board (SOL-ExecBench 1.0.2): an element passes if |out - ref| <= max_atol + max_rtol * |ref|; a tensor passes if at
least 99 % of its elements do and all are finite. The lab, per tensor: no element beyond 2 * max_atol, at most 0.1 %
beyond max_atol, and a relative error (Frobenius norm) of at most 1e-3; every element written, inputs left alone, no
memory shared; and, in the first case, right with other inputs and with another eps too, and then the same again. The
board's norm weights are all ones; here they are random.
"""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from . import hardware, problem, suite
from .reference import oracle

OUTLIER_FACTOR = 2.0
OUTLIER_SHARE = 1e-3
RELATIVE_ERROR = 1e-3
LARGEST_M_ON_CPU = 586
SHOWN = 6  # lines of a printed report
COLUMNS = [
    "case", "uuid", "round", "tensor", "board", "lab", "elements", "beyond", "worst_error", "worst_index", "worst_value",
    "worst_expected", "relative_error", "verdict",
]  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What verify found. `table`: a row per case, round and tensor; `passed`: every row, by both rules."""

    name: str
    table: pd.DataFrame

    @property
    def passed(self):
        return bool(len(self.table)) and bool(self.table.board.all() and self.table.lab.all())

    def __str__(self):
        wrong = self.table[~(self.table.board & self.table.lab)]
        checked = f"{len(self.table)} tensors of {self.table.case.nunique()} case(s)"
        if self.table.empty:
            head = f"{self.name}: nothing was checked"
        else:
            head = f"{self.name}: " + (f"right in all {checked}" if self.passed else f"wrong in {len(wrong)} of {checked}")
        lines = [f"  {row.case} {row.tensor}: {row.verdict}" for row in wrong.head(SHOWN).itertuples()]
        if len(wrong) > SHOWN:
            lines.append(f"  and {len(wrong) - SHOWN} more: see .table")
        return "\n".join([head, *lines])

    __repr__ = __str__


def verify(fn, cases=None, *, rounds=1):
    """Hold `fn` against the oracle, in `rounds` rounds of fresh inputs for each case.

    fn: any callable with the reference's signature, returning three fp32 tensors [B, S, 8, 128].
    cases: qkvlab.Case or (batch_size, seq_len), or a list; default: the suite, up to M = 586 where the interpreter runs it.
    Returns a Report. An exception that fn raises is the caller's to see; TypeError where fn cannot be called.
    """
    if not callable(fn):
        raise TypeError(f"expected something to call, got {fn!r}; a stage is one of qkvlab.IMPLEMENTATIONS")
    device = hardware.device()
    if cases is None:
        cases = [case for case in suite.cases() if device == "cuda" or case.m <= LARGEST_M_ON_CPU]
    cases = suite.as_cases(cases)
    name = getattr(fn, "name", None) or getattr(fn, "__name__", type(fn).__name__)
    work = [(case, draw) for case in cases for draw in range(rounds)]
    rows = []
    for i, (case, draw) in enumerate(tqdm(work, desc=f"verify {name}", leave=False)):
        inputs = suite.make_inputs(case.batch_size, case.seq_len, device=device, seed=200 + i)
        found = check(fn, inputs, case) if i else check_steadiness(fn, inputs, case)
        rows += [{"case": str(case), "uuid": case.uuid, "round": draw, **row} for row in found]
    return Report(name, pd.DataFrame(rows, columns=COLUMNS))


def check_steadiness(fn, inputs, case):
    """As check, and then what a single call cannot show: other inputs with small rows, those with a large eps, and the first call again.

    Finds results that a later call overwrites, values kept from an earlier one, and an eps that is not what is passed.
    """
    rows, outputs = _checked(fn, inputs, case)
    if not all(map(_comparable, outputs, problem.empty_outputs(inputs.hidden_states))):
        return rows
    other = suite.make_inputs(case.batch_size, case.seq_len, device=inputs.hidden_states.device, seed=case.m)
    other = other._replace(hidden_states=other.hidden_states / 16)
    kept = [out.clone() for out in outputs]
    asked = {"other inputs": other, "eps = 0.01: is the eps used that is passed, inside the root?": other._replace(eps=1e-2)}
    for what, given in asked.items():
        for row, first, want, now in zip(rows, kept, oracle(*given), fn(*given)):
            if not _comparable(now, want):
                found = "another kind of tensor"
            elif float((now - want).norm()) <= RELATIVE_ERROR * float(want.norm()):
                continue
            elif torch.equal(now, first):
                found = "the first call's result again"
            else:
                found = _worst(_errors(now, want), now, want)[-1]
            if row["lab"]:
                row |= {"lab": False, "verdict": f"right at first, wrong with {what} ({found})"}
    for row, out, first in zip(rows, outputs, kept):
        if not torch.equal(out.view(torch.int32), first.view(torch.int32)):
            row |= {"lab": False, "verdict": f"a later call wrote into the result of this one; {row['verdict']}"}
    again = check(fn, inputs, case)
    return [row if not row["lab"] else repeated for row, repeated in zip(rows, again)]


def check(fn, inputs, case):
    """One call of `fn` on `inputs`, judged: a dict for each of the three tensors, with the keys

    tensor, board (bool), lab (bool), elements, beyond (how many of them beyond max_atol), worst_error, worst_index,
    worst_value, worst_expected, relative_error (Frobenius), verdict (one sentence).
    """
    return _checked(fn, inputs, case)[0]


def _checked(fn, inputs, case):
    """(what check returns, what fn returned)."""
    before = [tensor.clone() for tensor in inputs[:6]]
    expected = oracle(*inputs)
    with poisoned_memory():
        outputs = fn(*inputs)
    if not isinstance(outputs, (tuple, list)) or len(outputs) != 3 or not all(type(out) is torch.Tensor for out in outputs):
        got = type(outputs).__name__
        if isinstance(outputs, (tuple, list)):
            got = f"a {got} of {', '.join(type(out).__name__ for out in outputs) or 'nothing'}"
        raise TypeError(f"expected three tensors (query_states, key_states, value_states), got {got}")
    faults = [
        f"{name} was changed by the call"
        for name, old, now in zip(inputs._fields, before, inputs)
        if not torch.equal(old.view(torch.int32), now.view(torch.int32))
    ]
    named = dict(zip(problem.QKV._fields, outputs))
    tensors = {**dict(zip(inputs._fields, inputs[:6])), **named}
    rows = []
    for (name, out), want in zip(named.items(), expected):
        shared = [
            f"{name} shares memory with {other}" for other in tensors if other != name and problem.overlap(out, tensors[other])
        ]
        rows.append({"tensor": name, **_judge(out, want, case, faults + shared)})
    return rows, outputs


@contextmanager
def poisoned_memory():
    """Inside, memory that PyTorch hands out unwritten holds NaN: an element that nobody writes shows."""
    modes = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])


def _errors(out, expected):
    """|out - expected|; an element that cannot be compared counts as infinitely wrong, but for agreement on what is not finite."""
    same = (out == expected) | (out.isnan() & expected.isnan())
    return (out - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).masked_fill(same, 0.0)


def _worst(error, out, expected):
    """(index, error, value, expectation, the same in words) of the element that is furthest off."""
    flat = int(error.argmax())
    index = tuple(int(i) for i in np.unravel_index(flat, out.shape))
    worst, value, wanted = (float(tensor.flatten()[flat]) for tensor in (error, out, expected))
    return index, worst, value, wanted, f"worst at (batch, token, head, column) {index}: {value:.6g}, expected {wanted:.6g}"


def _comparable(out, expected):
    return out.shape == expected.shape and out.dtype == torch.float32 and out.device == expected.device


def _judge(out, expected, case, faults):
    if not _comparable(out, expected):
        verdict = f"is {out.dtype} {list(out.shape)} on {out.device}, expected torch.float32 {list(expected.shape)} on {expected.device}"
        return {"board": False, "lab": False, "elements": out.numel(), "verdict": verdict}
    if not out.numel():
        return {"board": True, "lab": not faults, "elements": 0, "verdict": "; ".join(faults) or "empty, as expected"}
    error = _errors(out, expected)
    beyond = int((error > case.max_atol).sum())
    index, worst, value, wanted, where = _worst(error, out, expected)
    finite = expected.isfinite()
    norm = float(expected[finite].norm())
    relative = float(error[finite].norm()) / norm if norm else float(error.max())

    matched = float((error <= case.max_atol + case.max_rtol * expected.abs()).double().mean())
    zeroed = norm > 0 and not bool(out.any())
    board = matched >= case.required_matched_ratio and bool(out.isfinite().all()) and not zeroed
    reasons = list(faults)
    if zeroed:
        reasons.append("all zeros")
    unwritten = int((out.isnan() & finite).sum())
    if unwritten:
        reasons.append(f"{unwritten} of {out.numel()} elements never written, or NaN")
    if worst > OUTLIER_FACTOR * case.max_atol or beyond > OUTLIER_SHARE * out.numel():
        reasons.append(f"{beyond} of {out.numel()} elements beyond {case.max_atol:g}")
    if not relative <= RELATIVE_ERROR:
        reasons.append(f"relative error {relative:.1e}, at most {RELATIVE_ERROR:g} allowed")
    lab = not reasons
    if not board:
        reasons.append("fails the board's rule")
    if reasons != faults or not reasons:  # values are right where there are only other faults
        reasons.append(where)
    return {
        "board": board, "lab": lab, "elements": out.numel(), "beyond": beyond, "worst_error": worst, "worst_index": index,
        "worst_value": value, "worst_expected": wanted, "relative_error": relative, "verdict": "; ".join(reasons),
    }  # fmt: skip
