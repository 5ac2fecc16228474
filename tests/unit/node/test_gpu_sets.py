"""Places of one GPU and of several: how they are written, shared out, and exchanged."""

from __future__ import annotations

from functools import partial

from hegmd.migration.contracts import MigratedProcess
from hegmd.node.gpu_sets import exchange, gpus_of, is_several, more_than, place_of, shared_out


def test_a_place_is_written_and_read_in_the_order_of_the_devices() -> None:
    assert gpus_of(place_of(("gpu3", "gpu1"))) == ("gpu3", "gpu1")
    assert (gpus_of("gpu0"), gpus_of(None)) == (("gpu0",), ())
    assert [is_several(place) for place in ("gpu0,gpu1", "gpu0", None)] == [True, False, False]


def test_each_device_has_its_share_and_unknown_shares_may_be_on_any_device() -> None:
    assert shared_out("gpu3,gpu1", (5, 7), 12) == {"gpu3": 5, "gpu1": 7}
    assert shared_out("gpu0,gpu1", (), 12) == {"gpu0": 12, "gpu1": 12}
    assert shared_out(None, (5, 7), 12) == {}
    assert more_than({"gpu0": 7, "gpu1": 5}, {"gpu0": 5, "gpu1": 7}) == {"gpu0": 2, "gpu1": 0}


def test_an_exchange_stays_a_permutation_of_all_gpus() -> None:
    assert exchange(["0"], ["1"]) == {"0": "1", "1": "0"}
    assert exchange(["0", "1"], ["1", "0"]) == {"0": "1", "1": "0"}
    for new in (["2", "3"], ["1", "2"], ["2", "1"], ["0", "2"], ["3", "0"]):
        changed = exchange(["0", "1"], new)
        assert sorted(changed) == sorted(changed.values())
        assert [changed["0"], changed["1"]] == new


def test_memory_allocated_after_the_survey_may_be_on_any_of_several_gpus() -> None:
    plain = partial(MigratedProcess, "1", "7", 7, 1, target_gpu=None, previous_gpu=None, driver_bytes=30)
    several = plain(
        gpu="gpu0,gpu1", driver_bytes_by_gpu=(10, 20), storage_reservation_bytes=107, storage_bytes_by_gpu=(60, 40)
    )
    assert several.storages("gpu2,gpu3") == {"gpu2": 67, "gpu3": 47}
    assert several.wholes("gpu0,gpu1") == {"gpu0": 77, "gpu1": 67}
    by_driver = plain(gpu="gpu0,gpu1", driver_bytes_by_gpu=(10, 20))
    assert by_driver.wholes("gpu0,gpu1") == {"gpu0": 10, "gpu1": 20}
    single = plain(gpu="gpu0", storage_reservation_bytes=5)
    assert (single.storages("gpu0"), single.storages(None), single.wholes("gpu1")) == ({"gpu0": 5}, {}, {"gpu1": 35})
