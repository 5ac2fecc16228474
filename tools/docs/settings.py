"""Writes contrib/hegmd.toml, the shipped example, from the table of settings: `python -m tools.docs.settings`.

A test keeps the file fresh. The manual page of the file is made of the same table.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hegmd.config import PATH_VARIABLE, SYSTEM_PATH, USER_PATH
from hegmd.settings import SECTIONS, Row, rows_of


def example() -> str:
    """Return the shipped configuration file: every setting with its meaning, commented out at its default."""
    return example_of(SECTIONS)


def example_of(sections: Mapping[str, type[Any]]) -> str:
    """Return the file for those sections."""
    opening = (
        f"The configuration of hegmd: {SYSTEM_PATH}, with --user {USER_PATH}, or what --config or {PATH_VARIABLE} "
        "names. Every setting is here at its default; remove the # to change it. `hegmd --check-config` lists "
        "every mistake with its line, `hegmctl config` shows the active settings. Written by `python3 -m "
        "tools.docs.settings`."
    )
    parts = [_comment(opening)]
    rows = rows_of(sections)
    for section, cls in sections.items():
        parts.append(f"\n\n[{section}]\n# {(cls.__doc__ or '').strip()}\n")
        parts.extend(_example_of(row) for row in rows.values() if row.section == section)
    return "".join(parts)


def _example_of(row: Row) -> str:
    sentences = [row.doc, f"{row.kind.form}."]
    if row.user_default != row.default:
        sentences.append(f"With --user: {toml_of(row.user_default)}.")
    if row.variable:
        sentences.append(f"Also {row.variable} and {row.flag}.")
    sentences.append("Takes effect at a reload." if row.reloads else "Takes a restart.")
    return f"\n{_comment(' '.join(sentences))}#{row.name} = {toml_of(row.default)}\n"


def _comment(text: str) -> str:
    lines = textwrap.wrap(text, 100, break_on_hyphens=False, break_long_words=False)
    return "".join(f"# {line}\n" for line in lines)


def toml_of(value: str | float | tuple[str, ...]) -> str:
    """Return a value as the file has it."""
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else "contrib/hegmd.toml").write_text(example())
