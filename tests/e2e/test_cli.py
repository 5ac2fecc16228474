"""hegmctl in front of a real hegmd with simulated GPUs: what a person sees, and what a program gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import pytest

from hegmctl.answers import RecoveryPlan
from hegmctl.async_connection import connect_async
from hegmd import __version__
from hegmd.protocol.record import Record
from tests.e2e.daemon import RunningDaemon
from tests.looks import COMMAND_MS, pause
from tests.patience import HANG_S
from tests.unit.hegmctl.running import as_nobody, command, environment, hegmctl
from tests.unit.hegmctl.terminal import Terminal
from tests.unit.hegmctl.test_cli import Running
from tools.docs.hegmctl.json_reference import printed

pytestmark = pytest.mark.e2e

GIB = 1 << 30


@pytest.fixture
def daemon(socket_dir: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(socket_dir) as running:
        yield running


def answer(daemon: RunningDaemon, *words: str) -> dict[str, Any]:
    """The document that hegmctl prints; it succeeds."""
    ran = hegmctl(*words, "--json", socket=daemon.socket_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def eventually(read: Callable[[], dict[str, Any]], true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask until the answer is the one waited for; the daemon may show what is a quarter of a second old."""
    deadline = monotonic() + HANG_S
    while not true(result := read()):
        assert monotonic() < deadline, result
        pause(COMMAND_MS)
    return result


class Holder:
    """A process that holds simulated memory by way of `hegmctl simulate hold`, until its context ends."""

    def __init__(self, daemon: RunningDaemon, gpu: str, size: str) -> None:
        self.process = subprocess.Popen(
            [*command("simulate", "hold", gpu, size, "--"), "sh", "-c", "echo holding; exec cat"],
            env=environment(daemon.socket_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"holding\n"

    def __enter__(self) -> int:
        return self.process.pid

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def _fields(value: object, record: type[Record]) -> None:
    """Every field of the record is there, and no other; so for the records in it."""
    assert isinstance(value, dict)
    assert set(value) == {field.name for field in record.fields}, record.__name__


ONE_DOCUMENT = printed()[0][2]
NEEDS_MORE = (
    "attach",
    "simulate hold",
    "simulate fault",
    "inspect",
    "wait",
    "priority",
    "make-room",
    "release",
    "recovery --drop",
    "doctor --nccl",
    "op",
    "cancel",
    "adopt --drop",
    "images show",
    "images verify",
    "images rm",
    "hegm enable",
    "hegm disable",
    "hegm status",
    "run --recover --dry-run",
)


@pytest.mark.parametrize(
    ("line", "record"),
    [(line, record) for line, record, how in printed() if how == ONE_DOCUMENT and line not in NEEDS_MORE],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_documents_have_the_fields_that_are_documented(daemon: RunningDaemon, line: str, record: type[Record]) -> None:
    document = answer(daemon, *line.split())
    assert document.pop("schema") == 1
    _fields(document, record)


def test_the_plan_of_a_recovery_has_the_fields_that_are_documented(daemon: RunningDaemon) -> None:
    ran = hegmctl("run", "--recover", "--dry-run", "--json", "--", "python3", "train.py", socket=daemon.socket_path)
    document = json.loads(ran.stdout)
    assert document.pop("schema") == 1
    _fields(document, RecoveryPlan)
    assert document["command"] == ["python3", "train.py"]


def test_gpus_of_a_fresh_simulated_node(daemon: RunningDaemon) -> None:
    gpus = answer(daemon, "gpus")["gpus"]
    assert [gpu["id"] for gpu in gpus] == ["gpu0", "gpu1"]
    assert [gpu["memory_total_bytes"] for gpu in gpus] == [8 * GIB, 8 * GIB]
    assert all(gpu["utilisation_percent"] is None for gpu in gpus), "nothing runs there, and nobody measures"
    lines = hegmctl("gpus", socket=daemon.socket_path).stdout.splitlines()
    assert lines[1].split()[:1] == ["gpu0"]
    assert "0.0/8.0 GiB" in lines[1]
    assert lines[-1] == "These GPUs are simulated."
    assert hegmctl("ps", socket=daemon.socket_path).stdout.startswith("No process is on a GPU here.\n")


def test_a_process_that_holds_memory_is_listed_with_its_command_until_it_frees_it(daemon: RunningDaemon) -> None:
    with Holder(daemon, "gpu1", "3GiB") as pid:
        reply = eventually(lambda: answer(daemon, "ps"), lambda document: len(document["processes"]) == 1)
        process = reply["processes"][0]
        assert process["pid"] == pid
        assert process["gpus"] == [{"gpu": "gpu1", "vram_bytes": 3 * GIB, "kind": "compute"}]
        assert process["uid"] == os.geteuid()
        ran = hegmctl("ps", str(pid), "--gpu", "gpu1", socket=daemon.socket_path)
        assert ran.stdout.splitlines()[1].split()[2:5] == ["gpu1", "3.0", "GiB"]
        ways = hegmctl("ps", "--ways", str(pid), socket=daemon.socket_path).stdout
        assert {"driver", "criu", "restart"} <= {line.split()[0] for line in ways.splitlines() if line.startswith("  ")}
        elsewhere = hegmctl("ps", str(pid), "--gpu", "gpu0", socket=daemon.socket_path)
        assert elsewhere.stdout.startswith("No such process is on gpu0.\n")
        assert hegmctl("__complete", "pids", socket=daemon.socket_path).stdout == f"{pid}\n"
    eventually(lambda: answer(daemon, "ps"), lambda document: not document["processes"])
    assert hegmctl("ps", str(pid), socket=daemon.socket_path).returncode == 5


def test_missing_memory_is_refused_with_the_numbers(daemon: RunningDaemon) -> None:
    with Holder(daemon, "gpu0", "6GiB"):
        ran = hegmctl("simulate", "hold", "gpu0", "4GiB", "--", "true", socket=daemon.socket_path)
        assert ran.returncode == 6
        assert "2 GiB" in ran.stderr
    ran = hegmctl("simulate", "hold", "gpu7", "1GiB", socket=daemon.socket_path)
    assert ran.returncode == 5
    assert "gpu7" in ran.stderr


def test_a_lost_gpu_is_recognised_when_it_returns(daemon: RunningDaemon) -> None:
    with Running("events", "--follow", "--kind", "gpu", "--json", socket=daemon.socket_path) as following:
        assert answer(daemon, "simulate", "fault", "gpu1", "lost")["faults"] == {"gpu1": "lost"}
        eventually(lambda: answer(daemon, "gpus"), lambda document: document["gpus"][1]["state"] == "lost")
        lost = json.loads(following.line())
        assert (lost["kind"], lost["gpu"]) == ("gpu.lost", "gpu1")
        table = hegmctl("gpus", socket=daemon.socket_path).stdout
        assert "gpu1 is gone: it fell off the bus" in table
        assert table.splitlines()[2].split()[-2] == "lost"

        assert answer(daemon, "simulate", "fault", "gpu1", "none")["faults"] == {}
        eventually(lambda: answer(daemon, "gpus"), lambda document: document["gpus"][1]["state"] == "ok")
        assert json.loads(following.line())["kind"] == "gpu.back"


def test_a_hanging_library_makes_the_answer_old_and_marks_it(daemon: RunningDaemon) -> None:
    hegmctl("simulate", "fault", "vendor", "hang", socket=daemon.socket_path)
    document = eventually(lambda: answer(daemon, "gpus"), lambda reply: reply["vendors"][0]["state"] == "stale")
    assert document["gpus"][0]["memory_total_bytes"] == 8 * GIB
    assert " old): " in hegmctl("gpus", socket=daemon.socket_path).stdout.splitlines()[-1]
    hegmctl("simulate", "fault", "vendor", "none", socket=daemon.socket_path)
    eventually(lambda: answer(daemon, "gpus"), lambda reply: reply["vendors"][0]["state"] == "ok")


def test_the_doctor_queries_the_daemon(daemon: RunningDaemon) -> None:
    ran = hegmctl("doctor", "--json", socket=daemon.socket_path)
    document = json.loads(ran.stdout)
    checks = document["checks"]
    assert ran.returncode == (15 if document["fail"] else 0)
    assert checks[0]["id"] == "daemon"
    assert checks[0]["status"] == "ok"
    assert {"kernel.version", "memory.host", "disk.state"} <= {check["id"] for check in checks}
    assert all(check["fix"] for check in checks if check["status"] in ("warn", "fail"))
    last = hegmctl("doctor", socket=daemon.socket_path).stdout.splitlines()[-1]
    assert last.startswith(f"{document['ok']} ok, ")


def test_without_a_daemon_the_doctor_checks_the_node_itself(socket_path: Path) -> None:
    ran = hegmctl("doctor", "--json", socket=socket_path)
    document = json.loads(ran.stdout)
    assert ran.returncode == 15
    assert document["checks"][0]["status"] == "fail"
    assert "there is no socket" in document["checks"][0]["summary"]
    assert {"kernel.version", "memory.host"} <= {check["id"] for check in document["checks"]}


def test_a_bad_configuration_is_refused_and_the_one_before_stays(socket_dir: Path) -> None:
    config = socket_dir / "hegmd.toml"
    config.write_text("[inventory]\nrefresh_s = 7\n")
    with RunningDaemon(socket_dir, "--config", str(config)) as daemon:
        config.write_text("[inventory]\nrefresh_s = 9\nrefrehs_s = 1\n[nothing]\n")
        ran = hegmctl("config", "--reload", socket=daemon.socket_path)
        assert ran.returncode == 10
        assert f"{config}:3" in ran.stderr
        assert "nothing" in ran.stderr
        settings = {row["key"]: row for row in answer(daemon, "config")["settings"]}
        assert (settings["inventory.refresh_s"]["value"], settings["inventory.refresh_s"]["source"]) == (7, "file")

        config.write_text("[inventory]\nrefresh_s = 9\n[metrics]\nport = 9400\n")
        document = answer(daemon, "config", "--reload")
        assert document["changed"] == ["inventory.refresh_s"]
        assert document["after_restart"] == ["metrics.port"]


def test_running_operations_survive_a_restart_of_the_daemon(daemon: RunningDaemon) -> None:
    with (
        Running("events", "-f", socket=daemon.socket_path) as following,
        Terminal("ps", "--watch=0.1", socket=daemon.socket_path) as watching,
    ):
        assert "inventory.ready" in following.line()
        watching.until(lambda lines: any("No process is on a GPU here." in line for line in lines))
        daemon.stop()
        watching.until(lambda lines: "waiting for the daemon" in lines[0])
        assert "waiting for the daemon" in following.line(of_errors=True)
        daemon.start()
        watching.until(lambda lines: "waiting" not in lines[0])
        assert following.line(of_errors=True) == "hegmctl: the daemon is back"
        assert "inventory.ready" in following.line()
        assert watching.end(signal.SIGINT) == -signal.SIGINT
        assert not watching.picture.second


def test_metrics_and_version_and_ping(daemon: RunningDaemon) -> None:
    assert "hegmd_build_info{" in hegmctl("metrics", socket=daemon.socket_path).stdout
    document = answer(daemon, "version")
    assert document["version"] == document["daemon"]["version"] == __version__
    assert document["daemon"]["simulated"] is True
    assert document["daemon"]["you"]["uid"] == os.geteuid()
    assert len(answer(daemon, "ping", "-c", "3")["round_trips_s"]) == 3


def test_a_user_without_access_to_the_socket_gets_the_remedy(daemon: RunningDaemon) -> None:
    daemon.folder.chmod(0o755)
    ran = as_nobody(*command("gpus"), environ=environment(daemon.socket_path))
    assert ran.returncode == 4
    assert ran.stdout == ""
    assert "sudo usermod -aG hegm nobody" in ran.stderr


@pytest.mark.skipif(os.path.exists("/run/hegm/hegmd.sock"), reason="this node has a daemon of its own")
def test_a_users_own_daemon_is_found_without_being_named(tmp_path: Path, socket_dir: Path) -> None:
    environ = environment(XDG_RUNTIME_DIR=str(socket_dir), XDG_STATE_HOME=str(tmp_path), HOME=str(tmp_path))
    own = socket_dir / "hegm" / "hegmd.sock"
    with subprocess.Popen(
        [sys.executable, "-m", "hegmd", "--user", "--simulate", "1x1GiB"],
        env=environ,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stderr is not None
        try:
            while b"serves at" not in (line := process.stderr.readline()):
                assert line, "it ended"
            ran = subprocess.run(
                command("version", "--json"),
                env=environ,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[2],
                check=True,
            )
            document = json.loads(ran.stdout)
            assert document["socket"] == str(own)
            assert document["daemon"] is not None
        finally:
            process.terminate()
            process.communicate()


@pytest.mark.xdist_group("demonstration")
def test_the_demonstration_succeeds_and_leaves_nothing_behind() -> None:
    with subprocess.Popen(
        [sys.executable, "contrib/demo/demo.py"],
        env=environment(),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as demonstration:
        output, errors = demonstration.communicate()
    assert (demonstration.returncode, errors) == (0, ""), errors
    assert output.count("\n  $ hegmctl ") >= 10
    assert not list(Path("/tmp").glob(f"hegm-demo-{demonstration.pid}-*"))


@pytest.mark.xdist_group("demonstration")
@pytest.mark.parametrize(("interrupt", "status"), [(False, 0), (True, 128 + signal.SIGINT)])
def test_an_interrupted_demonstration_is_not_a_failure(interrupt: bool, status: int) -> None:
    """`make demo | head` reported a failed demonstration, and Ctrl-C printed a traceback."""
    with subprocess.Popen(
        [sys.executable, "contrib/demo/demo.py"],
        env=environment(),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as demonstration:
        assert demonstration.stdout is not None
        assert demonstration.stderr is not None
        while "$ hegmctl version" not in demonstration.stdout.readline():
            pass
        if interrupt:
            os.killpg(demonstration.pid, signal.SIGINT)
            demonstration.stdout.read()
        demonstration.stdout.close()
        output = demonstration.stderr.read()
        assert (demonstration.wait(), output) == (status, "")
    assert not list(Path("/tmp").glob(f"hegm-demo-{demonstration.pid}-*"))


async def test_the_asynchronous_face_with_the_real_daemon(daemon: RunningDaemon) -> None:
    async with connect_async(str(daemon.socket_path)) as hegmd:
        observed: list[str] = []

        async def follow() -> None:
            async for event in hegmd.events(follow=True, kinds=["gpu.lost"]):
                observed.append(event.message)
                scope.cancel()

        with anyio.fail_after(HANG_S):
            async with anyio.create_task_group() as tasks:
                scope = tasks.cancel_scope
                tasks.start_soon(follow)
                assert len((await hegmd.gpus()).gpus) == 2
                await hegmd.simulate_fault("gpu0", "lost")
                while not observed:  # an event comes of a look at the node, and asking makes the daemon look
                    await hegmd.gpus()
        assert len(observed) == 1
        assert (await hegmd.simulate_fault("gpu0", "none")).faults == {}
        assert (await hegmd.ping()) is not None


def test_a_job_keeps_its_id_when_the_daemon_is_killed_and_its_exit_status_is_known(daemon: RunningDaemon) -> None:
    script = "echo begun; read x; exit 7"
    with subprocess.Popen(
        command("run", "--name", "kept", "sh", "-c", script),
        env=environment(daemon.socket_path),
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        assert job.stdout.readline() == b"begun\n"
        (before,) = answer(daemon, "jobs", "kept")["jobs"]
        assert (before["state"], before["pid"], before["command"]) == ("starting", job.pid, f"sh -c '{script}'")
        daemon.stop(signal.SIGKILL)
        daemon.start()
        (after,) = answer(daemon, "jobs", str(job.pid))["jobs"]
        assert (after["id"], after["name"]) == (before["id"], "kept")
        job.stdin.close()  # before Linux 6.15 its status is known only until its parent has asked for it
        ended = hegmctl("wait", after["id"], socket=daemon.socket_path)
    assert (ended.returncode, "with exit status 7" in ended.stdout) == (7, True), ended.stderr
