"""The doctor runs before anything is whole: in a bare Python it says what is lacking, in this one what it sees."""

import subprocess
import sys
from pathlib import Path

DOCTOR = Path(__file__).parents[1] / "qkvlab" / "doctor.py"


def doctor(*flags):
    return subprocess.run([sys.executable, *flags, str(DOCTOR)], capture_output=True, text=True)


def test_a_bare_python_is_told_what_it_lacks():
    found = doctor("-I", "-S")
    assert found.returncode == 1, found.stderr
    assert all(name in found.stdout for name in ("lacks", "torch", "triton", "pandas", "nbval"))


def test_this_python_lacks_nothing():
    found = doctor()
    assert found.returncode == 0, found.stdout + found.stderr
    assert "Triton" in found.stdout and "torch" in found.stdout
