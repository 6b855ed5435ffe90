"""What is on record: the board's runs and the lab's own, as DataFrames."""

from functools import cache

import pandas as pd

from . import hardware, sol, tables

RUN_COLUMNS = {
    "gpu": str, "impl": str, "precision": str, "launches": int | None, "uuid": str, "batch_size": int, "seq_len": int,
    "median_us": float, "mean_us": float, "p5_us": float, "p95_us": float, "busy_us": float, "gap_us": float, "calls": int,
    "method": str, "sm_clock_mhz": float | None, "sm_clock_after_mhz": float | None, "torch": str, "triton": str,
    "driver": str | None, "commit": str, "date": str,
}  # fmt: skip
ERROR_COLUMNS = {
    "gpu": str, "impl": str, "precision": str, "uuid": str, "tensor": str, "board": int, "lab": int, "elements": int, "beyond": int,
    "worst_error": float, "relative_error": float, "torch": str, "triton": str, "driver": str | None, "commit": str, "date": str,
}  # fmt: skip
HOST_COLUMNS = {
    "gpu": str, "impl": str, "batch_size": int, "seq_len": int, "first_ms": float, "host_us": float, "torch": str, "triton": str,
    "driver": str | None, "commit": str, "date": str,
}  # fmt: skip
TRIAL_COLUMNS = {
    "gpu": str, "date": str, "triton": str, "method": str, "topic": str, "variant": str, "m": int, "median_us": float, "note": str | None,
}  # fmt: skip
# The tables that the notebooks and the README speak of: data/<kind>/<gpu>/<date>.csv.
PUBLISHED = {kind: ("H200", "2026-12-01") for kind in ("runs", "errors", "judge", "trials", "between", "host", "sanitizer")}
BASELINE = "torch_fp32"
CLOCK_SHARE = 0.1


@cache
def board():
    """The 17 ranked B200 runs: rank, implementation, mean_latency_us, sol_percent, slowdown_vs_first, observed."""
    columns = {
        "rank": int,
        "implementation": str,
        "mean_latency_us": float,
        "sol_percent": int,
        "slowdown_vs_first": float,
        "observed": str,
    }
    return tables.read(tables.DATA / "records.csv", columns)


@cache
def implementations():
    """The 29 implementations that the board's page lists: implementation, runtime, best_latency_us, slowdown_vs_first, evidence, availability."""
    columns = dict.fromkeys(
        ("implementation", "runtime", "best_latency_us", "slowdown_vs_first", "evidence", "availability"), str
    )
    return tables.read(tables.DATA / "implementations.csv", columns | {"best_latency_us": float, "slowdown_vs_first": float})


def path(kind, gpu, date):
    """Where a table lies: data/<kind>/<gpu>/<date>.csv."""
    return tables.DATA / kind / gpu / f"{date}.csv"


def recorded(kind="runs", columns=RUN_COLUMNS):
    """The table of a kind that PUBLISHED names."""
    return tables.read(path(kind, *PUBLISHED[kind]), columns)


def newest():
    """The newest run on record, of whichever GPU; the last by name of several from one day."""
    files = (tables.DATA / "runs").glob("*/*.csv")
    return tables.read(max(files, key=lambda file: (file.stem, file)), RUN_COLUMNS)


def save(rows, kind="runs", file=None):
    """Write rows, which have gpu and date, to `file`, or to their `path`, in the place of a table of that day; returns the path."""
    file = file or path(kind, rows.gpu.iloc[0], rows.date.iloc[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    columns = list(RUN_COLUMNS) if kind == "runs" else list(rows)
    rows[columns].to_csv(file, index=False, float_format="%.6g" if kind == "errors" else "%.3f")
    return file


def add(rows, kind, columns):
    """As save, but what a table of that day says of other stages, of whichever day, stays; columns: the kind's, {name: type}."""
    file = path(kind, rows.gpu.iloc[0], rows.date.iloc[0])
    if file.exists():
        earlier = tables.read(file, columns)
        rows = pd.concat([earlier[~earlier.impl.isin(rows.impl)], rows])
    return save(rows[list(columns)], kind, file)


def against_sol(rows):
    """Rows of a run with what they are held against: m, precision_class, bound_us (datasheet), measured_bound_us, sol_share, sol_score, flag.

    The bound is that of the row's class, 'reduced' or 'exact', so the rows of a class share it; sol_share is bound /
    median. sol_score is the board's score with PyTorch fp32 of the same run as the baseline (NaN without it). flag names
    what forbids taking the row at its word, '' for nothing.
    """
    rows = rows.copy()
    rows["m"] = rows.batch_size * rows.seq_len
    rows["precision_class"] = rows.precision.map(sol.precision_class)
    known = hardware.gpus()
    for column, measured in (("bound_us", False), ("measured_bound_us", True)):
        rows[column] = [
            sol.bound_us(row.m, row.gpu, sol.BEST_OF_CLASS[row.precision_class], measured=measured)
            if row.gpu in known and (known[row.gpu].measured or not measured) else float("nan")
            for row in rows.itertuples()
        ]  # fmt: skip
    rows["sol_share"] = rows.bound_us / rows.median_us
    baseline = rows[rows.impl == BASELINE].set_index("uuid").median_us
    rows["sol_score"] = sol.sol_score(rows.median_us, rows.bound_us, rows.uuid.map(baseline))
    rows["flag"] = [_flag(row, rows.method.nunique()) for row in rows.itertuples()]
    return rows


def of_the_operation(rows):
    """Rows without the yardsticks (gemm_only_*), which leave out part of the operation."""
    return rows[~rows.impl.str.startswith("gemm_only")]


def _flag(row, methods):
    flags = []
    if row.gpu not in hardware.gpus():
        flags.append("GPU not in data/devices.yaml: no bound")
    if row.sol_share > 1:
        flags.append("above 100 % of SOL: explain before use")
    if abs(row.sm_clock_after_mhz / row.sm_clock_mhz - 1) > CLOCK_SHARE:
        flags.append(f"SM clock moved from {row.sm_clock_mhz:.0f} to {row.sm_clock_after_mhz:.0f} MHz")
    if methods > 1:
        flags.append("timing methods are mixed in this table")
    return "; ".join(flags)


def means(rows):
    """Mean over the cases, per gpu, impl and precision, fastest first: cases, mean_us (of the medians), mean_bound_us, ratio of the two, mean_score.

    Takes the rows of against_sol. Raises ValueError if they come from different timing methods.
    """
    if rows.method.nunique() > 1:
        raise ValueError(
            f"rows of different timing methods are never averaged together: {', '.join(sorted(rows.method.unique()))}"
        )
    grouped = rows.groupby(["gpu", "impl", "precision", "precision_class"], sort=False)
    table = grouped.agg(
        cases=("uuid", "nunique"), mean_us=("median_us", "mean"), mean_bound_us=("bound_us", "mean"), mean_score=("sol_score", "mean"),
        flags=("flag", lambda flags: int((flags != "").sum())),
    ).reset_index()  # fmt: skip
    table["ratio"] = table.mean_us / table.mean_bound_us
    return table.sort_values("mean_us", ignore_index=True)


def figure(name):
    """Where a figure is kept: data/figures/<name>.png."""
    return tables.DATA / "figures" / f"{name}.png"


def latencies(rows):
    """A table to read: one row a case, in the order of M; one column an implementation; median µs.

    Raises ValueError if an implementation has several rows for a case, as those of two GPUs or days would be.
    """
    rows = rows.assign(m=rows.batch_size * rows.seq_len, case=rows.batch_size.astype(str) + "x" + rows.seq_len.astype(str))
    table = rows.pivot(index=["m", "case"], columns="impl", values="median_us")
    return table[list(dict.fromkeys(rows.impl))].sort_index()
