"""The lab's pictures: each takes a DataFrame and returns a Figure. Readable in grey, and at half size."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator

from . import hardware, sol, suite, verification

# Shape and grey level tell the series apart; colour only helps.
STYLES = {
    "torch_fp32": ("o", "none", "0.35"),
    "torch_tf32": ("s", "none", "0.35"),
    "torch_compile_tf32": ("D", "none", "0.35"),
    "naive": ("v", "#c9d6df", "0.2"),
    "split": ("^", "#8fb3cc", "0.2"),
    "fused": ("s", "#3f7fae", "0.1"),
    "cublas_fp16": ("p", "none", "0.35"),
    "tma": ("P", "#e3b23c", "0.1"),
    "wide": ("H", "#f2d388", "0.1"),
    "pair": ("X", "#6a994e", "0.1"),
    "persistent": ("d", "#c97b63", "0.1"),
    "exact": ("h", "#7b5ea7", "0.1"),
    "auto": ("*", "#b3261e", "0.1"),
}
OTHERS = [("<", "#444444", "0.1"), (">", "#9bc1bc", "0.1"), ("8", "#d9a5b3", "0.1")]  # a reader's own
INK, FAINT = "0.15", "0.8"


def _style(impl, position):
    marker, face, edge = STYLES.get(impl) or OTHERS[position % len(OTHERS)]
    return {"marker": marker, "markerfacecolor": face, "markeredgecolor": edge, "linestyle": "none"}


def _plain(axis):
    """Log axes with plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _origin(rows):
    """'H200, 2026-11-30, cupti': where and when the rows of one figure were taken."""
    parts = ["/".join(sorted(map(str, rows[column].unique()))) for column in ("gpu", "date", "method")]
    return ", ".join(parts)


def latency_vs_sol(rows):
    """One row a case in the order of M, µs on a log axis: the bound as a tick, baselines hollow, stages filled, % of SOL at the right.

    rows: records.against_sol of one GPU. The percentage is the fastest row's of the reduced class, marked (!) if it is flagged.
    """
    order = rows.drop_duplicates("uuid").sort_values(["m", "batch_size"]).uuid.tolist()
    height = {uuid: i for i, uuid in enumerate(reversed(order))}
    figure, axes = plt.subplots(figsize=(9.5, 6.6), layout="constrained")
    for y in height.values():
        axes.axhline(y, color=FAINT, linewidth=0.8, zorder=0)
    for position, (impl, series) in enumerate(rows.groupby("impl", sort=False)):
        size = 15 if impl == "auto" else 7  # behind the stage that it is, and larger
        axes.plot(
            series.median_us,
            series.uuid.map(height),
            label=impl,
            markersize=size,
            zorder=1.5 if impl == "auto" else 2,
            **_style(impl, position),
        )
    bounds = rows[rows.precision_class == "reduced"].drop_duplicates("uuid")
    axes.plot(
        bounds.bound_us, bounds.uuid.map(height), "|", color=INK, markersize=17, markeredgewidth=2.5, label="bound, datasheet"
    )
    if bounds.measured_bound_us.notna().all():
        axes.plot(
            bounds.measured_bound_us,
            bounds.uuid.map(height),
            "|",
            color=INK,
            markersize=11,
            markeredgewidth=1,
            label="bound, measured rates",
        )
    for uuid, y in height.items():
        case = rows[(rows.uuid == uuid) & (rows.precision_class == "reduced") & rows.bound_us.notna()]
        if len(case):
            best = case.sort_values("median_us").iloc[0]
            axes.text(
                1.01,
                y,
                f"{best.sol_share:.0%}  {best.impl}{' (!)' if best.flag else ''}",
                transform=axes.get_yaxis_transform(),
                va="center",
                color=INK,
            )
    first = rows.drop_duplicates("uuid").set_index("uuid")
    axes.set_yticks(list(height.values()), [f"{first.batch_size[u]}×{first.seq_len[u]}   M = {first.m[u]}" for u in height])
    axes.set_xscale("log")
    _plain(axes.xaxis)
    axes.set_xlabel("median latency, µs")
    axes.set_title(f"Latency and the speed of light, case by case ({_origin(rows)})", loc="left", fontsize=11)
    axes.text(1.01, len(order) - 0.3, "of SOL, fastest", transform=axes.get_yaxis_transform(), va="bottom", color=INK, fontsize=9)
    axes.grid(axis="x", color=FAINT, linewidth=0.5)
    axes.set_ylim(-0.7, len(order) - 0.3)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def roofline(rows):
    """TFLOP/s over FLOPs a byte, both log: the GPU's roofs (datasheet solid, measured dashed, one a precision), a marker a case.

    rows: records.against_sol of one GPU. Intensity is the fused operation's, in fp32.
    """
    gpu = hardware.gpus()[rows.gpu.iloc[0]]
    figure, axes = plt.subplots(figsize=(8.5, 5.6), layout="constrained")
    low, high = 35, 700
    x = np.geomspace(low, high, 200)
    rates = {name: gpu.tflops[name] for name in ("fp16", "tf32", "fp32")}
    for name, rate in rates.items():
        axes.plot(x, np.minimum(x * gpu.dram_tb_s, rate), color=INK, linewidth=1.4, zorder=1)
        axes.text(high * 0.98, rate * 1.04, f"{name} {rate:g} TFLOP/s", ha="right", va="bottom", fontsize=9, color=INK)
        if gpu.measured:
            measured = gpu.measured[name]
            axes.plot(x, np.minimum(x * gpu.measured["dram_tb_s"], measured), color=INK, linewidth=0.9, linestyle="--", zorder=1)
            # At the right edge, where no case lies, between the two roofs, and over the grid line that may run through it.
            axes.text(
                high * 0.98, measured * 1.03, f"{measured:g} measured", ha="right", va="bottom", fontsize=8, color="0.35",
                zorder=1, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
    _label_slope(axes, low * 1.25, gpu.dram_tb_s, f"DRAM {gpu.dram_tb_s:g} TB/s", "bottom")
    if gpu.measured:
        _label_slope(axes, low * 1.25, gpu.measured["dram_tb_s"], f"{gpu.measured['dram_tb_s']:g} measured", "top")
    for position, (impl, series) in enumerate(rows.groupby("impl", sort=False)):
        reached = [sol.flops(m) / us / 1e6 for m, us in zip(series.m, series.median_us)]
        axes.plot(series.m.map(sol.intensity), reached, label=impl, markersize=7, zorder=2, **_style(impl, position))
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOPs a byte (fused, fp32)", ylabel="TFLOP/s")
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.grid(color=FAINT, linewidth=0.5)
    axes.set_title(f"Roofline ({_origin(rows)})", loc="left", fontsize=11)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _label_slope(axes, x, slope, text, side):
    """Write on a bandwidth roof, along it: the angle is the roof's in data, and matplotlib turns it into the page's."""
    y = x * slope * (1.05 if side == "bottom" else 0.95)
    axes.text(
        x,
        y,
        text,
        rotation=np.degrees(np.arctan(slope)),
        rotation_mode="anchor",
        transform_rotates_text=True,
        va=side,
        fontsize=9,
        color=INK,
    )


def leaderboard(means, board):
    """The board's ranked runs and the lab's rows as bars: mean latency over the mean bound of the GPU that ran it, µs written out.

    means: records.means. board: records.board(). A ratio compares across GPUs, microseconds do not.
    """
    sol_us = np.mean([case.b200_sol_us for case in suite.cases()])
    bars = [
        (row.mean_latency_us / sol_us, f"{row.rank}  {row.implementation}", f"{row.mean_latency_us:.1f} µs on B200", False)
        for row in board.itertuples()
    ]
    bars += [
        (row.ratio, f"{row.impl} ({row.precision}, {row.precision_class})", f"{row.mean_us:.1f} µs on {row.gpu}", True)
        for row in means.itertuples()
    ]
    bars.sort(key=lambda bar: -bar[0])
    figure, axes = plt.subplots(figsize=(9, 0.3 * len(bars) + 1.2), layout="constrained")
    for y, (ratio, label, note, ours) in enumerate(bars):
        axes.barh(y, ratio, color="#3f7fae" if ours else "0.86", edgecolor="0.3", hatch="///" if ours else None, linewidth=0.6)
        axes.text(ratio * 1.03, y, f"{ratio:.2f}×   {note}", va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(bars)), [label for _, label, _, _ in bars], fontsize=9)
    axes.set_xscale("log")
    axes.set_xlim(1, max(bar[0] for bar in bars) * 4)
    _plain(axes.xaxis)
    axes.set_xlabel("mean latency over the 16 cases / mean bound of the same GPU (1 = speed of light)")
    axes.set_title(
        "The board's 17 ranked runs (grey, B200, board's SOL) and this lab (hatched, physical bound)", loc="left", fontsize=10
    )
    axes.margins(y=0.01)
    return figure


def error_budget(errors, means):
    """Worst relative error over the mean latency, a marker an implementation, the lab's limit as a line: what accuracy costs.

    errors: records.recorded("errors", ...). means: records.means.
    """
    worst = errors.groupby("impl").relative_error.max()
    passed = errors.groupby("impl")[["board", "lab"]].min()
    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    axes.axhline(verification.RELATIVE_ERROR, color=INK, linewidth=1.2, zorder=0.5)
    axes.text(
        0.01, verification.RELATIVE_ERROR * 1.1, "the lab's limit", transform=axes.get_yaxis_transform(), color=INK, fontsize=9
    )
    last, up = 0.0, False
    for position, row in enumerate(means[means.impl.isin(worst.index)].sort_values("mean_us").itertuples()):
        axes.plot(row.mean_us, worst[row.impl], markersize=10, **_style(row.impl, position))
        failed = [rule for rule in ("board", "lab") if not passed[rule][row.impl]]
        note = f"{row.impl} ({row.precision})" + (f"\nfails: {', '.join(failed)}" if failed else "")
        # Slanted into the empty space below, or above where the neighbour's label is near and below.
        up = row.mean_us < 1.15 * last and not up
        last = row.mean_us
        axes.annotate(
            note, (row.mean_us, worst[row.impl]), xytext=(6, 9 if up else -9), textcoords="offset points",
            rotation=40 if up else -40, rotation_mode="anchor", va="center", fontsize=9, color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, zorder=1,  # over the line, under the markers
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="mean latency over the 16 cases, µs", ylabel="worst relative error of a tensor")
    _plain(axes.xaxis)
    axes.margins(x=0.2, y=0.35)  # room for the slanted notes
    axes.grid(color=FAINT, linewidth=0.5)
    axes.set_title(
        f"Accuracy against latency ({', '.join(sorted(errors.gpu.unique()))}, {', '.join(sorted(errors.date.unique()))})",
        loc="left",
        fontsize=11,
    )
    return figure


def where_time_goes(rows, impls):
    """Busy time and gaps of a call, stacked, a bar an implementation, a panel a case: the smallest, a middle and the largest M.

    rows: records.against_sol of one GPU.
    """
    sizes = sorted(rows.m.unique())
    chosen = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    figure, panels = plt.subplots(1, 3, figsize=(10, 0.32 * len(impls) + 1.4), layout="constrained", sharey=True)
    for axes, m in zip(panels, chosen):
        series = rows[rows.m == m].drop_duplicates("impl").set_index("impl").loc[impls[::-1]]
        axes.barh(series.index, series.busy_us, color="#3f7fae", edgecolor="0.3", linewidth=0.6, label="busy")
        axes.barh(
            series.index,
            series.gap_us,
            left=series.busy_us,
            color="white",
            edgecolor="0.3",
            hatch="///",
            linewidth=0.6,
            label="gaps",
        )
        axes.axvline(series.bound_us.min(), color=INK, linewidth=1.5, label="bound")
        axes.set_title(f"M = {m}", loc="left", fontsize=10)
        axes.set_xlabel("µs")
        axes.set_xlim(0, 1.05 * (series.busy_us + series.gap_us).max())
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(f"Where a call's time goes ({_origin(rows)})", x=0.01, ha="left", fontsize=11)
    return figure
