"""The books of simulated memory: on which GPU a new worker is, and what is recommended to who finds no room."""

from __future__ import annotations

import pytest

from hegmd.errors import Refused
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology

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


def test_a_job_was_put_elsewhere_than_on_the_lost_gpu_that_it_was_started_for(provider: SimulatedProvider) -> None:
    """Issue 14, row 8: three of three jobs trained on another GPU than their user wanted."""
    named = {f"gpu{gpu.index}": gpu.id for gpu in provider.snapshot().gpus}
    simulated = SimulatedMemory(provider, gpus=lambda: provider.snapshot().gpus)
    assert simulated.place(named["gpu1"]) == named["gpu1"]
    provider.set_fault("gpu1", "lost")
    assert simulated.place(named["gpu1"]) is None
    assert simulated.place("gpu7") is None
    assert simulated.place(f"{named['gpu1']},{named['gpu0']}") == named["gpu0"]
    assert simulated.place(None) == named["gpu0"]


def test_each_rank_is_on_its_own_of_the_gpus_that_its_job_was_started_for(provider: SimulatedProvider) -> None:
    """As with `cuda:LOCAL_RANK` on real GPUs.

    Rank 0 of two was on the second GPU if it reached its first batch later.
    """
    named = {f"gpu{gpu.index}": gpu.id for gpu in provider.snapshot().gpus}
    simulated = SimulatedMemory(provider, gpus=lambda: provider.snapshot().gpus)
    both = f"{named['gpu1']},{named['gpu0']}"
    assert [simulated.place(both, rank) for rank in (1, 0, 2)] == [named["gpu0"], named["gpu1"], named["gpu1"]]
    assert simulated.place(named["gpu1"], 1) == named["gpu1"]
