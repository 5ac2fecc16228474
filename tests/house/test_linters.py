"""Formatter, linter, spelling and both type checkers, as tests: what pre-commit runs, and what a change must pass.

A missing tool is skipped here and nowhere else; `make test` and `make check` install all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT
from tests.patience import TYPE_CHECKER_S

BIN = Path(sys.executable).parent
# For pyright, whose collector would otherwise scan all young objects repeatedly, a tenth of its time.
ROOMY = "--max-semi-space-size=64"


def _run(*argv: str) -> None:
    """Run a tool of this environment; its own words are the failure."""
    if not (BIN / argv[0]).exists():
        pytest.skip(f"{argv[0]} is not installed; `make check` installs it")
    done = subprocess.run(
        [BIN / argv[0], *argv[1:]],
        cwd=ROOT,
        env=os.environ | {"NO_COLOR": "1", "NODE_OPTIONS": ROOMY},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(done.stdout, pytrace=False)


def test_the_code_is_formatted() -> None:
    _run("ruff", "format", "--check", ".")


def test_the_linter_finds_nothing() -> None:
    _run("ruff", "check", ".")


@pytest.mark.thorough
def test_the_words_are_spelled_right() -> None:
    _run("codespell")


@pytest.mark.wide
@pytest.mark.timeout(TYPE_CHECKER_S)
def test_mypy_finds_nothing() -> None:
    """Half a minute of the processor in a fresh clone: CI runs both type checkers by `make lint`."""
    _run("mypy")


@pytest.mark.wide
@pytest.mark.timeout(TYPE_CHECKER_S)
def test_pyright_finds_nothing() -> None:
    """As much of the processor as all other house rules together, and half as much again."""
    _run("pyright")
