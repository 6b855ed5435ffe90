"""Launches queued together: the graph's life, against a driver that keeps count. On a GPU test_gpu.py has the real one."""

import sys
from enum import IntEnum
from types import SimpleNamespace

import pytest

from qkvlab.kernels import launch

GRIDS = (4,), (132,)


class Result(IntEnum):
    SUCCESS = 0
    FAILED = 900


class Driver:
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)

    def __init__(self):
        self.capturing, self.graphs, self.executables, self.launched, self.made = False, set(), set(), [], 0
        self.update = Result.SUCCESS

    def make(self, kept):
        self.made += 1
        kept.add(self.made)
        return Result.SUCCESS, self.made

    def cuStreamCreate(self, flags):
        return Result.SUCCESS, 7

    def cuStreamBeginCapture(self, stream, mode):
        if self.capturing:
            return (Result.FAILED,)
        self.capturing = True
        return (Result.SUCCESS,)

    def cuStreamEndCapture(self, stream):
        if not self.capturing:
            return Result.FAILED, None
        self.capturing = False
        return self.make(self.graphs)

    def cuGraphExecUpdate(self, executable, graph):
        assert executable in self.executables and graph in self.graphs
        return self.update, None

    def cuGraphInstantiate(self, graph, flags):
        assert graph in self.graphs
        return self.make(self.executables)

    def cuGraphLaunch(self, executable, stream):
        assert executable in self.executables
        self.launched.append((executable, stream))
        return (Result.SUCCESS,)

    def cuGraphDestroy(self, graph):
        self.graphs.remove(graph)
        return (Result.SUCCESS,)

    def cuGraphExecDestroy(self, executable):
        self.executables.remove(executable)
        return (Result.SUCCESS,)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    return driver


def plans(driver, queued):
    def plan(i, stream):
        assert stream == 7 and not driver.capturing  # prepared before the capture

        def queue():
            assert driver.capturing
            queued.append(i)

        return queue

    return [lambda stream, i=i: plan(i, stream) for i in range(2)]


def test_the_executable_graph_is_kept_and_nothing_else(driver):
    graph, queued = launch._Graph(), []
    for _ in range(3):
        graph.launch(0, GRIDS, plans(driver, queued))
    assert queued == [0, 1] * 3
    assert len(set(driver.launched)) == 1 and len(driver.launched) == 3
    assert len(driver.executables) == 1 and not driver.graphs and not driver.capturing


def test_what_cannot_be_updated_is_made_anew(driver):
    graph = launch._Graph()
    graph.launch(0, GRIDS, plans(driver, []))
    driver.update = Result.FAILED
    graph.launch(0, GRIDS, plans(driver, []))
    assert len(set(driver.launched)) == 2 and len(driver.executables) == 1 and not driver.graphs


def test_other_grids_have_an_executable_graph_of_their_own(driver):
    graph = launch._Graph()
    for grids in (GRIDS, ((8,), (132,)), GRIDS):
        graph.launch(0, grids, plans(driver, []))
    first, other, again = driver.launched
    assert first == again != other


def test_there_are_not_more_than_so_many_executable_graphs_and_the_last_used_stay(driver):
    graph = launch._Graph()
    for i in [*range(graph.MOST), 0, graph.MOST, 0, 1]:
        graph.launch(0, ((i,),), plans(driver, []))
    assert len(driver.executables) == graph.MOST
    *first, again, beyond, still, lost = driver.launched
    assert first[0] == again == still and beyond == first[1] and lost == first[2]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_no_capture_behind(driver, failure):
    def fails(stream):
        def queue():
            raise failure

        return queue

    graph, queued = launch._Graph(), []
    with pytest.raises(failure):
        graph.launch(0, GRIDS, [*plans(driver, []), fails])
    assert not driver.capturing and not driver.graphs and not driver.launched
    graph.launch(0, GRIDS, plans(driver, queued))
    assert queued == [0, 1] and len(driver.launched) == 1


def test_an_error_of_the_driver_is_named(driver):
    driver.capturing = True
    with pytest.raises(RuntimeError, match="cuStreamBeginCapture: FAILED"):
        launch._Graph().launch(0, GRIDS, plans(SimpleNamespace(capturing=False), []))
