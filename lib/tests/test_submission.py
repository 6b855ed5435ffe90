"""What is handed to the judge, called as the judge calls it: in a process that knows nothing of the lab."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qkvlab import IMPLEMENTATIONS, UnsupportedError, __main__, api, hardware, problem, submission, suite

# The caller is a judge in small: it blocks the lab from being imported, moves every address by 256 bytes from call to
# call, and looks for what an honest solution can trip over.
JUDGE = """
import importlib, json, sys, threading
sys.modules["qkvlab"] = None
sys.path.insert(0, ".")
import torch
patched = {name: id(eval(name)) for name in ("torch.cuda.Event.elapsed_time", "torch.empty", "torch.cuda.synchronize", "torch.Tensor.data_ptr")}
solution = json.load(open("solution.json"))
module, function = solution["spec"]["entry_point"].split("::")
run = getattr(importlib.import_module(module.removesuffix(".py")), function)

device, (B, S) = "cuda" if torch.cuda.is_available() else "cpu", (2, 5)
shapes = [(B, S, 1024), *[(1024, 1024)] * 3, (128,), (128,), *[(B, S, 8, 128)] * 3]
pools = [torch.empty(torch.Size(shape).numel() + 3 * 64, device=device) for shape in shapes]
values = [torch.randn(shape, device=device) / (32 if len(shape) == 2 else 1) for shape in shapes[:4]] + [torch.ones(128, device=device)] * 2
threads = None
for call in range(4):
    moved = []
    for shape, pool in zip(shapes, pools):
        size = torch.Size(shape).numel()
        moved.append(pool[call * 64 : call * 64 + size].view(shape))
    for tensor, value in zip(moved, values):
        tensor.copy_(value * (call + 1))
    for out in moved[6:]:
        out.zero_()
    if solution["spec"]["destination_passing_style"]:
        run(*moved[:6], 1e-6, *moved[6:])
        out = moved[6:]
    else:
        out = run(*moved[:6], 1e-6)
    assert [type(tensor) for tensor in out] == [torch.Tensor] * 3, [type(tensor) for tensor in out]
    assert [tuple(tensor.shape) for tensor in out] == [(B, S, 8, 128)] * 3
    want = torch.nn.functional.linear(moved[0].double(), moved[3].double()).view(B, S, 8, 128)
    assert float((out[2] - want).norm() / want.norm()) < 1e-3, call  # these weights, not the last call's
    threads = threads or threading.active_count()
assert threading.active_count() == threads
assert patched == {name: id(eval(name)) for name in patched}
assert "qkvlab" not in [name for name, module in sys.modules.items() if module]
print("judged")
"""


@pytest.mark.parametrize("destination_passing", [False, True], ids=["return", "out"])
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "auto"])
def test_an_exported_stage_stands_alone(impl, destination_passing, tmp_path, device):
    path = submission.write(impl, destination_passing=destination_passing, folder=tmp_path)
    for source in json.loads(path.read_text())["sources"]:
        file = tmp_path / source["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source["content"])
    (tmp_path / "judge.py").write_text(JUDGE)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not Path(path, "qkvlab").exists()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": str(int(device == "cpu"))}
    done = subprocess.run([sys.executable, "judge.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("judged\n"), done.stderr


def test_the_solution_says_what_it_is():
    found = submission.solution("fused", destination_passing=False)
    assert found["definition"] == problem.DEFINITION
    assert found["spec"] == {
        "languages": ["triton"], "target_hardware": ["B200", "LOCAL"], "entry_point": "main.py::run",
        "dependencies": ["torch", "triton"], "destination_passing_style": False,
    }  # fmt: skip
    hopper = submission.solution("persistent", destination_passing=False)
    assert hopper["spec"]["target_hardware"] == ["LOCAL"]
    paths = [source["path"] for source in found["sources"]]
    assert (
        "main.py" in paths
        and "qkv_fused/kernels/fused.py" in paths
        and "qkv_fused/kernels/naive.py" not in paths
        and len(set(paths)) == len(paths)
    )
    with pytest.raises(ValueError, match="STAGE must be 'auto' or one of naive, split, fused"):
        submission.solution("fastest", destination_passing=False)


def test_the_problem_is_the_suite():
    lines = submission.workloads()
    assert [line["uuid"] for line in lines] == [case.uuid for case in suite.cases()]
    assert lines[4]["axes"] == {"batch_size": 8, "seq_len": 773} and lines[4]["tolerance"]["max_atol"] == 0.0022
    assert lines[0]["inputs"]["eps"] == {"type": "scalar", "value": 1e-6}
    definition = submission.definition()
    assert list(definition["inputs"]) == list(problem.Inputs._fields) and list(definition["outputs"]) == list(problem.QKV._fields)


def test_its_reference_is_the_labs_own(small):
    import torch

    from qkvlab import reference

    namespace = {}
    exec(submission.definition()["reference"], namespace)
    assert all(torch.equal(a, b) for a, b in zip(namespace["run"](*small), reference(*small)))


def test_without_the_evaluator_the_judge_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(submission.shutil, "which", lambda name: None)
    monkeypatch.setattr(submission.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="not installed: pip install .*SOL-ExecBench"):
        submission.judge("fused", folder=tmp_path)


@pytest.mark.skipif(hardware.device() == "cuda", reason="without a GPU")
@pytest.mark.parametrize("stage", ["tma", "persistent", "auto"])
def test_without_a_gpu_the_judge_says_so(stage, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["qkvlab", "judge", stage])
    assert __main__.main() == 1 and "judging needs an NVIDIA GPU" in capsys.readouterr().out


def test_a_stage_that_does_not_run_here_is_not_judged(capsys, monkeypatch):
    def lacking(device):
        raise UnsupportedError("no such instruction")

    there = dataclasses.replace(IMPLEMENTATIONS["persistent"], needs=lacking)
    monkeypatch.setattr(hardware, "device", lambda: "cuda")
    monkeypatch.setattr(api, "contenders", lambda: [there])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["qkvlab", "judge", "persistent"])
    assert __main__.main() == 1 and "persistent does not run here: no such instruction" in capsys.readouterr().out


def test_traces_are_read_back(tmp_path):
    passed = {"status": "PASSED", "performance": {"latency_ms": 0.02}, "correctness": {"max_absolute_error": 1e-3}}
    failed = {"status": "INCORRECT_NUMERICAL", "performance": None, "correctness": {"max_absolute_error": 2.0}}
    lines = [
        {"solution": "qkvlab_fused", "workload": {"uuid": f"u{i}"}, "evaluation": found}
        for i, found in enumerate((passed, failed))
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    table = submission.traces(path)
    assert table.impl.tolist() == ["fused"] * 2 and table.judge_us[0] == 20 and table.judge_us.isna()[1]
