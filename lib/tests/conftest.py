import pytest

import qkvlab
from qkvlab import IMPLEMENTATIONS, hardware


@pytest.fixture(scope="session")
def device():
    return hardware.device()


@pytest.fixture
def small(device):
    """Inputs of a shape that no tile divides."""
    return qkvlab.make_inputs(3, 5, device=device, seed=1)


def pytest_collection_modifyitems(items):
    """What a stage needs and this machine lacks skips its tests, with the reason; those marked `anywhere` launch nothing."""
    for item in items:
        stage = getattr(item, "callspec", None) and IMPLEMENTATIONS.get(item.callspec.params.get("impl"))
        reason = stage and stage.unsupported(hardware.device())
        if reason and not item.get_closest_marker("anywhere"):
            item.add_marker(pytest.mark.skip(reason=f"{stage.name}: {reason}"))
