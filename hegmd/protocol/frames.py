"""Frames: a 4-byte big-endian length, then that many bytes of payload.

Bytes in, payloads out; no sockets. The length is checked against the limit before anything is stored, so that a
peer can make us hold at most one frame's limit of its bytes. Precedent for refusing early: HTTP servers cap the header
block before they parse it.
"""

from __future__ import annotations

from ..errors import BAD_REQUEST, Bug, PeerError

HEADER_BYTES = 4


class FrameReader:
    """Cuts a byte stream into payloads. After it raised, the stream has no known frame border and must be closed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._broken = False

    @property
    def partial_bytes(self) -> int:
        """How many bytes of an incomplete frame are held; 0 between frames."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes as they came from the stream."""
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """The next whole payload, or None until more bytes come.

        One at a time, so that the limit may change between two frames of one read (it grows after hello).
        Raises PeerError for a frame that is empty or over the limit.
        """
        if self._broken:
            raise Bug("a broken frame stream was read on")
        if len(self._buffer) < HEADER_BYTES:
            return None
        length = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        if length == 0 or length > self.limit_bytes:
            self._broken = True
            self._buffer.clear()
            raise PeerError(
                BAD_REQUEST,
                f"frame of {length} bytes; 1 to {self.limit_bytes} are allowed here",
                "send a 4-byte big-endian length and a msgpack map of at most that size; hello tells the limit",
                {"length_bytes": length, "limit_bytes": self.limit_bytes},
            )
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return payload


def frame(payload: bytes) -> bytes:
    """The payload with its length before it."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload
