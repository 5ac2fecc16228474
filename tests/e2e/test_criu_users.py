"""Jobs of users, dumped and brought back by CRIU with their own rights: no path of theirs leads it further."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.criu import run
from hegmd.images.criu.credentials import credentials_in
from hegmd.images.criu.needs import Needs
from hegmd.images.criu.privileges import rights_missing, to_dump, to_restore
from hegmd.node.processes.process_set import end_all, population_of
from hegmd.node.processes.process_tree import read_tree
from tests.e2e.handed_job import as_user
from tests.e2e.real_criu import Job, criu_or_skip, directory, ended_after, job, pipe, python, tell
from tests.needs import need_a_clone_for_all

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to be somebody else")]
BOB = 54713

# Objects that root's CRIU would touch by path: files open and without a name, a bound socket, a locked file, a watched
# folder.
RICH = """
import fcntl, os, signal, socket, sys, tempfile, threading, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.chdir(sys.argv[1])
log = open("log", "a")
both = open("both", "w+"); both.write("hello"); both.flush()
locked = open("locked", "w"); fcntl.flock(locked, fcntl.LOCK_EX)
unnamed = tempfile.TemporaryFile(dir="."); unnamed.write(b"x" * 1000); unnamed.flush()
gone = open("gone", "w+"); gone.write("gone"); gone.flush(); os.unlink("gone")
shared = open("/dev/shm/hegm-test-%d" % os.getpid(), "w+b"); shared.write(b"s" * 4096); shared.flush()
os.unlink(shared.name)
listens = socket.socket(socket.AF_UNIX); listens.bind("socket"); listens.listen()
if os.fork() == 0:
    while True: signal.pause()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
while True:
    signal.sigwait([signal.SIGUSR1])
    both.seek(0); gone.seek(0); shared.seek(0)
    log.write("ran\\n"); log.flush()
    print(both.read(), gone.read(), os.fstat(unnamed.fileno()).st_size, len(shared.read()), flush=True)
"""
SAID = "hello gone 1000 4096\n"


@pytest.fixture(autouse=True)
def _able() -> None:
    need_a_clone_for_all()
    missing = rights_missing(frozenset({BOB}), as_user=True, in_unit=False)
    if missing is not None:
        pytest.skip(missing.message)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users can enter, unlike those below pytest's own: with a folder of Bob's in it."""
    with tempfile.TemporaryDirectory(prefix="hegm-users-") as name:
        os.chmod(name, 0o755)
        (Path(name) / "bob").mkdir()
        os.chown(Path(name) / "bob", BOB, BOB)
        yield Path(name)


async def dumped(started: Job, images: int) -> Needs:
    """The job, ended and in an image; what it needs."""
    assert started.line() == "ready"
    tree = read_tree(started.pid)
    needs = started.needs()
    assert needs.reasons == needs.only_by_root == ()
    dump = run.dump(
        criu_or_skip(), started.pid, images, needs, leave_stopped=True, in_unit=False, guise=to_dump(tree, ())
    )
    await dump
    end_all(population_of(needs.pids))
    started.gone()
    return needs


async def restored(images: int, logs: int, needs: Needs, outlets: dict[str, int] | None = None) -> None:
    guise = to_restore(credentials_in(images), BOB)
    await run.restore(criu_or_skip(), images, needs, log_dir_fd=logs, unit_name=None, outlets=outlets, guise=guise)


def bobs(place: Path) -> list[str]:
    return [*as_user(BOB), *python(RICH), str(place / "bob")]


async def test_a_users_job_is_restored_with_that_users_rights(place: Path) -> None:
    with (
        job(bobs(place), start_new_session=True, stderr=subprocess.DEVNULL) as started,
        directory(place / "image") as images,
    ):
        needs = await dumped(started, images)
        with ended_after(needs.pids), directory(place / "logs") as logs, pipe() as (reader, output):
            os.fchown(output, BOB, BOB)  # CRIU opens it once more
            await restored(images, logs, needs, {outlet.key: output for outlet in needs.outlets})
            tell(started.pid)
            assert reader.readline() == SAID
            status = _status(started.pid)
            assert f"Uid:\t{BOB}\t{BOB}\t{BOB}\t{BOB}\n" in status
            assert all(f"{kind}:\t0000000000000000\n" in status for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb"))
            opened = [descriptor.path for descriptor in read_tree(started.pid).descriptors]
            assert not [path for path in opened if path.startswith((f"{place}/image", f"{place}/logs"))]


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def lead_log(place: Path, to: Path) -> None:
    log = place / "bob" / "log"
    log.unlink()
    log.symlink_to(to)


def lead_folder(place: Path, to: Path) -> None:
    (to.parent / "log").write_text("")
    for name in ("both", "locked"):
        (to.parent / name).write_bytes((place / "bob" / name).read_bytes())
    os.rename(place / "bob", place / "was-bob")
    (place / "bob").symlink_to(to.parent)


@pytest.mark.parametrize("lead", [lead_log, lead_folder])
async def test_a_restored_job_had_roots_file_open_where_its_owner_had_put_a_link(
    lead: Callable[[Path, Path], None], place: Path
) -> None:
    """Root's CRIU follows links of the job's owner: a user who could restore an image could write to any file."""
    roots = place / "roots"
    roots.mkdir(mode=0o755)
    (roots / "secret").write_text("")
    (roots / "secret").chmod(0o644)
    with (
        job(bobs(place), start_new_session=True, stderr=subprocess.DEVNULL) as started,
        directory(place / "image") as images,
    ):
        needs = await dumped(started, images)
        lead(place, roots / "secret")
        before = {path.name: path.read_bytes() for path in roots.iterdir()}
        with ended_after(needs.pids), directory(place / "logs") as logs:
            with pytest.raises(HegmError, match="the job's user has no permission to"):
                await restored(images, logs, needs)
            assert population_of(needs.pids).start_ticks == {}
        assert {each.name: each.read_bytes() for each in roots.iterdir()} == before
        assert os.stat(roots / "secret").st_uid == 0
