"""The order of events in persistent, which the interpreter does not run: the kernel's own source, its warps in a random order.

Values are left out. Kept account of is what lies in which buffer when products read it, who waits for what, which rows are
cast, and what a tile's results were made of. The module's functions run as coroutines that pause wherever another warp, a
copy or a product may come first; `gl`, the copy engine, barriers and products are stand-ins.
"""

import __future__

import ast
import inspect
import random
from types import SimpleNamespace
from typing import NamedTuple  # noqa: F401  for the kernel's source

import numpy as np
import pytest

from qkvlab.kernels import persistent

HEADS, D, K, BLOCK = 8, 128, 1024, (128, 64)
UNUSUAL = range(2, 3 * HEADS, 5)  # heads with weights that have other scales than usual
USUAL_ROOT = persistent.USUAL_ROOT.value
RUN = {
    "casting_warp", "weight_buffers", "kept_steps", "first_place", "next_place", "skipped", "queue_products", "done_before",
    "multiplying_warps", "fetching_warp", "result_of", "Plan", "most_tiles", "plan",
}  # fmt: skip
CONSTANTS = {"WARPS", "CASTING_WARPS", "CASTING_ROWS", "STEPS", "BUFFERS", "BARRIERS", "QUARTER", "USUAL_ROOT"}
PAUSING = {
    "casting_warp", "queue_products", "done_before", "multiplying_warps", "fetching_warp", "gdc_wait", "take", "claim", "publish",
    "wait_for", "wait", "arrive", "expect", "async_copy_global_to_shared", "warpgroup_mma", "warpgroup_mma_wait",
}  # fmt: skip


class Coroutines(ast.NodeTransformer):
    """Functions that call what pauses become coroutines, and await it."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.decorator_list = []
        return ast.AsyncFunctionDef(**vars(node)) if node.name in PAUSING else node

    def visit_Call(self, node):
        self.generic_visit(node)
        return ast.Await(node) if getattr(node.func, "id", getattr(node.func, "attr", "")) in PAUSING else node


def module(change=("", "")):
    """The functions of persistent's source, in which change[0] is change[1], as coroutines among the stand-ins below."""
    source = inspect.getsource(persistent)
    assert change[0] in source, "there is nothing to change"
    tree = ast.parse(source.replace(*change))
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", "") in RUN or isinstance(node, ast.Assign) and node.targets[0].id in CONSTANTS
    ]
    names = dict(globals(), cache=lambda f: f, NUM_HEADS=HEADS)
    tree = ast.fix_missing_locations(Coroutines().visit(tree))
    exec(compile(tree, persistent.__file__, "exec", __future__.annotations.compiler_flag), names)
    return SimpleNamespace(**names)


# --- what stands in ------------------------------------------------------------------------------------------------------


class Until:
    """Awaited: pause, and go on at some time after the condition holds."""

    def __init__(self, condition=lambda: True):
        self.condition = condition

    def __await__(self):
        yield self.condition


now = SimpleNamespace()  # the warp that runs, and the call it belongs to


class gl:
    constexpr = staticmethod(lambda x: type("constexpr", (type(x),), {"value": x})(x))
    to_tensor = staticmethod(lambda x: x)
    SliceLayout = BlockedLayout = staticmethod(lambda *args: None)
    float16 = float32 = None
    minimum, static_range = min, range
    where = staticmethod(lambda condition, one, other: one if condition else other)
    cdiv = staticmethod(lambda a, b: -(-a // b))
    arange = staticmethod(lambda low, high, layout: np.arange(low, high))
    zeros = staticmethod(lambda shape, dtype, layout: ())
    program_id = staticmethod(lambda axis: now.warp.cta)
    num_programs = staticmethod(lambda axis: now.call.ctas)

    @staticmethod
    def load(p, mask=True, other=None):
        assert now.call.seen(p.at[np.broadcast_to(mask, p.at.shape)]), "scales are read before they can be seen"
        return p.at[0]


class Pointer:
    """Into unscale or the counters."""

    def __init__(self, at=0):
        self.at = at

    def __add__(self, other):
        return Pointer(self.at + other)


class Barrier:
    """One arrival a phase, and the bytes that were announced with it."""

    def __init__(self):
        self.phases, self.arrived, self.bytes = 0, False, 0

    def arrive(self, n=0):
        assert not self.arrived, "two arrivals in a phase"
        self.arrived, self.bytes = True, self.bytes + n
        self.complete(0)

    def complete(self, n):
        self.bytes -= n
        if self.arrived and not self.bytes:
            self.phases, self.arrived = self.phases + 1, False


class Several(list):
    index = list.__getitem__


class mbarrier:
    @staticmethod
    async def wait(barrier, parity):
        await Until(lambda: barrier.phases % 2 != parity)
        # A warp sees a barrier's phases one by one; a first wait of odd parity is for none.
        now.warp.seen[barrier] = now.warp.seen.get(barrier, -parity) + 1
        assert barrier.phases == now.warp.seen[barrier], "a phase is passed early, or missed"

    @staticmethod
    async def expect(barrier, n, pred):
        await Until()
        if pred:
            barrier.arrive(n)

    @staticmethod
    async def arrive(barrier, count, pred):
        """Both warpgroups meet before and after, and one of their threads arrives."""
        await meet()
        if pred and now.warp.part == 0:
            barrier.arrive()
        await meet()


async def meet():
    cta = now.call.running[now.warp.cta]
    cta.met += 1
    wanted = (cta.met + 1) // 2 * 2
    await Until(lambda: cta.met >= wanted)


class Buffer:
    def __init__(self):
        self.holds, self.readers, self.filling = None, 0, False

    permute = _reinterpret = lambda self, *args: self


class tma:
    @staticmethod
    async def async_copy_global_to_shared(desc, coord, barrier, buffer, pred=True):
        await Until()
        if not pred:
            return
        assert not buffer.readers and not buffer.filling, "a buffer is filled while products may read it"
        row, k = (coord[0] // BLOCK[0], coord[1]) if desc is X else (coord[0] * 16 // D, coord[4])
        assert desc is not X or now.call.seen(np.array([3 * HEADS * D + coord[0]])), "rows are fetched before they are cast"
        buffer.holds, buffer.filling = None, True

        def arrives():
            buffer.holds, buffer.filling = (desc, row, k), False
            barrier.complete(BLOCK[0] * BLOCK[1] * 2)

        now.call.events.append(arrives)


class TensorMap:
    block_shape = layout = None


X, W = TensorMap(), TensorMap()


async def warpgroup_mma(x, w, acc, use_acc, is_async):
    await Until()
    assert x.holds and w.holds, "products of what is not there"
    warp, group = now.warp, SimpleNamespace(done=False)
    warp.queued.append(group)
    for buffer in (x, w):
        buffer.readers += 1

    def done():
        group.done = True
        for buffer in (x, w):
            buffer.readers -= 1

    now.call.events.append(done)
    return (*acc * use_acc, (x.holds, w.holds))


async def warpgroup_mma_wait(n, deps):
    warp = now.warp
    await Until(lambda: all(group.done for group in warp.queued[: len(warp.queued) - n]))
    return deps[0]


def warpgroup_mma_init(acc):
    return acc


async def gdc_wait():
    await Until()


async def take(counter):
    await Until()
    now.call.taken += 1
    return now.call.taken - 1


async def claim(flag):
    await Until()
    assert flag.at < now.call.counters, "a flag beyond the counters"
    first = flag.at not in now.call.claimed
    now.call.claimed.add(flag.at)
    return first


def load_rows(source, i_row, end, K, ROWS, EVICTION):
    return i_row


def store_cast(b_row, cast, unscale, i_row, end, weights):
    assert i_row == 3 * HEADS * D + b_row, "other rows than were loaded"
    now.call.cast[b_row : b_row + now.call.module.CASTING_ROWS] += 1


async def publish(counter, n):
    await Until()
    call, i_m = now.call, counter.at - 1
    call.published[i_m] += n
    assert call.published[i_m] < BLOCK[0] or call.cast[i_m * BLOCK[0] : (i_m + 1) * BLOCK[0]].all(), "published before it is cast"


async def wait_for(counter, n):
    call = now.call
    await Until(lambda: call.published[counter.at - 1] >= n)


class Shared:
    def store(self, value):
        self.value = value

    def slice(self, *args):
        return self


def quarters(acc):
    return (acc,) * 4


def any_unusual(b_column_root):
    return b_column_root // D in UNUSUAL


def unscaled(quarter, b_row_root, column_root):
    return tuple((*part, b_row_root, column_root.at[0]) for part in quarter)


def sum_of_squares(b):
    return ()


def row_factor(b_squares, b_row_root, column_root, i_proj, eps, D):
    return b_row_root, column_root, i_proj


def alternated(b, b_factor, s_norm):
    return ((b, b_factor, s_norm.value),) * 2


def store_half(b, out, i_head, i_row, M, i_column, RIGHT, HEADS, D):
    if i_row >= M:
        return
    (*acc, row, column), factor, norm = b if i_head in UNUSUAL else ((*b[0], *2 * [None]), *b[1:])
    i_m, i_proj = i_row // BLOCK[0], i_head // HEADS
    assert {x for x, _ in acc} == {(X, i_m, k) for k in range(0, K, BLOCK[1])} and len(acc) == K // BLOCK[1], "not its rows"
    assert all(w == (W, i_head, k) for (_, _, k), w in acc), "not its weights"
    scales = 3 * HEADS * D + i_row, i_head * D
    if i_head in UNUSUAL:
        assert (row, column) == scales and factor == (1.0, 1.0, i_proj) and norm == i_proj, "not its scales"
    else:
        assert factor == (scales[0], USUAL_ROOT, i_proj) and norm == i_proj * USUAL_ROOT, "not its scales"
    assert out == "qkv"[i_proj], "not its projection"
    now.call.stored.append((i_m, i_head, i_column, RIGHT, now.warp.part))


def norm_of(q_norm_weight, k_norm_weight, i_proj, o_column):
    return i_proj


def dealt(o):
    return o


def wgmma_layout(columns):
    return None


# --- the call ------------------------------------------------------------------------------------------------------------


class Call:
    """One call's second launch: M rows on `sms` multiprocessors, of which `resident` run CTAs at a time."""

    def __init__(self, kernel, M, sms, stages, seed, resident):
        *self.division, self.first_rows, self.ctas, self.counters = kernel.plan(M, sms)
        self.module, self.M, self.tiles_m, self.stages = kernel, M, -(-M // BLOCK[0]), stages
        self.taken, self.claimed, self.stored, self.events = 0, set(), [], []
        self.cast, self.published = np.zeros(self.tiles_m * BLOCK[0], int), np.zeros(self.tiles_m, int)
        self.running, self.warps, self.random = {}, [], random.Random(seed)
        waiting = self.random.sample(range(self.ctas), self.ctas)
        now.call = self
        try:
            while waiting or self.warps or self.events:
                while waiting and len(self.running) < resident:
                    self.start(waiting.pop())
                self.step()
        finally:
            for warp in self.warps:
                warp.coroutine.close()
        self.check()

    def seen(self, rows):
        """Whether these rows of cast are cast for all to see."""
        i_m = np.unique((rows[rows >= 3 * HEADS * D] - 3 * HEADS * D) // BLOCK[0])
        return all(i * BLOCK[0] < self.first_rows or self.published[i] == BLOCK[0] for i in i_m)

    def start(self, i):
        kernel, S = self.module, self.stages
        buffers = (
            Several(Buffer() for _ in range(S)), Several(Buffer() for _ in range(kernel.weight_buffers(S))),
            Several(Barrier() for _ in range(kernel.BARRIERS)), Several(Barrier() for _ in range(kernel.BARRIERS)),
        )  # fmt: skip
        self.running[i] = SimpleNamespace(met=0, left=4 + kernel.CASTING_WARPS - 1)
        parts = [
            kernel.multiplying_warps(
                "q",
                "k",
                "v",
                buffers,
                Pointer(np.zeros(1, int)),
                None,
                None,
                Shared(),
                self.M,
                *self.division,
                0.0,
                HEADS,
                D,
                BLOCK[0],
                S,
            )
            for _ in range(2)
        ]
        parts += [kernel.fetching_warp(X, W, buffers, Pointer(), self.M, self.first_rows, *self.division, HEADS, D, *BLOCK, S)]
        parts += [
            kernel.casting_warp(None, None, None, Pointer(), self.M, self.first_rows, K, 3 * HEADS * D, BLOCK[0], i_warp)
            for i_warp in range(kernel.CASTING_WARPS)
        ]
        for part, coroutine in enumerate(parts):
            slow = self.random.choice([1, 1, 10])
            self.warps.append(
                SimpleNamespace(cta=i, part=part, coroutine=coroutine, slow=slow, queued=[], seen={}, until=lambda: True)
            )

    def step(self):
        """Something that can happen next does: a copy arrives, products are done, or a warp goes on to where it pauses."""
        if self.events and self.random.random() < 0.3:
            return self.events.pop(self.random.randrange(len(self.events)))()
        start = self.random.randrange(len(self.warps)) if self.warps else 0
        for i in range(len(self.warps)):
            warp = self.warps[(start + i) % len(self.warps)]
            if warp.until() and self.random.randrange(warp.slow) == 0:
                break
        else:
            ready = [warp for warp in self.warps if warp.until()]
            if not ready:
                assert self.events, "nobody goes on"
                return self.events.pop(self.random.randrange(len(self.events)))()
            warp = ready[0]
        now.warp = warp
        try:
            warp.until = warp.coroutine.send(None)
        except StopIteration:
            self.warps.remove(warp)
            self.running[warp.cta].left -= 1
            if not self.running[warp.cta].left:
                del self.running[warp.cta]

    def check(self):
        heads, halves = (
            range(3 * HEADS),
            [(column, right, part) for column in range(0, D, 32) for right in (0, 1) for part in (0, 1)],
        )
        wanted = sorted((i_m, head, *half) for i_m in range(self.tiles_m) for head in heads for half in halves)
        assert sorted(self.stored) == wanted, "not every tile once"
        assert (self.cast[: self.first_rows] == 0).all() and (self.cast[self.first_rows :] == 1).all(), "not every row once"


@pytest.fixture(scope="module")
def kernel():
    return module()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "M, sms, resident", [(1, 24, 24), (300, 24, 24), (900, 30, 30), (1500, 25, 7), (700, 10, 3), (1664, 16, 16)]
)
def test_any_order_of_events_gives_every_tile_what_it_is_made_of(kernel, M, sms, resident, seed):
    Call(kernel, M, sms, 6, seed, resident)


@pytest.mark.parametrize("M, resident", [(1024, 132), (2164, 132), (4096, 8), (6184, 132)])
def test_cases_of_the_suite_on_132_multiprocessors(kernel, M, resident):
    Call(kernel, M, 132, 6, 0, resident)


@pytest.mark.parametrize("stages", [5, 7])
def test_other_numbers_of_buffers(kernel, stages):
    Call(kernel, 900, 30, stages, 0, 30)


@pytest.mark.parametrize(
    "change",
    [
        ("i_done = i_step - STAGES + 2", "i_done = i_step - STAGES - 1 + 2"),  # buffers are filled a step early
        ("return BUFFERS - 2 * stages + 1", "return BUFFERS - 2 * stages + 2"),  # one step more is kept
        (
            "fresh = (j >= KEPT) | (i_step < STEPS) | (one_head == 0)",
            "fresh = (j >= KEPT) | (i_step < STEPS)",
        ),  # by lone CTAs too
        ("back = back == 0", "back = back"),  # K is walked forth again
        ("i - (items - known)", "0"),  # first rows are not offered again
        ("i_item = gl.where(claim(claimed + i_item), i_item, -1)", "i_item = i_item"),  # and taken without a claim
        ("            wait_for(counter + 1 + i_m, BLOCK_M)", "            wait_for(counter + 1 + i_m, BLOCK_M - 2)"),
        ("warpgroup_mma_wait(1, deps", "warpgroup_mma_wait(2, deps"),  # a buffer is given back too early
        ("b_root = gl.where(unusual, 1.0, b_row_root)", "b_root = b_row_root"),  # scales are undone twice
        ("        s_norm.store(b_norm * column_root)", "        s_norm.store(b_norm)"),
    ],
)
def test_an_error_would_show(change):
    changed = module(change)
    with pytest.raises(AssertionError):
        for seed in range(4):
            for M, sms, resident in ((900, 30, 30), (1500, 25, 7)):
                Call(changed, M, sms, 6, seed, resident)
