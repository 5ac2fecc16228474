"""Records are frozen, compare by value, and take nothing from the wire that does not fit."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hegmd.protocol.record import BadValue, Record, field
from tests.cells import in_one_test


class Inner(Record):
    """A record inside another."""

    size_bytes: int = field("how many")


class Outer(Record):
    """A record with a field of each kind."""

    name: str = field("a name")
    ratio: float | None = field("may be unknown", default=None)
    inner: Inner | None = field("nested", default=None)
    many: tuple[Inner, ...] = field("a list", default=())
    named: Mapping[str, int] = field("a map", default={})
    on: bool = field("a flag", default=False)


def test_a_record_survives_its_plain_form() -> None:
    record = Outer(name="x", ratio=0.5, inner=Inner(size_bytes=1), many=(Inner(size_bytes=2),), named={"a": 3}, on=True)
    assert Outer.from_plain(record.to_plain(), "outer") == record


def test_fields_with_a_default_may_be_missing_and_unknown_ones_are_ignored() -> None:
    assert Outer.from_plain({"name": "x", "from_the_future": [1]}, "outer") == Outer(name="x")


@in_one_test(
    ("plain", "where"),
    [
        ({}, "outer.name: is missing"),
        ([], "outer: a map"),
        ({"name": 1}, "outer.name: a string"),
        ({"name": "x", "ratio": "y"}, "outer.ratio: a number"),
        ({"name": "x", "ratio": float("nan")}, "outer.ratio: a finite"),
        ({"name": "x", "ratio": float("inf")}, "outer.ratio: a finite"),
        ({"name": "x", "ratio": True}, "outer.ratio: a number"),
        ({"name": "x", "inner": {}}, "outer.inner.size_bytes: is missing"),
        ({"name": "x", "inner": {"size_bytes": True}}, "outer.inner.size_bytes: an integer"),
        ({"name": "x", "inner": {"size_bytes": 2**64}}, "at most 64 bits"),
        ({"name": "x", "inner": {"size_bytes": -(2**63) - 1}}, "at most 64 bits"),
        ({"name": "x", "many": {}}, "outer.many: a list"),
        ({"name": "x", "many": [{"size_bytes": 1}, None]}, r"outer.many\[1\]: a map is needed, not nil"),
        ({"name": "x", "named": {"k": "v"}}, "outer.named.k: an integer"),
        ({"name": "x", "on": 1}, "outer.on: true or false"),
    ],
)
def test_misfits_are_named_by_their_path(plain: object, where: str) -> None:
    with pytest.raises(BadValue, match=where):
        Outer.from_plain(plain, "outer")


@pytest.mark.parametrize("number", [-(2**63), 2**64 - 1])
def test_the_least_and_the_largest_integer_of_64_bits_are_taken(number: int) -> None:
    """Issue 14, row 20: no test missed the least one."""
    assert Inner.from_plain({"size_bytes": number}, "inner").size_bytes == number


def test_a_whole_number_is_a_number() -> None:
    assert Outer.from_plain({"name": "x", "ratio": 2}, "outer").ratio == 2.0


def test_records_are_frozen_and_hashable() -> None:
    record = Inner(size_bytes=1)
    with pytest.raises(AttributeError, match="frozen"):
        record.size_bytes = 2  # type: ignore[misc]  # what is tried
    with pytest.raises(AttributeError, match="frozen"):
        del record.size_bytes
    assert {record, Inner(size_bytes=1)} == {record}
    assert record != Inner(size_bytes=2)
    assert record.replace(size_bytes=5) == Inner(size_bytes=5)


def test_a_bug_of_ours_is_reported_immediately() -> None:
    with pytest.raises(TypeError, match="needs size_bytes"):
        Inner()  # type: ignore[call-arg]  # what is tried
    with pytest.raises(TypeError, match="has no sise"):
        Inner(size_bytes=1, sise=2)  # type: ignore[call-arg]  # what is tried
    with pytest.raises(TypeError, match="without a type"):

        class Untyped(Record):
            value = field("no type")
