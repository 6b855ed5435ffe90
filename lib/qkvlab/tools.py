"""NVIDIA's command line tools on the stages: Nsight Compute on one, compute-sanitizer on all. Both come with the CUDA toolkit."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from itertools import product

import pandas as pd

from . import api, hardware, problem

SECTIONS = ["SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats"]
ODD_SHAPES = [(1, 131), (3, 683)]
# A library asks a driver for functions that it may lack, which memcheck would count with the errors of memory.
SANITIZERS = {"memcheck": ["--report-api-errors=no"], "racecheck": []}
_FINDING = re.compile(r"^=+ ((?!COMPUTE-SANITIZER|.*SUMMARY)\S.*(?:\n=+ {2,}\S.*)?)", re.M)
TIMEOUT = 100  # seconds that a sanitizer may take
SANITIZER_COLUMNS = {
    "gpu": str, "impl": str, "tool": str, "batch_size": int, "seq_len": int, "errors": int | None, "said": str, "torch": str,
    "triton": str, "driver": str | None, "commit": str, "date": str,
}  # fmt: skip

_ONE_CALL = """
import torch
from qkvlab import IMPLEMENTATIONS, make_inputs
inputs = make_inputs({batch_size}, {seq_len}, device="cuda")
function = IMPLEMENTATIONS["{stage}"].function
function(*inputs)
torch.cuda.synchronize()
torch.cuda.profiler.start()
function(*inputs)
torch.cuda.synchronize()
torch.cuda.profiler.stop()
"""


def _require(tool, purpose):
    """Raise UnsupportedError, with what to do, without a GPU or the tool."""
    if hardware.device() == "cpu":
        raise problem.UnsupportedError(
            f"{purpose} needs an NVIDIA GPU and {tool}; what it said on one is in notebook 06, and `make aot` shows what the compiler makes of a stage"
        )
    if not shutil.which(tool):
        raise problem.UnsupportedError(f"{tool} is not there: it comes with the CUDA toolkit; put it on PATH")


def profile(stage, case):
    """One call of a stage on a suite.Case under Nsight Compute, clocks left alone; returns ncu's exit code.

    Raises UnsupportedError without a GPU or ncu.
    """
    _require("ncu", "profiling")
    options = ["--clock-control=none", "--profile-from-start=off", *(f"--section={name}" for name in SECTIONS)]
    source = _ONE_CALL.format(stage=stage, batch_size=case.batch_size, seq_len=case.seq_len)
    return subprocess.run(["ncu", *options, sys.executable, "-c", source]).returncode


def sanitize(stages=None, shapes=ODD_SHAPES):
    """Stages by name, or every one that runs here, under each of SANITIZERS, at shapes that no tile divides: the rows of data/sanitizer.

    errors: what the tool counted, warnings too, NA where it gave no summary or the call under it failed; said: that summary,
    and the first two findings that differ, each with the line that goes on with it, or else the end of the output.
    Raises UnsupportedError without a GPU or compute-sanitizer, ValueError for a stage that does not run here.
    """
    if not set(stages or ()) <= set(api.IMPLEMENTATIONS):
        raise ValueError(f"a stage is one of {', '.join(api.IMPLEMENTATIONS)}; got {', '.join(stages)}")
    _require("compute-sanitizer", "sanitizing")
    running = [stage.name for stage in api.IMPLEMENTATIONS.values() if not stage.unsupported("cuda")]
    stages = stages or running
    if not set(stages) <= set(running):
        raise ValueError(f"here runs {', '.join(running)}; got {', '.join(stages)}")

    def run(work):
        stage, tool, (batch_size, seq_len) = work
        source = _ONE_CALL.format(stage=stage, batch_size=batch_size, seq_len=seq_len)
        # An allocation of its own for every tensor, so that reading past one is an error.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        try:
            command = ["compute-sanitizer", f"--tool={tool}", *SANITIZERS[tool], sys.executable, "-c", source]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT)
            output, failed = done.stdout + done.stderr, done.returncode != 0
        except subprocess.TimeoutExpired:
            output, failed = f"no end within {TIMEOUT} s", True
        found = None if failed else re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+).*", output)
        findings = dict.fromkeys(re.sub(r"\n=+ +", " ", finding) for finding in _FINDING.findall(output))
        said = [found.group(), *list(findings)[:2]] if found else [output.strip()[-200:]]
        return {
            "impl": stage, "tool": tool, "batch_size": batch_size, "seq_len": seq_len,
            "errors": int(found.group(1)) if found else pd.NA, "said": "; ".join(said),
        }  # fmt: skip

    with ThreadPoolExecutor(max_workers=8) as pool:
        rows = list(pool.map(run, product(stages, SANITIZERS, shapes)))
    rows = pd.DataFrame(rows).assign(date=date.today().isoformat(), **hardware.state())
    return rows[list(SANITIZER_COLUMNS)]
