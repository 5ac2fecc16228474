"""The daemon's permissions under a real systemd: who may connect, what it writes, and its sandbox."""

from __future__ import annotations

import json
import re
import stat

import pytest

from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import CONFIGURATION, SERVICE, SOCKET, ask, drop_in, main_pid

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("packages")]

EXPOSURE_LIMIT = 3.0


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


def test_the_group_may_connect_and_others_get_the_reason(node: SystemdNode) -> None:
    assert ask(node, "version", user="member")["daemon"]["you"]["may_act_on_all"] is True
    refused = node.run("hegmctl", "ping", user="outsider", check=False)
    assert refused.returncode == 4
    assert "hegm" in refused.stderr


def test_with_a_wider_socket_all_users_may_act_on_their_own_processes(node: SystemdNode) -> None:
    path = node.root / "run/systemd/system/hegmd.socket.d/test.conf"
    path.parent.mkdir(parents=True)
    path.write_text("[Socket]\nSocketMode=0666\n")
    try:
        node.run("systemctl", "daemon-reload")
        node.run("systemctl", "stop", SERVICE, SOCKET)
        node.run("systemctl", "start", SOCKET)
        assert ask(node, "version", user="outsider")["daemon"]["you"]["may_act_on_all"] is False
    finally:
        path.unlink()
        node.run("systemctl", "daemon-reload")
        node.run("systemctl", "stop", SERVICE, SOCKET)


# -- journal -----------------------------------------------------------------------------------------------------------


def test_the_journal_gets_fields_and_priorities(node: SystemdNode) -> None:
    before = node.journal_cursor()
    node.run("systemctl", "start", SERVICE)
    node.run("hegmctl", "config", "--reload")
    entries = [entry for entry in node.journal(SERVICE, after=before) if entry.get("_COMM") == "hegmd"]
    assert entries
    assert all(entry["_TRANSPORT"] == "journal" for entry in entries), "lines of text on standard error"
    (audited,) = [entry for entry in entries if entry.get("LOGGER") == "hegmd.telemetry.audit"]
    assert audited["HEGM_OP"] == "reload"
    assert audited["HEGM_RESULT"] == "ok"
    assert audited["HEGM_UID"] == "0"
    assert audited["HEGM_OPERATION"]
    assert audited["PRIORITY"] in "56"


# -- sandbox -----------------------------------------------------------------------------------------------------------


def test_exposure_by_systemds_own_measure(node: SystemdNode) -> None:
    output = node.run("systemd-analyze", "security", "--no-pager", SERVICE).stdout
    found = re.search(r"Overall exposure level for hegmd\.service: ([0-9.]+)", output)
    assert found is not None
    assert float(found[1]) <= EXPOSURE_LIMIT, output


def test_units_have_no_line_that_systemd_does_not_know(node: SystemdNode) -> None:
    for scope in ("system", "user"):
        for unit in ("hegmd.service", "hegmd.socket"):
            verify = ["systemd-analyze", "verify", "--man=no", f"--{scope}", f"/usr/lib/systemd/{scope}/{unit}"]
            checked = node.run("env", "XDG_RUNTIME_DIR=/run", *verify, check=False)
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_daemon_has_no_capabilities_beyond_its_unit(node: SystemdNode) -> None:
    node.run("systemctl", "start", SERVICE)
    status = (node.root / f"proc/{main_pid(node)}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    dac_override, dac_read_search, kill, sys_ptrace = 1, 2, 5, 19
    allowed = 1 << dac_override | 1 << dac_read_search | 1 << kill | 1 << sys_ptrace
    assert int(fields["CapBnd"], 16) == int(fields["CapEff"], 16) == allowed
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2"


def test_the_daemon_sees_processes_of_all_users_from_its_sandbox(node: SystemdNode) -> None:
    drop_in(node, "ExecStart=", "ExecStart=/usr/bin/hegmd --simulate 2x8GiB")
    node.run("systemctl", "start", SERVICE)
    hold = ["hegmctl", "simulate", "hold", "gpu1", "1GiB", "--", "sh", "-c", "echo held; exec sleep 600"]
    with node.start(*hold, user="member") as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "held\n"
        (reply,) = ask(node, "ps")["processes"]
    assert reply["user"] == "member"
    assert reply["command"] == "sleep 600"
    assert reply["start_ticks"] > 0


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
    # The stub of CRIU prints its capabilities.
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
