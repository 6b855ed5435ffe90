import pytest

import qkvlab
from qkvlab import hardware


@pytest.fixture(scope="session")
def device():
    return hardware.device()


@pytest.fixture
def small(device):
    """Inputs of a shape that no tile divides."""
    return qkvlab.make_inputs(3, 5, device=device, seed=1)
