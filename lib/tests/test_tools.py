"""NVIDIA's tools: what they say is read, and what is missing is named."""

import subprocess

import pytest
import torch

from qkvlab import UnsupportedError, hardware, suite, tools


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU, and the tools."""
    monkeypatch.setattr(hardware, "device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(hardware, "state", lambda: dict.fromkeys(("gpu", "driver", "torch", "triton", "commit"), "x"))
    monkeypatch.setattr(tools.shutil, "which", lambda name: name)
    monkeypatch.setattr(tools.api, "IMPLEMENTATIONS", {"fused": tools.api.IMPLEMENTATIONS["fused"]})


CLEAN = """========= COMPUTE-SANITIZER
========= ERROR SUMMARY: 0 errors"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at fused+0x120 in fused.py:3
=========     and Write access at fused+0x340 in fused.py:9 [64 hazards]
=========
========= Error: Race reported between Read access at fused+0x120 in fused.py:3
=========     and Write access at fused+0x340 in fused.py:9 [64 hazards]
=========
========= Warning: another
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)"""


@pytest.mark.parametrize(
    "output, errors, said",
    [
        (CLEAN, 0, "ERROR SUMMARY: 0 errors"),
        (
            RACES,
            3,
            "RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning); Error: Race reported between Read access at fused+0x120 "
            "in fused.py:3 and Write access at fused+0x340 in fused.py:9 [64 hazards]; Warning: another",
        ),
        ("Traceback: no such kernel", None, "Traceback: no such kernel"),
    ],
)
def test_a_summary_and_its_findings_are_read(gpu, monkeypatch, output, errors, said):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, output, ""))
    rows = tools.sanitize(shapes=[(1, 131)])
    assert rows.tool.tolist() == list(tools.SANITIZERS) and list(rows) == list(tools.SANITIZER_COLUMNS)
    assert rows.errors.isna().all() if errors is None else (rows.errors == errors).all()
    assert (rows.said == said).all()


def test_a_call_that_failed_is_no_pass(gpu, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, CLEAN, "no such kernel"))
    rows = tools.sanitize(shapes=[(1, 131)])
    assert rows.errors.isna().all() and rows.said.str.endswith("no such kernel").all()


def test_a_sanitizer_that_does_not_end_is_no_pass(gpu, monkeypatch):
    def endless(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", endless)
    rows = tools.sanitize(["fused"], [(1, 131)])
    assert rows.errors.isna().all() and (rows.said == f"no end within {tools.TIMEOUT} s").all()


def test_a_stage_that_is_not_there_is_named(gpu):
    with pytest.raises(ValueError, match="one of fused; got fussed"):
        tools.sanitize(["fussed"])


def test_ncu_is_called_with_the_case(gpu, monkeypatch):
    called = []
    monkeypatch.setattr(subprocess, "run", lambda command: called.append(command) or subprocess.CompletedProcess(command, 0))
    assert tools.profile("fused", suite.case(8, 773)) == 0
    assert called[0][0] == "ncu" and "--clock-control=none" in called[0] and "make_inputs(8, 773" in called[0][-1]


def test_what_is_missing_is_named(gpu, monkeypatch):
    monkeypatch.setattr(tools.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="ncu is not there: it comes with the CUDA toolkit"):
        tools.profile("fused", suite.case(8, 773))
    with pytest.raises(UnsupportedError, match="compute-sanitizer is not there"):
        tools.sanitize()
    monkeypatch.setattr(hardware, "device", lambda: "cpu")
    with pytest.raises(UnsupportedError, match="sanitizing needs an NVIDIA GPU"):
        tools.sanitize()
