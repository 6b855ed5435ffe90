"""Launches queued together: the graphs' life, against a driver that keeps count. On a GPU test_gpu.py has the real one."""

import itertools
import sys
import threading
import time
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from types import SimpleNamespace

import pytest

from qkvlab.kernels import launch

FORM = (4, 64), (132, 64)


class Result(IntEnum):
    SUCCESS = 0
    FAILED = 900


class Driver:
    """Graphs and executables by number, with what is in them; `fails`: names of calls that fail."""

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self):
        self.numbers, self.fails = itertools.count(7), set()
        self.streams, self.capturing, self.graphs, self.executables, self.launched = [], {}, {}, {}, []

    def keep(self, name, kept, content):
        number = next(self.numbers)
        if name in self.fails:
            return Result.FAILED, None
        kept[number] = content
        return Result.SUCCESS, number

    def cuStreamCreate(self, flags):
        assert flags == 1
        time.sleep(0.005)  # long enough for another thread
        self.streams.append(next(self.numbers))
        return Result.SUCCESS, self.streams[-1]

    def cuStreamBeginCapture(self, stream, mode):
        assert mode == 2 and stream in self.streams
        if stream in self.capturing or "begin" in self.fails:
            return (Result.FAILED,)
        self.capturing[stream] = []
        return (Result.SUCCESS,)

    def cuStreamEndCapture(self, stream):
        if stream not in self.capturing:
            return Result.FAILED, None
        return self.keep("end", self.graphs, self.capturing.pop(stream))

    def cuGraphExecUpdate(self, executable, graph):
        if "update" in self.fails:
            return Result.FAILED, None
        assert executable in self.executables
        self.executables[executable] = self.graphs[graph]
        return Result.SUCCESS, None

    def cuGraphInstantiate(self, graph, flags):
        assert flags == 0
        return self.keep("instantiate", self.executables, self.graphs[graph])

    def cuGraphLaunch(self, executable, stream):
        if "launch" in self.fails:
            return (Result.FAILED,)
        self.launched.append((executable, stream, self.executables[executable]))
        return (Result.SUCCESS,)

    def cuGraphDestroy(self, graph):
        del self.graphs[graph]
        return (Result.SUCCESS,)

    def cuGraphExecDestroy(self, executable):
        del self.executables[executable]
        return (Result.SUCCESS,)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    return driver


def plans(driver, *values):
    """Launches that leave a value in what is captured."""

    def plan(value, stream):
        assert stream in driver.streams

        def queue():
            time.sleep(0.0002)
            driver.capturing[stream].append(value)

        return queue

    return [partial(plan, value) for value in values]


def test_an_executable_graph_is_kept_and_nothing_else(driver):
    graph = launch._Graph()
    for i in range(3):
        graph.launch(3, FORM, plans(driver, i, -i))
    assert len({executable for executable, *_ in driver.launched}) == len(driver.executables) == 1
    assert [launched[1:] for launched in driver.launched] == [(3, [i, -i]) for i in range(3)]
    assert not driver.graphs and not driver.capturing


def test_everything_is_prepared_before_the_capture(driver):
    def plan(stream):
        assert not driver.capturing
        return lambda: None

    launch._Graph().launch(0, FORM, [plan, plan])


def test_what_cannot_be_updated_is_made_anew(driver):
    graph = launch._Graph()
    graph.launch(0, FORM, plans(driver, 1))
    driver.fails = {"update"}
    graph.launch(0, FORM, plans(driver, 2))
    first, second = driver.launched
    assert first[0] != second[0] and second[2] == [2] and len(driver.executables) == 1 and not driver.graphs


def test_another_form_has_an_executable_graph_of_its_own(driver):
    graph = launch._Graph()
    for form in (FORM, ((8, 64), (132, 64)), FORM):
        graph.launch(0, form, plans(driver, form))
    first, other, again = driver.launched
    assert first[0] == again[0] != other[0]


def test_there_are_not_more_than_so_many_executable_graphs_and_the_last_used_stay(driver):
    graph = launch._Graph()
    for i in [*range(graph.MOST), 0, graph.MOST, 0, 1]:
        graph.launch(0, (i,), plans(driver, i, -i))
        assert driver.launched[-1][2] == [i, -i]
    assert len(driver.executables) == graph.MOST
    *first, again, beyond, still, lost = (executable for executable, *_ in driver.launched)
    assert first[0] == again == still and beyond == first[1] and lost == first[2]


def test_threads_take_turns(driver):
    graph, failed = launch._Graph(), []

    def calls(name):
        try:
            for i in range(10):
                graph.launch(0, FORM, plans(driver, (name, i), (name, -i)))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=calls, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(driver.executables) == 1 and not driver.graphs
    assert sorted(content for *_, content in driver.launched) == [[(name, i), (name, -i)] for name in "abc" for i in range(10)]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_no_capture_behind(driver, failure):
    def fails(stream):
        def queue():
            raise failure

        return queue

    graph = launch._Graph()
    with pytest.raises(failure):
        graph.launch(0, FORM, [*plans(driver, 1), fails])
    assert not driver.capturing and not driver.graphs and not driver.launched
    graph.launch(0, FORM, plans(driver, 2))
    assert driver.launched[0][2] == [2]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", ["begin", "end", "instantiate", "launch"])
def test_an_error_of_the_driver_is_named_and_leaves_nothing_behind(driver, name, kept):
    graph = launch._Graph()
    if kept:
        graph.launch(0, FORM, plans(driver, 0))
    driver.fails = {name, "update"} if name == "instantiate" else {name}
    with pytest.raises(RuntimeError, match=f"(?i){name}.*FAILED"):
        graph.launch(0, FORM, plans(driver, 1))
    assert not driver.graphs and not driver.capturing and set(graph.executables.values()) == set(driver.executables)
    driver.fails = set()
    graph.launch(0, FORM, plans(driver, 2))
    assert driver.launched[-1][2] == [2] and len(driver.executables) == 1


class Gpu:
    """What launch_together asks of torch and Triton where there is a GPU."""

    def __init__(self, driver, monkeypatch):
        self.driver, self.current, self.stream, self.capturing, self.bound, self.queued = driver, 0, 0, False, [], []
        cuda = SimpleNamespace(
            current_device=lambda: self.current, is_current_stream_capturing=lambda: self.capturing,
            current_stream=lambda device: SimpleNamespace(cuda_stream=self.stream), device=self.device,
        )  # fmt: skip
        active = SimpleNamespace(utils=SimpleNamespace(launch=None))
        monkeypatch.setattr(launch, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(launch, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active))))
        monkeypatch.setattr(launch, "_RUNS_ON", "cuda")
        monkeypatch.setattr(launch, "_graphs", {})
        monkeypatch.setattr(launch, "_bind_context", lambda index: self.bound.append((index, self.current)))

    @contextmanager
    def device(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before

    def prepare(self, kernel, grid, value, stream=None, **meta):
        return lambda: (self.driver.capturing[stream] if stream else self.queued).append(value)

    def together(self, *launches, index=0):
        """launches: (kernel, grid, value, meta). The executable, the stream and the values that were launched last."""
        made = [partial(self.prepare, SimpleNamespace(fn=kernel), grid, value, **meta) for kernel, grid, value, meta in launches]
        launch.launch_together(SimpleNamespace(type="cuda", index=index), *made)
        return self.driver.launched[-1] if self.driver.launched else None


@pytest.fixture
def gpu(driver, monkeypatch):
    return Gpu(driver, monkeypatch)


def test_what_differs_in_device_stream_kernels_grids_or_constants_has_an_executable_of_its_own(gpu):
    second = ("g", (2,), 2, {"LOW": False})
    first = gpu.together(("f", [1], 1, {}), second)
    others = [
        gpu.together(("h", [1], 1, {}), second),
        gpu.together(("f", [3], 1, {}), second),
        gpu.together(("f", [1], 1, {}), ("g", (2,), 2, {"LOW": True})),
        gpu.together(("f", [1], 1, {}), second, index=1),
    ]
    gpu.stream = 5
    others.append(gpu.together(("f", [1], 1, {}), second))
    gpu.stream = 0
    assert gpu.together(("f", [1], 1, {}), second) == first
    assert len({first[0], *(executable for executable, *_ in others)}) == 6 and others[-1][1] == 5
    assert gpu.bound == [(0, 0)] * 4 + [(1, 1)] + [(0, 0)] * 2 and gpu.current == 0 and not gpu.queued


def test_a_stream_that_is_being_captured_is_queued_on_itself(gpu):
    gpu.capturing = True
    gpu.together(("f", (1,), 1, {}), ("g", (2,), 2, {}))
    assert gpu.queued == [1, 2] and not gpu.driver.streams


def test_first_calls_of_several_threads_make_one_stream(gpu):
    threads = [threading.Thread(target=gpu.together, args=(("f", (1,), i, {}),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.driver.streams) == 1 and sorted(content for *_, content in gpu.driver.launched) == [[i] for i in range(8)]
