"""Writes the text format 0.0.4 of Prometheus.

Owns the form: names, help, escaping, numbers, the order of lines. A family without samples is left out, and a sample
without a value (None) is left out, so that unknown never reads as 0. See
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hegmd.telemetry.metrics.counters import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


class Family:
    """The samples of one name."""

    def __init__(self, name: str, kind: str, meaning: str) -> None:
        self.name = name
        self._head = f"# HELP {name} {_escaped(meaning)}\n# TYPE {name} {kind}\n"
        self._lines: list[str] = []

    def add(self, value: float | None, labels: Labels | None = None) -> None:
        """Add a sample; does nothing for None."""
        if value is not None:
            self._lines.append(f"{self.name}{_labels(labels or {})} {_number(value)}\n")

    def add_histogram(self, histogram: Histogram, labels: Labels) -> None:
        for bound, count in histogram.cumulative():
            self._lines.append(f"{self.name}_bucket{_labels({**labels, 'le': _number(bound)})} {count}\n")
        self._lines.append(f"{self.name}_sum{_labels(labels)} {_number(histogram.sum_s)}\n")
        self._lines.append(f"{self.name}_count{_labels(labels)} {histogram.count}\n")

    def text(self) -> str:
        return self._head + "".join(self._lines) if self._lines else ""


class Exposition:
    """Families in the order in which they are opened."""

    def __init__(self) -> None:
        self._families: list[Family] = []

    def family(self, name: str, kind: str, meaning: str) -> Family:
        """Start a family; `kind` is gauge, counter or histogram."""
        self._families.append(Family(name, kind, meaning))
        return self._families[-1]

    def text(self) -> str:
        return "".join(family.text() for family in self._families)


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quote=True)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str, *, quote: bool = False) -> str:
    # Halves of surrogate pairs come from names that were not UTF-8, and cannot be encoded again.
    whole = text.encode(errors="replace").decode().replace("\\", "\\\\").replace("\n", "\\n")
    return whole.replace('"', '\\"') if quote else whole


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))  # also of True and False
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
