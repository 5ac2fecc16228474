"""Measured throughput of this node, for the next estimate. Each new measurement has a weight of one half.

Pure: the executor reports durations. Amounts too small to indicate a speed are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from hegmd.memory.sizes import NEXT_TO_NOTHING_BYTES
from hegmd.migration.model import CARRIERS, CarrierRow, Rates
from hegmd.protocol.operations import BY_DRIVER

# Below this, a copy is mostly its overhead.
TELLING_BYTES = 256 << 20
OUT, IN = "out", "in"
# The part of an image that is written while a job that trains on is parked: its processes.
LEFT = "left"
# The least time in seconds that an image takes besides its bytes.
_MIN_S = 0.05


class Throughputs:
    """Begins with the figures that were measured elsewhere."""

    def __init__(self, carriers: Mapping[str, CarrierRow] = CARRIERS) -> None:
        self._carriers = carriers
        self._rates = Rates()

    def rates(self) -> Rates:
        """Return the rates as measured so far."""
        return self._rates

    def note(self, carrier: str, direction: str, size_bytes: int, took_s: float, rounds: int = 1) -> None:
        """Record how long a carrier or the driver took for that many bytes; for a reload, in that many rounds."""
        if carrier == BY_DRIVER:
            self._note_driver(direction, size_bytes, took_s)
            return
        name = self._rate_of(carrier, direction)
        copying_s = took_s - self._rates.exchange_s / 2
        if direction == IN:
            copying_s -= size_bytes / self._rates.make_bytes_per_s + (rounds - 1) * self._rates.round_s
        if name is not None and size_bytes >= TELLING_BYTES and copying_s > 0:
            self._mean(name, size_bytes / copying_s)

    def note_overlapped(self, carrier: str, direction: str, size_bytes: int, took_s: float) -> None:
        """Record how much a carrier copied concurrently with a step of the driver, and nothing else."""
        name = self._rate_of(carrier, direction)
        if name is not None and size_bytes >= TELLING_BYTES and took_s > 0:
            self._mean(name, size_bytes / took_s)

    def note_arming(self, carrier: str, took_s: float) -> None:
        """Record how long a carrier took to prepare for a job that was parked already."""
        row = self._carriers.get(carrier)
        if row is not None and row.is_helped:
            self._mean("arm_s", took_s)

    def note_image(self, direction: str, size_bytes: int, took_s: float) -> None:
        """Record how long an image of that size took, with its processes; LEFT, OUT or IN."""
        fixed_s = getattr(self._rates, f"image_{direction}_s")
        rate = f"image_{direction}_bytes_per_s"
        if size_bytes >= NEXT_TO_NOTHING_BYTES and took_s > fixed_s:
            self._mean(rate, size_bytes / (took_s - fixed_s))
        else:
            self._mean(f"image_{direction}_s", max(_MIN_S, took_s - size_bytes / getattr(self._rates, rate)))

    def _rate_of(self, carrier: str, direction: str) -> str | None:
        """The field of `Rates` for it, if the table has one."""
        row = self._carriers.get(carrier)
        if row is None or row.rates is None:
            return None
        out, back = row.rates
        return {OUT: out, IN: back}[direction]

    def _note_driver(self, direction: str, size_bytes: int, took_s: float) -> None:
        fixed_s = getattr(self._rates, f"driver_{direction}_s")
        more_bytes = size_bytes - NEXT_TO_NOTHING_BYTES
        if more_bytes < TELLING_BYTES:
            carrying_s = max(0, more_bytes) / getattr(self._rates, f"driver_{direction}_bytes_per_s")
            self._mean(f"driver_{direction}_s", max(0.0, took_s - carrying_s))
        elif took_s > fixed_s:
            self._mean(f"driver_{direction}_bytes_per_s", more_bytes / (took_s - fixed_s))

    def _mean(self, name: str, rate: float) -> None:
        self._rates = self._rates.replace(**{name: (getattr(self._rates, name) + rate) / 2})


def image_s(rates: Rates, direction: str, size_bytes: int) -> float:
    """Return how long an image of that size takes."""
    fixed_s: float = getattr(rates, f"image_{direction}_s")
    bytes_per_s: float = getattr(rates, f"image_{direction}_bytes_per_s")
    return fixed_s + size_bytes / bytes_per_s
