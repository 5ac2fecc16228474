"""Health that NVIDIA's provider derives from errors that a GPU counts and reports, over the stub library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.node.devices.nvidia import NvidiaProvider
from hegmd.protocol.snapshots import Health
from tests.stubs.nvml.node import MakeNode, NvidiaNode


@pytest.fixture
def node(tmp_path: Path, make_nvidia_node: MakeNode) -> NvidiaNode:
    return make_nvidia_node(tmp_path)


@pytest.fixture
def provider(node: NvidiaNode) -> Iterator[NvidiaProvider]:
    provider = node.provider()
    provider.open()
    provider.snapshot()
    yield provider
    provider.close()


def health(provider: NvidiaProvider, index: int = 0) -> Health:
    return provider.snapshot().gpus[index].health


@pytest.mark.parametrize(
    ("facts", "state", "note"),
    [
        ({"ecc_uncorrected": 2}, "warn", "2 uncorrected memory errors"),
        ({"remapped_rows": "0 1 1 0"}, "warn", "bad memory rows are replaced at the next reset"),
        ({"remapped_rows": "0 8 0 1"}, "failed", "replace the GPU"),
        ({"retired_pending": 1}, "warn", "bad memory pages are retired at the next reset"),
        ({"field.230": 1}, "failed", "nvidia-smi --gpu-reset -i 0"),
        ({"field.230": 2}, "failed", "a reboot of the node"),
        ({"field.230": 77}, "failed", "recovery action 77"),
        ({"clocks_event_reasons": "0x48"}, "warn", "too hot"),
        ({"clocks_event_reasons": "0x80"}, "warn", "power supply"),
        ({"clocks_event_reasons": "0x08"}, "warn", "heat or power"),
        ({"fabric_state": 2}, "warn", "nvidia-fabricmanager"),
        ({"fabric_state": 3, "fabric_status": 3}, "warn", "refused it (status 3)"),
    ],
)
def test_reasons_against_a_gpu(
    node: NvidiaNode, provider: NvidiaProvider, facts: dict[str, str | int | None], state: str, note: str
) -> None:
    node.scenario.gpus[0] |= facts
    node.scenario.write()
    found = health(provider)
    assert found.state == state
    assert len(found.notes) == 1
    assert note in found.notes[0]
    assert health(provider, 1) == Health(state="ok", ecc_corrected=0, ecc_uncorrected=0, retired_pages=0)


@pytest.mark.parametrize("reasons", ["0x0", "0x1", "0x2", "0x4", "0x10", "0x100", "N/A"])
def test_clocks_that_are_low_for_a_normal_reason_cause_no_note(
    node: NvidiaNode, provider: NvidiaProvider, reasons: str
) -> None:
    node.scenario.gpus[0]["clocks_event_reasons"] = reasons
    node.scenario.write()
    assert (health(provider).state, health(provider).notes) == ("ok", ())


def test_counters_have_the_values_of_the_driver(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.gpus[0] |= {"ecc_corrected": 12, "remapped_rows": "3 1 0 0"}
    node.scenario.gpus[1] |= {"ecc_corrected": None, "ecc_uncorrected": None, "remapped_rows": None}
    node.scenario.gpus[1] |= {"retired_single_bit": 2, "retired_double_bit": 5, "retired_pending": 0}
    node.scenario.write()
    first, second = health(provider, 0), health(provider, 1)
    assert (first.ecc_corrected, first.ecc_uncorrected, first.retired_pages) == (12, 0, 4)
    assert (second.ecc_corrected, second.ecc_uncorrected, second.retired_pages) == (None, None, 7)


def test_nothing_to_go_by_is_unknown_and_not_ok(node: NvidiaNode, provider: NvidiaProvider) -> None:
    for fact in ("ecc_corrected", "ecc_uncorrected", "remapped_rows", "field.230", "clocks_event_reasons"):
        node.scenario.gpus[0][fact] = None
    node.scenario.write()
    assert health(provider).state == "unknown"


# ---- XID events -----------------------------------------------------------------------------------------------------


def test_a_jobs_own_fault_is_noted_and_held_against_no_gpu(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("xid 1 0 31", "xid 2 0 31")
    for _ in range(2):  # remembered, and not counted again
        found = health(provider)
        assert (found.state, found.last_xid) == ("ok", 31)
        (note,) = found.notes
        assert note.startswith("XID 31, 2 times, last seen 2025-03-09 12:00:00 UTC: a job accessed memory")
    assert (health(provider, 1).last_xid, health(provider, 1).xid_count) == (None, None)


def test_the_worst_comes_first_and_the_newest_is_the_last_xid(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("xid 1 0 43", "xid 2 0 63", "xid 3 0 119", "xid 4 0 45", "xid 5 0 4242")
    found = health(provider)
    assert (found.state, found.last_xid, found.xid_count) == ("failed", 4242, 5)
    assert [note.split()[1].rstrip(",") for note in found.notes] == ["119", "63", "4242", "43", "45"]


def test_xids_are_remembered_when_the_library_is_opened_again(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("xid 1 1 48")
    before = health(provider, 1)
    node.scenario.mend()
    provider.close()
    provider.open()
    assert health(provider, 1) == before
    assert (before.state, before.last_xid) == ("failed", 48)


def test_a_lost_gpu_does_not_hide_the_reports_of_others(node: NvidiaNode, provider: NvidiaProvider) -> None:
    """With a lost GPU in the event set every wait fails at once, so that it has to leave the set."""
    node.scenario.order("lost_after 0 0", "xid 1 1 79")
    for _ in range(2):
        snapshot = provider.snapshot()
        assert snapshot.gpus[0].state == "lost"
    assert provider.snapshot().gpus[1].health.last_xid == 79


def test_a_lost_gpu_that_came_back_is_watched_again(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("xid 1 0 62")
    assert health(provider).last_xid == 62
    node.scenario.order("lost_after 0 0")
    assert (health(provider).state, health(provider).last_xid) == ("failed", 62)
    node.scenario.mend()
    provider.snapshot()
    node.scenario.order("xid 2 0 64")
    assert health(provider).last_xid == 64


# ---- whether jobs are to be on it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "condition", "causes"),
    [
        ("31 43 45 13", "healthy", ()),
        ("63", "failing", ("rows",)),
        ("64", "failing", ("rows",)),
        ("63 94 45", "failing", ("rows", "uncorrected")),
        ("48 45 45", "failing", ("uncorrected",)),
        ("74", "failing", ("link",)),
        ("92", "failing", ("corrected",)),
        ("119 45", "failing", ("driver",)),
        ("48 95 45", "gone", ("uncorrected",)),
        ("74 79", "gone", ("lost", "link")),
    ],
)
def test_a_row_of_xids_makes_a_gpu_failing_or_gone_for_a_stated_reason(
    node: NvidiaNode, provider: NvidiaProvider, recorded: str, condition: str, causes: tuple[str, ...]
) -> None:
    """As drivers report them: what a job did, and what follows from an error, are XIDs too."""
    node.scenario.order(*(f"xid {sequence} 0 {number}" for sequence, number in enumerate(recorded.split(), 1)))
    found = health(provider)
    assert (found.condition, found.causes) == (condition, causes)
    assert (found.reason is None) == (condition == "healthy")
    assert found.reason is None or found.reason in found.notes
    assert health(provider, 1).condition == "healthy"


@pytest.mark.parametrize(
    ("facts", "condition", "causes"),
    [
        ({"ecc_uncorrected": 2}, "failing", ("uncorrected",)),
        ({"remapped_rows": "0 1 1 0"}, "failing", ("rows",)),
        ({"remapped_rows": "0 8 0 1"}, "failing", ("rows",)),
        ({"remapped_rows": "3 8 0 0"}, "healthy", ()),
        ({"retired_pending": 1}, "failing", ("rows",)),
        ({"field.230": 4}, "failing", ("driver",)),
        ({"clocks_event_reasons": "0x48"}, "healthy", ()),
        ({"fabric_state": 2}, "healthy", ()),
    ],
)
def test_counters_make_a_gpu_failing_and_heat_does_not(
    node: NvidiaNode,
    provider: NvidiaProvider,
    facts: dict[str, str | int | None],
    condition: str,
    causes: tuple[str, ...],
) -> None:
    node.scenario.gpus[0] |= facts
    node.scenario.write()
    assert (health(provider).condition, health(provider).causes) == (condition, causes)


def test_corrected_errors_that_rise_make_a_gpu_failing_and_old_ones_do_not(
    node: NvidiaNode, provider: NvidiaProvider
) -> None:
    node.scenario.gpus[1] |= {"ecc_corrected": 5000}
    node.scenario.write()
    node.scenario.gpus[0] |= {"ecc_corrected": 99}
    node.scenario.write()
    assert health(provider).condition == "healthy"
    node.scenario.gpus[0] |= {"ecc_corrected": 100}
    node.scenario.write()
    found = health(provider)
    assert (found.condition, found.causes, found.state) == ("failing", ("corrected",), "warn")
    provider.close()
    provider.open()
    assert health(provider).condition == "failing"


def test_a_gpu_that_was_reset_is_healthy_again(node: NvidiaNode, provider: NvidiaProvider) -> None:
    """It was lost and answers again, or its counters restarted; the record still has the number of XIDs."""
    node.scenario.gpus[0] |= {"ecc_uncorrected": 1}
    node.scenario.order("xid 1 0 48", "xid 2 1 79")
    assert [gpu.health.condition for gpu in provider.snapshot().gpus] == ["failing", "gone"]
    node.scenario.order("lost_after 1 0")
    lost = health(provider, 1)
    assert (lost.condition, lost.causes[0]) == ("gone", "lost")
    node.scenario.gpus[0] |= {"ecc_uncorrected": 0}
    node.scenario.mend()
    node.scenario.write()
    first, second = provider.snapshot().gpus
    assert (first.health.condition, second.health.condition) == ("healthy", "healthy")
    assert (first.health.xid_count, second.health.xid_count) == (1, 1)


def test_a_storm_of_events_is_one_note(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order(*(f"xid {sequence} 0 92" for sequence in range(1, 101)))
    found = health(provider)
    assert found.notes[0].startswith("XID 92, 100 times")
    assert found.xid_count == 100


def test_events_that_the_driver_does_not_offer_cost_nothing_else(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("error nvmlEventSetCreate 3", "error nvmlDeviceRegisterEvents 3")
    provider.close()
    provider.open()
    assert (health(provider).state, health(provider).last_xid) == ("ok", None)


def test_a_failed_event_set_is_created_again(node: NvidiaNode, provider: NvidiaProvider) -> None:
    """Even when all GPUs answer: one may have been lost and reset between two snapshots."""
    node.scenario.log = node.folder / "calls"
    node.scenario.order("error nvmlEventSetWait_v2 15")
    assert [gpu.state for gpu in provider.snapshot().gpus] == ["ok", "ok"]
    node.scenario.mend()
    assert node.scenario.log.read_text().split().count("nvmlEventSetCreate") == 1
    provider.snapshot()
    assert node.scenario.log.read_text().split().count("nvmlEventSetCreate") == 1
