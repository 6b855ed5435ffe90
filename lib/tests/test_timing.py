"""The measuring: what can be checked without a GPU, and on one the timer against itself."""

import os

import numpy as np
import pandas as pd
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

import qkvlab  # before triton: it decides where kernels run
from qkvlab import bench, records, reference, timing

import triton  # isort: skip

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="times on a GPU")


def samples(**impls):
    """What measure returns, from {impl: (spans, busy)}."""
    state = dict(
        gpu="H200",
        method="cupti",
        sm_clock_mhz=1980.0,
        sm_clock_after_mhz=1980.0,
        torch="-",
        triton="-",
        driver="-",
        commit="-",
        date="2026-11-30",
    )
    return pd.DataFrame([
        {"impl": impl, "precision": "tf32", "launches": 1, "uuid": "u", "batch_size": 1, "seq_len": 128, "call": i, "span_us": span, "busy_us": busy, **state}
        for impl, calls in impls.items() for i, (span, busy) in enumerate(zip(*calls))
    ])  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_timing_is_refused_with_the_reason():
    with pytest.raises(qkvlab.UnsupportedError, match="needs an NVIDIA GPU.*data/runs"):
        bench(reference)
    with pytest.raises(qkvlab.UnsupportedError, match="needs an NVIDIA GPU.*data/runs"):
        qkvlab.host_time(reference, (1, 4))


def test_a_first_call_finds_nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "compiled").touch()
    with timing._nothing_compiled():
        assert os.listdir(triton.knobs.cache.dir) == [] == os.listdir(cache_dir())
    assert os.listdir(triton.knobs.cache.dir) == ["compiled"]


def test_summary():
    spans = np.arange(1.0, 51.0)
    row = timing.summarise(samples(fused=(spans, spans - 0.5))).iloc[0]
    assert (row.median_us, row.mean_us, row.calls) == (25.5, 25.5, 50)
    assert row.p5_us < 4 and row.p95_us > 47 and row.gap_us == pytest.approx(0.5)
    assert set(records.RUN_COLUMNS) <= set(row.index)


def test_ratio_and_its_interval():
    rng = np.random.default_rng(0)
    a, b = rng.normal(20, 1, 50), rng.normal(10, 1, 50)
    found = timing.ratio(samples(a=(a, a), b=(b, b)), "a", "b").iloc[0]
    assert found.low < found.ratio < found.high and found.low > 1.8 and found.high < 2.2
    same = timing.ratio(samples(a=(a, a), b=(a[::-1], a)), "a", "b").iloc[0]
    assert same.low <= 1 <= same.high
    with pytest.raises(ValueError, match="not measured: c; measured: a, b"):
        timing.ratio(samples(a=(a, a), b=(b, b)), "a", "c")


def test_what_would_be_averaged_or_mislabelled_is_refused(monkeypatch):
    monkeypatch.setattr(timing.hardware, "device", lambda: "cuda")
    with pytest.raises(ValueError, match="would be averaged together: reference, reference; name them with Stage"):
        bench([reference, reference])
    with pytest.raises(ValueError, match="method must be 'cupti' or 'cuda-events', got 'CUPTI'"):
        bench(reference, method="CUPTI")


def test_each_callable_once_a_round_and_after_every_other():
    order = timing._interleaved(50, 4)
    rounds = [order[i : i + 4] for i in range(0, 200, 4)]
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in rounds)
    assert set(zip(order, order[1:])) >= {(a, b) for a in range(4) for b in range(4) if a != b}


def test_arguments_move_by_256_bytes_and_keep_their_values(device):
    inputs = qkvlab.make_inputs(1, 3, device=device)
    seen = []
    for arguments in timing._shifting(inputs, 3):
        assert all(torch.equal(moved, given) for moved, given in zip(arguments, inputs[:6])) and arguments[6] == inputs.eps
        seen.append([tensor.data_ptr() for tensor in arguments[:6]])
    assert np.all(np.diff(np.array(seen), axis=0) == timing.SHIFT_BYTES)


@on_gpu
def test_cupti_sees_launches_gaps_and_what_is_longer():
    case = [qkvlab.case(8, 512)]
    rows = bench(
        [*(qkvlab.IMPLEMENTATIONS[name] for name in ("naive", "fused")), reference],
        case,
        calls=10,
        method="cupti",
    ).set_index("impl")
    assert rows.launches["naive"] == 5 and rows.launches["fused"] == 1
    assert rows.gap_us["fused"] == 0 and (rows.busy_us + rows.gap_us - rows.median_us).abs().max() < 0.2 * rows.median_us.max()
    assert rows.median_us["fused"] < rows.median_us["naive"] < rows.median_us["reference"]


@on_gpu
def test_events_are_marked_and_never_shorter():
    case, fused = [qkvlab.case(8, 512)], qkvlab.IMPLEMENTATIONS["fused"]
    events, cupti = (bench(fused, case, calls=20, method=method).iloc[0] for method in ("cuda-events", "cupti"))
    assert (events.method, cupti.method) == ("cuda-events", "cupti") and events.median_us > 0.95 * cupti.median_us
