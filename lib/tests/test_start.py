"""Where kernels run is decided on import, said in one line, and never guessed."""

import os
import subprocess
import sys

import pytest
import torch

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
PRETEND_NVIDIA = (
    "import pathlib; real = pathlib.Path.exists; pathlib.Path.exists = lambda path: str(path) == '/dev/nvidiactl' or real(path); "
)


def python(source, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", source], env=clean | environment, capture_output=True, text=True)


@without_gpu
def test_the_interpreter_is_chosen_and_said():
    found = python("import qkvlab, triton; print(triton.knobs.runtime.interpret)")
    first, last = found.stdout.splitlines()
    assert "no NVIDIA GPU" in first and last == "True"


@without_gpu
def test_after_triton_it_says_what_to_do():
    found = python("import triton, qkvlab")
    assert found.returncode and "import qkvlab before triton, or set TRITON_INTERPRET=1" in found.stderr
    assert python("import triton, qkvlab", TRITON_INTERPRET="1").returncode == 0


@without_gpu
def test_a_gpu_that_cuda_cannot_use_is_an_error():
    found = python(PRETEND_NVIDIA + "import qkvlab")
    assert found.returncode and "there is an NVIDIA device here" in found.stderr and "driver" in found.stderr


@without_gpu
def test_asking_for_a_gpu_that_is_not_there_is_one_sentence():
    found = python("from qkvlab import hardware; hardware.device()", TRITON_INTERPRET="0")
    assert found.returncode and "TRITON_INTERPRET is set" in found.stderr.splitlines()[-1]
