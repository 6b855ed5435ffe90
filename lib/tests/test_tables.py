"""A table that is not what its reader declares is an error that names file, line and column."""

import pytest

from qkvlab import hardware, records, suite, tables

COLUMNS = {"name": str, "count": int, "us": float, "mhz": float | None}
OPTIONAL = {"name": str | None, "count": int | None, "mhz": float | None}


def table(tmp_path, text):
    path = tmp_path / "table.csv"
    path.write_text(text)
    return path


def test_types_and_empty_fields(tmp_path):
    read = tables.read(table(tmp_path, "us,name,count,mhz\n1.5,a,2,\n"), COLUMNS)
    assert list(read) == list(COLUMNS)
    assert read.iloc[0].tolist()[:3] == ["a", 2, 1.5] and read.mhz.isna().all()


def test_what_may_be_empty(tmp_path):
    read = tables.read(table(tmp_path, "name,count,mhz\n,,\na,2,3\n"), OPTIONAL)
    assert (
        read["name"].tolist() == ["", "a"] and read["count"].isna().tolist() == [True, False] and read["count"].dtype == "Int64"
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("name,count,us\na,1,2\n", r"line 1: column 'mhz' is missing"),
        ("name,count,us,mhz,extra\n", r"line 1: column 'extra' is not known"),
        ("name,count,us,mhz,us\n", r"line 1: column 'us' appears twice"),
        ("name,count,us,mhz\na,1,2,3\nb,x,2,3\n", r"line 3, column 'count': expected int, got 'x'"),
        ("name,count,us,mhz\na,1,,3\n", r"line 2, column 'us': expected float, got ''"),
        ("name,count,us,mhz\n,1,2,3\n", r"line 2, column 'name': expected str, got ''"),
        ("name,count,us,mhz\na,1,2\n", r"line 2: 3 fields, expected 4"),
        ("", r"line 1: column 'name' is missing"),
    ],
)
def test_faults_are_named(tmp_path, text, message):
    with pytest.raises(tables.TableError, match=message):
        tables.read(table(tmp_path, text), COLUMNS)


def test_a_missing_file_is_named(monkeypatch):
    monkeypatch.setitem(records.PUBLISHED, "runs", ("H200", "1999-01-01"))
    with pytest.raises(FileNotFoundError, match=r"data/runs/H200/1999-01-01.csv is missing: the lab runs from a checkout"):
        records.recorded()


def test_a_missing_rate_is_named(monkeypatch):
    monkeypatch.setattr(hardware, "_devices", lambda: {"X1": {"sm_count": 1}})
    with pytest.raises(tables.TableError, match=r"devices.yaml: X1 has no 'dram_tb_s'"):
        hardware.gpus.__wrapped__()


def test_what_is_shipped():
    assert len(suite.cases()) == 16 and [case.index for case in suite.cases()] == list(range(16))
    assert len(records.board()) == 17 and len(records.implementations()) == 29
    assert {"B200", "H200", "H100"} <= set(hardware.gpus())
