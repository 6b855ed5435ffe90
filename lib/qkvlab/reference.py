"""What is right: the operation in eager PyTorch, and the same in float64. No kernel imports this; every kernel is held against it."""

import torch
import torch.nn.functional as F

from .problem import EPS, HEAD_DIM, NUM_HEADS, QKV


def reference(hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps=EPS):
    """The operation as one writes it in PyTorch, in the dtype of its arguments; shapes as in problem.Inputs and problem.QKV."""
    heads = (*hidden_states.shape[:-1], NUM_HEADS, HEAD_DIM)
    query, key, value = (F.linear(hidden_states, weight).view(heads) for weight in (q_proj_weight, k_proj_weight, v_proj_weight))
    return QKV(_rms_norm(query, q_norm_weight, eps), _rms_norm(key, k_norm_weight, eps), value)


def oracle(hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight, eps=EPS):
    """`reference` in float64: takes the fp32 arguments, returns float64 results."""
    tensors = (hidden_states, q_proj_weight, k_proj_weight, v_proj_weight, q_norm_weight, k_norm_weight)
    return reference(*(tensor.double() for tensor in tensors), eps)


def _rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
