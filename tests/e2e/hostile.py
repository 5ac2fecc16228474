"""A seeded source of the frames of hostile peers, wrong in every way we could think of.

Some break the protocol, some only ask for nonsense, some are whole messages with a few bytes turned over. A batch goes
down one connection at once, after a correct hello or instead of one.
"""

from __future__ import annotations

import random

import msgpack

from hegmd.protocol.frames import frame
from hegmd.protocol.messages import REQUESTS

HELLO = frame(msgpack.packb({"v": 1, "id": 1, "op": "hello", "args": {"versions": [2], "name": "hostile"}}))
_STRANGE: tuple[object, ...] = (
    None,
    True,
    -1,
    2**64 - 1,
    1.5,
    float("nan"),
    "",
    "x" * 300,
    "\x1b[2J\n",
    b"\xff",
    [],
    {},
    [[[]]],
    {"a": {}},
)
_BOMBS = (
    b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xdb\xff\xff\xff\xff",  # a string of 4 GiB
    b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
    b"\x91" * 1000,
    b"\x81\xa1a" * 1000,
    b"\xdc\xff\xff" + b"\xc0" * 65_535,
    b"\xc1",
    b"",
)
# Requests that keep a stream open do not count as hostile here: no process reads it.
_OPS = sorted(set(REQUESTS) - {"doctor", "reload", "simulate.fault"})


class Hostile:
    """Hostile frames without end, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._next_id = 2

    def batch(self, count: int) -> tuple[bytes, int]:
        """Bytes for one connection, and how many descriptors to send along."""
        r = self._random
        self._next_id = 2
        opening = HELLO if r.random() < 0.9 else b""
        frames = [self._gentle() if r.random() < 0.97 else self._breaking() for _ in range(count)]
        return opening + b"".join(frames), r.choice((0, 0, 0, 1, 16))

    def _gentle(self) -> bytes:
        """A frame that the daemon has to answer with an error or a reply, and survive."""
        r = self._random
        self._next_id += 1
        envelope = {"v": 2, "id": self._next_id, "op": r.choice(_OPS), "args": {}}
        match r.randrange(5):
            case 0:
                envelope["op"] = r.choice((*_STRANGE, "no.such", "x" * 2000))
            case 1:
                envelope["v"] = r.choice(_STRANGE)
            case 2:
                envelope["args"] = r.choice(_STRANGE)
            case 3:
                names = ("pids", "gpus", "gpu", "since", "follow", "kinds", "request", "vram_bytes", "versions")
                envelope["args"] = {name: r.choice(_STRANGE) for name in r.sample(names, 4)}
            case _:
                envelope["novel"] = r.choice(_STRANGE[:8])
        return frame(msgpack.packb(envelope))

    def _breaking(self) -> bytes:
        """A frame after which the daemon is expected to close."""
        r = self._random
        match r.randrange(6):
            case 0:
                return frame(r.choice(_BOMBS) or b"\xc0")
            case 1:
                return r.randbytes(r.randrange(1, 64))
            case 2:
                return r.choice((bytes(4), b"\xff\xff\xff\xff", (1 << 20).to_bytes(4, "big")))
            case 3:
                whole = bytearray(self._gentle())
                for _ in range(3):
                    whole[r.randrange(len(whole))] ^= 1 << r.randrange(8)
                return bytes(whole)
            case 4:
                return self._gentle()[: r.randrange(1, 20)]
            case _:
                return frame(msgpack.packb({"v": 2, "id": r.choice(_STRANGE), "op": "ping", "fds": r.choice(_STRANGE)}))
