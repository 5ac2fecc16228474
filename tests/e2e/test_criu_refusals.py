"""Refusals of real CRIU: the plan predicts each, and if CRIU meets it, the error explains it.

Each case is a job that CRIU cannot dump, or an image that it cannot restore. The job to be dumped continues in every
case.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.criu import run
from hegmd.images.criu.needs import Needs, needs_of
from hegmd.node.processes.process_set import end_all, population_of
from hegmd.node.processes.process_tree import read_tree
from tests.e2e.agented import environment
from tests.e2e.real_criu import Job, criu_or_skip, directory, ended_after, job, python, tell
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e]

GOES_ON = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
while True:
    signal.sigwait([signal.SIGUSR1])
    print("goes on", flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A job's beginning, what the plan has to say against it, and what the error has to say all the same."""

    name: str
    begin: str
    planned: str
    message: str | None  # None: the dump succeeds, and its restore would not


CASES = (
    Case(
        "a connected TCP socket",
        "import socket\nheld = socket.create_connection(('127.0.0.1', int(sys.argv[1])))",
        "has a TCP connection to 127.0.0.1:",
        "the job has a TCP connection to a process outside the job",
    ),
    Case(
        "a connected unix socket",
        "import socket\nheld = socket.socket(socket.AF_UNIX); held.connect(sys.argv[2])",
        "has a Unix socket connected to a process outside the job",
        None,
    ),
    Case(
        "io_uring",
        "import ctypes\nassert ctypes.CDLL(None).syscall(425, 4, ctypes.create_string_buffer(512)) >= 0, 'no io_uring'",
        "has io_uring open",
        "the job has a descriptor open that the kernel passes to no other process, such as io_uring",
    ),
    Case(
        "a device",
        "import os\nheld = os.open('/dev/fuse', os.O_RDWR)",
        "has /dev/fuse open (descriptor 3), a device that CRIU cannot dump",
        "the job has descriptor 3 open, which CRIU cannot dump: chr 10:229",
    ),
    Case(
        "a mount namespace",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x20000) == 0",
        "has namespaces of its own: mnt",
        "on a mount that CRIU does not see",
    ),
    Case(
        "shared memory of the node",
        "import ctypes\nlibc = ctypes.CDLL(None)\nsegment = libc.shmget(0, 4096, 0o1600)\n"
        "libc.shmat.restype = ctypes.c_void_p\nlibc.shmat(segment, None, 0)\nlibc.shmctl(segment, 0, None)",
        "has a System V shared memory segment mapped",
        "the job has System V shared memory mapped",
    ),
)


@pytest.fixture
def outside(socket_dir: Path) -> Iterator[list[str]]:
    """A port and a path that a job can connect to."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(socket_dir / "listens"))
        unix.listen()
        yield [str(tcp.getsockname()[1]), str(socket_dir / "listens")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_job_that_cannot_be_dumped_is_refused_and_continues(
    case: Case, outside: list[str], tmp_path: Path
) -> None:
    criu = criu_or_skip()
    with job([*python(f"import sys\n{case.begin}\n{GOES_ON}"), *outside]) as started:
        if started.line() != "ready":
            pytest.skip(f"this machine has no {case.name}")
        needs = started.needs()
        assert any(case.planned in reason.message for reason in needs.reasons), needs.reasons
        with directory(tmp_path / "image") as images:
            dump = run.dump(criu, started.pid, images, needs, leave_stopped=False, in_unit=False)
            if case.message is None:
                await dump
            else:
                with pytest.raises(HegmError) as failed:
                    await dump
                assert case.message in failed.value.message
        tell(started.pid)
        assert started.line() == "goes on"


async def test_a_tracer_is_detected_beforehand_and_the_job_continues(tmp_path: Path) -> None:
    trace = "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\npid = int(sys.argv[1])\n"
    trace += "assert libc.ptrace(0x4206, pid, None, None) == 0\nprint('traces', flush=True)\nsys.stdin.read()"
    criu = criu_or_skip()
    with job(python(GOES_ON)) as started, directory(tmp_path / "image") as images:
        assert started.line() == "ready"
        with job([*python(trace), str(started.pid)], stdin=-1) as tracer:
            assert tracer.line() == "traces"
            needs = started.needs()
            assert f"is traced by process {tracer.pid}" in needs.reasons[0].message
            with pytest.raises(HegmError, match="dump failed"):
                await run.dump(criu, started.pid, images, needs, leave_stopped=False, in_unit=False)
            assert tracer.process.stdin is not None
            tracer.process.stdin.close()
            tracer.gone()
        tell(started.pid)
        assert started.line() == "goes on"


# Two processes of a fresh pid namespace whose session is the one outside, as with `kubectl exec`.
FROM_OUTSIDE = """
import os, signal, sys
from hegmd.images.criu.needs import needs_of
from hegmd.node.processes.process_tree import read_tree
job = os.fork()
if job == 0:
    signal.pause()
try:
    print(needs_of(read_tree(job)).reasons[0].message, flush=True)
    images = sys.argv[2]
    words = ["dump", "-t", str(job), "-D", images, "-o", "log", "-R", "--shell-job", "--manage-cgroups=ignore"]
    assert os.spawnv(os.P_WAIT, sys.argv[1], [sys.argv[1], *words]) != 0
finally:
    os.kill(job, signal.SIGKILL)
    os.waitpid(job, 0)
"""


def test_a_job_from_outside_of_its_pid_namespace_was_found_out_by_criu_alone(tmp_path: Path) -> None:
    criu = criu_or_skip()
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *python(FROM_OUTSIDE), criu.path]
    ran = subprocess.run(
        [*inside, str(tmp_path)],
        env=environment(None, PYTHONPATH=str(Path(__file__).parents[2])),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "process 2 is in a session whose leader is outside this pid namespace\n"
    assert "is outside of its pid namespace" in (tmp_path / "log").read_text()


# -- at the restore ----------------------------------------------------------------------------------------------------

WITH_FILE = f"import sys\nheld = open(sys.argv[1], 'r+b')\n{GOES_ON}"


async def _ended(started: Job, images: int) -> Needs:
    assert started.line() == "ready"
    needs = started.needs()
    await run.dump(criu_or_skip(), started.pid, images, needs, leave_stopped=True, in_unit=False)
    end_all(population_of(needs.pids))
    started.gone()
    return needs


async def _refusal(images: int, needs: Needs) -> HegmError:
    with ended_after(needs.pids), pytest.raises(HegmError) as failed:
        await run.restore(criu_or_skip(), images, needs, log_dir_fd=images, unit_name=None)
    assert population_of(needs.pids).start_ticks == {}
    return failed.value


async def test_changed_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"1234567")
    with job([*python(WITH_FILE), str(file)]) as started, directory(tmp_path / "image") as images:
        needs = await _ended(started, images)
        assert [(each.path, each.size_bytes, each.is_written) for each in needs.files] == [(str(file), 7, True)]
        file.write_bytes(b"123456789")
        grown = await _refusal(images, needs)
        assert f"{file} has 9 bytes; it had 7 when the image was written" in grown.message
        assert "--truncate-outputs" in grown.hint
        file.unlink()
        assert f"{file} does not exist" in (await _refusal(images, needs)).message


async def test_an_invalid_image_or_one_of_another_version_is_reported_as_such(tmp_path: Path) -> None:
    with job(python(GOES_ON)) as started, directory(tmp_path / "image") as images:
        needs = await _ended(started, images)
        whole = (tmp_path / "image" / "inventory.img").read_bytes()
        # The version of images is the first field: its value follows magic, size and tag.
        (tmp_path / "image" / "inventory.img").write_bytes(whole[:9] + b"\x63" + whole[10:])
        assert "this CRIU does not know the version or format of the image" in (await _refusal(images, needs)).message
        (tmp_path / "image" / "inventory.img").write_bytes(b"not an image of anything at all")
        assert "this CRIU does not know the version or format of the image" in (await _refusal(images, needs)).message


async def test_a_job_of_a_shell_has_to_be_declared(tmp_path: Path) -> None:
    """Without the option from the needs, CRIU fails; its message is known too."""
    criu = criu_or_skip()
    shell = ["sh", "-c", '"$@" & wait', "sh"]  # the leader of the job's session, and no part of what is dumped
    with job([*shell, *python(GOES_ON)]) as started, directory(tmp_path / "image") as images:
        assert started.line() == "ready"
        (pid,) = {member.pid for member in read_tree(started.pid).members} - {started.pid}
        needs = needs_of(read_tree(pid))
        bare = needs._replace(dump_options=tuple(word for word in needs.dump_options if word != "--shell-job"))
        assert bare != needs
        with pytest.raises(HegmError, match="the job has a terminal or a session whose leader is outside the job"):
            await run.dump(criu, pid, images, bare, leave_stopped=False, in_unit=False)
        tell(pid)
        assert started.line() == "goes on"


@contextmanager
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for next to nothing."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine does not mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


async def test_a_full_disk_is_reported_and_the_job_continues(tmp_path: Path) -> None:
    criu = criu_or_skip()
    with small_disk(tmp_path) as folder, job(python(GOES_ON)) as started, directory(folder) as images:
        assert started.line() == "ready"
        with pytest.raises(HegmError, match="the disk of the image is full") as failed:
            await run.dump(criu, started.pid, images, started.needs(), leave_stopped=True, in_unit=False)
        assert "free space there" in failed.value.hint
        tell(started.pid)
        assert started.line() == "goes on"
