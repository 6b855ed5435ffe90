"""Typed tables from `data/`: every column is declared, and every fault is named by file, line and column."""

import csv
from pathlib import Path

import pandas as pd

EMPTY = {int | None: pd.NA, float | None: float("nan"), str | None: ""}
DATA = Path(__file__).resolve().parents[2] / "data"


class TableError(ValueError):
    """A file under `data/` that does not hold what its reader declares."""


def shown(path):
    """`path`, in words, as a reader of the checkout knows it: relative to the top level."""
    path = Path(path).resolve()
    return str(path.relative_to(DATA.parent) if path.is_relative_to(DATA.parent) else path)


def existing(path):
    """`path` itself, or FileNotFoundError that says where the lab looks for its data."""
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{shown(path)} is missing: the lab runs from a checkout, with data/ beside lib/ (looked for {path})"
        )
    return Path(path)


def read(path, columns):
    """Read a CSV file whose header is exactly the names in `columns`, in any order.

    columns: name -> int, float or str, or one of these with None where a field may be empty (pd.NA, NaN, '').
    Returns a DataFrame in the order of `columns`. Raises FileNotFoundError or TableError.
    """
    rows = []
    with open(existing(path), newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        for problem, names in [
            ("is missing", [name for name in columns if name not in header]),
            ("is not known here", [name for name in header if name not in columns]),
            ("appears twice", [name for name in header if header.count(name) > 1]),
        ]:
            if names:
                raise TableError(f"{shown(path)}, line 1: column {names[0]!r} {problem}; expected {', '.join(columns)}")
        for row in reader:
            where = f"{shown(path)}, line {reader.line_num}"
            if len(row) != len(header):
                raise TableError(f"{where}: {len(row)} fields, expected {len(header)}")
            rows.append({name: _parse(text, columns[name], f"{where}, column {name!r}") for name, text in zip(header, row)})
    table = pd.DataFrame(rows, columns=list(columns))
    return table.astype({name: "Int64" for name, kind in columns.items() if kind == int | None})


def _parse(text, kind, where):
    if kind in EMPTY:
        if not text:
            return EMPTY[kind]
        kind = kind.__args__[0]
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value == "":
        raise TableError(f"{where}: expected {kind.__name__}, got {text!r}")
    return value
