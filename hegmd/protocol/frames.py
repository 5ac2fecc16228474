"""Frames: a 4-byte big-endian length, then the payload.

No sockets. The length is checked before the payload is stored, so a peer can make us hold at most one frame of bytes.
"""

from __future__ import annotations

from ..errors import BAD_REQUEST, Bug, PeerError

HEADER_BYTES = 4


class FrameReader:
    """Splits a byte stream into payloads. After it raised, close the stream: its next frame cannot be found."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._broken = False

    @property
    def partial_bytes(self) -> int:
        """Return the number of bytes of an incomplete frame; 0 between frames."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Add bytes from the stream."""
        self._buffer += data

    def next_payload(self) -> bytes | None:
        """Return the next complete payload, or None until more bytes come.

        Returns one at a time, because the limit can change between two frames of one read: it grows after hello. Raises
        PeerError for a frame that is empty or over the limit.
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
                "send a 4-byte big-endian length and a msgpack map of at most that size; the hello reply has the limit",
                {"length_bytes": length, "limit_bytes": self.limit_bytes},
            )
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return payload


def frame(payload: bytes) -> bytes:
    """Return the payload with its length in front."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload
