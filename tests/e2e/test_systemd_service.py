"""The daemon's life under a real systemd: started by its socket, stopped, reloaded, killed, hung."""

from __future__ import annotations

import json
import re
import threading

import pytest

from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import CONFIGURATION, SERVICE, SOCKET, ask, drop_in, main_pid, setting

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("packages")]


# -- start and stop ----------------------------------------------------------------------------------------------------


def test_the_first_client_starts_the_daemon(node: SystemdNode) -> None:
    assert node.show(SERVICE, "ActiveState") == "inactive"
    version = ask(node, "version")
    assert version["daemon"]["version"] == version["version"]
    assert node.show(SERVICE, "ActiveState") == "active"
    assert node.show(SERVICE, "StatusText") != ""


def test_a_stopped_daemon_exits_cleanly_and_starts_with_the_next_client(node: SystemdNode) -> None:
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


def test_stopping_the_socket_removes_it_and_clients_get_the_reason(node: SystemdNode) -> None:
    node.run("systemctl", "stop", SOCKET, SERVICE)
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
    message = "\n".join(str(entry["MESSAGE"]) for entry in node.journal(SERVICE, after=before))
    assert "refresh_s" in message
    assert "unheard" in message
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


def test_a_parked_job_waited_two_seconds_for_the_next_daemon(node: SystemdNode) -> None:
    """A killed daemon starts in a quarter of a second, and systemd waited for two before it."""
    assert node.show(SERVICE, "RestartUSec") == "500ms"


def test_a_following_client_lives_through_the_death_of_the_daemon(node: SystemdNode) -> None:
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
    drop_in(node, "WatchdogSec=1s", "TimeoutAbortSec=1s")
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
    drop_in(node, "WatchdogSec=1s", "Environment=LD_PRELOAD=/run/blocking.so")
    node.run("systemctl", "start", SERVICE)
    first = main_pid(node)
    before = node.journal_cursor()
    node.run("systemctl", "kill", "--kill-who=main", "--signal=USR2", SERVICE)
    node.wait_for_journal("Watchdog timeout", after=before, unit=SERVICE)
    node.run("hegmctl", "ping")
    assert main_pid(node) not in (0, first)
    message = "\n".join(str(entry["MESSAGE"]) for entry in node.journal(SERVICE, after=before))
    assert re.search(r"File .*hegmd/__main__\.py", message), "no stack of the hung daemon in the journal:\n" + message


def test_an_idle_daemon_feeds_the_watchdog(node: SystemdNode) -> None:
    drop_in(node, "WatchdogSec=2s")
    node.run("systemctl", "start", SERVICE)
    pid = main_pid(node)
    # systemd keeps the time of the last report; three different ones in a row are three reports.
    timestamps = {node.show(SERVICE, "WatchdogTimestampMonotonic") for _ in range(3)}
    while len(timestamps) < 4:
        timestamps.add(node.show(SERVICE, "WatchdogTimestampMonotonic"))
    assert main_pid(node) == pid


def test_processes_that_the_daemon_started_survive_its_restart(node: SystemdNode) -> None:
    drop_in(node, "ExecStartPre=+/bin/sh -c 'sleep 600 & echo $! > /run/started'")
    node.run("systemctl", "start", SERVICE)
    started = (node.root / "run/started").read_text().strip()
    node.run("systemctl", "restart", SERVICE)
    assert (node.root / "proc" / started / "comm").read_text().strip() == "sleep"
    node.run("kill", started, (node.root / "run/started").read_text().strip())
