"""Damage to a journal that was written by a daemon: every bit flipped, every cut. Run whole by `make bench-chaos`.

A damaged journal is refused with the position, or the damage is the unfinished end of the last write; it is never read
as something else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path

from hegmd.migration.journal import records

SAMPLE = Path(__file__).parents[1] / "unit" / "migration" / "journals" / "v2.journal"
CHUNK = 256


def flip_bits(data: bytes, places: Iterable[int], bits: Iterable[int] = range(8)) -> Iterator[str]:
    """Return the bytes with a bit of them flipped."""
    for place in places:
        for bit in bits:
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            try:
                records.read(bytes(damaged))
            except records.JournalBroken as broken:
                if broken.where > place or not broken.hint:
                    yield f"bit {bit} of byte {place} is said to be wrong at byte {broken.where}"
                continue
            yield f"bit {bit} of byte {place} was flipped, and it was read"


def cut(data: bytes, lengths: Iterable[int], tail: bytes = b"") -> Iterator[str]:
    """The records read from a truncated or overlong journal, if they are not its beginning."""
    ends = record_ends(data)
    whole = {end: records.read(data[:end]).histories for end in ends}
    for length in lengths:
        reading = records.read(data[:length] + tail)
        sound = max(end for end in ends if end <= length)
        if reading.sound_bytes != sound or reading.histories != whole[sound]:
            yield f"cut at byte {length}: {reading.sound_bytes} bytes were read, {sound} are sound"
        if reading.torn != (sound != length or bool(tail)):
            yield f"cut at byte {length}: it is {'' if reading.torn else 'not '}said to be torn"


def record_ends(data: bytes) -> list[int]:
    """Return the end of each record, with the beginning of the file and its magic."""
    return [0, len(records.MAGIC), *[end for _, end, _ in records.payloads(data)]]


def _flip_chunk(start: int) -> list[str]:
    data = SAMPLE.read_bytes()
    return list(flip_bits(data, range(start, min(start + CHUNK, len(data)))))


def main() -> int:
    """Everything that can be done to the sample."""
    data = SAMPLE.read_bytes()
    began = time.monotonic()
    wrong = [*cut(data, range(len(data) + 1)), *cut(data, range(len(data)), bytes(700))]
    with Pool() as pool:
        for found in pool.imap_unordered(_flip_chunk, range(0, len(data), CHUNK)):
            wrong += found
    for line in wrong[:20]:
        sys.stdout.write(f"{line}\n")
    took_s = time.monotonic() - began
    sys.stdout.write(
        f"{8 * len(data)} bits flipped and {2 * len(data)} cuts in a journal of {len(data)} bytes: {took_s:.0f} s; "
        f"wrongly read {len(wrong)}\n"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
