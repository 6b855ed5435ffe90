"""What is on record can be believed: the run is whole, rows that cannot be compared are not, and doubts are flagged."""

import pandas as pd
import pytest

from qkvlab import IMPLEMENTATIONS, __main__, api, hardware, plots, records, sol, suite, tables, timing, tuned


@pytest.fixture(scope="module")
def run():
    return records.against_sol(records.recorded())


def test_the_published_run_is_whole(run):
    peers = {stage.name for stage in [*timing.peers(), *timing.yardsticks()]}
    assert {"auto", *peers} <= set(run.impl) <= {*IMPLEMENTATIONS, "auto", *peers}  # test_readme says which stages
    uuids = {case.uuid for case in suite.cases()}
    for impl, rows in run.groupby("impl"):
        assert set(rows.uuid) == uuids and len(rows) == len(uuids), impl
    assert (
        (run.calls == 50).all()
        and set(run.method) == {"cupti"}
        and run.gpu.nunique() == run.date.nunique() == run["commit"].nunique() == 1
    )
    assert (
        (run.p5_us <= run.median_us).all() and (run.median_us <= run.p95_us).all() and (run.busy_us <= run.median_us * 1.2).all()
    )
    assert not run["commit"].str.endswith("+").any()


def test_stages_are_as_many_launches_as_they_say(run):
    for impl, rows in run[run.impl.isin(list(IMPLEMENTATIONS))].groupby("impl"):
        assert set(rows.launches) == {IMPLEMENTATIONS[impl].launches}, impl


def test_launches_that_are_queued_together_leave_no_gap(run):
    """A launch boundary is about a microsecond; what is more, the host would have been late."""
    assert (run[run.impl.isin(["pair", "persistent", "exact", "auto"])].gap_us < 2).all()


def test_fused_leads_pytorch_and_split(run):
    mean = records.means(run).set_index("impl").mean_us
    assert mean["fused"] < mean[["torch_fp32", "torch_tf32", "torch_compile_tf32", "split"]].min()


def test_auto_leads_its_class(run):
    """What it took, and the stage that it takes now, is within 3 % of its class's fastest, on every case and on shapes between."""
    stages = [*IMPLEMENTATIONS.values(), *timing.peers()]
    reduced = [stage.name for stage in stages if sol.precision_class(stage.precision) == "reduced"]
    between = records.recorded("between")
    for rows, least in ((run, 16), (between, 11)):
        rows = rows.pivot_table(index=["batch_size", "seq_len"], columns="impl", values="median_us")
        now = [rows.loc[shape, api.tuned_for(shape[0] * shape[1], tuned.known()["H200"])[1][0][0]] for shape in rows.index]
        best = rows[rows.columns.intersection(reduced)].min(axis=1)
        assert len(rows) >= least and max((rows.auto / best).max(), (now / best).max()) < 1.03


def test_exact_is_as_exact_as_fp32():
    worst = records.recorded("errors", records.ERROR_COLUMNS).groupby("impl").relative_error.max()
    assert worst["exact"] <= worst["torch_fp32"]


def test_what_is_recorded_of_the_host_reads(run):
    host = records.recorded("host", records.HOST_COLUMNS)
    assert set(run.impl) - {stage.name for stage in timing.yardsticks()} <= set(host.impl) and (host.host_us > 0).all()


def test_what_is_added_leaves_other_stages_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "DATA", tmp_path)
    columns = {"gpu": str, "impl": str, "us": float, "date": str}

    def rows(date, **us):
        return pd.DataFrame([("H200", impl, value, date) for impl, value in us.items()], columns=list(columns))

    today = records.save(rows("2026-11-30", fused=1.0, tma=2.0), "judge", records.path("judge", "H200", "2026-12-01"))
    for added in ({"tma": 3.0, "pair": 4.0}, {"pair": 5.0}):
        assert records.add(rows("2026-12-01", **added), "judge", columns) == today
    found = tables.read(today, columns).set_index("impl")
    assert found.us.to_dict() == {"fused": 1.0, "tma": 3.0, "pair": 5.0}
    assert found.date.to_dict() == {"fused": "2026-11-30", "tma": "2026-12-01", "pair": "2026-12-01"}


def test_doubts_are_flagged(run):
    odd = run[run.flag == ""].head(4).copy()
    odd["gpu"] = ["H200", "unknown GPU", "H200", "H200"]
    odd.loc[odd.index[0], "median_us"] = 0.1
    odd.loc[odd.index[2], "sm_clock_after_mhz"] = 0.5 * odd.sm_clock_mhz.iloc[2]
    flags = records.against_sol(odd[list(records.RUN_COLUMNS)]).flag.tolist()
    assert "above 100 % of SOL" in flags[0] and "no bound" in flags[1] and "SM clock moved" in flags[2] and flags[3] == ""


def test_methods_are_never_averaged_together(run):
    mixed = run.copy()
    mixed.loc[mixed.index[0], "method"] = "cuda-events"
    mixed = records.against_sol(mixed[list(records.RUN_COLUMNS)])
    assert mixed.flag.str.contains("timing methods are mixed").all()
    with pytest.raises(ValueError, match="never averaged together: cuda-events, cupti"):
        records.means(mixed)


def test_rows_of_two_runs_are_never_averaged_in_a_table(run):
    with pytest.raises(ValueError, match="duplicate"):
        records.latencies(pd.concat([run, run]))


def test_a_saved_run_reads_back_the_same(run, tmp_path, monkeypatch):
    monkeypatch.setattr(records.tables, "DATA", tmp_path)
    records.save(run)
    assert records.recorded().equals(run[list(records.RUN_COLUMNS)])


def test_a_run_without_cupti_and_nvml_reads_back(run, tmp_path, monkeypatch):
    monkeypatch.setattr(records.tables, "DATA", tmp_path)
    bare = run.assign(method="cuda-events", launches=None, driver=None, sm_clock_mhz=None, sm_clock_after_mhz=None)
    records.save(bare)
    found = records.against_sol(records.recorded())
    assert found.launches.isna().all() and (found.driver == "").all() and (found.flag == "").all()


def test_score_is_a_half_at_the_baseline(run):
    assert run[run.impl == "torch_fp32"].groupby("uuid").size().eq(1).all()
    reduced = run[run.precision_class == "reduced"]
    assert reduced.sol_score.between(0, 1).all() and (reduced[reduced.impl == "auto"].sol_score > 0.5).all()


def test_latency_plot_shows_every_case_stage_and_share(run):
    axes = plots.latency_vs_sol(run).axes[0]
    assert [text.get_text().split("M = ")[1] for text in axes.get_yticklabels()] == [
        str(m) for m in sorted((case.m for case in suite.cases()), reverse=True)
    ]
    shares = [text.get_text() for text in axes.texts if "%" in text.get_text()]
    assert len(shares) == 16
    best = run[run.precision_class == "reduced"].groupby("uuid").sol_share.max()
    assert sorted(int(text.split("%")[0]) for text in shares) == sorted(round(100 * share) for share in best)
    labels = {line.get_label() for line in axes.get_lines()}
    assert set(run.impl) <= labels and "bound, datasheet" in labels


def test_latency_plot_takes_rows_that_were_put_together(run):
    mine = run[run.impl == "fused"].assign(impl="mine", median_us=1.0, sol_share=0.5)
    shares = plots.latency_vs_sol(pd.concat([run, mine.set_axis(run.index[run.impl == "tma"])])).axes[0].texts
    assert sum("50%  mine" in text.get_text() for text in shares) == 16


def test_leaderboard_says_the_gpu_of_every_row(run):
    axes = plots.leaderboard(records.means(run), records.board()).axes[0]
    notes = [text.get_text() for text in axes.texts]
    assert len(notes) == 17 + run.impl.nunique() and all("on B200" in note or "on H200" in note for note in notes)


def test_roofline_draws_every_roof(run):
    texts = [text.get_text() for text in plots.roofline(run).axes[0].texts]
    assert (
        any("DRAM 4.8 TB/s" in text for text in texts)
        and sum("TFLOP/s" in text for text in texts) == 3
        and sum("measured" in text for text in texts) == 4
    )


def test_a_report_without_a_gpu_draws_what_is_on_record(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hardware, "device", lambda: "cpu")
    monkeypatch.setattr(records, "figure", lambda name: tmp_path / f"{name}.png")
    assert __main__.report(None) == 0
    said = capsys.readouterr().out
    assert {path.stem for path in tmp_path.iterdir()} == {"latency_vs_sol", "roofline", "leaderboard"}
    assert all(str(path) in said for path in tmp_path.iterdir()) and "auto" in said
