"""The README says what is: its figures are the recorded run's, its links and make targets exist."""

import re
from pathlib import Path

import pytest

from qkvlab import IMPLEMENTATIONS, records, submission, suite

BESIDE = ["torch_fp32", "torch_tf32", "torch_compile_tf32", "auto"]
TOP = Path(__file__).parents[2]
README = (TOP / "README.md").read_text()


def stages():
    """{stage: the cells of its row}."""
    table = README.split("<!-- stages:")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return {row[0]: row for row in rows[2:]}


def published():
    """{stage: its mean, as written}; a stage that was not measured for the record yet has none."""
    return {impl: row[3] for impl, row in stages().items() if row[3]}


def test_figures_are_the_recorded_runs():
    means = records.means(records.against_sol(records.recorded())).set_index("impl")
    recorded = [impl for impl in (*IMPLEMENTATIONS, *BESIDE) if impl in means.index]
    assert published() == {impl: f"{means.mean_us[impl]:.1f}" for impl in recorded} and {"fused", *BESIDE} <= set(recorded)
    ratios = re.search(r"\"auto\" is ([\d.]+) times the mean bound; .* is ([\d.]+) times its own", README).groups()
    best = records.board().mean_latency_us.min() / (sum(case.b200_sol_us for case in suite.cases()) / 16)
    assert ratios == (f"{means.ratio['auto']:.2f}", f"{best:.2f}")
    bound = re.search(r"The mean bound is ([\d.]+) µs with fp16", README).group(1)
    assert bound == f"{means.mean_bound_us['fused']:.1f}"
    assert all(part in README for part in records.PUBLISHED["runs"])


def test_figures_of_the_judge_are_the_recorded_ones():
    judged = records.recorded("judge", submission.JUDGE_COLUMNS)
    mean = judged.groupby("impl").judge_us.mean()
    shown = re.search(r"by its clock \"auto\" takes ([\d.]+) µs on average and `persistent` ([\d.]+) µs", README).groups()
    assert shown == (f"{mean['auto']:.1f}", f"{mean['persistent']:.1f}")
    assert (judged.status == "PASSED").all() and set(judged.impl) == {*published()} & {*IMPLEMENTATIONS, "auto"}


def test_every_stage_is_listed_as_it_is():
    rows = stages()
    assert [impl for impl in rows if impl not in BESIDE] == list(IMPLEMENTATIONS)
    for name, stage in IMPLEMENTATIONS.items():
        assert rows[name][1:3] == [str(stage.launches), stage.precision] and rows[name][4] == stage.about


@pytest.mark.parametrize("document", ["README.md", "data/README.md"])
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", (TOP / document).read_text()):
        assert target.startswith("https://") or (TOP / document).parent.joinpath(target).exists(), target


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (TOP / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z]+)", README)) - {"its"} <= targets


def test_nothing_else_at_the_top():
    import subprocess

    tracked = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= {
        "notebooks", "lib", "data", "environment.yml", "README.md", "Makefile", "LICENSE"
    }  # fmt: skip
