"""The modules that a command may load.

`hegmctl gpus` has 2.5 times a bare Python start; one careless import costs a third.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.hegmctl.fake_daemon import FakeDaemon
from tests.unit.hegmctl.running import ROOT, environment

# Each costs between 3 and 13 ms, of the 15 that are left after Python itself has started.
HEAVY = {
    "argparse",
    "anyio",
    "asyncio",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "inspect",
    "json",
    "logging",
    "pathlib",
    "re",
    "select",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "typing",
    "unicodedata",
}
# The modules that only some commands need.
RARE = {
    "hegmctl.answers_text",
    "hegmctl.async_connection",
    "hegmctl.completions",
    "hegmctl.help",
    "hegmctl.suggestions",
    "tools.docs.hegmctl",
    "hegmctl.screen",
    "hegmctl.watch",
}

_PROGRAM = """
import sys
before = set(sys.modules)
from hegmctl.cli import run
status = run(sys.argv[1:])
print("\\n".join(sorted(set(sys.modules) - before)), file=sys.stderr)
raise SystemExit(status)
"""


def _loaded_by(daemon: FakeDaemon, *words: str) -> set[str]:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words],
        env=environment(daemon.path),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return set(ran.stderr.split())


@pytest.mark.parametrize("words", [("gpus",), ("ps",), ("ps", "--ways"), ("__complete", "gpus")])
def test_the_usual_commands_load_nothing_heavy(daemon: FakeDaemon, words: tuple[str, ...]) -> None:
    loaded = _loaded_by(daemon, *words)
    assert not loaded & HEAVY
    assert not loaded & RARE
    assert not {name for name in loaded if name.startswith("hegmd.") and not name.startswith("hegmd.protocol")} - {
        "hegmd.errors"
    }


def test_only_json_output_imports_json(daemon: FakeDaemon) -> None:
    loaded = _loaded_by(daemon, "gpus", "--json")
    assert "json" in loaded
    assert not loaded & (HEAVY - {"json", "re", "enum", "functools"})


def test_no_command_loads_the_event_loop(daemon: FakeDaemon) -> None:
    for words in (("doctor",), ("events",), ("config",), ("version",), ("metrics",)):
        assert not _loaded_by(daemon, *words) & {"anyio", "asyncio", "socket", "argparse", "typing", "dataclasses"}
