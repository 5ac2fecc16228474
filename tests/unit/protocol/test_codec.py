"""Every plain message survives the codec; everything else is refused with a sentence, never with another exception."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.errors import BAD_REQUEST, PeerError
from hegmd.protocol import codec
from hegmd.protocol.messages import GpusReply
from hegmd.protocol.snapshots import Gpu, Health
from tests.cells import in_one_test

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


def outcome(payload: bytes) -> dict[str, object] | PeerError:
    try:
        return codec.decode(payload)
    except PeerError as error:
        return error


@pytest.mark.thorough
@given(st.dictionaries(st.text(), values, max_size=5))
def test_plain_maps_survive(message: dict[str, object]) -> None:
    got = outcome(codec.encode(message))
    assert got == message or (isinstance(got, PeerError) and "nested" in got.message)  # which the strategy can overdo


@given(st.binary(max_size=300))
def test_any_bytes_are_a_map_or_a_peer_error(payload: bytes) -> None:
    got = outcome(payload)
    assert got.code is BAD_REQUEST if isinstance(got, PeerError) else all(type(key) is str for key in got)


def nested(depth: int) -> bytes:
    return b"\x81\xa1a" + b"\x91" * depth + b"\xc0"


@in_one_test(
    ("payload", "says"),
    [
        (b"\x93\x01\x02\x03", "list"),
        (b"\xc0", "NoneType"),
        (b"\x81\x01\x02", "key"),
        (b"\x81\xa1a\x81\xc4\x01b\x01", "key of type bytes"),
        (b"\x81\xa1a\xc7\x01\x05\x00", "extension type 5"),
        (b"\x81\xa1a\xd6\xff\x00\x00\x00\x01", "Timestamp"),
        (b"\x81\xa1\xff\x01", "utf-8"),
        (b"\x80\x80", "extra"),
        (b"\x81\xa1a", "incomplete"),
        (nested(codec.MAX_DEPTH), "nested deeper"),
        (nested(5000), "malformed"),
        (b"\xdf\xff\xff\xff\xff", "malformed"),
        (b"\x81\xa1a\xdd\x7f\xff\xff\xff", "malformed"),
    ],
)
def test_anything_but_a_plain_map_is_refused(payload: bytes, says: str) -> None:
    with pytest.raises(PeerError, match=says):
        codec.decode(payload)


def test_a_record_is_encoded_as_its_plain_form() -> None:
    gpu = Gpu(id="gpu0", index=0, uuid="U", vendor="nvidia", health=Health(state="warn", notes=("hot",)))
    reply = GpusReply(taken_utc=1.0, gpus=(gpu, gpu.replace(id="gpu1")), vendors=())
    assert codec.encode({"ok": reply}) == codec.encode({"ok": reply.to_plain()})
    assert codec.decode(codec.encode({"ok": reply})) == {"ok": reply.to_plain()}


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j])
def test_values_without_an_encoding_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        codec.encode({"a": value})


@pytest.mark.parametrize(("value", "sent"), [(2**64, 2**64 - 1), (-(2**63) - 1, -(2**63))])
def test_a_sum_that_does_not_fit_64_bits_does_not_prevent_the_answer(value: int, sent: int) -> None:
    """A peer that asked for 2**64 - 1 bytes got no answer: 4 % more did not fit, and its connection was closed."""
    assert codec.decode(codec.encode({"needed_bytes": value})) == {"needed_bytes": sent}


def test_nesting_up_to_the_limit_is_taken() -> None:
    assert codec.decode(nested(codec.MAX_DEPTH - 2))


def test_a_long_array_is_refused_by_its_header() -> None:
    packed: bytes = msgpack.packb({"a": [0] * (codec.MAX_ITEMS + 1)})
    with pytest.raises(PeerError):
        codec.decode(packed)
