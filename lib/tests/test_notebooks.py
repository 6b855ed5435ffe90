"""What nbval does not see: a notebook that was never run, run out of order, or that carries a machine's traces."""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
named = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert [path.stem[:2] for path in NOTEBOOKS][:4] == ["01", "02", "03", "04"]


@named
def test_executed_from_top_to_bottom(path):
    assert [cell.execution_count for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))
    assert not [
        output
        for cell in code_cells(path)
        for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@named
def test_portable(path):
    text = path.read_text()
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5) and book.metadata.kernelspec.name == "python3"
    assert not re.search(r'"/(home|root|work|tmp|opt)/|/(home|root|work)/[a-z]', text)
    assert not any("execution" in cell.metadata for cell in book.cells)
    assert len(text) < 1_500_000


@named
def test_what_differs_from_machine_to_machine_is_not_compared(path):
    """Pictures, addresses, and the errors that a report quotes: a GPU draws other random inputs than the CPU."""
    for cell in code_cells(path):
        shown = [mime for output in cell.outputs for mime in output.get("data", {})]
        if "image/png" in shown or re.search(r"0x[0-9a-f]{8,}|worst at \(", str(cell.outputs)):
            assert "nbval-ignore-output" in cell.metadata.get("tags", []), cell.source


@named
def test_links_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r"\]\(([^)#]+)\)", cell.source):
                assert target.startswith("https://") or (path.parent / target).exists(), target


@named
def test_form(path):
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown")
    assert text.startswith("# ")
    for part in ("You will", "## Predict", "## Check", "## Look back", "## Exercises", "<details>"):
        assert part in text, part
