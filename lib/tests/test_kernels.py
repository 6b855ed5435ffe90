"""Every stage on the shapes, scales and values where a kernel goes wrong; configurations that the heuristic does not pick here."""

import inspect

import pytest
import torch
import triton
import triton.language as tl

import qkvlab  # before triton: it decides where kernels run
from qkvlab import IMPLEMENTATIONS, oracle, problem, verification, verify
from qkvlab.kernels import tile

stages = pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "auto"])


def run(impl, inputs):
    return qkvlab.qkv_rmsnorm(*inputs, impl=impl)


def relative(out, expected):
    return float((out - expected).norm() / expected.norm())


@stages
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 43), (1, 131)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_odd_shapes(impl, shape):
    report = verify(lambda *inputs: run(impl, inputs), [shape])
    assert report.passed, report


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="all 16 cases take the interpreter minutes; the notebooks run the small ones"
)
@stages
def test_all_cases(impl):
    report = verify(lambda *inputs: run(impl, inputs), rounds=3)
    assert report.passed, report


@pytest.mark.parametrize(
    "stage, config",
    [
        ("naive", tile.Config(BLOCK_M=32, BLOCK_K=64, num_warps=4, num_stages=2)),
        ("split", tile.Config(BLOCK_M=64, BLOCK_K=64, num_warps=4, num_stages=2)),
        ("fused", tile.Config(BLOCK_M=64, BLOCK_K=32, num_warps=4, num_stages=3)),
        ("fused", tile.Config(BLOCK_M=16, BLOCK_K=128, num_warps=4, num_stages=2)),
    ],
)
def test_other_configurations(stage, config):
    report = verify(lambda *inputs: IMPLEMENTATIONS[stage].function(*inputs, config=config), [(1, 70)])
    assert report.passed, report


@stages
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e5, 1e15])
def test_any_scale(impl, scale, device):
    """A common scale of hidden_states cancels in query and key (once eps is small beside it) and carries over to value."""
    inputs = qkvlab.make_inputs(1, 6, device=device, seed=3)
    inputs = inputs._replace(hidden_states=inputs.hidden_states * scale)
    for out, expected in zip(run(impl, inputs), oracle(*inputs)):
        assert relative(out, expected) < verification.RELATIVE_ERROR


@stages
@pytest.mark.parametrize("states, weights", [(1e-18, 1e-18), (1e-10, 1e-26), (1e30, 1e-30), (1e-30, 1e37)])
def test_any_two_scales(impl, states, weights, device):
    """The product of two scales may leave fp32's range where the result does not."""
    inputs = qkvlab.make_inputs(1, 6, device=device, seed=3)
    scaled = [weight * weights for weight in inputs[1:4]]
    inputs = inputs._replace(**dict(zip(inputs._fields[:4], (inputs.hidden_states * states, *scaled))))
    for out, expected in zip(run(impl, inputs), oracle(*inputs)):
        assert relative(out, expected) < verification.RELATIVE_ERROR


@stages
@pytest.mark.parametrize("size", [2.0**-8, 2.0])
def test_rows_of_weights_of_either_side_of_a_size(impl, size, device):
    """persistent has one scale for all rows of weights whose largest element is between these, and others for the others."""
    inputs = qkvlab.make_inputs(1, 6, device=device, seed=4)
    for weight in inputs[1:4]:
        weight *= size / weight.abs().amax(dim=1).median()
        weight[::7] = 0.0
    for out, expected in zip(run(impl, inputs), oracle(*inputs)):
        assert relative(out, expected) < verification.RELATIVE_ERROR


@stages
@pytest.mark.parametrize("states, weights", [(1.0, 1e12), (1e-8, 1e24)])
def test_a_head_of_large_and_small_rows(impl, states, weights, device):
    """Each column is as right as if it were alone: its row's scale is its own. The norm mixes the columns of a head, value_states does not."""
    inputs = qkvlab.make_inputs(1, 6, device=device, seed=4)
    inputs.hidden_states.mul_(states)
    for weight in inputs[1:4]:
        weight[::2] *= weights
        weight[1::2] /= weights
    outputs, expected = run(impl, inputs), oracle(*inputs)
    assert all(relative(out, want) < verification.RELATIVE_ERROR for out, want in zip(outputs, expected))
    for columns in (slice(0, None, 2), slice(1, None, 2)):
        out, want = outputs.value_states[..., columns], expected.value_states[..., columns]
        assert relative(out, want) < verification.RELATIVE_ERROR


@stages
@pytest.mark.parametrize("states, weight, others", [(1e36, 1e33, 1e-33), (1e-36, 1e33, 1.0), (1e33, 1e33, 1e-32)])
def test_a_column_out_of_proportion_leaves_its_neighbours_alone(impl, states, weight, others, device):
    inputs = qkvlab.make_inputs(1, 6, device=device, seed=4)
    inputs.hidden_states[:, ::2] *= states
    inputs.v_proj_weight.mul_(others)[::128] *= weight / others
    value, expected = run(impl, inputs).value_states, oracle(*inputs).value_states
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert relative(value[:, rows, :, 1:], expected[:, rows, :, 1:]) < verification.RELATIVE_ERROR


@stages
def test_products_that_are_all_zero_stay_zero(impl, small):
    small.hidden_states.zero_()[..., 5] = 1e38
    small.v_proj_weight.zero_()[:, 6] = 1e38
    assert not run(impl, small).value_states.any()


@stages
def test_a_zero_row_gives_zeros(impl, small):
    small.hidden_states[1, 2] = 0.0
    assert all(not out[1, 2].any() and out[1, 1].all() for out in run(impl, small))


@stages
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(impl, small, value):
    small.hidden_states[1, 2, 17] = value
    for out in run(impl, small):
        assert not out[1, 2].isfinite().any()
        out[1, 2] = 0.0
        assert out.isfinite().all()


@stages
def test_one_huge_element(impl, small):
    small.hidden_states[2, 1, 5] = 3e8
    for out, expected in zip(run(impl, small), oracle(*small)):
        assert relative(out, expected) < verification.RELATIVE_ERROR


@stages
def test_eps_is_what_is_passed(impl, small):
    large = small._replace(eps=10.0)
    for out, expected in zip(run(impl, large), oracle(*large)):
        assert relative(out, expected) < verification.RELATIVE_ERROR
    assert not torch.equal(run(impl, large).query_states, run(impl, small).query_states)


@stages
def test_the_same_call_twice_is_bitwise_the_same(impl, small):
    assert all(torch.equal(a, b) for a, b in zip(run(impl, small), run(impl, small)))


@triton.jit
def rounded_kernel(x, out, N, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(out + o, tile.round_tf32(tl.load(x + o, mask=o < N, other=0.0)), mask=o < N)


def test_rounding_to_tf32(device):
    up = 1 + 2**-10
    pairs = [
        (1.0, 1.0),
        (1 + 2**-11, up),
        (1 + 2**-11 - 2**-23, 1.0),
        (up, up),
        (-1 - 2**-11, -up),
        (0.0, 0.0),
        (float("inf"), float("inf")),
    ]
    values = torch.tensor([value for value, _ in pairs] + [0.0])
    values[-1:].view(torch.int32)[:] = 0x7FFFFFFF  # the NaN that the GPU makes
    out = torch.empty_like(values, device=device)
    rounded_kernel[(1,)](values.to(device), out, len(values), BLOCK=8)
    assert out[:-1].tolist() == [expected for _, expected in pairs] and out[-1].isnan()


def test_a_size_that_would_be_specialised_is_refused(device):
    from qkvlab.kernels import launch

    @triton.jit
    def careless_kernel(x, M, BLOCK: tl.constexpr):
        tl.store(x + tl.arange(0, BLOCK), 1.0, mask=tl.arange(0, BLOCK) < M)

    with pytest.raises(TypeError, match=r"do_not_specialize=\['M'\]"):
        launch.launch(careless_kernel, (1,), torch.zeros(4, device=device), 4, BLOCK=4)


def test_stages_say_what_they_are():
    for name, stage in IMPLEMENTATIONS.items():
        assert stage.name == name and stage.launches > 0 and stage.about and stage.runs
        assert list(inspect.signature(stage.function).parameters)[:7] == list(problem.Inputs._fields)
        assert "problem.Inputs" in stage.function.__doc__
