"""Estimates of the downtime: as measured, and as this node has shown since."""

from __future__ import annotations

import pytest

from hegmd.migration.machine.operation import MIGRATE, RESUME, SUSPEND, Limits
from hegmd.migration.model import CARRIERS, PlanRequest, Rates
from hegmd.migration.plan.carrier_choice import OverlappedCopies, estimate_s
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.migration.plan.throughput import IN, OUT, Throughputs
from tests.cells import in_one_test
from tests.unit.migration.nvidia_nodes import GIB, MIB, SUSPENSION, a_gpu, a_process, a_snapshot, an_agent, the_plan, to
from tests.unit.migration.operations import DrivenOperation


def test_a_resumed_job_stays_parked_while_the_helper_prepares() -> None:
    """The estimate was half of the measurement: contexts take their time while the job is parked."""
    snapshot = a_snapshot(a_process(an_agent()), gpus=(a_gpu("gpu0", free_bytes=50 * GIB), a_gpu("gpu1")))
    suspension = the_plan(planned(snapshot, SUSPENSION))
    op = (
        DrivenOperation(suspension.operation("1", snapshot.candidates, {}, limits=Limits(), utc=0.0))
        .until("suspended")
        .op
    )
    op = op.with_worker(op.workers[0].replace(size_bytes=32 * GIB, driver_bytes=GIB))
    request = PlanRequest(kind=RESUME, pids=(4711,))
    paces = Throughputs()
    estimates: list[float] = []
    for _ in range(2):
        estimates.append(the_plan(planned_resume(snapshot.replace(rates=paces.rates()), request, op)).estimate_s)
        for _ in range(8):
            paces.note_arming("host", 1.0)
            paces.note_arming("worker", 100.0)
    assert estimates[0] == pytest.approx(1.475, rel=0.1), "as measured"
    assert estimates[1] - estimates[0] == pytest.approx(0.7, rel=0.05)


# The rows of docs/benchmarks.md: GiB, command, carrier, seconds; twice if both directions were measured.
GIB_AND_CARRIER = [
    *((1, MIGRATE, "peer", took_s) for took_s in (0.649, 0.691)),
    *((8, MIGRATE, "peer", took_s) for took_s in (0.711, 0.723)),
    *((32, MIGRATE, "peer", took_s) for took_s in (0.905, 0.822)),
    *((100, MIGRATE, "peer", took_s) for took_s in (2.403, 1.624)),
    *((8, MIGRATE, "host", took_s) for took_s in (1.147, 1.134)),
    *((32, MIGRATE, "host", took_s) for took_s in (2.350, 2.266)),
    (8, MIGRATE, "worker", 3.277),
    (32, MIGRATE, "driver", 24.620),
    *((size_gib, SUSPEND, "host", took_s) for size_gib, took_s in ((1, 0.601), (8, 0.766), (32, 1.250), (100, 2.854))),
    (8, SUSPEND, "worker", 1.428),
    (32, SUSPEND, "driver", 17.233),
    *((size_gib, RESUME, "host", took_s) for size_gib, took_s in ((1, 0.679), (8, 0.874), (32, 1.475), (100, 3.245))),
    (8, RESUME, "worker", 1.539),
    (32, RESUME, "driver", 5.965),
]
# The bytes that the driver carries: it also copies the stacks if the agent does not export their storages.
REST_BYTES = {"peer": 756 * MIB, "host": 756 * MIB, "worker": 1020 * MIB, "driver": 33 * GIB}


@in_one_test(("size_gib", "kind", "carrier", "took_s"), GIB_AND_CARRIER)
def test_the_estimate_equals_the_measurement(size_gib: int, kind: str, carrier: str, took_s: float) -> None:
    """The worker's was a third of that, and 100 GiB in rounds of 1 GiB had the rounds for nothing."""
    size_bytes = size_gib * GIB
    overlap_bytes = size_bytes - GIB if size_gib == 100 and carrier == "peer" else 0
    estimated_s = estimate_s(kind, CARRIERS[carrier], size_bytes, REST_BYTES[carrier], Rates(), overlap_bytes)
    assert estimated_s == pytest.approx(took_s, rel=0.3)


def test_copies_during_the_drivers_steps_are_not_added_to_them() -> None:
    """The longer of the two counts. If a GPU has no memory for staging, they are added up as before."""

    def estimated(kind: str, size_gib: int, copies: OverlappedCopies) -> float:
        return estimate_s(kind, CARRIERS["host"], size_gib * GIB, 756 * MIB, Rates(), copies=copies)

    for kind in (SUSPEND, RESUME):
        apart, both = (
            estimated(kind, 32, OverlappedCopies()),
            estimated(kind, 32, OverlappedCopies(out=True, back=True)),
        )
        assert apart - both == pytest.approx(0.25, abs=0.1), kind
        assert (
            estimated(kind, 1, OverlappedCopies(out=True, back=True)) > estimated(kind, 1, OverlappedCopies()) - 0.05
        ), "the step is the longer one"
    assert estimated(SUSPEND, 32, OverlappedCopies(back=True)) == estimated(SUSPEND, 32, OverlappedCopies())
    assert estimated(RESUME, 32, OverlappedCopies(out=True)) == estimated(RESUME, 32, OverlappedCopies())


def test_a_plan_relies_only_on_free_gpu_memory() -> None:
    def estimated(free_gib: int) -> float:
        gpus = (a_gpu("gpu0", free_bytes=free_gib * GIB), a_gpu("gpu1"))
        return the_plan(planned(a_snapshot(a_process(an_agent()), gpus=gpus), SUSPENSION)).estimate_s

    assert estimated(36) < estimated(33) - 0.2, "for 32 GiB and some calm"
    assert estimated(36) == estimated(90)


RATES = {
    "peer": ("peer_out_bytes_per_s", "peer_in_bytes_per_s", "make_bytes_per_s"),
    "host": ("host_out_bytes_per_s", "host_in_bytes_per_s", "make_bytes_per_s"),
    "worker": ("cuda_out_bytes_per_s", "cuda_in_bytes_per_s", "make_bytes_per_s"),
    "driver": ("driver_out_bytes_per_s", "driver_in_bytes_per_s"),
}
FIXED = ("driver_out_s", "driver_in_s")


@pytest.mark.parametrize("carrier", RATES)
def test_an_estimate_uses_only_the_rates_of_its_carrier(carrier: str) -> None:
    rates = Rates()

    def estimated(changed: Rates) -> float:
        return estimate_s(MIGRATE, CARRIERS[carrier], 32 * GIB, 40 * GIB, changed, 4 * GIB)

    for name in (*RATES[carrier], *FIXED):
        assert estimated(rates.replace(**{name: getattr(rates, name) / 2 + 100.0})) != pytest.approx(
            estimated(rates), rel=1e-6
        )
    others = {name for several in RATES.values() for name in several} - set(RATES[carrier]) - set(RATES["driver"])
    assert estimated(rates.replace(**dict.fromkeys(others, 1.0))) == estimated(rates)


@pytest.mark.parametrize("carrier", ["peer", "host", "worker"])
def test_the_duration_of_a_carrier_is_its_next_estimate(carrier: str) -> None:
    """Half of what was paid for making and for rounds went into the rate of the copies, and was counted twice then."""
    paces = Throughputs()
    for _ in range(40):
        paces.note(carrier, OUT, 32 * GIB, 3.0)
        paces.note(carrier, IN, 32 * GIB, 5.0, rounds=9)
        paces.note("driver", OUT, 760 * MIB, 0.5)
        paces.note("driver", IN, 760 * MIB, 0.25)
    overlap_bytes = 32 * GIB - 6 * GIB  # makes rounds of 4 GiB, of which there are eight
    estimated_s = estimate_s(MIGRATE, CARRIERS[carrier], 32 * GIB, 760 * MIB, paces.rates(), overlap_bytes)
    assert estimated_s == pytest.approx(3.0 + 5.0 - 0.005 + 0.75, rel=0.001)


def test_the_duration_of_a_move_enters_the_next_estimate() -> None:
    paces = Throughputs()
    snapshot = a_snapshot(a_process(an_agent()))
    before = the_plan(planned(snapshot.replace(rates=paces.rates()), to())).estimate_s
    for _ in range(8):
        paces.note("peer", OUT, 32 * GIB, 2.0)
        paces.note("driver", IN, GIB // 2, 1.0)
        paces.note("peer", IN, 1, 100.0)
    rates = paces.rates()
    assert rates.peer_out_bytes_per_s == pytest.approx(32 * GIB / 1.98, rel=0.1)
    assert rates.driver_in_s == pytest.approx(1.0, rel=0.01)
    assert the_plan(planned(snapshot.replace(rates=rates), to())).estimate_s > before + 2


def test_a_copy_during_a_step_measures_the_link_and_not_the_step() -> None:
    """Copies within a GPU counted as the carrier's work: 500 GB/s over the link, and steps looked too slow."""
    paces = Throughputs()
    for _ in range(20):
        paces.note_overlapped("host", OUT, 32 * GIB, 0.64)
        paces.note_overlapped("host", IN, 32 * GIB, 0.8)
        paces.note_overlapped("host", OUT, MIB, 1.0)
    rates = paces.rates()
    assert rates.host_out_bytes_per_s == pytest.approx(32 * GIB / 0.64, rel=0.001)
    assert rates.host_in_bytes_per_s == pytest.approx(32 * GIB / 0.8, rel=0.001)
    known = {"host_out_bytes_per_s": rates.host_out_bytes_per_s, "host_in_bytes_per_s": rates.host_in_bytes_per_s}
    assert rates == Rates().replace(**known)
