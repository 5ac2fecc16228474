"""Numbers as people write and read them."""

from __future__ import annotations

import pytest

from hegmctl.quantities import binary_size, duration, parse_size, used_of_total
from tests.cells import in_one_test

GIB = 1024**3


@in_one_test(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),  # and not 1024.0 KiB
        (8 * GIB, "8.0 GiB"),
        (GIB + GIB // 2, "1.5 GiB"),
        (3 * 1024**4, "3.0 TiB"),
        (5000 * 1024**5, "5000.0 PiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(size_bytes: int, text: str) -> None:
    assert binary_size(size_bytes) == text


@in_one_test(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        ("1.5GiB", GIB + GIB // 2),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 1024**2),
        ("9007199254740993", 9007199254740993),  # a float could not hold it
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@in_one_test("text", ["", "GiB", "-1GiB", "1..5GiB", "1e3", "2 apples", "0x10", "١GiB", ".", "1,5GiB", "nan"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_size(text)


@pytest.mark.parametrize(
    ("used_bytes", "total_bytes", "text"),
    [(None, None, "-"), (None, 8 * GIB, "-/8.0 GiB"), (0, 8 * GIB, "0.0/8.0 GiB"), (GIB, None, "1.0/- GiB")],
)
def test_unknown_memory_is_not_shown_as_none_in_use(used_bytes: int | None, total_bytes: int | None, text: str) -> None:
    assert used_of_total(used_bytes, total_bytes) == text


@in_one_test(
    ("seconds", "text"),
    [
        (0.25, "250 ms"),
        (3.21, "3.2 s"),
        (42.0, "42 s"),
        (59.6, "1 min"),
        (75.0, "1 min 15 s"),
        (3600.0, "1 h"),
        (3660.0, "1 h 1 min"),
        (90_000.0, "1 d 1 h"),
    ],
)
def test_durations_are_shown_in_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text
