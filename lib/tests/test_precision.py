"""The operand roundings of precision.py, and what the two rules say of each."""

import pytest
import torch

from qkvlab import oracle, precision, verify

SHAPES = [(1, 128)]


def test_roundings_by_hand():
    x = torch.tensor([1 + 2**-10 + 2**-11 + 2**-20, -1 - 2**-11 - 2**-20, 70000.0, 1e-30])
    assert precision.tf32_truncated(x)[:2].tolist() == [1 + 2**-10, -1.0]
    assert precision.tf32_rounded(x)[:2].tolist() == [1 + 2**-9, -1 - 2**-10]
    assert precision.fp16(x)[2].isinf() and precision.fp16(x)[3] == 0
    assert precision.bf16(x)[0] == 1.0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_scaled_roundings_are_relative_to_the_row(scale):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * scale
    norm = x.double().norm()
    assert 1e-5 < (precision.fp16_scaled(x).double() - x.double()).norm() / norm < 5e-4
    assert (precision.fp16_twice(x).double() - x.double()).norm() / norm < 1e-7


def test_truncation_leans_and_rounding_does_not(device):
    import qkvlab

    inputs = qkvlab.make_inputs(1, 64, device=device)
    exact = oracle(*inputs).value_states
    lean = {
        name: float(
            ((precision.on_operands(precision.OPERANDS[name])(*inputs)[2] - exact) * exact.sign()).mean() / exact.abs().mean()
        )
        for name in ("tf32_truncated", "tf32_rounded")
    }
    assert lean["tf32_truncated"] < -5e-4 and abs(lean["tf32_rounded"]) < 5e-5


def test_what_the_board_passes_and_the_lab_does_not():
    reports = {name: verify(precision.on_operands(through), SHAPES) for name, through in precision.OPERANDS.items()}
    board = {name: bool(report.table.board.all()) for name, report in reports.items()}
    assert board == {
        "tf32_truncated": False,
        "tf32_rounded": True,
        "fp16": True,
        "bf16": False,
        "fp16_scaled": True,
        "fp16_twice": True,
    }
    assert {name for name, report in reports.items() if report.passed} == {"tf32_rounded", "fp16", "fp16_scaled", "fp16_twice"}
    assert reports["fp16_twice"].table.worst_error.max() < 1e-5
