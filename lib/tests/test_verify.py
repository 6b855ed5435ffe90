"""verify sees what the board forgives: each mutant is wrong in one way, and is caught with a verdict that says where."""

import re

import pytest
import torch

import qkvlab
from qkvlab import oracle, problem, reference, suite, verification, verify

SHAPES = [(2, 67)]


def last_row_only(*inputs):
    out = reference(*inputs)
    out.value_states[-1, -1] *= 1.01
    return out


def norm_weights_swapped(x, q, k, v, q_norm, k_norm, eps):
    return reference(x, q, k, v, k_norm, q_norm, eps)


def tail_skipped(*inputs):
    out = problem.empty_outputs(inputs[0])
    for written, right in zip(out, reference(*inputs)):
        written.flatten(0, 1)[:128] = right.flatten(0, 1)[:128]
    return out


def zeros(*inputs):
    return problem.QKV(*(torch.zeros_like(out) for out in reference(*inputs)))


def in_bf16(*inputs):
    return problem.QKV(*(out.float() for out in reference(*(tensor.bfloat16() for tensor in inputs[:6]), inputs[6])))


def one_element(*inputs):
    out = reference(*inputs)
    out.key_states[1, 3, 2, 1] += 0.5
    return out


def heads_swapped(*inputs):
    query, key, value = reference(*inputs)
    return query.flip(2), key, value


def not_normalised(*inputs):
    value = [torch.nn.functional.linear(inputs[0], weight).view(*inputs[0].shape[:2], 8, 128) for weight in inputs[1:4]]
    return value[0] * inputs[4], value[1] * inputs[5], value[2]


def eps_forgotten(*inputs):
    return reference(*inputs[:6], 0.0)


def input_changed(*inputs):
    out = reference(*inputs)
    inputs[0][0, 0, 0] = 7.0
    return out


def aliased(*inputs):
    query, key, _ = reference(*inputs)
    return query, key, key


def right_and_interleaved(*inputs):
    query, key, value = reference(*inputs)
    return *torch.stack([query, key], dim=-1).unbind(-1), value


def infinite(*inputs):
    out = reference(*inputs)
    out.query_states[0, 0, 0, 0] = float("inf")
    return out


BUFFERS = {}


def results_overwritten(*inputs):
    kept = BUFFERS.setdefault(inputs[0].shape, problem.empty_outputs(inputs[0]))
    for buffer, right in zip(kept, reference(*inputs)):
        buffer.copy_(right)
    return kept


CACHE = {}


def weights_kept_from_the_first_call(*inputs):
    return reference(inputs[0], *CACHE.setdefault("weights", tuple(weight.clone() for weight in inputs[1:4])), *inputs[4:])


def first_result_again(*inputs):
    return CACHE.setdefault("result", tuple(out.clone() for out in reference(*inputs)))


def eps_ignored(*inputs):
    return reference(*inputs[:6], 1e-6)


def eps_outside_the_root(*inputs):
    query, key, value = (
        torch.nn.functional.linear(inputs[0], weight).view(*inputs[0].shape[:2], 8, 128) for weight in inputs[1:4]
    )
    query, key = (
        x / (x.square().mean(-1, keepdim=True).sqrt() + inputs[6]) * weight
        for x, weight in ((query, inputs[4]), (key, inputs[5]))
    )
    return query, key, value


def nan_where_rows_are_small(*inputs):
    out = reference(*inputs)
    if inputs[0].abs().max() < 1:
        out.query_states[0, 0, 0, 0] = float("nan")
    return out


def norm_weights_without_sign(*inputs):
    return reference(*inputs[:4], inputs[4].abs(), inputs[5].abs(), inputs[6])


MUTANTS = {
    results_overwritten: "a later call wrote into the result of this one",
    weights_kept_from_the_first_call: r"right at first, wrong with other inputs \(worst at",
    first_result_again: r"wrong with other inputs \(the first call's result again\)",
    eps_ignored: "wrong with eps = 0.01: is the eps used that is passed",
    eps_outside_the_root: "wrong with eps = 0.01",
    nan_where_rows_are_small: "wrong with other inputs",
    norm_weights_without_sign: "query_states",
    last_row_only: "value_states",
    norm_weights_swapped: "query_states",
    tail_skipped: "never written, or NaN",
    zeros: "all zeros",
    in_bf16: "relative error",
    one_element: r"1 of \d+ elements beyond .*worst at .* \(1, 3, 2, 1\)",
    heads_swapped: "query_states",
    not_normalised: "query_states",
    input_changed: "hidden_states was changed by the call",
    aliased: "value_states shares memory with key_states",
    infinite: r"worst at .* \(0, 0, 0, 0\): inf",
}


def test_the_reference_passes():
    report = verify(reference, SHAPES, rounds=2)
    assert report.passed and len(report.table) == 6, report


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutants_are_caught(mutant):
    report = verify(mutant, SHAPES)
    assert not report.passed
    assert re.search(MUTANTS[mutant], str(report)), report


def test_the_board_would_forgive_some_of_them():
    forgiven = [mutant for mutant in MUTANTS if verify(mutant, SHAPES).table.board.all()]
    assert {last_row_only, one_element, input_changed} <= set(forgiven)


def test_eps_matters_where_rows_are_small(device):
    inputs = qkvlab.make_inputs(1, 4, device=device)
    inputs = inputs._replace(hidden_states=inputs.hidden_states * 1e-3)
    case = suite.case(1, 4)
    assert all(row["lab"] for row in verification.check(reference, inputs, case))
    assert not all(row["lab"] for row in verification.check(eps_forgotten, inputs, case))


def test_wrong_returns_are_refused():
    with pytest.raises(TypeError, match="expected three tensors"):
        verify(lambda *inputs: oracle(*inputs).query_states, SHAPES)
    report = verify(lambda *inputs: oracle(*inputs), SHAPES)
    assert "is torch.float64" in str(report) and not report.passed


def test_a_nan_is_not_taken_for_a_later_write():
    report = verify(tail_skipped, SHAPES)
    assert not report.passed and not report.table.verdict.str.contains("later call|other inputs|eps =").any(), report


def test_right_values_in_shared_memory_are_not_called_worst():
    report = verify(right_and_interleaved, SHAPES)
    assert "shares memory" in str(report) and "worst at" not in str(report)


def test_what_is_wrong_beyond_the_shown_lines_is_counted():
    report = verify(zeros, SHAPES, rounds=3)
    assert "wrong in 9 of 9" in str(report) and str(report).splitlines()[-1].strip() == "and 3 more: see .table"


def test_a_stage_by_name_is_no_function():
    with pytest.raises(TypeError, match="expected something to call, got 'fused'"):
        verify("fused", SHAPES)


def test_results_elsewhere_are_named():
    report = verify(lambda *inputs: tuple(out.to("meta") for out in reference(*inputs)), SHAPES)
    assert not report.passed and "on meta, expected" in str(report)


def test_no_case_is_no_pass():
    report = verify(reference, [])
    assert not report.passed and str(report) == "reference: nothing was checked"


def test_the_headline_counts():
    assert str(verify(reference, (1, 9))) == "reference: right in all 3 tensors of 1 case(s)"
    assert str(verify(one_element, SHAPES)).startswith("one_element: wrong in 1 of 3 tensors of 1 case(s)\n")


@pytest.mark.parametrize("cases", ["1x128", 7, [(1, 2, 3)], [("1", 2)]])
def test_what_is_no_case_is_refused(cases):
    with pytest.raises(TypeError, match="cases must be|not iterable"):
        verify(reference, cases)
