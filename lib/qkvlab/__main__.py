"""python -m qkvlab: what the Makefile calls."""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path


def lacking(extras):
    """Names that lib/pyproject.toml requires, with these extras, and this Python has not."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [name for extra in extras for name in project["optional-dependencies"][extra]]
    names = [re.match(r"[\w.-]+", requirement).group() for requirement in wanted]
    installed = {re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    return [name for name in names if name.lower() not in installed]


def doctor(options):
    """What this Python lacks, and what the lab sees of the machine. Exits with 1 if a test run could not start."""
    missing = lacking(["test"])
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}: install them, or leave PYTHON= out and let make build its own environment"
        )
        return 1
    if lacking(["lab"]):
        print(f"for `make lab` it also lacks {', '.join(lacking(['lab']))}")
    import torch
    import triton

    from . import hardware, timing

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, Triton {triton.__version__}, commit {hardware.commit()}")
    if hardware.device() == "cpu":
        print("no NVIDIA GPU: kernels run in Triton's interpreter, timings come from data/runs/")
        return 0
    state = hardware.state()
    known = "in data/devices.yaml" if state["gpu"] in hardware.gpus() else "NOT in data/devices.yaml: no bound for it"
    print(f"GPU {state['gpu']} ({known}), driver {state['driver']}, SM clock {hardware.sm_clock_mhz()} MHz")
    if lacking(["gpu"]):
        print(f"it lacks {', '.join(lacking(['gpu']))}: timing would fall back to {timing.EVENTS}, without clocks")
    return 0


def report(options):
    """Measure all stages and peers on all 16 cases (on a GPU), draw the figures, print the table."""
    from . import api, hardware, plots, records, timing

    if hardware.device() == "cuda":
        path = records.save(timing.bench([*timing.peers(), *api.contenders()]))
        print(f"measured on this {hardware.gpu_name()}, written to {records.tables.shown(path)}")
    rows = records.against_sol(records.newest())
    if hardware.device() == "cpu":
        print(
            f"no GPU here: drawn from the run recorded on {rows.gpu.iloc[0]}, {rows.date.iloc[0]}, commit {rows['commit'].iloc[0]}"
        )
    if rows.bound_us.notna().all():
        drawn = {
            "latency_vs_sol": plots.latency_vs_sol(rows),
            "roofline": plots.roofline(rows),
            "leaderboard": plots.leaderboard(records.means(rows), records.board()),
        }
        for name, figure in drawn.items():
            records.figure(name).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(records.figure(name), dpi=110)
    print(f"\nmedian µs by {rows.method.iloc[0]}\n{records.latencies(rows).round(1).to_string()}\n")
    print(records.means(rows).round(2).to_string(index=False))
    return 0


def aot(options):
    """Compile every stage for a GPU that is not here, and print what it uses."""
    from . import aot, api, problem

    shapes = [(case.batch_size, case.seq_len) for case in problem.cases()]
    for name in api.IMPLEMENTATIONS:
        table = aot.compiled(name, options.arch, shapes)
        print(table.drop(columns=["batch_size", "seq_len"]).drop_duplicates().to_string(index=False), "\n")
    return 0


PROFILED = """
import torch
from qkvlab import IMPLEMENTATIONS, cases, make_inputs
case = cases()[{case}]
inputs = make_inputs(case.batch_size, case.seq_len, device="cuda")
function = IMPLEMENTATIONS["{stage}"].function
function(*inputs)
torch.cuda.synchronize()
torch.cuda.profiler.start()
function(*inputs)
torch.cuda.synchronize()
torch.cuda.profiler.stop()
"""


def profile(options):
    """One call of a stage under Nsight Compute, clocks left alone, with the sections that say what bounds it."""
    from . import api, problem

    if options.stage not in api.IMPLEMENTATIONS or not 0 <= options.case < len(problem.cases()):
        print(f"STAGE is one of {', '.join(api.IMPLEMENTATIONS)}; CASE is 0 to {len(problem.cases()) - 1} (data/cases.csv)")
        return 2
    if not shutil.which("ncu"):
        print("ncu is not there: Nsight Compute comes with the CUDA toolkit; put its ncu on PATH")
        return 1
    sections = ["SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats"]
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        *(word for name in sections for word in ("--section", name)),
    ]
    source = PROFILED.format(stage=options.stage, case=options.case)
    return subprocess.run([*command, sys.executable, "-c", source], env=os.environ).returncode


def main():
    parser = argparse.ArgumentParser(prog="python -m qkvlab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for command in (doctor, report, aot, profile):
        entry = commands.add_parser(command.__name__, help=command.__doc__.splitlines()[0])
        entry.set_defaults(command=command)
        if command is aot:
            entry.add_argument("--arch", default="sm_100", help="sm_90, sm_100 or sm_103")
        if command is profile:
            entry.add_argument("stage")
            entry.add_argument("case", type=int)
    options = parser.parse_args()
    return options.command(options)


if __name__ == "__main__":
    sys.exit(main())
