"""The metrics of a node, and what they must not reveal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from hegmd.protocol.snapshots import AgentInfo, Gpu, GpuProcess, GpuUse, Health, Vendor
from hegmd.telemetry.metrics import Build, Counters, JobTally, OwnProcess, Tallies, read_own_process, render
from tests.unit.telemetry.metrics.exposition_parser import ParsedFamily, parse

BUILD = Build(version="1.2.3", protocol_version=1, python_version="3.11.2")
OWN = OwnProcess(started_utc=1e9, cpu_s=1.5, resident_bytes=4096, threads=3, open_fds=9, max_fds=1024)
FULL = Gpu(
    id="gpu0",
    index=0,
    uuid="GPU-1",
    pci_address="0000:01:00.0",
    name='H"200"\\',
    vendor="nvidia",
    chip="10de:2335",
    memory_total_bytes=1000,
    memory_used_bytes=600,
    memory_free_bytes=390,
    utilisation_percent=25.0,
    temperature_celsius=0.0,
    power_watts=77.5,
    power_limit_watts=700.0,
    mig=False,
    mps=True,
    persistence=True,
    driver_version="580.1",
    health=Health(state="warn", ecc_corrected=3, ecc_uncorrected=0, retired_pages=2, last_xid=79),
)
BARE = Gpu(id="gpu1", index=1, uuid="GPU-2", vendor="nvidia")
GPU0 = {"gpu": "gpu0", "uuid": "GPU-1", "vendor": "nvidia", "name": 'H"200"\\'}
GPU1 = {"gpu": "gpu1", "uuid": "GPU-2", "vendor": "nvidia"}


@dataclass(frozen=True)
class Node:
    """The inventory's data."""

    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()
    vendors: tuple[Vendor, ...] = (Vendor(vendor="nvidia", state="ok", age_s=0.5),)
    taken_utc: float = 1e9 + 5


def metrics(
    node: Node | None = None, counters: Counters | None = None, tallies: Tallies | None = None, own: OwnProcess = OWN
) -> dict[str, ParsedFamily]:
    return parse(render(node, counters or Counters(), build=BUILD, own=own, tallies=tallies))


def values(families: dict[str, ParsedFamily], name: str) -> list[tuple[dict[str, str], float]]:
    if name not in families:
        return []
    return [(dict(labels), value) for (_, labels), value in families[name].samples.items()]


def test_all_facts_of_a_gpu_are_reported_in_base_units() -> None:
    found = metrics(Node(gpus=(FULL,)))
    expected = {
        "hegmd_gpu_up": 1,
        "hegmd_gpu_memory_total_bytes": 1000,
        "hegmd_gpu_memory_used_bytes": 600,
        "hegmd_gpu_memory_free_bytes": 390,
        "hegmd_gpu_utilisation_ratio": 0.25,
        "hegmd_gpu_temperature_celsius": 0,
        "hegmd_gpu_power_watts": 77.5,
        "hegmd_gpu_power_limit_watts": 700,
        "hegmd_gpu_mig_enabled": 0,
        "hegmd_gpu_mps_enabled": 1,
        "hegmd_gpu_persistence_enabled": 1,
        "hegmd_gpu_retired_pages": 2,
        "hegmd_gpu_last_xid": 79,
        "hegmd_gpu_processes": 0,
        "hegmd_gpu_processes_memory_bytes": 0,
    }
    assert {name: values(found, name) for name in expected} == {
        name: [(GPU0, value)] for name, value in expected.items()
    }
    info = {**GPU0, "pci_address": "0000:01:00.0", "chip": "10de:2335", "driver_version": "580.1"}
    assert values(found, "hegmd_gpu_info") == [(info, 1)]
    errors = {labels["kind"]: value for labels, value in values(found, "hegmd_gpu_ecc_errors_total")}
    assert errors == {"corrected": 3, "uncorrected": 0}
    health = {labels["state"]: value for labels, value in values(found, "hegmd_gpu_health")}
    assert health == {"ok": 0, "warn": 1, "failed": 0, "unknown": 0}


def test_unknown_values_are_left_out_and_never_0() -> None:
    found = metrics(Node(gpus=(BARE,)))
    about_gpus = {name for name, family in found.items() if any("gpu" in dict(labels) for _, labels in family.samples)}
    assert about_gpus == {
        "hegmd_gpu_info",
        "hegmd_gpu_up",
        "hegmd_gpu_condition",
        "hegmd_gpu_health",
        "hegmd_gpu_processes",
        "hegmd_gpu_processes_memory_bytes",
    }
    assert values(found, "hegmd_gpu_info") == [(GPU1, 1)]


@pytest.mark.parametrize(
    ("gpu_state", "vendor_state"), [("lost", "ok"), ("unknown", "ok"), ("ok", "stale"), ("ok", "failed")]
)
def test_old_values_of_a_silent_provider_are_not_reported_as_current(gpu_state: str, vendor_state: str) -> None:
    process = GpuProcess(pid=1, gpus=(GpuUse(gpu="gpu0", vram_bytes=5),))
    vendors = (Vendor(vendor="nvidia", state=vendor_state, age_s=99.0),)
    found = metrics(Node(gpus=(FULL.replace(state=gpu_state),), processes=(process,), vendors=vendors))
    assert values(found, "hegmd_gpu_up") == [(GPU0, 0)]
    assert values(found, "hegmd_gpu_memory_total_bytes") == [(GPU0, 1000)]
    assert values(found, "hegmd_vendor_age_seconds") == [({"vendor": "nvidia"}, 99)]
    for name in ("memory_used_bytes", "utilisation_ratio", "temperature_celsius", "health", "processes", "last_xid"):
        assert values(found, f"hegmd_gpu_{name}") == []


def test_the_state_of_each_vendor_is_reported() -> None:
    vendors = (Vendor(vendor="nvidia", state="stale", age_s=7.5), Vendor(vendor="amd", state="absent"))
    found = metrics(Node(vendors=vendors))
    states = [labels for labels, value in values(found, "hegmd_vendor_state") if value == 1]
    assert states == [{"vendor": "nvidia", "state": "stale"}, {"vendor": "amd", "state": "absent"}]
    assert values(found, "hegmd_vendor_age_seconds") == [({"vendor": "nvidia"}, 7.5)]


def test_processes_are_counted_for_each_gpu_and_their_memory_only_if_all_of_it_is_known() -> None:
    other = FULL.replace(id="gpu1", uuid="GPU-2")
    processes = (
        GpuProcess(pid=1, gpus=(GpuUse(gpu="gpu0", vram_bytes=5), GpuUse(gpu="gpu1", vram_bytes=None)), held_bytes=8),
        GpuProcess(
            pid=2,
            gpus=(GpuUse(gpu="gpu0", vram_bytes=6), GpuUse(gpu="gpu0", vram_bytes=1, kind="graphics")),
            agent=AgentInfo(name="hegm", version="1"),
        ),
    )
    found = metrics(Node(gpus=(FULL, other), processes=processes))
    by_gpu = {labels["gpu"]: value for labels, value in values(found, "hegmd_gpu_processes")}
    assert by_gpu == {"gpu0": 2, "gpu1": 1}
    by_gpu = {labels["gpu"]: value for labels, value in values(found, "hegmd_gpu_processes_memory_bytes")}
    assert by_gpu == {"gpu0": 12}
    assert values(found, "hegmd_held_bytes") == [({}, 8)]
    assert values(found, "hegmd_agents") == [({}, 1)]


def test_two_thousand_processes_make_no_more_series_than_none() -> None:
    processes = tuple(GpuProcess(pid=n, gpus=(GpuUse(gpu="gpu0", vram_bytes=n),)) for n in range(2000))
    many, none = (render(Node(gpus=(FULL,), processes=p), Counters(), build=BUILD, own=OWN) for p in (processes, ()))
    assert len(many.splitlines()) == len(none.splitlines())


def test_the_daemons_counters_are_exposed() -> None:
    counters = Counters()
    counters.request("gpus", "ok", 0.0003)
    counters.request("gpus", "ok", 0.7)
    counters.request("gpus", "timeout", None)
    counters.request("no such op" * 1000, "bad-request", 0.1)
    for _ in range(3):
        counters.connected()
    counters.disconnected()
    counters.refused("busy")
    counters.dropped("bad-request")
    counters.bad_frame()
    counters.received_bytes += 10
    counters.sent_bytes += 20
    counters.refreshed(0.02)
    counters.vendor_failed("amd")
    tallies = Tallies(events={"gpu.lost": 2}, log_dropped=3, log_held_back=4, audit_lost=5)
    found = metrics(Node(), counters, tallies)
    assert values(found, "hegmd_requests_total") == [
        ({"op": "gpus", "result": "ok"}, 2),
        ({"op": "gpus", "result": "timeout"}, 1),
        ({"op": "other", "result": "bad-request"}, 1),
    ]
    durations = found["hegmd_request_duration_seconds"].samples
    gpus = frozenset({("op", "gpus")})
    assert durations["hegmd_request_duration_seconds_count", gpus] == 2
    assert durations["hegmd_request_duration_seconds_sum", gpus] == pytest.approx(0.7003)
    single = {
        "hegmd_connections": 2,
        "hegmd_connections_total": 3,
        "hegmd_bad_frames_total": 1,
        "hegmd_received_bytes_total": 10,
        "hegmd_sent_bytes_total": 20,
        "hegmd_log_records_dropped_total": 3,
        "hegmd_log_records_held_back_total": 4,
        "hegmd_audit_records_lost_total": 5,
        "hegmd_inventory_timestamp_seconds": 1e9 + 5,
    }
    assert {name: values(found, name) for name in single} == {name: [({}, value)] for name, value in single.items()}
    assert values(found, "hegmd_connections_refused_total") == [({"code": "busy"}, 1)]
    assert values(found, "hegmd_connections_dropped_total") == [({"code": "bad-request"}, 1)]
    assert values(found, "hegmd_events_total") == [({"kind": "gpu.lost"}, 2)]
    assert values(found, "hegmd_vendor_failures_total") == [({"vendor": "amd"}, 1)]
    refreshes = found["hegmd_inventory_refresh_duration_seconds"].samples
    assert refreshes["hegmd_inventory_refresh_duration_seconds_count", frozenset()] == 1


def test_the_pool_and_operations_that_need_a_person_are_counted() -> None:
    shared = {"waiting": 1, "lease-held": 2}
    tallies = Tallies(pool_bytes={"memory": 6, "disk": 2, "budget": 64}, orphans=3, images_missed=2, sharing=shared)
    found = parse(render(None, Counters(), build=BUILD, own=OWN, tallies=tallies))
    figures = {labels["what"]: value for labels, value in values(found, "hegmd_pool_bytes")}
    assert figures == {"memory": 6, "disk": 2, "budget": 64}
    assert {labels["what"]: value for labels, value in values(found, "hegmd_sharing")} == shared
    assert values(found, "hegmd_orphans") == [({}, 3)]
    assert values(found, "hegmd_images_missed") == [({}, 2)]


def test_each_state_of_an_operation_has_a_series_also_when_none_is_in_it() -> None:
    tallies = Tallies(operations_now={"waiting": 2, "moving": 1})
    found = parse(render(None, Counters(), build=BUILD, own=OWN, tallies=tallies))
    figures = {labels["state"]: value for labels, value in values(found, "hegmd_operations")}
    assert figures == {"moving": 1, "quiesced": 0, "suspended": 0, "waiting": 2}


def test_a_job_before_its_first_batch_has_no_boundary_count() -> None:
    jobs = (
        JobTally("j1", "train", is_training=True, boundary=7),
        JobTally("j2", "new", is_training=False, boundary=None),
    )
    found = parse(render(None, Counters(), build=BUILD, own=OWN, tallies=Tallies(jobs=jobs)))
    first, second = {"id": "j1", "name": "train"}, {"id": "j2", "name": "new"}
    assert values(found, "hegmd_job_trains") == [(first, 1), (second, 0)]
    assert values(found, "hegmd_job_boundaries_total") == [(first, 7)]


def test_before_the_first_snapshot_the_metrics_describe_the_daemon_only() -> None:
    found = metrics(None)
    assert not [name for name in found if "gpu" in name or "vendor" in name]
    build = {"version": "1.2.3", "protocol_version": "1", "python_version": "3.11.2"}
    assert values(found, "hegmd_build_info") == [(build, 1)]
    assert values(found, "hegmd_process_resident_memory_bytes") == [({}, 4096)]
    assert values(found, "hegmd_connections") == [({}, 0)]


def test_the_text_is_the_same_for_the_same_facts_in_whatever_order_they_were_counted() -> None:
    one, two = Counters(), Counters()
    for counters, ops in ((one, ("gpus", "ping")), (two, ("ping", "gpus"))):
        for op in ops:
            counters.request(op, "ok", 0.001)
    node = Node(gpus=(FULL, BARE))
    assert render(node, one, build=BUILD, own=OWN) == render(node, two, build=BUILD, own=OWN)


def test_no_name_collides_with_those_of_node_exporter() -> None:
    assert all(name.startswith("hegmd_") for name in metrics(Node(gpus=(FULL,))))


def test_the_daemon_reads_its_own_cost() -> None:
    own = read_own_process()
    assert own.threads == len(os.listdir("/proc/self/task"))  # threads of libraries, unknown to Python, count too
    assert own.open_fds is not None
    extra = os.open("/dev/null", os.O_RDONLY)
    assert read_own_process().open_fds == own.open_fds + 1
    os.close(extra)
    assert own.resident_bytes is not None
    assert own.resident_bytes > 1 << 20
    assert own.cpu_s > 0


def test_unreadable_facts_of_the_daemon_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("1 (a) b) S 1")
    own = read_own_process(tmp_path)
    assert (own.resident_bytes, own.threads, own.open_fds) == (None, None, None)
    found = metrics(None, own=own)
    assert "hegmd_process_open_fds" not in found
    assert "hegmd_process_cpu_seconds_total" in found
