"""The daemon as a process: its signals, its socket and state, who may do what, and how it comes back."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hegmctl.connection import connect
from hegmd.errors import DENIED, NOT_FOUND, REFUSED, UNAVAILABLE, HegmError
from hegmd.protocol.connection import ClientConnection, Reply
from hegmd.protocol.messages import AgentAttend, Hello
from tests.e2e.daemon import RunningDaemon
from tests.looks import pause
from tests.unit.hegmctl import running

pytestmark = pytest.mark.e2e

GIB = 1 << 30
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def daemon(socket_dir: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(socket_dir) as running:
        yield running


def as_nobody(daemon: RunningDaemon, script: str) -> subprocess.CompletedProcess[str]:
    """Run Python as an ordinary user who may reach the socket; `hegmd` is a connection."""
    daemon.folder.chmod(0o755)
    daemon.socket_path.chmod(0o666)
    opening = f"from hegmctl.connection import connect\nhegmd = connect({str(daemon.socket_path)!r})\n"
    return running.as_nobody(sys.executable, "-c", opening + script, environ=running.environment())


class StartedDaemon(RunningDaemon):
    """A daemon that is started as users start theirs; these tests fork the others (forked.py)."""

    forks = False


def test_it_answers_and_exits_without_leaving_its_socket(socket_dir: Path) -> None:
    with StartedDaemon(socket_dir) as daemon:
        with connect(str(daemon.socket_path)) as hegmd:
            assert hegmd.welcome.simulated
            assert hegmd.welcome.you.uid == os.geteuid()
            assert hegmd.ping()
        assert daemon.stop() == 0
        assert not daemon.socket_path.exists()


def _seen_of(daemon: RunningDaemon) -> dict[str, object]:
    """Return the properties of a daemon that other processes can see, without those that differ between starts."""
    process = psutil.Process(daemon.process.pid)
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    fields = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "Cap", "NoNewPrivs")
    links = map(os.readlink, Path(f"/proc/{process.pid}/fd").iterdir())
    kept = sorted(re.sub(r"\d+", "N", link) for link in links if not link.startswith(("/proc/", "/sys/")))
    with connect(str(daemon.socket_path)) as hegmd:
        return {
            "session": (os.getsid(process.pid), os.getpgid(process.pid), process.terminal(), process.nice()),
            "place": (process.cwd(), process.exe(), process.name(), os.readlink(f"/proc/{process.pid}/root")),
            "limits": Path(f"/proc/{process.pid}/limits").read_text(),
            "children": process.children(),
            "signals and rights": [line for line in status if line.startswith(fields)],
            "open": kept,
            "welcome": {**hegmd.welcome.to_plain(), "run": None},
            "GPUs": [gpu.to_plain() for gpu in hegmd.gpus().gpus],
            "settings": hegmd.config().to_plain(),
            "checks": [(check.id, check.status) for check in hegmd.doctor().checks],
            "metrics": [line for line in hegmd.metrics().text.splitlines() if line.startswith("#")],
            "events": [event.kind for event in hegmd.events()],
        }


def test_a_forked_daemon_answers_and_ends_as_a_started_one(socket_dir: Path) -> None:
    """Most tests have forked ones."""
    observed: list[object] = []
    runs: set[str] = set()
    operations: set[str] = set()
    for made in (RunningDaemon, RunningDaemon, StartedDaemon):
        with made(socket_dir, "--log-level", "debug") as daemon:
            observed.append(_seen_of(daemon))
            with connect(str(daemon.socket_path)) as hegmd:
                runs.add(hegmd.welcome.run)
            operations.update(re.findall(r"operation=(\w+)-", daemon.log_text()))
            assert daemon.process.poll() is None
            assert daemon.stop(signal.SIGTERM) == daemon.process.poll() == daemon.process.returncode == 0
            daemon.start()
            daemon.process.send_signal(signal.SIGSTOP)
            with pytest.raises(subprocess.TimeoutExpired):
                daemon.process.wait(0.001)
            assert daemon.stop(signal.SIGKILL) == daemon.process.poll() == -signal.SIGKILL
        shutil.rmtree(socket_dir / "state")
    assert isinstance(daemon.process, subprocess.Popen)
    assert observed[0] == observed[1] == observed[2]
    assert len(runs) == len(operations) == 3


class SilentDaemon(RunningDaemon):
    """A daemon whose standard descriptors its parent has closed."""

    def command(self) -> list[str]:
        return ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *super().command()]


def test_closed_standard_descriptors_are_never_used_for_anything_else(socket_dir: Path) -> None:
    """It ended at once and silently."""
    with SilentDaemon(socket_dir) as daemon, connect(str(daemon.socket_path)) as hegmd:
        assert hegmd.ping()
        used_for = [os.readlink(f"/proc/{daemon.process.pid}/fd/{number}") for number in range(3)]
        assert used_for == [os.devnull] * 3


def test_a_client_is_notified_when_the_daemon_stops(daemon: RunningDaemon) -> None:
    with connect(str(daemon.socket_path)) as hegmd:
        events = hegmd.events(follow=True)
        next(events)
        daemon.process.send_signal(signal.SIGTERM)
        with pytest.raises(HegmError, match="stopping") as caught:
            for _ in events:
                pass
        assert caught.value.code is UNAVAILABLE


def test_after_a_kill_the_next_one_takes_over_the_socket_and_the_state(daemon: RunningDaemon) -> None:
    daemon.stop(signal.SIGKILL)
    assert daemon.socket_path.exists()
    daemon.start()
    with connect(str(daemon.socket_path)) as hegmd:
        assert len(hegmd.gpus().gpus) == 2


def test_a_second_daemon_on_the_same_state_is_refused(daemon: RunningDaemon) -> None:
    second = RunningDaemon(daemon.folder)
    try:
        with pytest.raises(RuntimeError, match=f"pid {daemon.process.pid}"):
            second.start()
    finally:
        second.log.close()
    with connect(str(daemon.socket_path)) as hegmd:
        hegmd.ping()


def test_memory_is_held_by_the_connection_and_visible_immediately(daemon: RunningDaemon) -> None:
    path = str(daemon.socket_path)
    with connect(path) as watcher:
        with connect(path) as holder:
            holder.simulate_hold("gpu1", 2 * GIB)
            (process,) = watcher.processes().processes
            assert (process.pid, process.gpus[0].gpu, process.gpus[0].vram_bytes) == (os.getpid(), "gpu1", 2 * GIB)
            assert [gpu.memory_used_bytes for gpu in watcher.gpus().gpus] == [0, 2 * GIB]
            with pytest.raises(HegmError, match="GiB"):
                holder.simulate_hold("gpu1", 9 * GIB)
            assert watcher.gpus().gpus[1].memory_used_bytes == 2 * GIB
        kinds = [event.kind for event in watcher.events(follow=False)]
        assert "process.started" in kinds


def test_a_hanging_driver_makes_the_answer_old_and_nothing_hang(daemon: RunningDaemon) -> None:
    with connect(str(daemon.socket_path)) as hegmd:
        hegmd.simulate_fault("vendor", "hang")
        (vendor,) = hegmd.gpus().vendors
        assert vendor.state == "stale"
        assert vendor.age_s is not None
        hegmd.ping()
        hegmd.simulate_fault("vendor", "none")
        while hegmd.gpus().vendors[0].state != "ok":
            pause()
        hegmd.simulate_fault("vendor", "hang")
        assert daemon.stop() == 0, "a hanging driver kept the daemon from ending"


def test_a_lost_gpu_keeps_its_name_and_has_no_figures(daemon: RunningDaemon) -> None:
    with connect(str(daemon.socket_path)) as hegmd:
        before = hegmd.gpus().gpus[1]
        hegmd.simulate_fault("gpu1", "lost")
        lost = hegmd.gpus().gpus[1]
        assert (lost.id, lost.uuid, lost.state) == (before.id, before.uuid, "lost")
        assert lost.memory_used_bytes is None
        hegmd.simulate_fault("gpu1", "none")
        assert hegmd.gpus().gpus[1].memory_used_bytes == 0
        assert {"gpu.lost", "gpu.back"} <= {event.kind for event in hegmd.events(kinds=("gpu",))}


def test_a_reload_applies_what_it_can_names_the_rest_and_refuses_errors(socket_dir: Path) -> None:
    config = socket_dir / "hegmd.toml"
    config.write_text("[inventory]\nrefresh_s = 5\n")
    with RunningDaemon(socket_dir, "--config", str(config)) as daemon, connect(str(daemon.socket_path)) as hegmd:
        config.write_text("[inventory]\nrefresh_s = 7\n[limits]\nclients = 10\n")
        reply = hegmd.reload()
        assert (reply.changed, reply.after_restart) == (("inventory.refresh_s",), ("limits.clients",))
        config.write_text("[inventory]\nrefresh = 7\n")
        with pytest.raises(HegmError, match=r"hegmd.toml:2.*did you mean inventory.refresh_s"):
            hegmd.reload()
        config.write_text(f'[audit]\nfile = "{socket_dir}/missing/audit.jsonl"\n')
        with pytest.raises(HegmError, match=r"audit file .* cannot be opened"):
            hegmd.reload()
        settings = {setting.key: setting.value for setting in hegmd.config().settings}
        assert (settings["inventory.refresh_s"], settings["limits.clients"]) == (7.0, 4096)
        config.write_text("[inventory]\nrefresh_s = 9\n")
        daemon.process.send_signal(signal.SIGHUP)
        for event in hegmd.events(follow=True, kinds=("config",)):
            if event.facts.get("changed") == ["inventory.refresh_s"] and event.seq > 2:
                break
        assert daemon.process.poll() is None


@needs_root
def test_an_ordinary_user_sees_but_does_not_change_the_node(daemon: RunningDaemon) -> None:
    with connect(str(daemon.socket_path)) as mine:
        mine.simulate_hold("gpu0", GIB)
        result = as_nobody(daemon, "p = hegmd.processes().processes[0]; print(p.uid, p.command, p.note)")
        assert result.stdout.startswith("0 None command line hidden"), result.stderr
    for change in ("hegmd.reload()", "hegmd.simulate_fault('gpu0', 'lost')"):
        refused = as_nobody(daemon, change)
        assert refused.returncode != 0
        assert DENIED.name in refused.stderr
    held = as_nobody(daemon, f"hegmd.simulate_hold('gpu0', {GIB}); print(hegmd.processes().processes[0].command)")
    assert "python" in held.stdout, held.stderr


@needs_root
def test_a_private_daemon_lets_root_in_and_no_other_user(socket_dir: Path) -> None:
    socket_dir.chmod(0o755)
    with RunningDaemon(socket_dir, "--user") as daemon:
        refused = as_nobody(daemon, "hegmd.ping()")
        assert refused.returncode != 0
        assert "private" in refused.stderr


def test_an_agent_is_shown_while_it_is_connected(daemon: RunningDaemon) -> None:
    path = str(daemon.socket_path)
    with connect(path) as holder:
        holder.simulate_hold("gpu0", GIB)
        assert holder.processes().processes[0].agent is None
        with socket.socket(socket.AF_UNIX) as agent:
            agent.connect(path)
            protocol = ClientConnection()
            _, hello = protocol.request(Hello(versions=(2,), name="test-agent", program_version="7", role="agent"))
            agent.sendall(hello)
            protocol.feed(agent.recv(65_536))
            assert isinstance(protocol.next_event(), Reply)
            _, attend = protocol.request(AgentAttend(token="0" * 32, python_version="3.11", boundary=0))
            agent.sendall(attend)
            while (shown := holder.processes().processes[0].agent) is None:
                pause()
            assert (shown.name, shown.version) == ("test-agent", "7")
        while holder.processes().processes[0].agent is not None:
            pause()


@pytest.mark.parametrize(
    ("script", "code"), [("hegmd.processes(pids=[1])", NOT_FOUND), ("hegmd.processes(gpus=['gpu9'])", NOT_FOUND)]
)
def test_missing_objects_are_named(daemon: RunningDaemon, script: str, code: object) -> None:
    with connect(str(daemon.socket_path)) as hegmd, pytest.raises(HegmError) as caught:
        eval(script, {"hegmd": hegmd})
    assert caught.value.code is code
    assert "hegmctl" in caught.value.hint


def test_simulation_is_no_part_of_a_daemon_with_real_gpus(socket_dir: Path) -> None:
    config = socket_dir / "off.toml"
    config.write_text('[inventory]\nnvidia = "off"\namd = "off"\n')
    real = RunningDaemon(socket_dir, "--config", str(config), simulate=False)
    with real, connect(str(real.socket_path)) as hegmd:
        assert not hegmd.welcome.simulated
        assert hegmd.gpus().gpus == ()
        assert {vendor.state for vendor in hegmd.gpus().vendors} == {"off"}
        with pytest.raises(HegmError) as caught:
            hegmd.simulate_hold("gpu0", GIB)
        assert caught.value.code is REFUSED


@pytest.mark.parametrize("gone", ["its file", "its folder"])
def test_a_deleted_socket_is_bound_again(socket_dir: Path, gone: str) -> None:
    """Issue 14, row 16: the daemon was unreachable until its next start, and the client reported that none runs."""
    folder = socket_dir / "deep"
    folder.mkdir()
    path = folder / "hegmd.sock"
    with RunningDaemon(socket_dir, "--socket", str(path)) as daemon:
        path.unlink()
        if gone == "its folder":
            folder.rmdir()
        reply = running.hegmctl("ping", socket=path)
        assert reply.returncode == 0 or f"hegmd runs, but its socket file {path} was removed" in reply.stderr, (
            reply.stderr
        )
        while not path.exists():
            pause()
        assert running.hegmctl("ping", socket=path).returncode == 0
        assert f"the socket file {path} had been removed, and was bound again" in daemon.log_text()
        assert daemon.stop() == 0
        assert not path.exists()
