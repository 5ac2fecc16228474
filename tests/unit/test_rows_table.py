"""The table that the benchmark on GPUs ends with: from what its parts left, beside the driver alone."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu import rows_table
from tests.gpu.bench_record import Record
from tests.gpu.bench_restart import Measurements
from tests.gpu.image_record import ImageRate
from tests.gpu.image_record import Record as ImageRecord
from tests.gpu.moves_timing import Measured
from tests.gpu.rows_table import Found, markdown, record_of, rows_of

DRIVER = {"helper checkpoint": 0.35, "helper restore": 0.25, "agent free": 0.03}


def test_a_row_has_the_median_and_how_many_times_the_driver_alone_that_is(tmp_path: Path) -> None:
    record = Record(tmp_path / "bench-rows.jsonl")
    for took_s in (0.9, 0.72, 0.7):
        record.measure(Measured(32, "migrate", "peer", "gpu0 to 1", took_s, None, {}, {}, DRIVER))
    record.measure(Measured(0, "migrate", "peer", "gpu0 to 1", 0.5, None, {}, {}))
    record.measure(Measured(0, "migrate", "driver", "gpu0 to 1", 0.4, None, {}, {}))
    record.measure(Measured(0, "hegmctl gpus", "", "", 0.019, None, {}, {}))
    record.measure(Measured(0, "python -c pass", "", "", 0.010, None, {}, {}))
    images = ImageRecord(tmp_path / "bench-images.jsonl")
    images.measure(ImageRate("checkpoint", 8, "disk", "host", 8.0, {}, 1e9, 2e9))
    images.measure(ImageRate("checkpoint", 8, "disk", "driver", 24.0, {}))
    figures = Measurements(tmp_path / "bench-restart.jsonl")
    figures.keep({"pinned": {"out": 50e9, "in": 50e9}})
    figures.keep({"task": "made-there", "took_s": 3.0, "parts": {}, "rates": {"written": 45e9}, "state_bytes": 1})
    rows = {row.what: row for row in rows_of(Found(tmp_path))}
    peer = rows["migrate 32 GiB, peer, downtime"]
    assert (peer.before, peer.now, peer.target, peer.driver_alone, peer.ratio) == (
        *("0.81 to 1.01", "0.720", "0.75"),
        *("0.600", 1.2),
    )
    small = rows["migrate 10 MiB, peer, downtime"]
    assert (small.now, small.driver_alone, small.ratio) == ("0.500", "0.400", 1.25)
    image = rows["image of 8 GiB on disk, checkpoint"]
    assert (image.now, image.target, image.driver_alone) == ("8.000", "6.8 (R = 2.00 GB/s)", "24.0")
    written = rows["restart: state written"]
    assert (written.now, written.driver_alone, written.ratio) == ("45.0 GB/s", "50.0 GB/s", 0.9)
    assert rows["hegmctl gpus, beside python -c pass"].ratio == 1.9
    unknown = rows["migrate 100 GiB, peer, downtime"]
    assert (unknown.now, unknown.driver_alone, unknown.ratio) == (None, None, None)
    assert "| migrate 100 GiB, peer, downtime | 1.43 to 1.61 |  | 1.1 |  |  |" in markdown(rows.values())


def test_the_record_in_the_documents_has_the_rows_of_this_program(tmp_path: Path) -> None:
    known = json.loads(rows_table.RECORD.read_text())
    made = record_of(rows_of(Found(tmp_path)), "", "", "")
    assert [row["what"] for row in known["rows"]] == [row["what"] for row in made["rows"]]
    assert known.keys() - {"conditions", "notes"} == made.keys()
