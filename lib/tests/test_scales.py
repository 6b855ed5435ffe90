"""persistent's arithmetic, which the interpreter does not run: how rows are scaled and what undoes it, the kernel's own source on NumPy arrays."""

import ast
import inspect
from types import SimpleNamespace

import numpy as np
import pytest

from qkvlab import problem, verification
from qkvlab.kernels import persistent

K, D = problem.HIDDEN_SIZE, problem.HEAD_DIM
FUNCTIONS = {"store_cast", "any_unusual", "unscaled", "sum_of_squares", "row_factor"}


class Block(np.ndarray):
    """A block of values: the methods that a Gluon tensor has."""

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)


class Pointer:
    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, other):
        return Pointer(self.memory, self.at + other)


def block(values, dtype=np.float32):
    return np.asarray(values, dtype).view(Block)


def store(p, values, mask):
    p.memory[p.at[np.broadcast_to(mask, p.at.shape)]] = values[np.broadcast_to(mask, p.at.shape)]


gl = SimpleNamespace(
    int32=np.int32, int64=np.int64, float32=np.float32, float16=np.float16, constexpr=None, static_range=range,
    max=lambda b, axis: b.max(axis), sum=lambda b, axis: b.sum(axis, dtype=np.float32), abs=np.abs, maximum=np.maximum,
    where=lambda condition, one, other: np.where(condition, one, other).view(Block), num_warps=lambda: 4,
    arange=lambda low, high, layout: block(np.arange(low, high), np.int32), SliceLayout=lambda *args: None,
    load=lambda p: p.memory[p.at].view(Block), store=store,
    inline_asm_elementwise=lambda asm, constraints, args, *_: 1 / np.sqrt(args[0]),
)  # fmt: skip


@pytest.fixture(scope="module")
def kernel():
    tree = ast.parse(inspect.getsource(persistent))
    tree.body = [node for node in tree.body if getattr(node, "name", "") in FUNCTIONS]
    for function in tree.body:
        function.decorator_list, function.args = [], _without_annotations(function.args)
    names = {"gl": gl, "USUAL_ROOT": persistent.USUAL_ROOT.value, "QUARTER": persistent.QUARTER.value}
    names |= {"row_layout": lambda warps: None, "wgmma_layout": lambda columns: None, "dealt": lambda o: o}
    exec(compile(tree, persistent.__file__, "exec"), names)
    return SimpleNamespace(**names)


def _without_annotations(args):
    for arg in args.args:
        arg.annotation = None
    return args


def cast(kernel, rows, weights):
    """(rows as fp16, scaled; the roots of what undoes that)."""
    out, root = np.full(rows.size, np.nan, np.float16), np.full(len(rows), np.nan, np.float32)
    kernel.store_cast(block(rows), Pointer(out), Pointer(root), 0, len(rows), weights)
    return out.reshape(rows.shape).astype(np.float32), root.view(Block)


def result(kernel, x, weight, norm, eps, i_proj):
    """One head as multiplying_warps finishes it, [rows, D]: of query (i_proj = 0) or value_states (2)."""
    (x_cast, row_root), (w_cast, column_root) = cast(kernel, x, False), cast(kernel, weight, True)
    quarters = [block(part) for part in np.split(x_cast @ w_cast.T, 4, axis=1)]
    unusual = kernel.any_unusual(column_root)
    if unusual:
        quarters, row_root = kernel.unscaled(quarters, row_root, Pointer(column_root)), np.ones_like(row_root)
    root = np.float32(1.0 if unusual else kernel.USUAL_ROOT)
    squares = sum(kernel.sum_of_squares(quarter) for quarter in quarters)
    factor = kernel.row_factor(squares, row_root, root, i_proj, np.float32(eps), D)
    return np.concatenate(quarters, axis=1) * factor[:, None] * (norm * root)[None, :]


def expected(x, weight, norm, eps, i_proj):
    out = x.astype(np.float64) @ weight.astype(np.float64).T
    return out if i_proj == 2 else out / np.sqrt((out**2).mean(axis=1, keepdims=True) + eps) * norm


@pytest.fixture
def head():
    random = np.random.default_rng(0)
    return random.standard_normal((6, K)).astype(np.float32), 0.03 * random.standard_normal((D, K)).astype(np.float32)


def compare(kernel, x, weight, eps=1e-6):
    """Row by row, of a head of query and one of value_states, whose norm weights are ones."""
    for i_proj, norm in ((0, np.linspace(0.5, 2, D, dtype=np.float32)), (2, np.ones(D, np.float32))):
        out, want = result(kernel, x, weight, norm, eps, i_proj), expected(x, weight, norm, eps, i_proj)
        error, size = np.linalg.norm(out - want, axis=1), np.linalg.norm(want, axis=1)
        assert (error <= verification.RELATIVE_ERROR * size).all(), (i_proj, error / size)


@pytest.mark.parametrize("states", [1e-30, 1e-10, 1.0, 1e6, 1e15])
@pytest.mark.parametrize("weights", [2.0**-6, 2.0**-5, 1.0, 2.0**4, 2.0**5])
def test_any_size_of_states_and_weights(kernel, head, states, weights):
    """2^-8 and 2, where weights stop being of usual size, are on the way."""
    compare(kernel, head[0] * np.float32(states), head[1] * np.float32(weights))


@pytest.mark.parametrize("states, weights", [(1e-18, 1e-18), (1e-10, 1e-26), (1e30, 1e-30), (1e-30, 1e37)])
def test_sizes_whose_product_leaves_the_range(kernel, head, states, weights):
    compare(kernel, head[0] * np.float32(states), head[1] * np.float32(weights))


def test_the_bounds_of_usual_size(kernel):
    rows = np.zeros((8, K), np.float32)
    rows[:, 3] = (
        2.0**-8,
        np.nextafter(np.float32(2.0**-8), 0),
        2.0,
        np.nextafter(np.float32(2.0), 0),
        0.03,
        0.0,
        1e-38,
        np.inf,
    )
    usual = cast(kernel, rows, True)[1] == kernel.USUAL_ROOT
    assert usual.tolist() == [True, False, False, True, True, False, False, False]
    out, root = cast(kernel, rows[:6], True)
    assert np.allclose(out * root[:, None] * root[:, None], rows[:6], rtol=2.0**-11, atol=0)


def test_one_row_of_another_size_leaves_the_others_alone(kernel, head):
    x, weight = head
    weight[5] *= 1e6
    weight[9] = 0.0
    out, want = result(kernel, x, weight, np.ones(D, np.float32), 1e-6, 2), expected(x, weight, 1.0, 0.0, 2)
    assert np.allclose(out[:, 5], want[:, 5], rtol=1e-2) and not out[:, 9].any()
    rest = np.delete(np.arange(D), [5, 9])
    assert np.linalg.norm(out[:, rest] - want[:, rest]) < verification.RELATIVE_ERROR * np.linalg.norm(want[:, rest])


def test_rows_of_every_size_beside_each_other(kernel, head):
    compare(kernel, head[0] * np.float32([[1e-30], [1e-12], [1.0], [1e5], [1e12], [1e17]]), head[1])


def test_small_projections_without_eps(kernel, head):
    compare(kernel, head[0] * np.float32(1e-17), head[1], eps=0.0)


@pytest.mark.parametrize("ratio", [1e4, 1e7])
def test_channels_out_of_proportion(kernel, head, ratio):
    """Large elements of states that meet small ones of weights: the small ones need their bits."""
    x, weight = head
    x[:, ::2] *= np.float32(ratio)
    weight[:, ::2] /= np.float32(ratio)
    compare(kernel, x, weight)
