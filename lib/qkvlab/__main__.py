"""python -m qkvlab: what the Makefile calls."""

import argparse
import sys

import pandas as pd

from .aot import ARCHITECTURES

BETWEEN = [48, 100, 200, 400, 620, 900, 1200, 1400, 1700, 3000, 5000, 7000]  # M of shapes that are not in the suite


def _running(contenders):
    """Those that run on this machine; records in data/host what the first call and the later ones cost the host."""
    from . import records, suite, timing

    running, first_ms, case = [], [], suite.case(4, 256)
    for contender in contenders:
        try:
            first_ms += timing.host_time(contender, case, calls=1).first_ms.tolist()
        except Exception as reason:  # an UnsupportedError, or whatever torch.compile has to say
            print(f"{contender.name} does not run here: {type(reason).__name__}: {reason}")
        else:
            running.append(contender)
    records.save(timing.host_time(running, case).assign(first_ms=first_ms)[list(records.HOST_COLUMNS)], "host")
    return running


def _verified(contenders):
    """Those stages that are right on all 16 cases of this GPU, and the peers in any case; records every error in data/errors."""
    from datetime import date

    from . import hardware, records, verification

    right, found = [], []
    for contender in contenders:
        if contender.name == "torch_compile_tf32":  # poisoned memory would have it compile everything a second time
            right.append(contender)
            continue
        report = verification.verify(contender)
        found.append(report.table.assign(impl=contender.name, precision=contender.precision))
        if report.passed or contender.name.startswith(("torch", "cublas")):
            right.append(contender)
        else:
            print(f"not timed, because it is wrong here:\n{report}")
    rows = pd.concat(found).assign(date=date.today().isoformat(), **hardware.state())
    records.save(rows[list(records.ERROR_COLUMNS)].astype({"board": int, "lab": int}), "errors")
    return right


def report(options):
    """Verify and measure all stages and peers on all 16 cases (on a GPU), draw the figures, print the table."""
    from . import api, hardware, plots, records, suite, tables, timing

    if hardware.device() == "cuda":
        right = _verified(_running([*timing.peers(), *api.contenders()]))
        stages = [stage for stage in right if stage in api.contenders()]
        records.save(timing.bench(stages, [suite.case(1, m) for m in BETWEEN]), "between")
        rows = timing.bench([*right, *timing.yardsticks()])
        print(f"measured on this {hardware.gpu_name()}, written to {tables.shown(records.save(rows))}")
    else:
        rows = records.newest()
        print(
            f"no GPU here: drawn from the run recorded on {rows.gpu.iloc[0]}, {rows.date.iloc[0]}, commit {rows['commit'].iloc[0]}"
        )
    rows = records.of_the_operation(records.against_sol(rows))
    if rows.bound_us.notna().all():
        drawn = {
            "latency_vs_sol": plots.latency_vs_sol(rows),
            "roofline": plots.roofline(rows[rows.impl.isin(["torch_fp32", "fused", "auto"])]),
            "leaderboard": plots.leaderboard(records.means(rows), records.board()),
        }
        for name, figure in drawn.items():
            records.figure(name).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(records.figure(name), dpi=110)
        print(f"drawn: {', '.join(tables.shown(records.figure(name)) for name in drawn)}")
    else:
        print("this GPU is not in data/devices.yaml, so there is no bound to draw against; the table stands")
    print(f"\nmedian µs by {rows.method.iloc[0]}\n{records.latencies(rows).round(1).to_string()}\n")
    print(records.means(rows).round(2).to_string(index=False))
    return 0


def tune(options):
    """Search launch configurations on this GPU, correctness first, and write data/tuned/<gpu>.json."""
    from . import problem, tables, tuning

    try:
        table = tuning.tune()
    except problem.UnsupportedError as reason:
        print(f"{reason}; what it found on one is in data/tuned/, and in notebook 06")
        return 1
    for entry in table["classes"]:
        other = entry["runner_up"] or {"stage": "none", "median_us": float("nan")}
        print(
            f"M = {entry['M']:5}: {entry['stage']:6} {entry['median_us']:6.1f} µs {entry['config']}; then {other['stage']} {other['median_us']:.1f}"
        )
    print(f"{len(table['rejected'])} rejected; written to {tables.shown(tuning.write(table))}")
    return 0


def aot(options):
    """Compile stages for a GPU that is not here, and print what they use."""
    from . import aot, api, problem, suite

    shapes = [(case.batch_size, case.seq_len) for case in suite.cases()]
    for name in options.stages or api.IMPLEMENTATIONS:
        try:
            table = aot.compiled(name, options.arch, shapes)
        except ValueError as reason:
            print(reason)
            return 1
        except problem.UnsupportedError as reason:
            print(f"{name}: {reason}\n")
            continue
        table.insert(2, "smallest M", table.batch_size * table.seq_len)
        table = table.drop(columns=["batch_size", "seq_len"]).sort_values("smallest M", kind="stable")
        print(table.drop_duplicates(table.columns.drop("smallest M")).to_string(index=False), "\n")
    return 0


def submit(options):
    """Write build/submission/solution.json for a stage, and the problem to judge it by."""
    from . import submission

    try:
        path = submission.write(options.stage, destination_passing=options.style == "out")
    except ValueError as wrong:
        print(wrong)
        return 2
    print(
        f"{options.stage}, style {options.style}: wrote {submission.tables.shown(path)} and {submission.tables.shown(path.parent / 'problem')}/"
    )
    return 0


def judge(options):
    """Run SOL-ExecBench's evaluator on stages, time each right after, and record both in data/judge."""
    from . import api, hardware, records, submission, timing

    known = {stage.name: stage for stage in api.contenders()}
    unknown = set(options.stages) - set(known)
    if unknown:
        print(f"STAGE must be 'auto' or one of {', '.join(api.IMPLEMENTATIONS)}; got {', '.join(sorted(unknown))}")
        return 2
    if hardware.device() == "cpu":
        print("judging needs an NVIDIA GPU; what the evaluator said on one is in data/judge/, and in notebook 09")
        return 1
    judged = []
    for stage in [known[name] for name in options.stages or known]:
        if reason := stage.unsupported("cuda"):
            print(f"{stage.name} does not run here: {reason}")
            continue
        try:
            found = submission.judge(stage.name)
        except submission.problem.UnsupportedError as reason:
            print(reason)
            return 1
        ours = timing.bench(stage)
        found["lab_us"] = found.uuid.map(ours.set_index("uuid").median_us)
        judged.append(found.assign(evaluator=submission.EVALUATOR, date=ours.date.iloc[0], **hardware.state()))
        path = records.add(judged[-1], "judge", submission.JUDGE_COLUMNS)
    if not judged:
        return 1
    rows = pd.concat(judged)
    passed = (rows.status == "PASSED").groupby(rows.impl, sort=False).sum()
    ratio = (rows.lab_us / rows.judge_us).groupby(rows.impl, sort=False).median()
    print(f"written to {submission.tables.shown(path)}")
    print(pd.DataFrame({"passed of 16": passed, "median of ours / the judge's": ratio.round(3)}).to_string())
    return 0


def profile(options):
    """One call of a stage under Nsight Compute, clocks left alone, with the sections that say what bounds it."""
    from . import api, suite, tools

    if options.stage not in api.IMPLEMENTATIONS or not 0 <= options.case < len(suite.cases()):
        print(f"STAGE is one of {', '.join(api.IMPLEMENTATIONS)}; CASE is 0 to {len(suite.cases()) - 1} (data/cases.csv)")
        return 2
    try:
        return tools.profile(options.stage, suite.cases()[options.case])
    except tools.problem.UnsupportedError as reason:
        print(reason)
        return 1


def sanitize(options):
    """compute-sanitizer's memcheck and racecheck on stages at two odd shapes, recorded in data/sanitizer."""
    from . import records, tables, tools

    try:
        rows = tools.sanitize(options.stages or None)
    except (tools.problem.UnsupportedError, ValueError) as reason:
        print(reason)
        return 1
    print(rows[["impl", "tool", "batch_size", "seq_len", "said"]].to_string(index=False))
    print(f"written to {tables.shown(records.add(rows, 'sanitizer', tools.SANITIZER_COLUMNS))}")
    return int((rows.errors != 0).fillna(True).any())


def main():
    parser = argparse.ArgumentParser(prog="python -m qkvlab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for command in (report, tune, aot, profile, sanitize, submit, judge):
        entry = commands.add_parser(command.__name__, help=command.__doc__.splitlines()[0])
        entry.set_defaults(command=command)
        if command is aot:
            entry.add_argument("--arch", default="sm_100", choices=ARCHITECTURES)
        if command in (aot, judge, sanitize):
            entry.add_argument("stages", nargs="*", help="stages by name; all of them, if none is named")
        if command is submit:
            entry.add_argument("stage")
            entry.add_argument(
                "--style", choices=("return", "out"), default="return", help="return the outputs, or fill those that are passed"
            )
        if command is profile:
            entry.add_argument("stage")
            entry.add_argument("case", type=int)
    options = parser.parse_args()
    return options.command(options)


if __name__ == "__main__":
    sys.exit(main())
