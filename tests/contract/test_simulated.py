"""Simulated GPUs: memory is never over-committed, faults come and go, and a hang blocks no other caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.errors import BAD_REQUEST, NOT_FOUND, HegmError, Refused
from hegmd.node.devices.base import DeviceAbsent, DeviceError, VendorSnapshot
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from tests.kit.contracts import check_provider, check_snapshot

GIB = 1 << 30
EXAMPLES = Path(__file__).resolve().parents[2] / "contrib" / "simulation"


def opened(spec: str = "2x8GiB") -> SimulatedProvider:
    provider = SimulatedProvider(parse_topology(spec))
    provider.open()
    return provider


def described(folder: Path, text: str) -> SimulatedProvider:
    path = folder / "node.toml"
    path.write_text(text)
    return opened(str(path))


def shares(snapshot: VendorSnapshot) -> dict[tuple[int, str], int | None]:
    index_of = {gpu.uuid: f"gpu{gpu.index}" for gpu in snapshot.gpus}
    return {(use.pid, index_of[use.use.gpu]): use.use.vram_bytes for use in snapshot.uses}


@pytest.mark.contract
@pytest.mark.parametrize("spec", ["1x1GiB", "2x8GiB", *(str(path) for path in sorted(EXAMPLES.glob("*.toml")))])
def test_the_contract_is_kept(spec: str) -> None:
    topology = parse_topology(spec)
    check_provider(lambda: SimulatedProvider(topology), expect_gpus=len(topology.gpus))


def test_the_simulated_node_matches_its_description() -> None:
    snapshot = opened(str(EXAMPLES / "every-key.toml")).snapshot()
    first, second = snapshot.gpus
    assert (first.name, first.chip, first.memory_total_bytes) == ("Imagined H200", "imagined-9.0", 141 * GIB)
    assert (first.memory_used_bytes, first.memory_free_bytes) == (3 * GIB, 138 * GIB)
    assert (first.temperature_celsius, first.power_watts, first.power_limit_watts) == (41, 120, 700)
    assert (first.mig, first.mps, first.persistence, first.numa_node) == (False, False, True, 0)
    assert (first.health.state, first.health.ecc_corrected) == ("ok", 2)
    assert [(link.to_uuid, link.kind, link.lanes) for link in first.links] == [(second.uuid, "nvlink", 18)]
    assert [link.to_uuid for link in second.links] == [first.uuid]
    assert shares(snapshot) == {(4_000_000, "gpu0"): 3 * GIB}
    assert (snapshot.driver_version, snapshot.compute_version) == ("580.159.04", "13.0")


def test_unmeasured_values_are_unknown() -> None:
    gpu = opened().snapshot().gpus[0]
    unknown = (gpu.utilisation_percent, gpu.temperature_celsius, gpu.power_watts, gpu.mig, gpu.health.ecc_corrected)
    assert unknown == (None,) * 5
    assert gpu.memory_used_bytes == 0  # known: no process holds anything


def test_a_hold_is_shown_until_its_owner_releases_it() -> None:
    provider = opened()
    assert provider.hold("connection 1", 71, "gpu1", 3 * GIB) == 3 * GIB
    assert provider.hold("connection 2", 72, "gpu1", 1 * GIB) == 1 * GIB
    assert provider.hold("connection 3", 71, "gpu1", 2 * GIB) == 2 * GIB
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "simulated")
    assert shares(snapshot) == {(71, "gpu1"): 5 * GIB, (72, "gpu1"): 1 * GIB}
    assert [gpu.memory_used_bytes for gpu in snapshot.gpus] == [0, 6 * GIB]
    provider.release("connection 1")
    provider.release("connection 1")
    assert shares(provider.snapshot()) == {(71, "gpu1"): 2 * GIB, (72, "gpu1"): 1 * GIB}
    provider.release("connection 3")
    provider.release("connection 2")
    assert provider.snapshot().uses == ()


def test_a_second_hold_replaces_the_first_and_does_not_add_to_it() -> None:
    provider = opened()
    for vram_bytes in (3 * GIB, 8 * GIB, 1 * GIB):
        assert provider.hold("c", 71, "gpu0", vram_bytes) == vram_bytes
        assert provider.snapshot().gpus[0].memory_used_bytes == vram_bytes
    assert provider.hold("c", 71, "gpu0", 0) == 0
    assert provider.snapshot().uses == ()


@pytest.mark.parametrize("name", ["gpu1", "1", "SIM-00000000-0000-4000-8000-000000000001"])
def test_a_gpu_is_found_by_id_index_and_uuid(name: str) -> None:
    provider = opened()
    provider.hold("c", 71, name, GIB)
    assert shares(provider.snapshot()) == {(71, "gpu1"): GIB}


def test_holds_outlive_a_close_of_the_library() -> None:
    provider = opened()
    provider.hold("c", 71, "gpu0", GIB)
    provider.close()
    provider.hold("d", 72, "gpu0", GIB)
    provider.open()
    assert shares(provider.snapshot()) == {(71, "gpu0"): GIB, (72, "gpu0"): GIB}


def test_a_request_beyond_the_pool_is_refused_with_numbers_and_a_remedy() -> None:
    provider = opened()
    provider.hold("c", 71, "gpu0", 6 * GIB)
    with pytest.raises(Refused) as caught:
        provider.hold("d", 72, "gpu0", 3 * GIB)
    assert caught.value.message == "gpu0 has 2 GiB of 8 GiB free, and 3 GiB more were requested"
    assert caught.value.hint.startswith("use gpu1, where 8 GiB are free, or ask for at most 2 GiB")
    assert caught.value.facts["free_bytes"] == 2 * GIB
    with pytest.raises(Refused) as caught:
        provider.hold("c", 71, "gpu0", 8 * GIB + 1)
    assert f"{2 * GIB + 1} B more were requested" in caught.value.message
    assert caught.value.hint.startswith("ask for at most 8 GiB")
    assert shares(provider.snapshot()) == {(71, "gpu0"): 6 * GIB}


def test_requests_that_make_no_sense_are_refused() -> None:
    provider = opened()
    for gpu in ("gpu2", "-1", "", "gpu01", "vendor"):
        with pytest.raises(HegmError) as caught:
            provider.hold("c", 71, gpu, GIB)
        assert caught.value.code is NOT_FOUND
        assert "gpu0 to gpu1" in caught.value.hint
    with pytest.raises(HegmError) as caught:
        provider.hold("c", 71, "gpu0", -1)
    assert caught.value.code is BAD_REQUEST
    assert provider.snapshot().uses == ()


HOLDS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.sampled_from(["gpu0", "gpu1"]), st.integers(0, 12)),
    max_size=30,
)


@given(HOLDS, st.sets(st.sampled_from("abc")))
def test_no_sequence_of_holds_over_commits_or_loses_a_byte(
    holds: list[tuple[str, int, str, int]], released: set[str]
) -> None:
    provider = opened("2x8B")
    expected: dict[tuple[str, str], tuple[int, int]] = {}
    for owner, pid, gpu, vram_bytes in holds:
        others = sum(size for (who, where), (_, size) in expected.items() if where == gpu and who != owner)
        held = expected.get((owner, gpu), (pid, 0))[1]
        if vram_bytes > held and others + vram_bytes > 8:
            with pytest.raises(Refused):
                provider.hold(owner, pid, gpu, vram_bytes)
        else:
            assert provider.hold(owner, pid, gpu, vram_bytes) == vram_bytes
            expected[owner, gpu] = (pid, vram_bytes)
    for owner in released:
        provider.release(owner)
    left: dict[tuple[int, str], int] = {}
    for (owner, gpu), (pid, vram_bytes) in expected.items():
        if owner not in released and vram_bytes:
            left[pid, gpu] = left.get((pid, gpu), 0) + vram_bytes
    snapshot = provider.snapshot()
    assert shares(snapshot) == left
    for shown_gpu in snapshot.gpus:
        used_bytes = sum(size for (_, where), size in left.items() if where == f"gpu{shown_gpu.index}")
        assert shown_gpu.memory_used_bytes == used_bytes <= 8


def test_a_lost_gpu_is_still_listed_with_its_identity_alone() -> None:
    provider = opened()
    provider.hold("c", 71, "gpu1", GIB)
    assert provider.set_fault("gpu1", "lost") == {"gpu1": "lost"}
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "simulated")
    lost = snapshot.gpus[1]
    assert (lost.state, lost.health.state, lost.uuid) == ("lost", "failed", "SIM-00000000-0000-4000-8000-000000000001")
    assert (lost.memory_total_bytes, lost.memory_used_bytes) == (None, None)
    assert (snapshot.gpus[0].state, snapshot.uses) == ("ok", ())
    with pytest.raises(Refused, match="`lost`"):
        provider.hold("c", 71, "gpu1", 2 * GIB)
    assert provider.hold("c", 71, "gpu1", GIB // 2) == GIB // 2  # giving back is always possible
    assert provider.set_fault("gpu1", "none") == {}
    assert shares(provider.snapshot()) == {(71, "gpu1"): GIB // 2}


def test_faults_of_one_gpu_show_on_that_gpu_alone() -> None:
    provider = opened()
    provider.hold("c", 71, "gpu0", GIB)
    sound = provider.snapshot().gpus[1]
    for fault, state, health in (
        ("error", "unknown", "unknown"),
        ("unknown-memory", "ok", "ok"),
        ("ecc", "ok", "failed"),
        ("xid", "ok", "warn"),
    ):
        assert provider.set_fault("gpu0", fault) == {"gpu0": fault}
        snapshot = provider.snapshot()
        check_snapshot(snapshot, "simulated")
        assert (snapshot.gpus[0].state, snapshot.gpus[0].health.state) == (state, health)
        assert snapshot.gpus[1] == sound


def test_unknown_memory_is_unknown_and_not_zero() -> None:
    provider = opened()
    provider.hold("c", 71, "gpu0", GIB)
    provider.set_fault("gpu0", "unknown-memory")
    snapshot = provider.snapshot()
    assert (snapshot.gpus[0].memory_used_bytes, snapshot.gpus[0].memory_free_bytes) == (None, None)
    assert shares(snapshot) == {(71, "gpu0"): None}
    with pytest.raises(Refused):  # memory that is not reported is not free
        provider.hold("d", 72, "gpu0", 8 * GIB)


def test_memory_errors_and_xids_are_reported_with_numbers() -> None:
    provider = opened()
    provider.set_fault("gpu0", "ecc")
    provider.set_fault("gpu1", "xid")
    first, second = provider.snapshot().gpus
    assert (first.health.ecc_uncorrected, first.health.last_xid) == (1, 48)
    assert second.health.last_xid == 74
    assert second.health.notes == ("the driver reported XID 74, an error of a link",)


def test_health_is_doubted_as_with_a_real_gpu(tmp_path: Path) -> None:
    provider = described(
        tmp_path,
        """
        [[gpu]]
        memory = "1GiB"
        retired_pages = 3
        [[gpu]]
        memory = "1GiB"
        ecc_uncorrected = 2
        [[gpu]]
        memory = "1GiB"
        last_xid = 48
        """,
    )
    assert [gpu.health.state for gpu in provider.snapshot().gpus] == ["ok", "warn", "failed"]
    assert provider.snapshot().gpus[0].health.retired_pages == 3


def test_faults_of_the_vendor_fail_every_snapshot_until_mended() -> None:
    provider = opened()
    assert provider.set_fault("vendor", "error") == {"vendor": "error"}
    with pytest.raises(DeviceError) as caught:
        provider.snapshot()
    assert not isinstance(caught.value, DeviceAbsent)
    provider.close()
    provider.open()
    with pytest.raises(DeviceError):
        provider.snapshot()
    with pytest.raises(Refused, match="the simulated driver has the fault `error`"):
        provider.hold("c", 71, "gpu0", GIB)
    provider.set_fault("vendor", "lost")
    with pytest.raises(DeviceAbsent):
        provider.snapshot()
    assert provider.set_fault("vendor", "none") == {}
    assert len(provider.snapshot().gpus) == 2


def test_faults_that_make_no_sense_are_refused_and_change_nothing() -> None:
    provider = opened()
    provider.set_fault("gpu0", "xid")
    for target, fault, code in (
        ("gpu7", "lost", NOT_FOUND),
        ("gpu0", "melted", BAD_REQUEST),
        ("vendor", "ecc", BAD_REQUEST),
        ("gpu0", "", BAD_REQUEST),
    ):
        with pytest.raises(HegmError) as caught:
            provider.set_fault(target, fault)
        assert caught.value.code is code
    assert provider.set_fault("gpu1", "none") == {"gpu0": "xid"}


def asked_to_hang(provider: SimulatedProvider, pool: ThreadPoolExecutor) -> Future[VendorSnapshot]:
    """A snapshot that is known to wait: the provider lets others in only once it does."""
    inside = threading.Event()

    def take_snapshot() -> VendorSnapshot:
        inside.set()
        return provider.snapshot()

    future = pool.submit(take_snapshot)
    assert inside.wait(120)
    return future


@pytest.mark.parametrize("target", ["gpu1", "vendor"])
def test_a_hang_blocks_the_snapshot_and_nothing_else_until_it_is_mended(target: str) -> None:
    provider = opened()
    provider.set_fault(target, "hang")
    with ThreadPoolExecutor(1) as pool:
        hanging = asked_to_hang(provider, pool)
        assert provider.hold("c", 71, "gpu0", 0) == 0
        with pytest.raises(Refused, match="`hang`"):
            provider.hold("c", 71, "gpu1", GIB)
        assert not hanging.done()
        provider.set_fault(target, "none")
        assert [gpu.state for gpu in hanging.result(10).gpus] == ["ok", "ok"]


def test_a_hang_that_turns_into_another_fault_ends_with_it() -> None:
    provider = opened()
    provider.set_fault("gpu1", "hang")
    with ThreadPoolExecutor(1) as pool:
        hanging = asked_to_hang(provider, pool)
        provider.set_fault("gpu1", "lost")
        assert hanging.result(10).gpus[1].state == "lost"


@pytest.mark.parametrize("then", [SimulatedProvider.close, lambda provider: (provider.close(), provider.open())])
def test_closing_ends_a_snapshot_that_hangs(then: Callable[[SimulatedProvider], object]) -> None:
    provider = opened()
    provider.set_fault("vendor", "hang")
    with ThreadPoolExecutor(1) as pool:
        hanging = asked_to_hang(provider, pool)
        then(provider)
        with pytest.raises(DeviceError):
            hanging.result(10)


def test_scheduled_faults_begin_and_end_by_themselves(tmp_path: Path) -> None:
    provider = described(
        tmp_path,
        """
        [[gpu]]
        count = 2
        memory = "8GiB"
        [[fault]]
        target = "gpu1"
        fault = "lost"
        after_snapshots = 2
        for_snapshots = 2
        [[fault]]
        target = "gpu0"
        fault = "xid"
        after_snapshots = 3
        [[fault]]
        target = "vendor"
        fault = "error"
        after_snapshots = 6
        for_snapshots = 1
        """,
    )
    observed: list[str] = []
    for _ in range(9):
        try:
            observed.append(" ".join(f"{gpu.state}/{gpu.health.state}" for gpu in provider.snapshot().gpus))
        except DeviceError:
            observed.append("failed")
            provider.close()
            provider.open()
    assert observed == [
        "ok/ok ok/ok",
        "ok/ok ok/ok",
        "ok/ok lost/failed",
        "ok/warn lost/failed",
        "ok/warn ok/ok",
        "ok/warn ok/ok",
        "failed",
        "ok/warn ok/ok",
        "ok/warn ok/ok",
    ]
    assert provider.set_fault("gpu0", "none") == {}
    assert provider.snapshot().gpus[0].health.state == "ok"


def test_a_scheduled_fault_cannot_be_ended_before_it_begins(tmp_path: Path) -> None:
    provider = described(
        tmp_path, '[[gpu]]\nmemory = "8GiB"\n[[fault]]\ntarget = "gpu0"\nfault = "lost"\nafter_snapshots = 1\n'
    )
    assert provider.snapshot().gpus[0].state == "ok"
    assert provider.set_fault("gpu0", "none") == {}
    assert provider.snapshot().gpus[0].state == "lost"
    assert provider.set_fault("gpu0", "none") == {}
    assert provider.snapshot().gpus[0].state == "ok"


def test_many_threads_holding_at_once_lose_nothing() -> None:
    provider = opened("1x1000B")

    def work(owner: int) -> int:
        got = 0
        for _ in range(50):
            try:
                got = provider.hold(owner, owner + 1, "gpu0", got + 1)
            except Refused:
                break
            provider.snapshot()
        return got

    with ThreadPoolExecutor(8) as pool:
        held = list(pool.map(work, range(8)))
    assert provider.snapshot().gpus[0].memory_used_bytes == sum(held) == 400
