"""Write the tables of docs/benchmarks.md from docs/measurements: `python -m tools.pictures.tables`.

A comment in the page says what a table shows: `<!-- table RECORD: COLUMN[=HEADER]... [| FIELD=VALUE...] -->`. Columns
are fields of the record's rows. The words after the bar select rows by a field and its allowed values, separated by
commas. Each table ends with a line that names its source.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from tools.pictures import records

PAGE = records.ROOT / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"(?s)(<!-- table (\S+): ([^|>]*?)(?:\| ([^>]*?))? -->\n).*?(<!-- table: end -->)")


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)


def table(name: str, columns: str, wanted: str = "") -> str:
    """One table as Markdown, and the line that names its source. Raises LookupError for an unknown field."""
    headers = {word.partition("=")[0]: word.partition("=")[2] for word in shlex.split(columns)}
    wishes = {word.partition("=")[0]: word.partition("=")[2].split(",") for word in shlex.split(wanted)}
    record = records.record(name)
    unknown = [field for field in (*headers, *wishes) if not any(field in row for row in record["rows"])]
    if unknown:
        raise LookupError(f"{name}.json has no field {', '.join(unknown)}")
    rows = [row for row in record["rows"] if all(str(row.get(field)) in values for field, values in wishes.items())]
    lines = [
        "| " + " | ".join(header or field.replace("_", " ") for field, header in headers.items()) + " |",
        "|" + "|".join(_alignment(record, field) for field in headers) + "|",
        *("| " + " | ".join(_shown(row.get(field)) for field in headers) + " |" for row in rows),
    ]
    conditions = f"; {record['conditions']}" if "conditions" in record else ""
    source = f"[{name}.json](measurements/{name}.json): `{record['command']}`, {record['date']}{conditions}."
    return "\n".join([*lines, "", source, ""])


def _alignment(record: dict[str, Any], field: str) -> str:
    values = [row[field] for row in record["rows"] if row.get(field) is not None]
    return "---:" if all(isinstance(value, int | float) for value in values) else "---"


def refreshed(page: str) -> str:
    """The page with each of its tables written again from the records."""
    return _BLOCK.sub(lambda found: f"{found[1]}{table(found[2], found[3], found[4] or '')}{found[5]}", page)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
