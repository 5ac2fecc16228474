"""hegmctl as a real process in front of a prepared daemon: outputs, exit statuses, JSON, interruptions."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from hegmctl.output import SCHEMA
from hegmd import __version__
from hegmd.errors import CODES, NOT_FOUND, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.connection import IncomingRequest
from hegmd.protocol.record import Record
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, failing, remembering, unanswered
from tests.unit.hegmctl.running import ROOT, command, environment, hegmctl


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(socket_path, node.answers(node.SIMULATED)) as daemon:
        yield daemon


ANSWERS: list[tuple[str, Record | None, str]] = [
    ("gpus", node.GPUS, "gpu0  NVIDIA H200  12.0/140.0 GiB"),
    ("gpus --long", node.GPUS, "  UUID            GPU-0000"),
    ("ps", node.PROCESSES, "4711  alice  gpu0-1  12.0 GiB"),
    ("ps --ways 4711", node.PROCESSES, "  criu     no   no criu program was found"),
    ("config", node.CONFIG, "metrics.port   0                     file"),
    ("config --reload", m.ReloadReply(changed=("log.level",), after_restart=("metrics.port",)), "changed: log.level"),
    ("metrics", m.MetricsReply(text='hegmd_build_info{version="0.1.0"} 1\n'), 'hegmd_build_info{version="0.1.0"} 1'),
    ("simulate fault gpu1 lost", m.FaultReply(faults={"gpu1": "lost"}), "gpu1: lost"),
    ("version", None, f"hegmd    {__version__}, protocol 2"),
    ("ping", None, f"hegmd {__version__} on node7 answers in"),
    ("doctor", None, "2 ok, 1 warning, 0 failures, 1 skipped"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("line", "record", "text"), ANSWERS, ids=[line for line, _record, _text in ANSWERS])
def test_every_command_answers_in_text_and_in_json(
    daemon: FakeDaemon, line: str, record: Record | None, text: str
) -> None:
    ran = hegmctl(*line.split(), socket=daemon.path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert text in ran.stdout
    assert "\x1b" not in ran.stdout

    ran = hegmctl(*line.split(), "--json", socket=daemon.path)
    assert (ran.returncode, ran.stderr) == (0, "")
    document = json.loads(ran.stdout)
    assert ran.stdout.count("\n") == 1, "one document is one line in a pipe"
    assert document.pop("schema") == SCHEMA
    if record is not None:
        assert document == json.loads(json.dumps(record.to_plain()))


def test_options_reach_the_daemon(daemon: FakeDaemon) -> None:
    hegmctl("ps", "--gpu", "gpu0,gpu1", "--gpu=gpu3", "4711", "12", socket=daemon.path)
    assert daemon.wait_for(m.Processes) == m.Processes(pids=(4711, 12), gpus=("gpu0", "gpu1", "gpu3"))
    hegmctl("events", "--since", "2", "--kind", "gpu", socket=daemon.path)
    assert daemon.wait_for(m.Events) == m.Events(since=2, kinds=("gpu",))
    hegmctl("events", "--since=3", "--run=abc", socket=daemon.path)
    assert daemon.wait_for(m.Events, 2) == m.Events(since=3, run="abc")


def test_the_socket_can_be_given_as_an_option(daemon: FakeDaemon) -> None:
    assert hegmctl("ping", "--socket", str(daemon.path), socket="/nowhere").returncode == 0


def test_events_are_one_object_a_line(daemon: FakeDaemon) -> None:
    ran = hegmctl("events", "--json", socket=daemon.path)
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [event.pop("schema") for event in events] == [SCHEMA, SCHEMA]
    assert events == [event.to_plain() for event in node.EVENTS]
    assert hegmctl("events", socket=daemon.path).stdout.splitlines()[1].endswith("gpu1 is lost")


def test_the_absence_of_events_is_stated(daemon: FakeDaemon) -> None:
    daemon.answers[m.Events] = remembering(())
    assert hegmctl("events", socket=daemon.path).stderr == "hegmctl: the daemon remembers no event\n"
    quiet = hegmctl("events", "--quiet", socket=daemon.path)
    assert (quiet.stdout, quiet.stderr) == ("", "")


def test_quiet_leaves_the_answer_alone(daemon: FakeDaemon) -> None:
    assert len(hegmctl("gpus", "-q", socket=daemon.path).stdout.splitlines()) == 1 + len(node.GPUS.gpus)


@pytest.mark.thorough
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.name)
def test_every_code_of_the_daemon_has_its_own_exit_status(daemon: FakeDaemon, code: Any) -> None:
    facts = {"pids": [7], "limit": 1.5}
    daemon.answers[m.Gpus] = failing(HegmError(code, "what failed", "what to do", facts))
    ran = hegmctl("gpus", socket=daemon.path)
    assert ran.returncode == code.exit_status
    assert ran.stdout == ""
    assert ran.stderr.startswith("hegmctl: what failed")
    assert ran.stderr.count("\n") == 1, "one line, with the reason and the next step"

    ran = hegmctl("gpus", "--json", socket=daemon.path)
    assert ran.returncode == code.exit_status
    assert ran.stdout == ""
    error = json.loads(ran.stderr)["error"]
    assert error["code"] == code.name
    assert error["facts"].items() >= facts.items()


def test_exit_statuses_are_distinct() -> None:
    assert len({code.exit_status for code in CODES}) == len(CODES)


def test_a_missing_daemon_is_one_line_with_a_hint(socket_path: Path) -> None:
    ran = hegmctl("gpus", socket=socket_path)
    assert ran.returncode == 3
    assert ran.stdout == ""
    assert ran.stderr == (
        f"hegmctl: there is no socket at {socket_path} (HEGM_SOCKET); "
        f"check the path, or start a daemon there: `hegmd --socket {socket_path}`\n"
    )


def test_a_usage_error_is_reported_in_the_requested_format() -> None:
    ran = hegmctl("gpsu", "--json")
    assert ran.returncode == 2
    assert json.loads(ran.stderr)["error"]["code"] == "usage"
    ran = hegmctl()
    assert ran.returncode == 2
    assert ran.stderr == "hegmctl: a command is needed; run: hegmctl --help; or begin with: hegmctl gpus\n"


def test_escape_sequences_in_an_error_do_not_reach_the_terminal(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = failing(HegmError(NOT_FOUND, "bad\x1b[2J\nsecond line", "hint\x07"))
    assert hegmctl("gpus", socket=daemon.path).stderr == "hegmctl: bad\\x1b[2J\nsecond line; hint\\x07\n"


def test_a_silent_daemon_costs_the_timeout_or_a_ctrl_c(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = unanswered
    ran = hegmctl("gpus", "--timeout", "0.05", socket=daemon.path)
    assert ran.returncode == 8
    assert "no answer to gpus within 0.05 s" in ran.stderr
    with Running("gpus", socket=daemon.path) as waiting:
        daemon.wait_for(m.Gpus, 2)
        assert waiting.end(signal.SIGINT) == (-signal.SIGINT, "", "")


def test_help_needs_no_daemon() -> None:
    assert "Commands:" in hegmctl("--help").stdout
    assert hegmctl("help", "simulate", "hold").stdout == hegmctl("simulate", "hold", "-h").stdout
    assert "simulate fault" in hegmctl("help", "simulate").stdout
    assert hegmctl("help").stdout == hegmctl("--help").stdout
    assert hegmctl("--version").stdout == f"hegmctl {__version__}\n"
    ran = hegmctl("help", "gpsu")
    assert ran.returncode == 2
    assert "did you mean `gpus`?" in ran.stderr


def test_version_is_content_without_a_daemon_and_ping_is_not(socket_path: Path) -> None:
    ran = hegmctl("version", "--json", socket=socket_path)
    assert ran.returncode == 0
    document = json.loads(ran.stdout)
    assert document["version"] == __version__
    assert document["daemon"] is None
    assert document["error"]["code"] == "no-daemon"
    assert document["socket"] == str(socket_path)
    assert hegmctl("ping", socket=socket_path).returncode == 3


def test_version_reports_incompatible_versions(daemon: FakeDaemon) -> None:
    daemon.answers[m.Hello] = failing(HegmError(next(c for c in CODES if c.name == "incompatible"), "no version", "x"))
    ran = hegmctl("version", socket=daemon.path)
    assert ran.returncode == 7
    assert "no version; this is hegmctl" in ran.stdout


def test_ping_counts(daemon: FakeDaemon) -> None:
    document = json.loads(hegmctl("ping", "-c", "5", "--json", socket=daemon.path).stdout)
    assert len(document["round_trips_s"]) == 5
    assert all(0 < seconds < 5 for seconds in document["round_trips_s"])


def test_an_interval_given_as_a_pid_is_explained(daemon: FakeDaemon) -> None:
    daemon.answers[m.Processes] = failing(HegmError(NOT_FOUND, "no process 5", "hegmctl ps lists them"))
    ran = hegmctl("ps", "--watch", "5", socket=daemon.path)
    assert ran.returncode == 5
    assert "written as --watch=5" in ran.stderr


def test_completions_list_ids_and_are_silent_otherwise(daemon: FakeDaemon) -> None:
    assert hegmctl("__complete", "gpus", socket=daemon.path).stdout == "gpu0\ngpu1\n"
    assert hegmctl("__complete", "pids", socket=daemon.path).stdout == "99\n4711\n"
    ran = hegmctl("__complete", "gpus", socket="/nowhere")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


class Running:
    """hegmctl under way, with its output at hand line by line."""

    def __init__(self, *words: str, socket: Path, **environ: str) -> None:
        self.process = subprocess.Popen(
            command(*words),
            env=environment(socket, **environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out, self.err = self.process.stdout, self.process.stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.out.close()
        self.err.close()

    def line(self, *, of_errors: bool = False) -> str:
        """The next line of its output; not a byte more is read."""
        stream = self.err if of_errors else self.out
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([stream], [], [], HANG_S)[0], f"nothing came after {line!r}"
            byte = stream.read(1)
            assert byte, f"it ended after {line!r}"
            line += byte
        return line.decode().rstrip("\n")

    def end(self, number: int | None = None) -> tuple[int, str, str]:
        """Return the exit status and the rest of the output, after a signal if one is given."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(120)
        return status, self.out.read().decode(), self.err.read().decode()


def test_doctor_shows_each_check_as_it_comes(daemon: FakeDaemon) -> None:
    """The second check is only made when the first was seen."""
    waiting: list[tuple[Caller, IncomingRequest]] = []

    def check_one(caller: Caller, request: IncomingRequest) -> None:
        caller.event(request.id, node.CHECKS[0])
        waiting.append((caller, request))

    daemon.answers[m.Doctor] = check_one
    with Running("doctor", socket=daemon.path) as doctor:
        assert doctor.line() == f"ok    daemon                    hegmd {__version__} answers at {daemon.path}"
        assert doctor.line() == "ok    nvidia.driver             driver 580.159.04"
        daemon.wait_for(m.Doctor)
        caller, request = waiting[0]
        failed = node.CHECKS[1].replace(status="fail")
        caller.event(request.id, failed)
        caller.reply(request.id, m.DoctorReply(checks=(node.CHECKS[0], failed)))
        status, out, err = doctor.end()
    assert status == 15
    assert err == ""
    assert out.splitlines()[-1] == "2 ok, 0 warnings, 1 failure"


def test_doctor_in_json_is_one_document(daemon: FakeDaemon) -> None:
    document = json.loads(hegmctl("doctor", "--json", socket=daemon.path).stdout)
    assert document.pop("schema") == SCHEMA
    assert [check["id"] for check in document.pop("checks")] == ["daemon", *[check.id for check in node.CHECKS]]
    assert document == {"ok": 2, "warn": 1, "fail": 0, "skip": 1}


def test_followed_events_end_with_ctrl_c_as_a_shell_expects(daemon: FakeDaemon) -> None:
    daemon.answers[m.Events] = remembering(node.EVENTS)
    with Running("events", "-f", socket=daemon.path) as following:
        assert following.line().endswith("2 GPUs were found")
        assert following.line().endswith("gpu1 is lost")
        status, out, err = following.end(signal.SIGINT)
    assert (status, out, err) == (-signal.SIGINT, "", "")  # which a shell shows as 130


def test_a_reader_that_stops_early_is_not_an_error(daemon: FakeDaemon) -> None:
    many = [node.EVENTS[0].replace(seq=seq) for seq in range(1, 5000)]
    daemon.answers[m.Events] = remembering(many)
    with Running("events", socket=daemon.path) as listing:
        listing.line()
        listing.out.close()
        assert listing.err.read() == b""
        assert listing.process.wait(120) == -signal.SIGPIPE  # which a shell shows as 141


def test_a_reader_of_a_short_answer_that_left_before_is_no_error_either(daemon: FakeDaemon) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as nobody:
        ran = subprocess.run(
            command("gpus"),
            env=environment(daemon.path),
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert (ran.returncode, ran.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize("words", [("gpus",), ("gpus", "--json"), ("--help",), ("events",)])
def test_a_full_disk_is_reported_and_not_a_success(daemon: FakeDaemon, words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command(*words),
            env=environment(daemon.path),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert ran.returncode == 14
    assert "standard output cannot be written to: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_closed_standard_output_is_reported(daemon: FakeDaemon) -> None:
    argv = ["sh", "-c", f"{shlex.join(command('gpus'))} >&-"]
    ran = subprocess.run(argv, env=environment(daemon.path), capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 14
    assert "standard output cannot be written to: it is closed" in ran.stderr


def test_names_that_the_encoding_lacks_are_escaped(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = lambda _caller, _asked: node.GPUS.replace(gpus=(node.GPU0.replace(name="Größe 漢字"),))
    ran = hegmctl("gpus", socket=daemon.path, environ={"PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 0
    assert r"Gr\xf6\xdfe \u6f22\u5b57" in ran.stdout


def test_a_hold_lasts_as_long_as_the_command_that_it_became(daemon: FakeDaemon) -> None:
    program = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [*command("simulate", "hold", "gpu0", "1GiB", "--"), sys.executable, "-c", program],
        env=environment(daemon.path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == holder.pid, "the daemon knows the holder by this pid"
        assert daemon.wait_for(m.SimulateHold) == m.SimulateHold(gpu="gpu0", vram_bytes=node.GIB)
        peer = daemon.callers[0].socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)
        assert int.from_bytes(peer, sys.byteorder) == holder.pid
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(120)
    daemon.wait_until(lambda: not daemon.callers)


def test_the_command_of_a_hold_gets_the_usual_signals(daemon: FakeDaemon) -> None:
    """Python ignores SIGPIPE, and an ignored signal stays ignored across an exec."""
    command = ["grep", "SigIgn", "/proc/self/status"]
    ran = hegmctl("simulate", "hold", "gpu0", "1GiB", "--", *command, socket=daemon.path)
    # Not zero: below a make that starts its commands by posix_spawn, glibc's own two signals are ignored permanently.
    usual = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ran.stdout == usual


def test_a_hold_without_a_command_waits_and_reports_when_the_daemon_ends(daemon: FakeDaemon) -> None:
    with Running("simulate", "hold", "gpu0", "1GiB", socket=daemon.path) as holding:
        assert holding.line() == "holding 1.0 GiB on gpu0 until interrupted"
        daemon.hang_up()
        status, _out, err = holding.end()
    assert status == 12
    assert "the daemon ended the connection" in err
    with Running("simulate", "hold", "gpu0", "1GiB", socket=daemon.path) as holding:
        holding.line()
        assert holding.end(signal.SIGINT)[0] == -signal.SIGINT


def test_a_command_that_cannot_be_run_is_reported(daemon: FakeDaemon) -> None:
    ran = hegmctl("simulate", "hold", "gpu0", "1GiB", "--", "/no/such/program", socket=daemon.path)
    assert ran.returncode == 127
    assert ran.stderr.startswith("hegmctl: /no/such/program cannot be run: No such file or directory; ")
