"""Compile a stage for a GPU that is not present, and read what it uses. Runs in a process of its own, without the interpreter.

A stage is called on meta tensors (shapes without memory); what it would launch is compiled by Triton for the target.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch

from . import api, problem, suite
from .kernels import launch

ARCHITECTURES = {"sm_90": 90, "sm_100": 100, "sm_103": 103}
MMA = {"sm_90": r"wgmma\.mma_async|mma\.sync", "sm_100": r"tcgen05\.mma|mma\.sync", "sm_103": r"tcgen05\.mma|mma\.sync"}


def compiled(stage, arch, shapes, config=None):
    """What `stage` (a name in IMPLEMENTATIONS) launches for each of `shapes`, compiled for `arch`.

    shapes: (batch_size, seq_len) or qkvlab.Case, or a list. config: a launch.Config in the place of the stage's heuristic.
    Returns a DataFrame: stage, arch, batch_size, seq_len, kernel, shared_bytes, registers, spill_bytes (stack frame and local
    memory), code_bytes, mma (the matrix instruction in the PTX, '' if none). Raises ValueError for an unknown stage or arch,
    UnsupportedError where the stage does not run on the arch, RuntimeError with the compiler's words.
    """
    if stage not in api.IMPLEMENTATIONS or arch not in ARCHITECTURES:
        raise ValueError(
            f"stage is one of {', '.join(api.IMPLEMENTATIONS)}, arch one of {', '.join(ARCHITECTURES)}; got {stage!r}, {arch!r}"
        )
    settings = asdict(config) if config else None
    shapes = [(case.batch_size, case.seq_len) for case in suite.as_cases(shapes)]
    ask = json.dumps({"stage": stage, "arch": arch, "shapes": shapes, "config": settings})
    done = subprocess.run(
        [sys.executable, "-m", "qkvlab.aot", ask], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "0"}
    )
    answer = {"reason": "it ended without an answer"} if done.returncode else json.loads(done.stdout.splitlines()[-1])
    if "reason" in answer:
        raise RuntimeError(f"{stage} does not compile for {arch}: {answer['reason']}\n{done.stderr.strip()[-2000:]}")
    if "unsupported" in answer:
        raise problem.UnsupportedError(answer["unsupported"])
    return pd.DataFrame(answer["launches"])


def _planned(stage, arch, shapes, config=None):
    """[(batch_size, seq_len, kernel, args, meta)] of every launch, none of which takes place."""
    plan = []
    weight = torch.empty(problem.QKV_OUT_SIZE, problem.HIDDEN_SIZE, device="meta")
    norm = torch.empty(problem.HEAD_DIM, device="meta")
    for batch_size, seq_len in shapes:

        def recorder(kernel, grid, args, meta):
            plan.append((batch_size, seq_len, kernel, args, meta))

        recorder.capability = divmod(ARCHITECTURES[arch], 10)
        launch.recorder = recorder
        states = torch.empty(batch_size, seq_len, problem.HIDDEN_SIZE, device="meta")
        try:
            api.IMPLEMENTATIONS[stage].function(states, weight, weight, weight, norm, norm, config=config)
        finally:
            launch.recorder = None
    return plan


def _compile(kernel, args, meta, arch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    constexprs = {name: value for name, value in meta.items() if name in kernel.arg_names}
    options = {name: value for name, value in meta.items() if name not in constexprs}
    signature = dict(zip(kernel.arg_names, map(_type, args))) | dict.fromkeys(constexprs, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(args) if _type(arg).startswith("*")}
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature, constexprs, aligned)
    return triton.compile(source, target=GPUTarget("cuda", ARCHITECTURES[arch], 32), options=options)


def _type(arg):
    if isinstance(arg, float):
        return "fp32"
    if isinstance(arg, int):
        return "i32"
    names = {"float32": "fp32", "float16": "fp16", "int32": "i32"}
    if hasattr(arg, "block_shape"):
        layout = f",{arg.layout!r}" if hasattr(arg, "layout") else ""
        return f"tensordesc<{names[str(arg.base.dtype).removeprefix('torch.')]}{list(arg.block_shape)}{layout}>"
    return "*" + names[str(arg.dtype).removeprefix("torch.")]


def _resources(cubin):
    """(registers, bytes of stack and local memory, bytes of code) of the one kernel in a cubin, by cuobjdump."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        listing = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", "-elf", file.name], capture_output=True, text=True, check=True
        ).stdout
    use = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    code = re.search(r"^ *\w+ +\w+ +(\w+) .* \.text\.\S+$", listing, re.MULTILINE)
    return use["REG"], use["STACK"] + use["LOCAL"], int(code.group(1), 16)


def main(ask):
    config = launch.Config(**ask["config"]) if ask["config"] else None
    try:
        plan = _planned(ask["stage"], ask["arch"], ask["shapes"], config)
    except problem.UnsupportedError as reason:
        print(json.dumps({"unsupported": str(reason)}))
        return
    rows, seen = [], {}
    for batch_size, seq_len, kernel, args, meta in plan:
        key = (kernel.fn, *meta.items())
        if key not in seen:
            try:
                binary = _compile(kernel, args, meta, ask["arch"])
            except Exception as error:  # the innermost says why, the others where
                while error.__cause__:
                    error = error.__cause__
                print(json.dumps({"reason": f"{type(error).__name__}: {error}"}))
                return
            registers, spills, code = _resources(binary.asm["cubin"])
            mma = re.search(MMA[ask["arch"]], binary.asm["ptx"])
            seen[key] = {
                "kernel": kernel.fn.__name__, "shared_bytes": binary.metadata.shared, "registers": registers,
                "spill_bytes": spills, "code_bytes": code, "mma": mma.group() if mma else "",
            }  # fmt: skip
        rows.append({"stage": ask["stage"], "arch": ask["arch"], "batch_size": batch_size, "seq_len": seq_len, **seen[key]})
    print(json.dumps({"launches": rows}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
