"""Writes down which tests run which lines of some files: a plugin of pytest, for `make mutants`.

Takes the files from LINES_OF, a path a line, and writes to LINES_INTO a JSON object: which tests failed, and for each
test its seconds and the lines that it ran, in this process only. A test that looks at Python's trace function may fail
beside it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

FILES, INTO = "LINES_OF", "LINES_INTO"


class ExecutedLines:
    """The lines of each test, noted by a trace function in those files alone."""

    def __init__(self, files: frozenset[str], into: Path) -> None:
        self._files = files
        self._into = into
        self._now: set[tuple[str, int]] = set()
        self._found: dict[str, dict[str, Any]] = {}
        self._failed: dict[str, None] = {}

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, _event: str, _arg: object) -> Any:
        self._now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._now = set()
        begun_s = time.monotonic()
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if self._now:
                self._found[item.nodeid] = {"seconds": time.monotonic() - begun_s, "lines": sorted(self._now)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        self._into.write_text(json.dumps({"tests": self._found, "failed": [*self._failed]}))


def pytest_configure(config: pytest.Config) -> None:
    files = frozenset(os.environ[FILES].splitlines())
    config.pluginmanager.register(ExecutedLines(files, Path(os.environ[INTO])), "executed-lines")
