"""A SOL-ExecBench solution from a stage, the problem to judge it by, and what the judge said.

A solution is the lab's own modules as they stand, those that the stage imports and no others, and a `main.py` with the
entry point. Nothing of the lab need be installed where it is judged. Written after the evaluator, version 1.0.2.
"""

import ast
import importlib.util
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd

from . import api, problem, suite, tables, tuned
from .kernels.launch import needs_wgmma
from .reference import _rms_norm, reference

FOLDER = tables.DATA.parent / "build" / "submission"
EVALUATOR = "SOL-ExecBench 1.0.2"
HOW_TO_GET = "pip install 'git+https://github.com/NVIDIA/SOL-ExecBench' (Python 3.12 or newer, an NVIDIA GPU)"
JUDGE_COLUMNS = {
    "gpu": str, "impl": str, "uuid": str, "status": str, "judge_us": float | None, "lab_us": float | None,
    "max_absolute_error": float | None, "evaluator": str, "torch": str, "triton": str,
    "driver": str | None, "commit": str, "date": str,
}  # fmt: skip

_ENTRY = '''"""{definition}: {about}.

Precision of the products: {precision}. Nothing is kept from call to call but compiled kernels and,
of launches that are queued together, their graphs: no argument and no result.
"""

from {package}.{module} import {function}


def run({arguments}):
    """Shapes and dtypes as the definition's; {returns}."""
    {call}
'''


def solution(name, *, destination_passing):
    """The solution of a stage (a name in IMPLEMENTATIONS, or 'auto'), as the dict that solution.json holds.

    destination_passing: whether `run` takes the outputs after the inputs and fills them, or returns them.
    """
    stage = next((stage for stage in api.contenders() if stage.name == name), None)
    if stage is None:
        raise ValueError(f"STAGE must be 'auto' or one of {', '.join(api.IMPLEMENTATIONS)}; got {name!r}")
    inputs, outputs = problem.Inputs._fields, problem.QKV._fields
    given = f"{', '.join(inputs)}, out=({', '.join(outputs)})" if destination_passing else ", ".join(inputs)
    call = f"{stage.function.__name__}({given})"
    module = stage.function.__module__.removeprefix("qkvlab.")
    package = f"qkv_{name}"
    main = _ENTRY.format(
        definition=problem.DEFINITION, about=stage.about, precision=stage.precision,
        package=package, module=module, function=stage.function.__name__,
        arguments=", ".join([*inputs, *(outputs if destination_passing else ())]),
        returns="the outputs are written in place" if destination_passing else "returns " + ", ".join(outputs),
        call=call if destination_passing else f"return tuple({call})",
    )  # fmt: skip
    return {
        "name": f"qkvlab_{name}",
        "definition": problem.DEFINITION,
        "author": "qkvlab",
        "description": f"{stage.about}; products in {stage.precision}",
        "spec": {
            "languages": ["triton"],
            # Of GPUs the board knows the B200 alone; LOCAL is the one that is there.
            "target_hardware": ["LOCAL"] if stage.needs is needs_wgmma else ["B200", "LOCAL"],
            "entry_point": "main.py::run",
            "dependencies": ["torch", "triton"],
            "destination_passing_style": destination_passing,
        },
        "sources": [{"path": "main.py", "content": main}, *_modules(stage.function.__module__, package)],
    }


def _modules(name, package):
    """[{path, content}] of a module of the lab and of all that it imports from the lab, as a package of that name."""
    found, waiting = {}, [name]
    while waiting:
        module = waiting.pop()
        source = _table() if module == "qkvlab.tuned" else Path(importlib.util.find_spec(module).origin).read_text()
        path = module.replace("qkvlab", package).replace(".", "/") + ".py"
        if path in found:
            continue
        found[path] = source
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = module.rsplit(".", node.level)[0]
                names = [f"{base}.{node.module}"] if node.module else [f"{base}.{alias.name}" for alias in node.names]
                waiting += names
    packages = {str(parent / "__init__.py") for path in found for parent in Path(path).parents if parent.name}
    return [{"path": path, "content": found.get(path, "# package\n")} for path in sorted(packages | set(found))]


def _table():
    """The source that stands in for tuned.py, which reads data/tuned: the same tables, and the same function."""
    lines = [
        f"    {gpu!r}: (\n" + "".join(f"        {entry!r},\n" for entry in found) + "    ),\n"
        for gpu, found in tuned.known().items()
    ]
    return (
        '"""What tuning found for a GPU, as api.chosen wants it: {gpu: ((M, ((stage, config), ...)), ...)}."""\n\n'
        "from functools import cache\n\nimport torch\n\n"
        f"KNOWN = {{\n{''.join(lines)}}}\n\n\ndef known():\n    return KNOWN\n\n\n{inspect.getsource(tuned.classes.__wrapped__)}"
    )


def definition():
    """The problem, with the lab's own reference expression, as the dict that definition.json holds."""
    head_axes = ["batch_size", "seq_len", "num_heads", "head_dim"]
    tensor = {
        "hidden_states": ["batch_size", "seq_len", "hidden_size"],
        **{f"{name}_proj_weight": ["qkv_out_size", "hidden_size"] for name in "qkv"},
        **{f"{name}_norm_weight": ["head_dim"] for name in "qk"},
        "eps": None,
    }
    constants = {"NUM_HEADS": problem.NUM_HEADS, "HEAD_DIM": problem.HEAD_DIM, "EPS": problem.EPS}
    text = [
        "from typing import NamedTuple\n\nimport torch\nimport torch.nn.functional as F\n",
        "\n".join(f"{name} = {value!r}" for name, value in constants.items()) + "\n",
        *(inspect.getsource(part) for part in (problem.QKV, _rms_norm, reference)),
        f"@torch.no_grad()\ndef run({', '.join(tensor)}):\n    return tuple(reference({', '.join(tensor)}))\n",
    ]
    return {
        "name": problem.DEFINITION,
        "description": "fp32 QKV projection with per-head RMSNorm (audio attention, gemma-3n-E4B)",
        "axes": {
            "batch_size": {"type": "var"},
            "seq_len": {"type": "var"},
            "hidden_size": {"type": "const", "value": problem.HIDDEN_SIZE},
            "num_heads": {"type": "const", "value": problem.NUM_HEADS},
            "head_dim": {"type": "const", "value": problem.HEAD_DIM},
            "qkv_out_size": {"type": "expr", "expression": "num_heads * head_dim"},
        },
        "inputs": {name: {"shape": shape, "dtype": "float32"} for name, shape in tensor.items()},
        "outputs": {name: {"shape": head_axes, "dtype": "float32"} for name in problem.QKV._fields},
        "reference": "\n\n".join(text),
    }


def workloads():
    """The 16 cases as the dicts that workload.jsonl holds, a line each."""
    random = {name: {"type": "random"} for name in problem.Inputs._fields if name != "eps"}
    return [
        {
            "uuid": case.uuid,
            "axes": {"batch_size": case.batch_size, "seq_len": case.seq_len},
            "inputs": random | {"eps": {"type": "scalar", "value": case.eps}},
            "tolerance": {name: getattr(case, name) for name in ("max_atol", "max_rtol", "required_matched_ratio")},
        }
        for case in suite.cases()
    ]


def write(name, *, destination_passing=False, folder=FOLDER):
    """Write <folder>/solution.json and <folder>/problem/{definition.json, workload.jsonl, config.json}; returns the solution's path.

    The configuration leaves out the evaluator's timing of the reference: the lab has PyTorch fp32 among its peers.
    """
    text = json.dumps(solution(name, destination_passing=destination_passing), indent=2)
    (folder / "problem").mkdir(parents=True, exist_ok=True)
    (folder / "problem" / "definition.json").write_text(json.dumps(definition(), indent=2))
    (folder / "problem" / "workload.jsonl").write_text("\n".join(map(json.dumps, workloads())) + "\n")
    (folder / "problem" / "config.json").write_text(json.dumps({"benchmark_reference": False}))
    path = folder / "solution.json"
    path.write_text(text)
    return path


def judge(name, *, folder=FOLDER):
    """Have the evaluator, if it is installed, judge a stage on this GPU; its traces as a DataFrame (see `traces`)."""
    if shutil.which("sol-execbench"):
        command = ["sol-execbench"]
    elif importlib.util.find_spec("sol_execbench"):
        command = [sys.executable, "-m", "sol_execbench.cli.main"]
    else:
        raise problem.UnsupportedError(f"the evaluator is not installed: {HOW_TO_GET}")
    path = write(name, folder=folder)
    output = folder / "traces.jsonl"
    output.unlink(missing_ok=True)
    done = subprocess.run([*command, str(folder / "problem"), "--solution", str(path), "--output", str(output)])
    if not output.exists():
        raise RuntimeError(f"the evaluator wrote no traces (exit code {done.returncode})")
    return traces(output)


def traces(path):
    """The evaluator's traces, a row a case: impl, uuid, status, judge_us, max_absolute_error (NaN where it gave none)."""
    rows = []
    for trace in map(json.loads, Path(path).read_text().splitlines()):
        found = trace["evaluation"]
        performance, correctness = found.get("performance") or {}, found.get("correctness") or {}
        rows.append({
            "impl": trace["solution"].removeprefix("qkvlab_"),
            "uuid": trace["workload"]["uuid"],
            "status": found["status"],
            "judge_us": performance.get("latency_ms", float("nan")) * 1e3,
            "max_absolute_error": correctness.get("max_absolute_error", float("nan")),
        })  # fmt: skip
    return pd.DataFrame(rows)
