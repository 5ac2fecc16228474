"""The simulated driver's memory: what is recommended to a process that finds no room."""

from __future__ import annotations

import pytest

from hegmd.devices.simulated import SimulatedProvider
from hegmd.devices.topology import parse_topology
from hegmd.errors import Refused

GIB = 1 << 30


@pytest.fixture
def provider() -> SimulatedProvider:
    made = SimulatedProvider(parse_topology("2x8GiB"))
    made.open()
    return made


def test_a_lost_gpu_was_recommended_to_who_wants_memory(provider: SimulatedProvider) -> None:
    """Issue 14, row 8: the hint of `simulate hold` named the GPU with the most room, which had fallen off the bus."""
    provider.set_fault("gpu1", "lost")
    with pytest.raises(Refused) as caught:
        provider.hold("c", 71, "gpu0", 8 * GIB + 1)
    assert caught.value.hint.startswith("ask for at most 8 GiB")
    provider.hold("c", 71, "gpu0", 5 * GIB)
    with pytest.raises(Refused) as caught:
        provider.hold("d", 72, "gpu0", 4 * GIB)
    assert "gpu1" not in caught.value.hint
    provider.set_fault("gpu1", "none")
    with pytest.raises(Refused) as caught:
        provider.hold("d", 72, "gpu0", 4 * GIB)
    assert caught.value.hint.startswith("use gpu1")
