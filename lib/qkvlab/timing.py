"""bench(fn): a callable's latency, as the board takes it; and the PyTorch peers that the stages are held against.

The protocol (SOL-ExecBench 1.0.2): for each call the arguments are copied to new addresses, 256 bytes further on, and
the L2 is flushed by writing twice its size; a call's latency is the span from its first kernel's start to its last
kernel's end by CUPTI, so gaps between launches count; 10 calls to warm up, 50 timed, and the median is the figure.
Here several callables share one run: each is called once a round, in an order drawn anew for every round.
"""

import os
import tempfile
import time
from contextlib import contextmanager
from datetime import date
from unittest.mock import patch

import numpy as np
import pandas as pd
import scipy.stats
import torch
from tqdm import tqdm

from . import hardware, problem, suite
from .kernels.split import normalise
from .problem import Stage, UnsupportedError
from .reference import reference

WARMUP, CALLS = 10, 50
SHIFT_BYTES = 256
CUPTI, EVENTS = "cupti", "cuda-events"


def bench(fns, cases=None, *, calls=CALLS, method=None):
    """Time callables with the reference's signature on `cases` (default: all 16). Returns the rows of data/runs.

    fns: one callable or a list; a stage from IMPLEMENTATIONS brings its name and precision with it. cases: qkvlab.Case
    or (batch_size, seq_len), or a list.
    method: 'cupti' (the default where cupti-python is installed) or 'cuda-events', which counts launch latency too;
    each row says which. Raises UnsupportedError without an NVIDIA GPU.
    """
    return summarise(measure(fns, cases, calls=calls, method=method))


def measure(fns, cases=None, *, calls=CALLS, method=None):
    """As bench, but a row for every call, with its number, span_us and busy_us."""
    _needs_a_gpu()
    fns = _timed(fns)
    names = [fn.name for fn in fns]
    if len(set(names)) < len(names):
        raise ValueError(
            f"two callables of one name would be averaged together: {', '.join(names)}; name them with Stage(name, function)"
        )
    cases = suite.as_cases(suite.cases() if cases is None else cases)
    method = method or (CUPTI if _cupti_installed() else EVENTS)
    if method not in (CUPTI, EVENTS):
        raise ValueError(f"method must be {CUPTI!r} or {EVENTS!r}, got {method!r}")
    rows = []
    for case in tqdm(cases, desc=f"bench {', '.join(fn.name for fn in fns)}", leave=False):
        found, clocks = _measure_case(fns, case, calls, _spans_by_cupti if method == CUPTI else _spans_by_events)
        state = hardware.state() | clocks | {"date": date.today().isoformat(), "method": method}
        for fn, spans in zip(fns, found):
            for call, (span, busy, launches) in enumerate(spans):
                rows.append({
                    "impl": fn.name, "precision": fn.precision, "launches": launches or fn.launches, "uuid": case.uuid,
                    "batch_size": case.batch_size, "seq_len": case.seq_len, "call": call, "span_us": span, "busy_us": busy,
                    **state,
                })  # fmt: skip
    return pd.DataFrame(rows)


def summarise(samples):
    """The rows of data/runs from the calls of `measure`: per impl and case the median, mean, 5th and 95th percentile, in µs."""
    keys = ["gpu", "impl", "precision", "uuid", "batch_size", "seq_len"]
    rows = []
    for key, calls in samples.groupby(keys, sort=False, dropna=False):
        first = calls.iloc[0]
        rows.append({
            **dict(zip(keys, key)),
            "launches": first.launches,
            "median_us": calls.span_us.median(),
            "mean_us": calls.span_us.mean(),
            "p5_us": calls.span_us.quantile(0.05),
            "p95_us": calls.span_us.quantile(0.95),
            "busy_us": calls.busy_us.median(),
            "gap_us": (calls.span_us - calls.busy_us).median(),
            "calls": len(calls),
            **{name: first[name] for name in ("method", "sm_clock_mhz", "sm_clock_after_mhz", "torch", "triton", "driver", "commit", "date")},
        })  # fmt: skip
    return pd.DataFrame(rows)


def ratio(samples, a, b):
    """How many times as long impl `a` takes as impl `b`, case by case: median over median, with a bootstrap interval (95 %).

    samples: the calls of one `measure`, where both were interleaved. Returns batch_size, seq_len, ratio, low, high.
    Raises ValueError for an impl that was not measured.
    """
    missing = {a, b} - set(samples.impl)
    if missing:
        raise ValueError(f"not measured: {', '.join(sorted(missing))}; measured: {', '.join(dict.fromkeys(samples.impl))}")
    rows = []
    for (batch_size, seq_len), calls in samples.groupby(["batch_size", "seq_len"], sort=False):
        spans = [calls.span_us[calls.impl == name].to_numpy() for name in (a, b)]
        interval = scipy.stats.bootstrap(
            spans, lambda x, y, axis: np.median(x, axis=axis) / np.median(y, axis=axis),
            n_resamples=2000, confidence_level=0.95, method="percentile", rng=0,
        ).confidence_interval  # fmt: skip
        rows.append((batch_size, seq_len, np.median(spans[0]) / np.median(spans[1]), interval.low, interval.high))
    return pd.DataFrame(rows, columns=["batch_size", "seq_len", "ratio", "low", "high"])


@contextmanager
def _nothing_compiled():
    """Triton and Inductor keep what they compiled on disk, from process to process: for a while they see an empty folder."""
    with tempfile.TemporaryDirectory() as empty:
        with patch.dict(os.environ, TRITON_CACHE_DIR=empty, TORCHINDUCTOR_CACHE_DIR=empty):
            yield


def host_time(fns, case, *, calls=200):
    """What a call costs the host, the rows of data/host: impl, first_ms (with compilation, if it is this process's first), host_us (median).

    fns: one callable or a list, which take turns after their first calls. case: a qkvlab.Case or (batch_size, seq_len). Raises
    UnsupportedError without an NVIDIA GPU.
    """
    _needs_a_gpu()
    (case,) = suite.as_cases(case)
    inputs = suite.make_inputs(case.batch_size, case.seq_len, device="cuda")

    def timed(fn):
        begin = time.perf_counter()
        fn.function(*inputs)
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return returned - begin, time.perf_counter() - begin

    fns = _timed(fns)
    with _nothing_compiled():
        first = [timed(fn)[1] for fn in fns]
    took = np.median([[timed(fn)[0] for fn in fns] for _ in range(calls)], axis=0)
    rows = [(fn.name, case.batch_size, case.seq_len, begun * 1e3, us * 1e6) for fn, begun, us in zip(fns, first, took)]
    found = pd.DataFrame(rows, columns=["impl", "batch_size", "seq_len", "first_ms", "host_us"])
    return found.assign(date=date.today().isoformat(), **hardware.state())


def peers():
    """What PyTorch makes of the operation, to be timed beside the stages.

    Eager fp32, eager tf32, torch.compile (tf32, max-autotune without CUDA graphs), and a cuBLAS fp16 GEMM with the
    casts before it and the lab's norm kernel after it.
    """
    # max-autotune without CUDA graphs; choices that cannot fit are dropped before they are compiled, which saves minutes.
    options = {"max_autotune": True, "coordinate_descent_tuning": True, "max_autotune_prune_choices_based_on_shared_mem": True}
    compiled = torch.compile(reference, dynamic=False, options=options)

    def compiled_for_each_shape(*args):
        # The default limit, 8 shapes, would send the rest of the 16 cases back to eager without a word.
        with torch._dynamo.config.patch(recompile_limit=64):
            return compiled(*args)

    return [
        Stage("torch_fp32", _with_tf32(reference, False), "fp32"),
        Stage("torch_tf32", _with_tf32(reference, True), "tf32"),
        Stage("torch_compile_tf32", _with_tf32(compiled_for_each_shape, True), "tf32"),
        Stage("cublas_fp16", _cublas_fp16, "fp16"),
    ]


def yardsticks():
    """What the operation's product alone takes cuBLAS, on operands that are fp16 already: no cast, no norm, not the operation.

    Timed for the same arguments as the stages; the operands are prepared outside the timed call.
    """
    prepared = {}

    def gemm(**out):
        def call(hidden_states, q_weight, k_weight, v_weight, *_):
            shape = hidden_states.shape
            if shape not in prepared:
                prepared.clear()
                weights = torch.cat((q_weight, k_weight, v_weight)).half()
                prepared[shape] = hidden_states.flatten(0, 1).half(), weights.T
            x, w = prepared[shape]
            return torch.mm(x, w, **out)

        return call

    return [Stage("gemm_only_fp16_out", gemm(), "fp16"), Stage("gemm_only_fp32_out", gemm(out_dtype=torch.float32), "fp16")]


def _cublas_fp16(hidden_states, q_weight, k_weight, v_weight, q_norm_weight, k_norm_weight, eps):
    weights = torch.cat((q_weight, k_weight, v_weight)).half()
    product = torch.mm(hidden_states.flatten(0, 1).half(), weights.T, out_dtype=torch.float32)
    query, key, value = (part.contiguous() for part in product.view(*hidden_states.shape[:2], 3, 8, 128).unbind(2))
    normalise(query, key, q_norm_weight, k_norm_weight, eps)
    return problem.QKV(query, key, value)


def _with_tf32(fn, allowed):
    """`fn` with PyTorch's tf32 matmuls allowed or forbidden during the call."""

    def call(*args):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            return fn(*args)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return call


def _needs_a_gpu():
    if hardware.device() != "cuda":
        raise UnsupportedError("timing needs an NVIDIA GPU; here the runs recorded in data/runs/ stand in (records.recorded())")


def _timed(fns):
    """Stages of a callable or a list of them."""
    return [
        fn if hasattr(fn, "function") else Stage(getattr(fn, "__name__", type(fn).__name__), fn)
        for fn in (fns if isinstance(fns, (list, tuple)) else [fns])
    ]


def _measure_case(fns, case, calls, timer):
    inputs = suite.make_inputs(case.batch_size, case.seq_len, device="cuda")
    flush = torch.empty(2 * torch.cuda.get_device_properties(None).L2_cache_size, dtype=torch.int8, device="cuda")
    arguments = _shifting(inputs, (WARMUP + calls) * len(fns))

    def prepared():
        args = next(arguments)
        flush.zero_()
        return args

    for _ in range(WARMUP):
        for fn in fns:
            fn.function(*prepared())
    torch.cuda.synchronize()
    before = hardware.sm_clock_mhz()  # after the warm-up: an idle GPU's clock says nothing
    order = _interleaved(calls, len(fns))
    spans = timer([fns[i].function for i in order], prepared)
    for wanted, fn in enumerate(fns):
        counts = {launches for i, (_, _, launches) in zip(order, spans) if i == wanted}
        if len(counts) > 1:
            raise RuntimeError(
                f"{fn.name} launched {sorted(counts)} kernels in different calls: not steady, or CUPTI lost records"
            )
    clocks = {"sm_clock_mhz": before, "sm_clock_after_mhz": hardware.sm_clock_mhz()}
    return [[span for i, span in zip(order, spans) if i == wanted] for wanted in range(len(fns))], clocks


def _interleaved(calls, callables):
    """Numbers of callables, each once a round of `calls`: shuffled, since one that always follows the same other inherits its state."""
    rng = np.random.default_rng(0)
    return [int(i) for _ in range(calls) for i in rng.permutation(callables)]


def _shifting(inputs, times):
    """Yield the arguments `times` times, the tensors each time copied to addresses SHIFT_BYTES further on."""
    pools = [tensor.new_empty(tensor.nbytes + times * SHIFT_BYTES, dtype=torch.uint8) for tensor in inputs[:6]]
    for turn in range(times):
        moved = []
        for tensor, pool in zip(inputs[:6], pools):
            start = turn * SHIFT_BYTES
            moved.append(pool[start : start + tensor.nbytes].view(torch.float32).view(tensor.shape).copy_(tensor))
        yield (*moved, inputs.eps)


def _spans_by_events(functions, prepared):
    """(span µs, span µs, None) of each call: events cannot see inside a call, nor take the launch latency off."""
    pairs = []
    for function in functions:
        args = prepared()
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        function(*args)
        pair[1].record()
        torch.cuda.synchronize()
        pairs.append(pair)
    return [(begin.elapsed_time(end) * 1e3,) * 2 + (None,) for begin, end in pairs]


def _spans_by_cupti(functions, prepared):
    """(span µs, busy µs, launches) of each call, from the GPU's own record of when each kernel, copy or fill ran."""
    from cupti import cupti

    with _activities() as (launches, device_work):
        windows = []
        for function in functions:
            args = prepared()
            begin = cupti.get_timestamp()
            function(*args)
            end = cupti.get_timestamp()
            torch.cuda.synchronize()
            windows.append((begin, end))
    # A call's work is what the driver was asked for between its two host timestamps; correlation ids lead to it.
    times = np.array(sorted(launches))
    spans = []
    for begin, end in windows:
        first, last = np.searchsorted(times[:, 0], [begin, end])
        ran = sorted(work for i in set(times[first:last, 1]) for work in device_work.get(i, ()))
        if not ran:
            raise RuntimeError("CUPTI recorded no GPU work for a call: is the callable using the GPU?")
        starts, ends = np.array(ran).T
        reached = np.maximum.accumulate(ends)
        gaps = np.maximum(starts[1:] - reached[:-1], 0).sum()
        span = reached[-1] - starts[0]
        spans.append((span / 1e3, (span - gaps) / 1e3, len(ran)))
    return spans


@contextmanager
def _activities():
    """Record through CUPTI, inside: yields [(host start ns, correlation id)] and {correlation id: [(start, end) ns on the GPU]}."""
    from cupti import cupti

    device_kinds = [cupti.ActivityKind.CONCURRENT_KERNEL, cupti.ActivityKind.MEMCPY, cupti.ActivityKind.MEMSET]
    host_kinds = [cupti.ActivityKind.RUNTIME, cupti.ActivityKind.DRIVER]
    launches, device_work = [], {}

    def completed(activities):
        for activity in activities:
            if activity.kind in device_kinds:
                # One launch of a graph is many kernels under one correlation id.
                device_work.setdefault(activity.correlation_id, []).append((activity.start, activity.end))
            elif activity.kind in host_kinds:
                launches.append((activity.start, activity.correlation_id))

    for kind in device_kinds + host_kinds:
        cupti.activity_enable(kind)
    cupti.activity_register_callbacks(lambda: (8 * 2**20, 0), completed)
    torch.cuda.synchronize()
    try:
        yield launches, device_work
        torch.cuda.synchronize()
        cupti.activity_flush_all(0)
    finally:
        for kind in device_kinds + host_kinds:
            cupti.activity_disable(kind)
        cupti.finalize()


def _cupti_installed():
    try:
        from cupti import cupti  # noqa: F401
    except ImportError:
        return False
    return True
