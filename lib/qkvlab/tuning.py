"""Choosing stage and launch configuration for a GPU and an M: correctness first, then the median.

A configuration is admitted only if it compiles, fits, does not spill, is right by both rules in ROUNDS rounds of fresh
inputs into poisoned outputs, and gives the same bits twice: some configurations compile into silent races. What is
rejected is recorded with the reason. The public call never tunes; api.chosen reads what `make tune` wrote.
"""

import json
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from . import api, hardware, problem, suite, tables, timing, verification
from .kernels import launch, pair, tile, tma

ROUNDS = 20
SHAPES = [(1, 64), (1, 131), (2, 128), (2, 293), (4, 256), (4, 541), (8, 512), (8, 773), (16, 512)]


def candidates(M, device):
    """[(stage, Config)] worth timing at M: each stage's own heuristic, and what lies around it."""
    found = [("fused", tile.heuristic(M, device)), ("pair", pair.heuristic(M, device))]
    found += [("tma", config) for config in (*tma.LADDER, tma.TWO_A_MULTIPROCESSOR) if M <= 64 * config.BLOCK_M]
    found += [
        ("pair", launch.Config(block_m, 64, warps, stages))
        for (block_m, warps), stages in product([(64, 4), (128, 8)], [3, 4])
        if M > 512
    ]
    return list(dict.fromkeys(found))


def rejection(stage, config, shape):
    """Why a configuration is not admitted at (batch_size, seq_len), or '' if it is."""
    run = partial(api.IMPLEMENTATIONS[stage].function, config=config)
    inputs = suite.make_inputs(*shape, device=hardware.device())
    try:
        first, second = run(*inputs), run(*inputs)
    except Exception as error:  # whatever the compiler or the driver has to say is the reason
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    spilling = [kernel for kernel, compiled in launch.compiled_with(config) if compiled.n_spills]
    if spilling:
        return f"spills in {', '.join(spilling)}"
    if not all(torch.equal(a, b) for a, b in zip(first, second)):
        return "two calls on the same inputs differ"
    report = verification.verify(run, [shape], rounds=ROUNDS)
    wrong = report.table[~(report.table.board & report.table.lab)]
    return "" if report.passed else f"wrong: {wrong.verdict.iloc[0]}"


def tune(shapes=SHAPES):
    """Search on this GPU; returns the table that data/tuned/<gpu>.json holds (see data/README.md)."""
    if hardware.device() != "cuda":
        raise problem.UnsupportedError("tuning needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    classes, rejected = [], []
    for shape in tqdm(shapes, desc="tune", leave=False):
        M = shape[0] * shape[1]
        proposed = candidates(M, device)
        inputs = suite.make_inputs(*shape, device=device)
        with ThreadPoolExecutor() as pool:  # compile side by side; what fails here fails again, with its reason, below
            futures = [pool.submit(api.IMPLEMENTATIONS[stage].function, *inputs, config=config) for stage, config in proposed]
            wait(futures)
        admitted = []
        for stage, config in proposed:
            reason = rejection(stage, config, shape)
            if reason:
                rejected.append({"M": M, "stage": stage, "config": asdict(config), "reason": reason})
            else:
                admitted.append((stage, config))
        timed = [
            problem.Stage(f"{i}", partial(api.IMPLEMENTATIONS[stage].function, config=config))
            for i, (stage, config) in enumerate(admitted)
        ]
        if not timed:
            raise RuntimeError(f"nothing was admitted at M = {M}: {rejected}")
        rows = timing.bench(timed, shape)
        median = rows.set_index("impl").median_us.sort_values()
        best, *others = [
            {"stage": admitted[int(i)][0], "config": asdict(admitted[int(i)][1]), "median_us": round(us, 2)}
            for i, us in median.items()
        ]
        classes.append({"M": M, **best, "runner_up": others[0] if others else None})
    return {
        **hardware.state(),
        "date": date.today().isoformat(),
        "method": rows.method.iloc[0],
        "rounds": ROUNDS,
        "classes": classes,
        "rejected": rejected,
    }


def write(table):
    """Write data/tuned/<gpu>.json; returns the path."""
    path = tables.DATA / "tuned" / f"{table['gpu']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    return path
