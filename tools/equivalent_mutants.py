"""Mutants that make no difference to anybody, each with the reason: for `make mutants`.

A mutant is here by its file, the line before and the line after. It is not judged and not counted as a survivor.
"""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str, str], str] = {}
