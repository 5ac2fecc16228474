"""Fixtures for the tests under systemd: the package built from this tree, a newer one, and machines to try them on.

Loaded as a plugin by the modules that need it (`pytest_plugins`), so that each package is built once in a session.
Both are built in copies of the tree: `build/` and `dist/` of the tree itself stay as they were.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.systemd_node import SystemdNode, why_not
from tests.e2e.systemd_service import CONFIGURATION, SOCKET, as_installed
from tests.room import MIB, SHARED_MEMORY

TREE = Path(__file__).resolve().parents[2]
NEWER_VERSION = "99.0.0"
# Space for the files in a build's temporary folder, with a margin.
BUILD_BYTES = 512 * MIB
_LEFT_OUT = (".git", ".venv", "build", "dist", "node_modules", "__pycache__", ".*_cache", ".hypothesis")


@pytest.fixture(scope="session")
def systemd_works() -> None:
    """Skip tests that need their own machine if none can be started."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def source(systemd_works: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree with its manual pages and completions made, and what its package was built from in build/."""
    copy = tmp_path_factory.mktemp("source") / "hegm"
    shutil.copytree(TREE, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (copy / ".venv").symlink_to(TREE / ".venv")
    for what in ("man", "completions"):
        _run(copy, sys.executable, "-m", "tools.docs.hegmctl", what, f"build/{what}")
    return copy


@pytest.fixture(scope="session")
def deb(source: Path) -> Path:
    """The package of this tree."""
    return _package(source)


@pytest.fixture
def build_environment() -> dict[str, str]:
    """The environment of further builds."""
    return _build_environment()


@pytest.fixture(scope="session")
def newer_deb(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same package under a higher version: in a second build, only the version would differ."""
    with tempfile.TemporaryDirectory(dir=_place_of_builds()) as folder:
        tree = Path(folder, "tree")
        _run(deb.parent, "dpkg-deb", "--raw-extract", str(deb), str(tree))
        control = tree / "DEBIAN/control"
        control.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {NEWER_VERSION}", control.read_text()))
        (version,) = tree.glob("usr/lib/hegm/lib/python3*/site-packages/hegmd/__init__.py")
        version.write_text(re.sub(r"(?m)^__version__ = .*$", f'__version__ = "{NEWER_VERSION}"', version.read_text()))
        _run(tree, "/usr/bin/python3", "-m", "compileall", "-q", "-s", str(tree), "-p", "/", str(version))
        package = tmp_path_factory.mktemp("newer") / deb.name.replace(deb.name.split("_")[1], NEWER_VERSION)
        _run(tree, "dpkg-deb", "--root-owner-group", "--build", str(tree), str(package))
        return package


@pytest.fixture
def fresh_node(systemd_works: None) -> Iterator[SystemdNode]:
    """A machine on which hegmd was never installed; this tree can be read there, for its tools."""
    with SystemdNode(TREE) as node:
        yield node


@pytest.fixture(scope="session")
def installed(deb: Path) -> Iterator[SystemdNode]:
    """A machine with the package, a member of the group hegm and a user outside it."""
    with SystemdNode() as node:
        shutil.copy(deb, node.root / "root")
        node.run("dpkg", "--install", f"/root/{deb.name}")
        node.run("useradd", "--create-home", "--groups", "hegm", "member")
        node.run("useradd", "--create-home", "outsider")
        yield node


@pytest.fixture
def node(installed: SystemdNode) -> Iterator[SystemdNode]:
    """The machine after the installation: socket open, daemon not started, configuration as shipped."""
    shipped = (installed.root / CONFIGURATION).read_bytes()
    installed.run("systemctl", "start", SOCKET)
    yield installed
    as_installed(installed, shipped)


def _package(tree: Path) -> Path:
    return Path(_run(tree, "packaging/deb.sh").splitlines()[-1])


def _build_environment() -> dict[str, str]:
    """The environment of a build: not compressed, and with its temporary files in memory if there is room.

    Three packages are built, installed a dozen times from the disk of this machine, and thrown away. Each has 3,000
    files, which take four times as long to write on a disk.
    """
    return {**os.environ, "DPKG_DEB_COMPRESSOR_TYPE": "none", "TMPDIR": _place_of_builds()}


def _place_of_builds() -> str:
    has_room = shutil.disk_usage(SHARED_MEMORY).free > BUILD_BYTES
    return str(SHARED_MEMORY) if has_room else tempfile.gettempdir()


def _run(tree: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=tree,
        env=_build_environment(),
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout
