"""The daemon under a real systemd: started by its socket, reloaded, killed, hung, and in its sandbox."""

from __future__ import annotations

import json
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.systemd_node import SystemdNode

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

SERVICE = "hegmd.service"
CONFIGURATION = "etc/hegm/hegmd.toml"
DROP_IN = "run/systemd/system/hegmd.service.d/test.conf"
EXPOSURE_LIMIT = 3.0


@pytest.fixture(scope="module")
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
    """That machine as it was after the installation: socket open, daemon not started, configuration as shipped."""
    shipped = (installed.root / CONFIGURATION).read_bytes()
    installed.run("systemctl", "start", "hegmd.socket")
    yield installed
    installed.run("systemctl", "kill", "--kill-who=all", "--signal=CONT", SERVICE, check=False)
    installed.run("systemctl", "stop", SERVICE)
    installed.run("systemctl", "reset-failed", SERVICE, check=False)
    (installed.root / CONFIGURATION).write_bytes(shipped)
    if (installed.root / DROP_IN).exists():
        (installed.root / DROP_IN).unlink()
        installed.run("systemctl", "daemon-reload")


def drop_in(node: SystemdNode, *lines: str) -> None:
    path = node.root / DROP_IN
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[Service]\n" + "\n".join(lines) + "\n")
    node.run("systemctl", "daemon-reload")


def main_pid(node: SystemdNode) -> int:
    return int(node.show(SERVICE, "MainPID"))


def ask(node: SystemdNode, *verb: str, user: str | None = None) -> Any:
    """What hegmctl answers, as JSON."""
    return json.loads(node.run("hegmctl", "--json", *verb, user=user).stdout)


def setting(node: SystemdNode, key: str) -> object:
    (value,) = [each["value"] for each in ask(node, "config")["settings"] if each["key"] == key]
    return value


# -- start and stop ----------------------------------------------------------------------------------------------------


def test_the_first_client_starts_the_daemon(node: SystemdNode) -> None:
    assert node.show(SERVICE, "ActiveState") == "inactive"
    version = ask(node, "version")
    assert version["daemon"]["version"] == version["version"]
    assert node.show(SERVICE, "ActiveState") == "active"
    assert node.show(SERVICE, "StatusText") != ""


def test_a_stopped_daemon_ends_cleanly_and_comes_with_the_next_client(node: SystemdNode) -> None:
    node.run("systemctl", "start", SERVICE)
    first = main_pid(node)
    node.run("systemctl", "stop", SERVICE)
    assert node.show(SERVICE, "ActiveState") == "inactive"
    assert node.show(SERVICE, "Result") == "success"
    assert node.show(SERVICE, "ExecMainCode") == "1"  # CLD_EXITED, and not by a signal
    assert node.show(SERVICE, "ExecMainStatus") == "0"
    node.run("hegmctl", "ping")
    assert main_pid(node) not in (0, first)


def test_a_restart_refuses_no_client(node: SystemdNode) -> None:
    node.run("systemctl", "start", SERVICE)
    first = main_pid(node)
    over = threading.Event()
    refusals: list[str] = []
    answers = 0

    def keep_asking() -> None:
        nonlocal answers
        while not over.is_set() or answers == 0:
            done = node.run("hegmctl", "ping", check=False)
            answers += 1
            if done.returncode:
                refusals.append(done.stderr)

    client = threading.Thread(target=keep_asking)
    client.start()
    for _ in range(3):
        node.run("systemctl", "restart", SERVICE)
    over.set()
    client.join()
    assert refusals == []
    assert main_pid(node) != first


def test_stopping_the_socket_takes_it_away_and_clients_are_told(node: SystemdNode) -> None:
    node.run("systemctl", "stop", "hegmd.socket", SERVICE)
    assert not (node.root / "run/hegm/hegmd.sock").exists()
    refused = node.run("hegmctl", "ping", check=False)
    assert refused.returncode == 3
    assert "systemctl start hegmd" in refused.stderr


# -- reload ------------------------------------------------------------------------------------------------------------


def test_reload_takes_a_new_configuration_into_the_running_daemon(node: SystemdNode) -> None:
    node.run("systemctl", "start", SERVICE)
    pid = main_pid(node)
    assert setting(node, "inventory.refresh_s") != 3
    (node.root / CONFIGURATION).write_text("[inventory]\nrefresh_s = 3\n")
    node.run("systemctl", "reload", SERVICE)
    assert setting(node, "inventory.refresh_s") == 3
    assert main_pid(node) == pid
    assert node.show(SERVICE, "ActiveState") == "active"


def test_a_bad_configuration_fails_the_reload_with_its_reason_and_changes_nothing(node: SystemdNode) -> None:
    (node.root / CONFIGURATION).write_text("[inventory]\nrefresh_s = 3\n")
    node.run("systemctl", "start", SERVICE)
    pid = main_pid(node)
    (node.root / CONFIGURATION).write_text('[inventory]\nrefresh_s = "often"\n\n[unheard]\nof = 1\n')
    before = node.journal_cursor()
    refused = node.run("systemctl", "reload", SERVICE, check=False)
    assert refused.returncode != 0
    said = "\n".join(str(entry["MESSAGE"]) for entry in node.journal(SERVICE, after=before))
    assert "refresh_s" in said
    assert "unheard" in said
    assert main_pid(node) == pid
    assert setting(node, "inventory.refresh_s") == 3


def test_a_bad_configuration_at_the_start_is_named_and_mended_without_a_restart_by_hand(node: SystemdNode) -> None:
    (node.root / CONFIGURATION).write_text("[unheard]\nof = 1\n")
    before = node.journal_cursor()
    assert node.run("systemctl", "start", SERVICE, check=False).returncode != 0
    node.wait_for_journal("unheard", after=before, unit=SERVICE)
    (node.root / CONFIGURATION).write_text("")
    node.run("hegmctl", "ping")  # waits in the socket's queue until the next attempt


# -- crash and hang ----------------------------------------------------------------------------------------------------


def test_a_killed_daemon_is_back_and_no_client_is_refused(node: SystemdNode) -> None:
    node.run("systemctl", "start", SERVICE)
    first = main_pid(node)
    node.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", SERVICE)
    node.run("hegmctl", "ping")
    assert main_pid(node) not in (0, first)
    assert node.show(SERVICE, "NRestarts") == "1"


def test_a_following_client_lives_through_the_death_of_the_daemon(node: SystemdNode) -> None:
    drop_in(node, "RestartSec=100ms")
    node.run("systemctl", "start", SERVICE)
    with node.start("hegmctl", "--json", "events", "--follow", "--kind", "config") as follower:
        assert follower.stdout is not None
        for refresh_s in (3, 4):
            (node.root / CONFIGURATION).write_text(f"[inventory]\nrefresh_s = {refresh_s}\n")
            node.run("systemctl", "reload", SERVICE)
            event = json.loads(follower.stdout.readline().lstrip("\x1e"))
            assert event["kind"] == "config.reloaded"
            node.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", SERVICE)
            node.run("hegmctl", "ping")
        assert follower.poll() is None


def test_a_stopped_process_is_caught_by_the_watchdog(node: SystemdNode) -> None:
    drop_in(node, "WatchdogSec=1s", "TimeoutAbortSec=1s", "RestartSec=100ms")
    node.run("systemctl", "start", SERVICE)
    first = main_pid(node)
    before = node.journal_cursor()
    node.run("systemctl", "kill", "--kill-who=main", "--signal=STOP", SERVICE)
    node.wait_for_journal("Watchdog timeout", after=before, unit=SERVICE)
    node.run("hegmctl", "ping")
    assert main_pid(node) not in (0, first)


# Loaded into the daemon before Python: SIGUSR2 never returns in the thread that gets it, which is the main one.
_BLOCKING = """
#include <signal.h>
#include <unistd.h>
static void block(int number) { for (;;) pause(); }
__attribute__((constructor)) static void prepare(void) { signal(SIGUSR2, block); }
"""


def test_a_blocked_loop_is_caught_by_the_watchdog_and_shows_where_it_hung(node: SystemdNode) -> None:
    node.run("cc", "-shared", "-fPIC", "-x", "c", "-", "-o", "/run/blocking.so", stdin=_BLOCKING)
    drop_in(node, "WatchdogSec=1s", "RestartSec=100ms", "Environment=LD_PRELOAD=/run/blocking.so")
    node.run("systemctl", "start", SERVICE)
    first = main_pid(node)
    before = node.journal_cursor()
    node.run("systemctl", "kill", "--kill-who=main", "--signal=USR2", SERVICE)
    node.wait_for_journal("Watchdog timeout", after=before, unit=SERVICE)
    node.run("hegmctl", "ping")
    assert main_pid(node) not in (0, first)
    said = "\n".join(str(entry["MESSAGE"]) for entry in node.journal(SERVICE, after=before))
    assert re.search(r"File .*hegmd/__main__\.py", said), "no stack of the hung daemon in the journal:\n" + said


def test_an_idle_daemon_feeds_the_watchdog(node: SystemdNode) -> None:
    drop_in(node, "WatchdogSec=500ms")
    node.run("systemctl", "start", SERVICE)
    pid = main_pid(node)
    # systemd keeps the time of the last report; three different ones in a row are three reports.
    seen = {node.show(SERVICE, "WatchdogTimestampMonotonic") for _ in range(3)}
    while len(seen) < 4:
        seen.add(node.show(SERVICE, "WatchdogTimestampMonotonic"))
    assert main_pid(node) == pid


def test_what_the_daemon_started_outlives_its_restart(node: SystemdNode) -> None:
    drop_in(node, "ExecStartPre=+/bin/sh -c 'sleep 600 & echo $! > /run/started'")
    node.run("systemctl", "start", SERVICE)
    started = (node.root / "run/started").read_text().strip()
    node.run("systemctl", "restart", SERVICE)
    assert (node.root / "proc" / started / "comm").read_text().strip() == "sleep"
    node.run("kill", started, (node.root / "run/started").read_text().strip())


# -- who may, and where it writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "mode", "group"),
    [
        ("run/hegm", 0o755, "root"),
        ("run/hegm/hegmd.sock", 0o660, "hegm"),
        ("var/lib/hegm", 0o700, "root"),
        ("var/log/hegm", 0o750, "root"),
        ("etc/hegm/hegmd.toml", 0o644, "root"),
    ],
)
def test_permissions(node: SystemdNode, path: str, mode: int, group: str) -> None:
    node.run("systemctl", "start", SERVICE)
    status = (node.root / path).lstat()
    assert stat.S_IMODE(status.st_mode) == mode
    assert status.st_uid == 0
    assert status.st_gid == int(node.run("getent", "group", group).stdout.split(":")[2])


def test_everything_in_the_state_directory_is_for_root_alone(node: SystemdNode) -> None:
    node.run("systemctl", "start", SERVICE)
    for path in (node.root / "var/lib/hegm").rglob("*"):
        assert path.lstat().st_uid == 0
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path


def test_the_group_is_let_in_and_others_are_told_why_not(node: SystemdNode) -> None:
    assert ask(node, "version", user="member")["daemon"]["you"]["may_act_on_all"] is True
    refused = node.run("hegmctl", "ping", user="outsider", check=False)
    assert refused.returncode == 4
    assert "hegm" in refused.stderr


def test_with_a_wider_socket_everybody_is_let_in_for_their_own(node: SystemdNode) -> None:
    path = node.root / "run/systemd/system/hegmd.socket.d/test.conf"
    path.parent.mkdir(parents=True)
    path.write_text("[Socket]\nSocketMode=0666\n")
    try:
        node.run("systemctl", "daemon-reload")
        node.run("systemctl", "stop", SERVICE, "hegmd.socket")
        node.run("systemctl", "start", "hegmd.socket")
        assert ask(node, "version", user="outsider")["daemon"]["you"]["may_act_on_all"] is False
    finally:
        path.unlink()
        node.run("systemctl", "daemon-reload")
        node.run("systemctl", "stop", SERVICE, "hegmd.socket")


# -- journal -----------------------------------------------------------------------------------------------------------


def test_the_journal_gets_fields_and_priorities(node: SystemdNode) -> None:
    before = node.journal_cursor()
    node.run("systemctl", "start", SERVICE)
    node.run("hegmctl", "config", "--reload")
    entries = [entry for entry in node.journal(SERVICE, after=before) if entry.get("_COMM") == "hegmd"]
    assert entries
    assert all(entry["_TRANSPORT"] == "journal" for entry in entries), "lines of text on standard error"
    (audited,) = [entry for entry in entries if entry.get("LOGGER") == "hegmd.audit"]
    assert audited["HEGM_OP"] == "reload"
    assert audited["HEGM_RESULT"] == "ok"
    assert audited["HEGM_UID"] == "0"
    assert audited["HEGM_OPERATION"]
    assert audited["PRIORITY"] in "56"


# -- sandbox -----------------------------------------------------------------------------------------------------------


def test_exposure_by_systemds_own_measure(node: SystemdNode) -> None:
    said = node.run("systemd-analyze", "security", "--no-pager", SERVICE).stdout
    found = re.search(r"Overall exposure level for hegmd\.service: ([0-9.]+)", said)
    assert found is not None
    assert float(found[1]) <= EXPOSURE_LIMIT, said


def test_units_have_no_line_that_systemd_does_not_know(node: SystemdNode) -> None:
    for scope in ("system", "user"):
        for unit in ("hegmd.service", "hegmd.socket"):
            verify = ["systemd-analyze", "verify", "--man=no", f"--{scope}", f"/usr/lib/systemd/{scope}/{unit}"]
            checked = node.run("env", "XDG_RUNTIME_DIR=/run", *verify, check=False)
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_daemon_holds_no_more_of_roots_powers_than_its_unit_says(node: SystemdNode) -> None:
    node.run("systemctl", "start", SERVICE)
    status = (node.root / f"proc/{main_pid(node)}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    kill, dac_read_search, sys_ptrace = 5, 2, 19
    allowed = 1 << kill | 1 << dac_read_search | 1 << sys_ptrace
    assert int(fields["CapBnd"], 16) == int(fields["CapEff"], 16) == allowed
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_the_daemon_sees_processes_of_everybody_from_its_sandbox(node: SystemdNode) -> None:
    drop_in(node, "ExecStart=", "ExecStart=/usr/bin/hegmd --simulate 2x8GiB")
    node.run("systemctl", "start", SERVICE)
    hold = ["hegmctl", "simulate", "hold", "gpu1", "1GiB", "--", "sh", "-c", "echo held; exec sleep 600"]
    with node.start(*hold, user="member") as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        (seen,) = ask(node, "ps")["processes"]
    assert seen["user"] == "member"
    assert seen["command"] == "sleep 600"
    assert seen["start_ticks"] > 0


def test_metrics_for_others_from_inside_the_sandbox(node: SystemdNode) -> None:
    # A directory of root's, as node_exporter's package makes it, and the line that the unit's comment asks for.
    (node.root / "srv/textfile").mkdir(exist_ok=True)
    drop_in(node, "ReadWritePaths=/srv/textfile")
    (node.root / CONFIGURATION).write_text('[metrics]\nport = 9477\ntextfile = "/srv/textfile/hegm.prom"\n')
    node.run("systemctl", "start", SERVICE)
    fetch = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9477/metrics').read().decode())"
    over_http = node.run("python3", "-c", fetch, user="outsider").stdout
    assert "hegm" in over_http
    assert "hegm" in (node.root / "srv/textfile/hegm.prom").read_text()
    assert stat.S_IMODE((node.root / "srv/textfile/hegm.prom").stat().st_mode) == 0o644, "node_exporter is not root"


def test_an_audit_file_needs_no_change_to_the_unit(node: SystemdNode) -> None:
    (node.root / CONFIGURATION).write_text('[audit]\nfile = "/var/log/hegm/audit.jsonl"\n')
    node.run("systemctl", "start", SERVICE)
    node.run("hegmctl", "config", "--reload", user="member")
    (record,) = [json.loads(line) for line in (node.root / "var/log/hegm/audit.jsonl").read_text().splitlines()]
    assert record["uid"] == int(node.run("id", "-u", "member").stdout)


def test_criu_is_run_outside_the_sandbox(node: SystemdNode) -> None:
    # What stands in for CRIU says under which powers it was run.
    criu = node.root / "usr/sbin/criu"
    criu.write_text(
        '#!/bin/sh\ncase $1 in --version) echo "Version: 4.1" ;; esac\ngrep CapEff /proc/self/status > /run/criu\n'
    )
    criu.chmod(0o755)
    try:
        ask_doctor = node.run("hegmctl", "--json", "doctor", check=False)
        assert ask_doctor.returncode in (0, 15)
        everything = node.run("sh", "-c", "grep CapBnd /proc/1/status").stdout.split()[1]
        assert (node.root / "run/criu").read_text().split()[1] == everything
    finally:
        criu.unlink()


# -- user mode ---------------------------------------------------------------------------------------------------------


def test_a_users_own_daemon(node: SystemdNode) -> None:
    uid = node.run("id", "-u", "outsider").stdout.strip()
    node.run("systemctl", "start", f"user@{uid}.service")
    own = ["env", f"XDG_RUNTIME_DIR=/run/user/{uid}"]
    try:
        node.run(*own, "systemctl", "--user", "start", "hegmd.socket", user="outsider")
        socket = f"/run/user/{uid}/hegm/hegmd.sock"
        version = json.loads(node.run(*own, "hegmctl", "--socket", socket, "--json", "version", user="outsider").stdout)
        assert version["daemon"]["you"]["uid"] == int(uid)
        assert stat.S_IMODE((node.root / socket[1:]).lstat().st_mode) == 0o600
        node.run(*own, "systemctl", "--user", "reload", SERVICE, user="outsider")
        node.run(*own, "hegmctl", "--socket", socket, "ping", user="outsider")
    finally:
        node.run("systemctl", "stop", f"user@{uid}.service")
