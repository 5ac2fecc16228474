"""The printed figures of the run over images on GPUs, and the parts of one call: GPUs are lent for minutes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu.image_record import DRIVER, HOST, LOGGED, ImageRate, Record, beside
from tests.gpu.image_run import TMPFS_BYTES_PER_S, cases_of, needed_s

GB = 1e9


def figure(action: str, carrier: str, took_s: float, place: str = "disk", **more: float) -> ImageRate:
    return ImageRate(action, 8, place, carrier, took_s, {}, **more)


def test_ours_is_compared_with_the_driver_and_criu_alone_of_the_same_size_and_place() -> None:
    figures = [
        figure("checkpoint", HOST, 10.0, written_bytes_per_s=1.4 * GB, dd_bytes_per_s=1.5 * GB),
        figure("checkpoint", DRIVER, 25.0),
        figure("restore", HOST, 4.0),
        figure("restore", DRIVER, 8.0),
        figure("leave-running", HOST, 12.0, parked_s=2.5, written_bytes_per_s=1.2 * GB, dd_bytes_per_s=1.5 * GB),
        figure("checkpoint", HOST, 9.0, "tmpfs", written_bytes_per_s=1.0 * GB, dd_bytes_per_s=2.0 * GB),
    ]
    rows = beside(figures).splitlines()[2:]
    assert rows == [
        "| 8 | disk | 10.000 | 25.000 (2.5 ×) | 4.000 | 8.000 (2.0 ×) | 2.500 | 0.87 |",
        "| 8 | tmpfs | 9.000 |  |  |  |  | 0.50 |",
    ]


def test_parts_are_found_in_the_daemons_current_wording() -> None:
    sources = Path(__file__).parents[2].joinpath("hegmd", "images").rglob("*.py")
    texts = [text for source in sources for text in re.findall(r'"([^"\n]* ms[^"\n]*)"', source.read_text())]
    logged = [text.replace("%s", "DIR").replace("%d", "1").replace("%.1f", "2.5") for text in texts]
    assert [name for name, wanted in LOGGED.items() if not any(map(wanted.search, logged))] == []


def test_a_badly_used_disk_is_reported() -> None:
    slow = figure("checkpoint", HOST, 10.0, written_bytes_per_s=1.1 * GB, dd_bytes_per_s=1.5 * GB)
    assert beside([slow]).endswith("0.73, **under** |")


def test_one_call_has_every_size_in_both_places_next_to_the_driver_alone(tmp_path: Path) -> None:
    """In the order in which it is worth its time: what is short of that is left for another call."""
    cases = list(cases_of([1, 8, 32], 1))
    wanted = [
        f"{what}-{size}-{place}" for what in ("back", "left") for size in (1, 8, 32) for place in ("tmpfs", "disk")
    ]
    wanted += ["workers", "taken", "driver-1-tmpfs", "driver-8-tmpfs"]
    wanted += ["driver-1-disk", "driver-8-disk", "driver-32-disk"]
    assert sorted(cases) == sorted(wanted)
    assert cases.index("driver-32-disk") < cases.index("left-32-disk") < cases.index("left-1-disk")
    rates = {"tmpfs": TMPFS_BYTES_PER_S, "disk": 1.5e9}
    taken_s = sum(needed_s(case, rates[case.place]) for case in cases_of([1, 8, 32], 1).values())
    assert taken_s < 540, "some of it is left for another call for certain"
    record = Record(tmp_path / "state")
    record.note("back-1-tmpfs", "", 5.0)
    assert Record(tmp_path / "state").is_done("back-1-tmpfs")
