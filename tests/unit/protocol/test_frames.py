"""Frames arrive whole, however the stream splits them, and a wrong length is refused before anything is stored."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.errors import BAD_REQUEST, Bug, PeerError
from hegmd.protocol.frames import FrameReader, frame

LIMIT = 64
payloads = st.lists(st.binary(min_size=1, max_size=LIMIT), max_size=8)


def drain(reader: FrameReader) -> list[bytes]:
    out: list[bytes] = []
    while (payload := reader.next_payload()) is not None:
        out.append(payload)
    return out


@pytest.mark.thorough
@given(payloads, st.lists(st.integers(min_value=1, max_value=30), min_size=1))
def test_any_cut_of_the_stream_gives_the_same_payloads(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in sent)
    reader = FrameReader(LIMIT)
    got: list[bytes] = []
    position = 0
    turn = 0
    while position < len(stream):
        step = cuts[turn % len(cuts)]
        reader.feed(stream[position : position + step])
        got += drain(reader)
        position += step
        turn += 1
    assert got == sent
    assert reader.partial_bytes == 0


def test_bytes_after_a_frame_are_kept_for_the_next_one() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(frame(b"one") + frame(b"two")[:5])
    assert drain(reader) == [b"one"]
    assert reader.partial_bytes == 5
    reader.feed(frame(b"two")[5:])
    assert drain(reader) == [b"two"]


@pytest.mark.parametrize("length", [0, LIMIT + 1, 2**32 - 1])
def test_a_length_outside_the_limit_is_refused_from_its_header_alone(length: int) -> None:
    reader = FrameReader(LIMIT)
    reader.feed(length.to_bytes(4, "big"))
    with pytest.raises(PeerError) as caught:
        reader.next_payload()
    assert caught.value.code is BAD_REQUEST
    assert str(length) in caught.value.message
    assert reader.partial_bytes == 0


def test_the_limit_may_grow_between_two_frames_of_one_read() -> None:
    reader = FrameReader(4)
    reader.feed(frame(b"four") + frame(b"longer"))
    assert reader.next_payload() == b"four"
    reader.limit_bytes = 6
    assert reader.next_payload() == b"longer"


def test_a_broken_stream_is_not_read_on() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(bytes(4))
    with pytest.raises(PeerError):
        reader.next_payload()
    with pytest.raises(Bug):
        reader.next_payload()
