"""The project's own tools: make targets that explain themselves, scripts that parse, dependencies with a reason."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from hegmd import __version__
from tests.cells import in_one_test
from tests.house.source import ROOT, files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROMISED_TARGETS = {"bench", "bench-gpu", "check", "deb", "demo", "install", "test", "test-gpu", "uninstall"}


def _shebang(path: Path) -> str:
    with path.open("rb") as file:
        first = file.readline(200)
    return first.decode(errors="replace").strip() if first.startswith(b"#!") else ""


# The maintainer scripts of the .deb get their mode when it is built.
SCRIPTS = {path: line for path in files() if (line := _shebang(path)) and path.parent != ROOT / "packaging" / "deb"}
BASH = [path for path, line in SCRIPTS.items() if line.endswith(("bash", "/sh"))]


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _make_targets() -> dict[str, str]:
    """Every target of the Makefile with its help, which is empty where it has none."""
    rules = re.findall(r"(?m)^([a-z][a-z-]*):[^=\n#]*(?:## (.*))?$", (ROOT / "Makefile").read_text())
    return {name: text.strip() for name, text in rules}


def test_every_make_target_explains_itself() -> None:
    targets = _make_targets()
    assert targets.keys() >= PROMISED_TARGETS
    assert [name for name, text in targets.items() if not text] == []


def test_every_make_target_is_phony() -> None:
    phony = re.search(r"(?m)^\.PHONY:(.*)$", (ROOT / "Makefile").read_text())
    assert phony
    assert set(phony[1].split()) == _make_targets().keys()


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[0] for line in done.stdout.splitlines()} == _make_targets().keys()


@in_one_test("target", sorted(PROMISED_TARGETS))
def test_a_promised_target_is_documented(target: str) -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    assert re.search(rf"make {target}(?![\w-])", text)


@in_one_test("path", BASH, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_parses(path: Path) -> None:
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# A stub of a program exits as that program would, so it decides about every status itself.
@in_one_test(
    "path",
    [path for path in BASH if not path.is_relative_to(ROOT / "tests" / "stubs")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_a_script_stops_at_the_first_error(path: Path) -> None:
    assert re.search(r"(?m)^\s*set -e", path.read_text()), f"{path.name} goes on after a failure"


@in_one_test("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_with_a_shebang_are_executable(path: Path) -> None:
    assert path.stat().st_mode & 0o111


def _distribution(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]


def test_every_dependency_has_a_reason_in_writing() -> None:
    project = _project()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {_distribution(requirement) for group in groups for requirement in group}
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`[^|]*?)(?:, in the extra `\w+`)? \|", section)
    explained = {package for row in rows for package in re.findall(r"`([\w-]+)`", row)}
    assert explained == wanted


def test_every_dependency_is_bounded() -> None:
    loose = [requirement for requirement in _project()["dependencies"] if not re.search(r">=|==", requirement)]
    assert loose == []


def test_the_version_is_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert _project()["dynamic"] == ["version"]


def test_ci_runs_the_commands_of_a_developer() -> None:
    runs = (ROOT / ".ci" / "run").read_text()
    assert "make test" in runs
    assert "make lint" in runs, "which alone has pyright"


def test_pre_commit_runs_the_checks_of_the_tests() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert all(tool in text for tool in ("ruff format", "ruff check", "codespell", "mypy", "pyright", "tests/house"))
