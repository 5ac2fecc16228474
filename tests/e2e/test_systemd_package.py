"""The package and `make install` on machines of their own: in, newer, out, and nothing left."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import pytest

from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import install

pytest_plugins = ["tests.e2e.systemd_packages"]
TREE = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("packages")]

# Files that any package or new group changes in the system's records.
_BOOK_KEEPING = (
    "/var/lib/dpkg",
    "/var/log",
    "/var/cache",
    "/var/lib/systemd",
    "/tmp",
    "/etc/group-",
    "/etc/gshadow-",
    "/root",
)


def files(node: SystemdNode) -> dict[str, str]:
    """Return the files that differ between the machine and this one, except for the system's records: kind, owner,
    contents.
    """
    found: dict[str, str] = {}
    for directory, _, names in os.walk(node.changes):
        for path in (Path(directory), *(Path(directory, name) for name in names)):
            inside = "/" + str(path.relative_to(node.changes))
            # A directory counts when it is new; old ones are there because of what was changed in them.
            if inside.startswith(_BOOK_KEEPING) or (path.is_dir() and Path(inside).is_dir()):
                continue
            status = path.lstat()
            if _is_as_it_was(path, Path(inside)):
                continue
            contents = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
            found[inside] = f"{stat.filemode(status.st_mode)} {status.st_uid}:{status.st_gid} {contents}"
    return found


def _is_as_it_was(path: Path, real: Path) -> bool:
    if not (path.is_file() and real.is_file()) or path.is_symlink() or real.is_symlink():
        return False
    same = path.stat().st_mode == real.stat().st_mode and path.stat().st_uid == real.stat().st_uid
    return same and path.read_bytes() == real.read_bytes()


def answers(node: SystemdNode) -> None:
    node.run("hegmctl", "ping")


# -- the package -------------------------------------------------------------------------------------------------------


def test_package_goes_in_serves_and_leaves_nothing(fresh_node: SystemdNode, deb: Path) -> None:
    before = files(fresh_node)
    install(fresh_node, deb)
    assert fresh_node.show("hegmd.socket", "ActiveState") == "active"
    assert fresh_node.show("hegmd.socket", "UnitFileState") == "enabled"
    answers(fresh_node)
    (fresh_node.root / "var/lib/hegm/kept").write_text("what a daemon would leave")

    fresh_node.run("dpkg", "--remove", "hegmd")
    assert fresh_node.show("hegmd.service", "ActiveState") == "inactive"
    assert fresh_node.show("hegmd.socket", "LoadState") == "not-found"
    assert not (fresh_node.root / "usr/lib/hegm").exists()
    assert not (fresh_node.root / "run/hegm").exists()
    # A removed package may come back: then it finds what it had.
    assert (fresh_node.root / "etc/hegm/hegmd.toml").exists()
    assert (fresh_node.root / "var/lib/hegm/kept").exists()

    fresh_node.run("dpkg", "--purge", "hegmd")
    assert files(fresh_node) == before
    assert fresh_node.run("getent", "group", "hegm", check=False).returncode == 2
    failed = fresh_node.run("systemctl", "list-units", "--failed", "--plain", "--no-legend").stdout
    assert failed == ""


def test_upgrade_restarts_the_daemon_and_keeps_the_configuration(
    fresh_node: SystemdNode, deb: Path, newer_deb: Path
) -> None:
    install(fresh_node, deb)
    fresh_node.run("systemctl", "start", "hegmd.service")
    old_pid = fresh_node.show("hegmd.service", "MainPID")
    configuration = fresh_node.root / "etc/hegm/hegmd.toml"
    configuration.write_text(configuration.read_text() + "\n# ours\n")

    install(fresh_node, newer_deb)
    newer = newer_deb.name.split("_")[1]
    assert fresh_node.run("hegmctl", "--version").stdout.split()[-1] == newer
    assert fresh_node.show("hegmd.service", "ActiveState") == "active"
    new_pid = fresh_node.show("hegmd.service", "MainPID")
    assert new_pid != old_pid
    assert fresh_node.run("hegmctl", "version", "--json").stdout.count(newer) == 2  # the client's and the daemon's
    assert configuration.read_text().endswith("# ours\n")


def test_an_upgrade_starts_no_daemon_that_did_not_run_and_leaves_a_disabled_socket_disabled(
    fresh_node: SystemdNode, deb: Path, newer_deb: Path
) -> None:
    install(fresh_node, deb)
    assert fresh_node.show("hegmd.service", "ActiveState") == "inactive"
    install(fresh_node, newer_deb)
    assert fresh_node.show("hegmd.service", "ActiveState") == "inactive"
    assert fresh_node.show("hegmd.socket", "ActiveState") == "active"
    fresh_node.run("systemctl", "disable", "--now", "hegmd.socket")
    install(fresh_node, deb)
    assert fresh_node.show("hegmd.socket", "UnitFileState") == "disabled"
    assert fresh_node.show("hegmd.socket", "ActiveState") == "inactive"


def test_the_package_uses_and_changes_no_other_python(node: SystemdNode) -> None:
    poison = node.root / "root/poison"
    poison.mkdir()
    for module in ("sitecustomize", "usercustomize", "hegmctl", "hegmd", "socket", "anyio"):
        (poison / f"{module}.py").write_text(f"raise SystemExit('{module} of somebody else')\n")
    user_site = node.root / "root/.local/lib" / _site_packages(node).parent.name / "site-packages"
    shutil.copytree(poison, user_site)
    version = node.run("hegmctl", "--version").stdout
    hostile = "cd /root/poison && PYTHONPATH=/root/poison PYTHONSTARTUP=/root/poison/socket.py PYTHONHOME=/root"
    assert node.run("sh", "-c", f"{hostile} hegmctl --version").stdout == version
    assert node.run("sh", "-c", f"{hostile} hegmd --version").stdout.split()[-1] == version.split()[-1]
    shutil.rmtree(user_site)
    # The other way round: what is ours is invisible to the interpreter of the distribution.
    assert "ModuleNotFoundError" in node.run("python3", "-c", "import hegmd", check=False).stderr


def test_everything_is_compiled_and_nothing_is_written_later(node: SystemdNode) -> None:
    place = node.root / "usr/lib/hegm"
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    sources = {path for path in before if path.suffix == ".py"}
    compiled = {path for path in before if path.suffix == ".pyc"}
    assert {_source_of(path) for path in compiled} == sources
    answers(node)
    node.run("/usr/lib/hegm/bin/python3", "-I", "-m", "compileall", "-q", "/usr/lib/hegm")  # would renew stale ones
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def _source_of(compiled: Path) -> Path:
    return compiled.parent.parent / f"{compiled.name.split('.')[0]}.py"


def _site_packages(node: SystemdNode) -> Path:
    (found,) = (node.root / "usr/lib/hegm/lib").glob("python3*/site-packages")
    return found


def test_manual_pages_and_completions_are_in_the_package(deb: Path) -> None:
    listed = subprocess.run(["dpkg-deb", "--contents", deb], check=True, capture_output=True, text=True).stdout.split()
    for path in ("man8/hegmd.8.gz", "man1/hegmctl.1.gz", "man5/hegmd.toml.5.gz", "man1/hegm-launcher.1.gz"):
        assert f"./usr/share/man/{path}" in listed
    for path in ("bash-completion/completions/hegmctl", "zsh/vendor-completions/_hegmctl"):
        assert f"./usr/share/{path}" in listed


def test_every_library_in_the_package_has_its_pinned_version(deb: Path) -> None:
    listed = subprocess.run(["dpkg-deb", "--contents", deb], check=True, capture_output=True, text=True).stdout.split()
    lines = (TREE / "packaging/constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    libraries = {
        Path(path) for path in listed if Path(path).match("usr/lib/hegm/lib/python3*/site-packages/*.dist-info")
    }
    found = dict(path.stem.rsplit("-", 1) for path in libraries)
    del found["hegmd"]
    assert {"anyio", "msgpack", "nvidia_ml_py"} <= set(found)
    assert {name.replace("_", "-").lower(): version for name, version in found.items()}.items() <= {
        name.replace("_", "-").lower(): version for name, version in pinned.items()
    }.items()


def test_the_same_tree_gives_the_same_package_and_it_names_no_place_of_the_build(
    source: Path, deb: Path, build_environment: dict[str, str], tmp_path: Path
) -> None:
    first = deb.read_bytes()
    # In another directory, too.
    again = tmp_path / "elsewhere"
    shutil.copytree(source, again, symlinks=True)
    subprocess.run(["packaging/deb.sh"], cwd=again, env=build_environment, check=True, capture_output=True)
    assert (again / "dist" / deb.name).read_bytes() == first
    # Its files are copied into it unchanged.
    assert b"/usr/lib/hegm/lib/python3" in first
    assert str(source).encode() not in first
    assert str(TREE).encode() not in first


def test_a_package_of_the_same_tree_differed_as_directories_took_more_of_a_disk(deb: Path) -> None:
    """A directory does not shrink when a file leaves it, and each compiled module has been there by another name."""
    files = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=BytesIO(files)) as archive:
        expected_kib = sum(-(-member.size // 1024) if member.isfile() else 1 for member in archive)
    command = ["dpkg-deb", "--field", str(deb), "Installed-Size"]
    assert int(subprocess.run(command, check=True, capture_output=True).stdout) == expected_kib


# -- make install ------------------------------------------------------------------------------------------------------


def scripts(node: SystemdNode, source: Path) -> None:
    """Copy the tree into the machine, as a user who cloned it would have it."""
    shutil.copytree(source, node.root / "root/source", symlinks=True, ignore=shutil.ignore_patterns("dist", "tests"))


def test_install_keeps_an_edited_configuration_and_works_after_a_failure_and_uninstall_removes_the_rest(
    fresh_node: SystemdNode, source: Path, deb: Path
) -> None:
    """One machine for all steps: each installation takes seconds."""
    scripts(fresh_node, source)
    before = files(fresh_node)
    fresh_node.run("/root/source/packaging/install.sh")
    answers(fresh_node)
    assert "/usr/local/bin/hegmd" in fresh_node.show("hegmd.service", "ExecStart")
    assert fresh_node.show("hegmd.service", "FragmentPath") == "/usr/local/lib/systemd/system/hegmd.service"
    assert fresh_node.show("hegmd.socket", "UnitFileState") == "enabled"

    configuration = fresh_node.root / "etc/hegm/hegmd.toml"
    edited = configuration.read_text() + "\n# ours\n"
    configuration.write_text(edited)
    fresh_node.run("/root/source/packaging/install.sh")  # over itself
    answers(fresh_node)
    assert configuration.read_text() == edited

    project = fresh_node.root / "root/source/pyproject.toml"
    whole = project.read_text()
    project.write_text("broken")
    assert fresh_node.run("/root/source/packaging/install.sh", check=False).returncode != 0
    fresh_node.run("systemctl", "restart", "hegmd.service")
    answers(fresh_node)
    assert configuration.read_text() == edited
    project.write_text(whole)

    assert "was edited and stays" in fresh_node.run("/root/source/packaging/uninstall.sh").stdout
    assert configuration.read_text() == edited
    shutil.rmtree(configuration.parent)
    output = fresh_node.run("/root/source/packaging/uninstall.sh")  # when there is nothing any more
    assert output.stdout + output.stderr == ""
    assert files(fresh_node) == before
    assert fresh_node.run("getent", "group", "hegm", check=False).returncode == 2
    assert fresh_node.show("hegmd.service", "LoadState") == "not-found"


def test_staged_under_another_prefix_it_touches_nothing_else(
    source: Path, deb: Path, build_environment: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(dir=build_environment["TMPDIR"]) as folder:
        stage = Path(folder)
        environment = {**build_environment, "DESTDIR": str(stage), "PREFIX": "/opt/gpu"}
        subprocess.run(["packaging/install.sh"], cwd=source, env=environment, check=True, capture_output=True)
        unit = (stage / "etc/systemd/system/hegmd.service").read_text()
        assert "ExecStart=/opt/gpu/bin/hegmd\n" in unit
        assert "/usr/bin/hegmd" not in unit
        for program in ("hegmctl", "hegm-launcher", "hegm-ctrl"):
            assert (stage / f"opt/gpu/bin/{program}").resolve() == stage / f"opt/gpu/lib/hegm/bin/{program}"
        assert (stage / "opt/gpu/lib/hegm/bin/hegmctl").read_text().startswith("#!/opt/gpu/lib/hegm/bin/python3 -IB\n")
        assert (stage / "etc/hegm/hegmd.toml").exists()
        uninstall = ["packaging/uninstall.sh"]
        output = subprocess.run(uninstall, cwd=source, env=environment, check=True, capture_output=True)
        assert output.stdout + output.stderr == b""
        assert [str(path.relative_to(stage)) for path in stage.rglob("*")] == []
