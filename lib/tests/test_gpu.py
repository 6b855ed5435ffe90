"""What only a GPU can show: CUDA graphs, streams, threads, other devices, and more than 2^31 elements."""

import threading
import time

import pytest
import torch

import qkvlab
from qkvlab import IMPLEMENTATIONS, make_inputs, oracle, verification, verify
from qkvlab.kernels import launch

import triton  # isort: skip
import triton.language as tl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
stages = pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "auto"])
SHAPE = (3, 683)  # rows beyond what persistent casts in its first launch, on up to 192 multiprocessors; a tile of one row


@pytest.fixture(autouse=True)
def give_memory_back():
    """The largest test takes a third of an H200's memory, and tests run side by side."""
    yield
    torch.cuda.empty_cache()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other))


@stages
def test_a_cuda_graph_replays_on_new_values(impl):
    inputs, other = (make_inputs(*SHAPE, device="cuda", seed=seed) for seed in (1, 2))
    qkvlab.qkv_rmsnorm(*inputs, impl=impl)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = qkvlab.qkv_rmsnorm(*inputs, impl=impl)
    for values in (other, make_inputs(*SHAPE, device="cuda", seed=3)):
        for tensor, value in zip(inputs[:6], values):
            tensor.copy_(value)
        graph.replay()
        assert same(captured, qkvlab.qkv_rmsnorm(*values, impl=impl))


@stages
def test_calls_in_flight_on_two_streams_share_nothing(impl):
    several = [make_inputs(*SHAPE, device="cuda", seed=seed) for seed in (1, 2)]
    wanted = [qkvlab.qkv_rmsnorm(*inputs, impl=impl) for inputs in several]
    streams = [torch.cuda.Stream() for _ in several]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for inputs, stream in zip(several, streams):
            with torch.cuda.stream(stream):
                found.append(qkvlab.qkv_rmsnorm(*inputs, impl=impl))
        torch.cuda.synchronize()
        assert all(same(*pair) for pair in zip(found, wanted))


@stages
@pytest.mark.parametrize("most", [1, 32])
def test_calls_queued_behind_each_other_keep_their_own_arguments(impl, most, monkeypatch):
    monkeypatch.setattr(launch, "_graphs", {})
    monkeypatch.setattr(launch._Graph, "MOST", most)  # executable graphs: with 1 it is updated while calls before are queued
    several = [make_inputs(2, seq_len, device="cuda", seed=seed) for seed, seq_len in enumerate((5, 1031, 64, 1031))]
    wanted = [qkvlab.qkv_rmsnorm(*inputs, impl=impl) for inputs in several]
    busy = torch.empty(2**28, device="cuda")
    for _ in range(3):
        for _ in range(8):
            busy.zero_()  # none of the calls runs before all are queued
        found = [qkvlab.qkv_rmsnorm(*inputs, impl=impl) for inputs in several]
        assert all(same(*pair) for pair in zip(found, wanted))


@stages
def test_a_first_call_in_a_new_thread(impl):
    inputs, found = make_inputs(*SHAPE, device="cuda"), []
    thread = threading.Thread(target=lambda: found.append(qkvlab.qkv_rmsnorm(*inputs, impl=impl)))
    thread.start()
    thread.join()
    assert same(found[0], qkvlab.qkv_rmsnorm(*inputs, impl=impl))


@pytest.mark.parametrize("impl", ["pair", "exact", "persistent"])
def test_two_threads_on_one_stream(impl):
    several = [make_inputs(*SHAPE, device="cuda", seed=seed) for seed in (1, 2)]
    wanted = [qkvlab.qkv_rmsnorm(*inputs, impl=impl) for inputs in several]
    found = [[], []]

    def calls(inputs, outs):
        outs += [qkvlab.qkv_rmsnorm(*inputs, impl=impl) for _ in range(50)]

    threads = [threading.Thread(target=calls, args=pair) for pair in zip(several, found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(outs) == 50 and all(same(out, want) for out in outs) for outs, want in zip(found, wanted))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@stages
def test_a_device_that_is_not_the_current_one(impl):
    here, there = (make_inputs(*SHAPE, device=f"cuda:{i}", seed=1) for i in (0, 1))
    assert torch.cuda.current_device() == 0
    for _ in range(2):  # compiles, then launches what is compiled
        found = qkvlab.qkv_rmsnorm(*there, impl=impl)
        wanted = qkvlab.qkv_rmsnorm(*here, impl=impl)
        assert same([out.to("cuda:0") for out in found], wanted) and torch.cuda.current_device() == 0


@stages
def test_more_than_2_to_the_31_elements(impl):
    M = 2**21 + 3
    small = make_inputs(1, 1, device="cuda")
    states = torch.randn(1, M, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found = qkvlab.qkv_rmsnorm(states, *small[1:], impl=impl)
    rows = torch.tensor([0, 1, 127, 2**20 + 5, 2**21 - 1, 2**21, M - 1], device="cuda")
    for out, want in zip(found, oracle(states[:, rows].contiguous(), *small[1:])):
        assert float((out[:, rows] - want).norm() / want.norm()) < verification.RELATIVE_ERROR


def test_any_number_of_rows_of_tiles_is_divided_among_the_multiprocessors():
    stage = IMPLEMENTATIONS["persistent"]
    if stage.unsupported("cuda"):
        pytest.skip(stage.unsupported("cuda"))
    report = verify(stage, [(1, 128 * tiles - 5) for tiles in (*range(1, 36), 49, 50, 67)])
    assert report.passed, report


@triton.jit
def hold(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


@stages
def test_a_call_ends_where_most_multiprocessors_are_taken(impl):
    inputs = make_inputs(1, 4096, device="cuda")
    wanted = qkvlab.qkv_rmsnorm(*inputs, impl=impl)
    flag, holder, releaser = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(holder):  # a CTA of 32 warps leaves no room for one of persistent
        hold[(launch.sm_count(flag.device) - 8,)](flag, num_warps=32)
    found = qkvlab.qkv_rmsnorm(*inputs, impl=impl)
    ended = torch.cuda.Event()
    ended.record()
    last = time.monotonic() + 10
    while not ended.query() and time.monotonic() < last:
        time.sleep(0.001)
    in_time = ended.query()
    with torch.cuda.stream(releaser):
        flag.fill_(1)
    torch.cuda.synchronize()
    assert in_time and same(found, wanted)
