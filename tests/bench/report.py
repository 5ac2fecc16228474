"""The results of a benchmark beside their budgets, as a text table, JSON or Markdown.

Pure: rows and a machine go in, text comes out. A figure is over when it is not known to be within its budget, so a
figure that is not a number is over as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

HEADINGS = ("WHAT", "FIGURE", "UNIT", "BUDGET", "")


class Row(NamedTuple):
    """One figure. A figure without a budget is for information only."""

    name: str
    value: float
    unit: str
    budget: float | None = None

    @property
    def verdict(self) -> str:
        """`ok`, `over`, or nothing where there is no budget."""
        if self.budget is None:
            return ""
        return "ok" if self.value <= self.budget else "over"


Results = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the time of the figures. Figures without them mean nothing."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    revision: str
    taken_utc: str
    load: str

    def lines(self) -> list[str]:
        """Return the lines that a reader needs to compare figures with others."""
        return [
            f"{self.cpu}, {self.cores} cores, {self.memory_bytes / (1 << 30):.0f} GiB; {self.kernel}; {self.python}",
            f"{self.taken_utc}, revision {self.revision}, load average {self.load}",
        ]


def is_within(results: Results) -> bool:
    """Whether nothing is over its budget."""
    return all(row.verdict != "over" for rows in results.values() for row in rows)


def as_text(machine: Machine, results: Results) -> str:
    """One aligned table, with a line of its own where a benchmark begins."""
    cells = {name: [_cells(row) for row in rows] for name, rows in results.items()}
    every = [HEADINGS, *(row for rows in cells.values() for row in rows)]
    widths = [max(len(row[column]) for row in every) for column in range(len(HEADINGS))]
    lines = [*machine.lines(), "", _line(HEADINGS, widths)]
    for name, rows in cells.items():
        lines += [f"{name}:", *(_line(row, widths) for row in rows)]
    return "\n".join(lines)


def as_markdown(machine: Machine, results: Results) -> str:
    """The same for a document, one table for each benchmark."""
    parts = ["  \n".join(machine.lines())]
    for name, rows in results.items():
        table = [f"### {name}", "", "| what | figure | budget | |", "|---|---:|---:|---|"]
        for row in rows:
            budget = "" if row.budget is None else f"{_amount(row.budget)} {row.unit}"
            table.append(f"| {row.name} | {_amount(row.value)} {row.unit} | {budget} | {row.verdict} |")
        parts.append("\n".join(table))
    return "\n\n".join(parts)


def as_json(machine: Machine, results: Results) -> str:
    """The same for programs."""
    figures = [
        {"benchmark": name, **row._asdict(), "verdict": row.verdict or None}
        for name, rows in results.items()
        for row in rows
    ]
    return json.dumps({"machine": asdict(machine), "figures": figures}, indent=2)


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    budget = "" if row.budget is None else _amount(row.budget)
    return f"  {row.name}", _amount(row.value), row.unit, budget, row.verdict


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    name, value, unit, budget, verdict = cells
    return (f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  {budget:>{widths[3]}}  {verdict}").rstrip()


def _amount(value: float) -> str:
    """Three digits that count, and no exponent."""
    if value == 0:
        return "0"
    digits = 0
    while digits < 4 and abs(value) * 10**digits < 100:
        digits += 1
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
