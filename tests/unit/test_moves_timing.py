"""How the benchmark of moves reads the daemon's log."""

from __future__ import annotations

from hegmd.gpu_helper.copy_client import CopyReport
from tests.gpu.moves_timing import rates_of


def test_bytes_that_stay_on_a_gpu_do_not_count_as_link_copies() -> None:
    """Copies to the pool continue during the driver's checkpoint; earlier copies within the GPU showed 2 TB/s."""
    log = [
        (
            "2026-11-22T04:00:00.0Z info hegmd.migration.carriers.copying: copied out within a GPU: "
            f"{CopyReport(100, 0.0, 0.01, 0.0)}"
        ),
        (
            "2026-11-22T04:00:00.1Z info hegmd.migration.carriers.host: copied out during the checkpoint: "
            f"{CopyReport(100, 0.0, 2.0, 0.0)}"
        ),
        f"2026-11-22T04:00:00.2Z info hegmd.migration.carriers.copying: copied in: {CopyReport(30, 0.0, 1.0, 0.0)}",
        f"2026-11-22T04:00:00.3Z info hegmd.migration.carriers.copying: copied in: {CopyReport(30, 0.0, 2.0, 0.0)}",
    ]
    assert rates_of(log) == {"out": 50.0, "in": 20.0}
