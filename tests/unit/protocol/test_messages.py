"""Every message: round trip, one byte at a time, and refused if a value has the wrong type."""

import pytest

from hegmd.protocol import jobs, messages, operations, snapshots
from hegmd.protocol.codec import decode, encode
from hegmd.protocol.record import REQUIRED, BadValue, Record
from tests.cells import in_one_test

EVERY_RECORD = sorted(
    {
        value
        for module in (jobs, messages, operations, snapshots)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Record) and value not in (Record, messages.Request)
    },
    key=lambda record: record.__name__,
)
SAMPLES: dict[str, object] = {
    "int": 7,
    "int | str": "j7",
    "float": 0.25,
    "bool": True,
    "str": "é",
    "bytes": b"\x00",
    "object": [1, {}],
}


def sample(type_text: str) -> object:
    """A value of that type, in the constructor's form."""
    text = type_text.removesuffix(" | None")
    if text.startswith("tuple["):
        return (sample(text[6:-6]),)
    if text.startswith("Mapping["):
        return {"key": sample(text[13:-1])}
    if text in SAMPLES:
        return SAMPLES[text]
    return full({**vars(snapshots), **vars(operations), **vars(jobs), **vars(messages)}[text])


def full(record: type[Record]) -> Record:
    """The record with every field filled."""
    return record(**{f.name: sample(f.type_text) for f in record.fields})


@in_one_test("record", EVERY_RECORD)
def test_a_full_record_survives_the_wire(record: type[Record]) -> None:
    before = full(record)
    assert record.from_plain(decode(encode(before.to_plain())), record.__name__) == before


@in_one_test("record", EVERY_RECORD)
def test_a_record_with_only_its_required_fields_survives(record: type[Record]) -> None:
    plain = {f.name: full(record).to_plain()[f.name] for f in record.fields if f.default is REQUIRED}
    rebuilt = record.from_plain(plain, record.__name__)
    assert record.from_plain(rebuilt.to_plain(), record.__name__) == rebuilt


@in_one_test("record", EVERY_RECORD)
def test_no_field_takes_a_value_of_another_kind(record: type[Record]) -> None:
    plain = full(record).to_plain()
    for f in record.fields:
        if f.type_text == "object":
            continue
        wrong: object = [] if not f.type_text.startswith("tuple") else {}
        with pytest.raises(BadValue, match=f.name):
            record.from_plain({**plain, f.name: wrong}, record.__name__)


@in_one_test("record", EVERY_RECORD)
def test_every_record_and_field_has_a_description(record: type[Record]) -> None:
    assert record.__doc__
    assert all(f.doc for f in record.fields)


def test_every_request_has_an_operation_and_a_reply() -> None:
    for op, message in messages.REQUESTS.items():
        assert message.op == op
        assert issubclass(message.reply, Record)
        assert not issubclass(message.reply, messages.Request)


SECRET = "a-key-to-something"


@in_one_test("op", sorted(messages.REQUESTS))
def test_an_audit_record_has_all_of_a_request_but_the_values_of_an_environment(op: str) -> None:
    """Issue 14, row 20: no test noticed a record without a request's fields, or with the values of variables."""
    request = full(messages.REQUESTS[op])
    assert isinstance(request, messages.Request)
    variables = [f.name for f in request.fields if f.type_text.startswith("Mapping[str, str]")]
    secret = request.replace(**{name: {"TOKEN": SECRET, "A": SECRET} for name in variables})
    assert isinstance(secret, messages.Request)
    audited = secret.audited()
    assert audited == {**secret.to_plain(), **{name: ["A", "TOKEN"] for name in variables}}
    assert SECRET not in repr(audited)


def test_a_migration_has_variables_for_the_test_above() -> None:
    assert any(f.type_text.startswith("Mapping[str, str]") for f in messages.Migrate.fields)


def test_a_planned_process_reserves_memory_for_its_storages_unless_the_driver_carries_them() -> None:
    process = full(operations.PlannedProcess)
    assert isinstance(process, operations.PlannedProcess)
    process = process.replace(size_bytes=100, overlap_bytes=30, agent_overhead_bytes=4, driver_bytes=5)
    assert process.replace(carrier=operations.WORKER).reservation_bytes == 79
    assert process.replace(carrier=operations.BY_DRIVER).reservation_bytes == 9
