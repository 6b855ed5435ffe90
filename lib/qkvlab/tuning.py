"""Choosing stage and launch configuration for a GPU and an M: correctness first, then the median.

Candidates are timed together, then checked from the fastest on until two are admitted, the winner and its runner-up. A
configuration is admitted only if it compiles, fits, does not spill, is right by both rules in ROUNDS rounds of fresh
inputs into poisoned outputs, and gives the same bits twice: some configurations compile into silent races. What is
rejected is recorded with the reason. The public call never tunes; api.chosen reads what `make tune` wrote.

Where the two nearly tie, the first of the candidates wins: fewer launches cost the host less, and smaller tiles lose less
where M, up to the one tuned for, is smaller.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from functools import partial
from itertools import product

import torch
from tqdm import tqdm

from . import api, hardware, problem, suite, tables, timing, verification
from .kernels import launch, pair, persistent, tile, tma, wide

ROUNDS = 20
TIE = 0.02  # of the fastest's time: nearer than two stages are told apart from one run to the next


def shapes(device):
    """[(1, M)]: where the choices of tma and wide end on this device, and the suite's M.

    They end at the largest M of which all tiles run at once, for each tile of their ladders and for two CTAs of tma a multiprocessor.
    """
    count, heads = launch.sm_count(device), 3 * problem.NUM_HEADS
    ends = [count // heads * config.BLOCK_M for config in tma.LADDER] + [2 * count // heads * tma.TWO_A_MULTIPROCESSOR.BLOCK_M]
    ends += [count // wide.TILES * config.BLOCK_M for config in wide.LADDER]
    return [(1, M) for M in sorted({*ends, *(case.m for case in suite.cases())}) if M]


def candidates(M, device):
    """[(stage, Config)] worth timing at M: of each stage that can lead its heuristic, of tma, wide and pair what lies around it too.

    In the order in which one is taken where times tell nothing: by launches, then by tokens to a tile.
    """
    found = [("fused", tile.heuristic(M, device))]
    found += [("tma", config) for config in (*tma.LADDER, tma.TWO_A_MULTIPROCESSOR) if M <= 64 * config.BLOCK_M]
    found += [("wide", config) for config in wide.LADDER if M <= 16 * config.BLOCK_M]
    if M <= 512:
        return [*found, ("pair", pair.heuristic(M, device))]
    tiles = product([(64, 4), (128, 8)], [3, 4])
    found += [("pair", launch.Config(block_m, 64, warps, stages)) for (block_m, warps), stages in tiles]
    return [*found, ("persistent", persistent.heuristic(M, device))]


def rejection(stage, config, shape):
    """Why a configuration is not admitted at (batch_size, seq_len), or '' if it is."""
    run = partial(api.IMPLEMENTATIONS[stage].function, config=config)
    inputs = suite.make_inputs(*shape, device=hardware.device())
    first, second = _outcome(run, inputs), _outcome(run, inputs)
    if isinstance(first, str):
        return first
    spilling = [kernel for kernel, compiled in launch.compiled_with(config) if compiled.n_spills]
    if spilling:
        return f"spills in {', '.join(spilling)}"
    if not all(torch.equal(a, b) for a, b in zip(first, second)):
        return "two calls on the same inputs differ"
    report = verification.verify(run, [shape], rounds=ROUNDS)
    wrong = report.table[~(report.table.board & report.table.lab)]
    return "" if report.passed else f"wrong: {wrong.verdict.iloc[0]}"


def _outcome(run, inputs):
    """What a call returns, or why there is none: whatever the compiler or the driver has to say is the reason."""
    try:
        return run(*inputs)
    except Exception as error:
        return f"does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def ranked(admitted, proposed):
    """The two admitted, the faster first; if their medians are within TIE, the one that was proposed first."""
    if len(admitted) == 2 and admitted[1]["median_us"] <= (1 + TIE) * admitted[0]["median_us"]:
        return sorted(admitted, key=lambda found: proposed.index((found["stage"], launch.Config(**found["config"]))))
    return admitted


def tune():
    """Search on this GPU; returns the table that data/tuned/<gpu>.json holds (see data/README.md)."""
    if hardware.device() != "cuda":
        raise problem.UnsupportedError("tuning needs an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    classes, rejected = [], []
    for shape in tqdm(shapes(device), desc="tune", leave=False):
        M = shape[0] * shape[1]
        proposed = candidates(M, device)
        runs = [partial(api.IMPLEMENTATIONS[stage].function, config=config) for stage, config in proposed]
        inputs = suite.make_inputs(*shape, device=device)
        with ThreadPoolExecutor() as pool:  # compiled side by side
            outcomes = list(pool.map(lambda run: _outcome(run, inputs), runs))

        def reject(i, reason):
            rejected.append({"M": M, "stage": proposed[i][0], "config": asdict(proposed[i][1]), "reason": reason})

        timed = []
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, str):
                reject(i, outcome)
            else:
                timed.append(problem.Stage(f"{i}", runs[i]))
        rows = timing.bench(timed, shape)
        admitted = []
        for i, us in rows.set_index("impl").median_us.sort_values().items():
            stage, config = proposed[int(i)]
            reason = rejection(stage, config, shape)
            if reason:
                reject(int(i), reason)
            else:
                admitted.append({"stage": stage, "config": asdict(config), "median_us": round(us, 2)})
            if len(admitted) == 2:
                break
        if not admitted:
            raise RuntimeError(f"nothing was admitted at M = {M}: {rejected}")
        winner, *others = ranked(admitted, proposed)
        classes.append({"M": M, **winner, "runner_up": others[0] if others else None})
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
