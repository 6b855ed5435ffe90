"""Every wrong argument is refused with a message that names it and what was expected; nothing falls back in silence."""

import pytest
import torch

import qkvlab
from qkvlab import IMPLEMENTATIONS, UnsupportedError, problem


def changed(inputs, **changes):
    return inputs._replace(**changes)


WRONG = {
    "not a tensor": (
        lambda x: changed(x, q_norm_weight=[1.0] * 128),
        TypeError,
        "q_norm_weight must be a torch.Tensor, got list",
    ),
    "dtype": (
        lambda x: changed(x, k_proj_weight=x.k_proj_weight.half()),
        TypeError,
        "k_proj_weight must be float32, got torch.float16",
    ),
    "rank": (
        lambda x: changed(x, hidden_states=x.hidden_states[0]),
        ValueError,
        r"hidden_states must have shape \[batch_size, seq_len, 1024\], got \[5, 1024\]",
    ),
    "hidden size": (
        lambda x: changed(x, hidden_states=x.hidden_states[..., :512].contiguous()),
        ValueError,
        "hidden_states must have shape",
    ),
    "weight shape": (
        lambda x: changed(x, v_proj_weight=x.v_proj_weight[:512]),
        ValueError,
        r"v_proj_weight must have shape \[1024, 1024\]",
    ),
    "norm shape": (
        lambda x: changed(x, k_norm_weight=x.k_norm_weight[:64]),
        ValueError,
        r"k_norm_weight must have shape \[128\]",
    ),
    "transposed": (
        lambda x: changed(x, q_proj_weight=x.q_proj_weight.T),
        ValueError,
        r"q_proj_weight must be contiguous.*q_proj_weight\.contiguous\(\)",
    ),
    "strided": (
        lambda x: changed(x, hidden_states=x.hidden_states.transpose(0, 1)),
        ValueError,
        "hidden_states must be contiguous",
    ),
    "meta device": (
        lambda x: changed(x, q_norm_weight=x.q_norm_weight.to("meta")),
        ValueError,
        "q_norm_weight must be on the device of hidden_states",
    ),
    "eps": (lambda x: changed(x, eps="small"), TypeError, "eps must be a float, got str"),
    "grad": (
        lambda x: changed(x, q_proj_weight=x.q_proj_weight.clone().requires_grad_()),
        ValueError,
        r"q_proj_weight requires grad.*torch\.no_grad\(\)",
    ),
}


@pytest.mark.anywhere
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])
def test_wrong_arguments_are_refused(small, impl, wrong):
    change, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        qkvlab.qkv_rmsnorm(*change(small), impl=impl)


def test_a_misaligned_tensor_is_refused(small):
    buffer = torch.empty(128 + 1, device=small.q_norm_weight.device)
    with pytest.raises(ValueError, match="k_norm_weight must start at a multiple of 16 bytes"):
        qkvlab.qkv_rmsnorm(*changed(small, k_norm_weight=buffer[1:]))


def test_grad_is_no_matter_without_grad_mode(small):
    with torch.no_grad():
        qkvlab.qkv_rmsnorm(*changed(small, q_proj_weight=small.q_proj_weight.clone().requires_grad_()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="mixed devices need a GPU; the meta device stands in above")
def test_mixed_devices_are_refused(small):
    with pytest.raises(ValueError, match="q_norm_weight must be on the device of hidden_states, cuda:0, got cpu"):
        qkvlab.qkv_rmsnorm(*changed(small, q_norm_weight=small.q_norm_weight.cpu()))


def test_an_unknown_impl_is_named(small):
    with pytest.raises(ValueError, match="impl must be 'auto' or one of naive, split, fused.*got 'fastest'"):
        qkvlab.qkv_rmsnorm(*small, impl="fastest")


@pytest.mark.anywhere
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(0, 7), (4, 0)])
def test_an_empty_batch_gives_empty_outputs(device, impl, shape):
    out = qkvlab.qkv_rmsnorm(*qkvlab.make_inputs(*shape, device=device), impl=impl)
    assert [tuple(tensor.shape) for tensor in out] == [(*shape, 8, 128)] * 3
    assert type(out) is problem.QKV and all(tensor.dtype == torch.float32 for tensor in out)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_out_is_written_and_returned(small, impl):
    separate = [torch.full((3, 5, 8, 128), float("nan"), device=small.hidden_states.device) for _ in range(3)]
    out = qkvlab.qkv_rmsnorm(*small, impl=impl, out=separate)
    fresh = qkvlab.qkv_rmsnorm(*small, impl=impl)
    for given, returned, expected in zip(separate, out, fresh):
        assert returned is given and torch.equal(given, expected)


@pytest.mark.anywhere
@pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])
def test_an_out_that_shares_memory_is_refused(small, impl):
    one, two, three = (torch.empty(3, 5, 8, 128, device=small.hidden_states.device) for _ in range(3))
    with pytest.raises(ValueError, match="out: key_states must not share memory with query_states"):
        qkvlab.qkv_rmsnorm(*small, impl=impl, out=(one, one, three))
    with pytest.raises(ValueError, match="out: value_states must not share memory with hidden_states"):
        qkvlab.qkv_rmsnorm(*small, impl=impl, out=(one, two, small.hidden_states.view(3, 5, 8, 128)))


def test_an_out_that_is_misaligned_or_no_tensor_is_refused(small):
    good = [torch.empty(3, 5, 8, 128, device=small.hidden_states.device) for _ in range(3)]
    shifted = torch.empty(3 * 5 * 1024 + 1, device=small.hidden_states.device)[1:].view(3, 5, 8, 128)
    with pytest.raises(ValueError, match="out: query_states must be .* multiple of 16 bytes"):
        qkvlab.qkv_rmsnorm(*small, out=(shifted, *good[1:]))
    for wrong in (good[:2], [None, *good[1:]], "out"):
        with pytest.raises(TypeError, match="out must be three tensors"):
            qkvlab.qkv_rmsnorm(*small, out=wrong)


def test_tensors_where_no_kernel_runs_are_refused(small):
    away = [tensor.to("meta") for tensor in small[:6]]
    with pytest.raises(UnsupportedError, match="the tensors are on meta"):
        qkvlab.qkv_rmsnorm(*away)


def test_a_wrong_out_is_refused(small):
    good = [torch.empty(3, 5, 8, 128, device=small.hidden_states.device) for _ in range(3)]
    with pytest.raises(TypeError, match="out: key_states must be float32"):
        qkvlab.qkv_rmsnorm(*small, out=(good[0], good[1].half(), good[2]))
    with pytest.raises(ValueError, match=r"out: value_states must be a contiguous \[3, 5, 8, 128\]"):
        qkvlab.qkv_rmsnorm(*small, out=(good[0], good[1], good[2][:, :4]))
