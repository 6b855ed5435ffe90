"""What this Python lacks, and what the lab sees of the machine: run by path, since the package cannot be imported before it is whole."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path


def lacking(extras=()):
    """Names that this Python has not, of those that lib/pyproject.toml requires, or of its extras if some are named."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [] if extras else project["dependencies"]
    wanted += [name for extra in extras for name in project["optional-dependencies"][extra]]
    names = [re.match(r"[\w.-]+", requirement).group() for requirement in wanted]
    installed = {re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower() for found in importlib.metadata.distributions()}
    return [name for name in names if name.lower() not in installed]


def main():
    missing = lacking() + lacking(["test"])
    if missing:
        print(
            f"{sys.executable} lacks {', '.join(missing)}: install them, or leave PYTHON= out and let make build its own environment"
        )
        return 1
    if lacking(["lab"]):
        print(f"for `make lab` it also lacks {', '.join(lacking(['lab']))}")
    import torch

    from qkvlab import hardware, timing  # before triton: it decides where kernels run

    import triton  # isort: skip

    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, Triton {triton.__version__}, commit {hardware.commit()}")
    try:
        if hardware.device() == "cpu":
            return 0
    except RuntimeError as reason:
        print(reason)
        return 1
    state = hardware.state()
    known = "in data/devices.yaml" if state["gpu"] in hardware.gpus() else "NOT in data/devices.yaml: no bound for it"
    print(f"GPU {state['gpu']} ({known}), driver {state['driver']}, SM clock {hardware.sm_clock_mhz()} MHz")
    if lacking(["gpu"]):
        print(f"it lacks {', '.join(lacking(['gpu']))}: timing would fall back to {timing.EVENTS}, or go without clocks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
