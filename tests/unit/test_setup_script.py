"""tools/setup.sh decides rightly when to do nothing, with an interpreter that only records its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup.sh"

# In place of .venv/bin/python: answers yes to every question and logs the arguments of pip.
INTERPRETER = """#!/bin/sh
case "$*" in
*"-m pip install"*) echo "$*" >>"$(dirname "$0")/../../installed" ;;
esac
"""

# Programs that a level looks for and that have to seem present.
PRESENT = (
    "cc make systemctl systemd-sysusers dbus-daemon unshare nsenter setpriv "
    "mount runuser dpkg-deb useradd ps fish zsh mandoc"
)


class Checkout:
    """A copy of what the script reads, with a .venv that does nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs = root.with_name("programs")
        for folder in (root / "tools", root / "hegmd", root / "tests", root / ".venv" / "bin", self.programs):
            folder.mkdir(parents=True)
        shutil.copy(SCRIPT, root / "tools" / "setup.sh")
        (root / "pyproject.toml").write_text("[project]\n")
        (root / "hegmd" / "__init__.py").write_text('__version__ = "0"\n')
        self._program(root / ".venv" / "bin" / "python", INTERPRETER)
        for name in PRESENT.split():
            self.provide(name)
        self.provide("node", "#!/bin/sh\n")
        self.provide("npm", f'#!/bin/sh\necho "npm $*" >>{root}/installed\n')
        for name in "bash cat cut dirname env find flock id readlink rm sh sha256sum sort tr".split():
            (self.programs / name).symlink_to(shutil.which(name) or "/missing")
        # The one package without a program of its own may be missing here: the test then replaces its installation.
        self.provide("apt-get")
        self.be_user(0)

    def provide(self, name: str, text: str = "#!/bin/sh\nexit 0\n") -> None:
        self._program(self.programs / name, text)

    def be_user(self, uid: int) -> None:
        (self.programs / "id").unlink()
        self.provide("id", f"#!/bin/sh\necho {uid}\n")

    def _program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, level: str, said_to: int = subprocess.STDOUT) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "tools/setup.sh", level],
            cwd=self.root,
            env={"PATH": str(self.programs), "HOME": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=said_to,
            text=True,
        )

    def run(self, level: str, said_to: int = subprocess.STDOUT) -> tuple[int, str]:
        with self.start(level, said_to) as process:
            output, _ = process.communicate()
        return process.returncode, output

    def installed(self) -> list[str]:
        """Return what was installed since the last call."""
        log = self.root / "installed"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


@pytest.mark.thorough
def test_the_second_run_does_and_prints_nothing(checkout: Checkout) -> None:
    assert checkout.run("dev")[0] == 0
    assert any(line.endswith(".[dev,training]") for line in checkout.installed())
    assert checkout.run("dev") == (0, "")
    assert checkout.installed() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("done", "requested", "enough"),
    [("full", "dev", True), ("full", "run", True), ("dev", "run", True), ("run", "dev", False), ("dev", "full", False)],
)
def test_a_higher_level_holds_the_lower_ones(checkout: Checkout, done: str, requested: str, enough: bool) -> None:
    checkout.run(done)
    checkout.installed()
    assert checkout.run(requested)[0] == 0
    assert (checkout.installed() == []) is enough


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changed", ["pyproject.toml", "hegmd/__init__.py", "tools/setup.sh", "tests/package-lock.json"]
)
def test_a_changed_input_is_acted_on_once(checkout: Checkout, changed: str) -> None:
    checkout.run("dev")
    checkout.installed()
    with (checkout.root / changed).open("a") as file:
        file.write("\n")
    assert checkout.run("dev")[0] == 0
    assert checkout.installed() != []
    assert checkout.run("dev") == (0, "")


# pip's messages about a large file, a small one and a cached one.
SAYS = """Collecting torch
  Downloading torch-2.13.0-cp311.whl.metadata (30 kB)
  Downloading torch-2.13.0-cp311.whl (915.1 MB)
Progress 1000000 of 915100000
Progress 460000000 of 915100000
Progress 915100000 of 915100000
  Downloading packaging-26.0.whl (66 kB)
Progress 66000 of 66000
Using cached numpy-2.3.0.whl (16.6 MB)
Installing collected packages: numpy, torch
"""


def _be_told(checkout: Checkout) -> None:
    (checkout.root / "says").write_text(SAYS)
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text(f"{INTERPRETER}case \"$*\" in *progress-bar*) cat '{checkout.root}/says' ;; esac\n")


def test_the_download_of_a_gigabyte_is_announced(checkout: Checkout) -> None:
    """Issue 14, row 18: `make demo` was silent for a minute."""
    _be_told(checkout)
    status, output = checkout.run("run")
    assert status == 0
    assert "up to 1 GB" in output
    assert [line for line in output.splitlines() if "torch-2.13" in line or "numpy" in line] == [
        "setup: downloading torch-2.13.0-cp311.whl (915.1 MB)",
        "setup: torch-2.13.0-cp311.whl: 460 of 915 MB",
        "setup: torch-2.13.0-cp311.whl: 915 of 915 MB",
        "setup: using cached numpy-2.3.0.whl (16.6 MB)",
    ]
    assert "packaging" not in output


def test_on_a_terminal_the_progress_of_a_download_is_shown_in_place(checkout: Checkout) -> None:
    _be_told(checkout)
    ours, theirs = os.openpty()
    try:
        checkout.run("run", said_to=theirs)
        output = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "\r\x1b[Ksetup: 1 of 915 MB\r\x1b[Ksetup: 460 of 915 MB\r" in output
    assert output.count("torch-2.13.0-cp311.whl") == 1


def test_a_failure_of_pip_is_not_lost_behind_its_progress(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text(f'{INTERPRETER}case "$*" in *progress-bar*) exit 1 ;; esac\n')
    status, output = checkout.run("run")
    assert status == 1
    assert "pip could not install" in output


@pytest.mark.thorough
def test_a_moved_checkout_is_set_up_again(checkout: Checkout) -> None:
    checkout.run("dev")
    checkout.installed()
    moved = checkout.root.with_name("moved")
    checkout.root.rename(moved)
    checkout.root = moved
    assert checkout.run("dev")[0] == 0
    assert checkout.installed() != []


@pytest.mark.thorough
def test_an_environment_for_tests_stays_complete(checkout: Checkout) -> None:
    checkout.run("dev")
    (checkout.root / "pyproject.toml").write_text("[project]\n\n")
    checkout.installed()
    checkout.run("run")
    assert any(line.endswith(".[dev,training]") for line in checkout.installed())
    assert checkout.run("dev") == (0, "")


@pytest.mark.thorough
def test_two_concurrent_setups_install_once(checkout: Checkout) -> None:
    first, second = checkout.start("run"), checkout.start("run")
    with first, second:
        outputs = [process.communicate()[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0)
    assert sum(line.endswith("--editable .[training]") for line in checkout.installed()) == 1, outputs


@pytest.mark.thorough
def test_an_install_that_failed_is_tried_again(checkout: Checkout) -> None:
    python = checkout.root / ".venv" / "bin" / "python"
    python.write_text(INTERPRETER + 'case "$*" in *--editable*) exit 1 ;; esac\n')
    code, output = checkout.run("dev")
    assert code == 1
    assert "pip could not install" in output
    python.write_text(INTERPRETER)
    checkout.installed()
    assert checkout.run("dev")[0] == 0
    assert checkout.installed() != []


def test_missing_programs_are_installed_by_root_only(checkout: Checkout) -> None:
    (checkout.programs / "dbus-daemon").unlink()
    checkout.provide("apt-get", f'#!/bin/sh\necho "apt-get $*" >>{checkout.root}/installed\n')
    checkout.be_user(0)
    assert checkout.run("full")[0] == 0
    assert any(line.startswith("apt-get install ") and "dbus" in line.split() for line in checkout.installed())


def test_without_the_right_to_install_the_command_is_printed(checkout: Checkout) -> None:
    (checkout.programs / "dbus-daemon").unlink()
    checkout.provide("apt-get", "#!/bin/sh\nexit 100\n")
    checkout.be_user(1000)
    code, output = checkout.run("full")
    assert code == 1
    assert "run: sudo apt-get update && sudo apt-get install -y --no-install-recommends dbus" in output
    assert output.count("\n") == 1
    assert checkout.installed() == []


def test_an_unknown_level_is_refused(checkout: Checkout) -> None:
    code, output = checkout.run("everything")
    assert code == 2
    assert "run, dev or full" in output
