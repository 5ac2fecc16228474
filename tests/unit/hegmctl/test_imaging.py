"""Outputs that have grown since an image was made are truncated by the caller, who then repeats the restore."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
from pathlib import Path
from time import time

import pytest

from hegmctl.outputs import TruncatedFile, cut_back
from hegmd.errors import DENIED, EXTERNAL, NOT_FOUND, REFUSED, UNAVAILABLE, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Record
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Answerer, Caller, FakeDaemon, IncomingRequest, cancelling, failing, saying
from tests.unit.hegmctl.running import command, environment, hegmctl
from tests.unit.hegmctl.terminal import Terminal
from tests.unit.hegmctl.test_move_commands import DONE, PLAN
from tests.unit.images.files.directory import MANIFEST, built


def cut_of(path: Path, size_bytes: int) -> TruncatedFile:
    done: list[TruncatedFile] = []
    cut_back([[str(path), size_bytes]], done)
    return done[0]


def test_only_grown_files_are_truncated(tmp_path: Path) -> None:
    longer, shorter = tmp_path / "longer", tmp_path / "shorter"
    longer.write_text("0123456789")
    shorter.write_text("01")
    done: list[TruncatedFile] = []
    cut_back([[str(longer), 4], [str(shorter), 4], "nonsense"], done)
    (cut,) = done
    assert (cut.path, cut.size_bytes) == (str(longer), 4)
    assert longer.read_text() == "0123"
    assert shorter.read_text() == "01"
    assert cut.put_back()
    assert longer.read_text() == "0123456789"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["longer", "shorter"]


def test_truncated_output_is_kept_although_ctrl_c_comes_at_that_moment(tmp_path: Path) -> None:
    """It is known from before the cut, and putting back is fine where there was none yet."""
    longer = tmp_path / "longer"
    longer.write_text("0123456789")
    cut = cut_of(longer, 4)
    longer.write_text("0123456789")  # as if the output had arrived just before
    assert cut.put_back()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["0123456789"]


def test_later_output_of_a_job_is_not_overwritten(tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    longer.write_text("0123456789")
    cut = cut_of(longer, 4)
    longer.write_text("0123new")
    assert not cut.put_back()
    assert longer.read_text() == "0123new"
    assert Path(cut.kept).read_text() == "456789"


def test_a_file_that_cannot_be_truncated_is_reported_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(HegmError, match="No such file"):
        cut_of(tmp_path / "gone", 4)


def test_the_target_of_a_link_is_not_truncated(tmp_path: Path) -> None:
    """Root who restored a user's image cut, at that user's wish, a file that the user could not write."""
    (tmp_path / "etc").mkdir()
    other = tmp_path / "etc" / "output"
    other.write_text("0123456789")
    (tmp_path / "itself").symlink_to(other)
    (tmp_path / "folder").symlink_to(tmp_path / "etc")
    for path in (tmp_path / "itself", tmp_path / "folder" / "output"):
        with pytest.raises(HegmError, match="link"):
            cut_of(path, 4)
    assert other.read_text() == "0123456789"


def test_a_restore_refused_for_grown_files_is_repeated_after_they_were_cut(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text("0123456789")
    refused = HegmError(REFUSED, "it has grown", "cut it back", {"grown": [[str(output), 4]]})

    def as_it_is(caller: Caller, request: IncomingRequest) -> Record | None:
        answer = saying(m.OperationReply(operation=DONE)) if output.stat().st_size == 4 else failing(refused)
        return answer(caller, request)

    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: as_it_is}) as daemon:
        left = hegmctl("restore", "/images/one", socket=daemon.path)
        assert (left.returncode, output.read_text()) == (REFUSED.exit_status, "0123456789")
        ran = hegmctl("restore", "/images/one", "--truncate-outputs", socket=daemon.path)
    assert ran.returncode == 0
    assert output.read_text() == "0123"
    assert "was cut back to 4 bytes" in ran.stderr
    assert sorted(path.suffix for path in tmp_path.glob("output*")) == [""]


def test_the_newest_whole_image_of_a_directory_is_restored(tmp_path: Path) -> None:
    """A newer broken image is skipped, and one from before the clock was set back. An empty directory is reported."""
    (images := tmp_path / "images").mkdir()
    made_utc = {"train-1": 1000.0, "train-2": 3000.0, "train-3": 2000.0, "train-4": 4000.0, "train-5": time() + 7200.0}
    for name, utc in made_utc.items():
        built(images / name, manifest=MANIFEST.replace(made_utc=utc), size_bytes=4096)
    (images / "train-4" / "criu" / "pages-1.img").unlink()
    answers = {**node.answers(), m.Restore: saying(m.OperationReply(operation=DONE))}
    with FakeDaemon(tmp_path / "hegmd.sock", answers) as daemon:
        ran = hegmctl("restore", "--newest", str(images), socket=daemon.path)
        (request,) = [one for one in daemon.requests if isinstance(one, m.Restore)]
        none = hegmctl("restore", "--newest", str(tmp_path), socket=daemon.path)
    assert (ran.returncode, request.path) == (0, str(images / "train-2"))
    assert f"the newest image is {images / 'train-2'}" in ran.stderr
    assert none.returncode == NOT_FOUND.exit_status
    assert "there is no image in" in none.stderr


def test_the_newest_image_belonged_to_another_user_and_nothing_was_restored(tmp_path: Path) -> None:
    """The newest one that the caller may restore is restored, and those that were passed over are named."""
    for number in range(4):
        built(tmp_path / f"train-{number}", manifest=MANIFEST.replace(made_utc=1000.0 + number), size_bytes=4096)

    def as_owner(_caller: Caller, request: IncomingRequest) -> Record:
        asked = request.request
        assert isinstance(asked, m.Restore)
        if asked.path[-1] in "32":
            raise HegmError(DENIED, f"{asked.path} belongs to uid 7", "have its owner restore it")
        return m.OperationReply(operation=DONE)

    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: as_owner}) as daemon:
        ran = hegmctl("restore", "--newest", str(tmp_path), socket=daemon.path)
        paths = [request.path for request in daemon.requests if isinstance(request, m.Restore)]
    assert (ran.returncode, paths) == (0, [str(tmp_path / f"train-{number}") for number in (3, 2, 1)])
    for number in (3, 2):
        assert f"train-{number} belongs to uid 7; the next older image is" in ran.stderr


def test_who_waited_for_a_job_was_told_of_kernels_when_it_had_become_an_image(tmp_path: Path) -> None:
    job = m.Job(id="j1", name="train", state="ended", started_utc=0.0, uid=0, end="written into the image /images/one")
    kinds: tuple[type[m.Request], ...] = m.InspectJob, m.WaitForJob
    answers = {kind: saying(m.JobReply(job=job)) for kind in kinds}
    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), **answers}) as daemon:
        ran = hegmctl("wait", "train", socket=daemon.path)
    assert ran.returncode == UNAVAILABLE.exit_status
    assert "written into the image /images/one; hegmctl restore continues it from the image" in ran.stderr


def test_outputs_stayed_cut_when_the_restore_that_they_were_cut_for_failed(tmp_path: Path) -> None:
    """CRIU failed after the daemon had found nothing against it: the log of weeks was gone, and the job not back."""
    output = tmp_path / "output"
    output.write_text("0123456789")
    refused = HegmError(REFUSED, "it has grown", "cut it back", {"grown": [[str(output), 4]]})
    failed = HegmError(EXTERNAL, "CRIU's restore failed with status 1", "see its log")

    def as_it_is(caller: Caller, request: IncomingRequest) -> Record | None:
        return failing(failed if output.stat().st_size == 4 else refused)(caller, request)

    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: as_it_is}) as daemon:
        ran = hegmctl("restore", "/images/one", "--truncate-outputs", socket=daemon.path)
    assert ran.returncode == EXTERNAL.exit_status
    assert output.read_text() == "0123456789"
    assert "output is unchanged" in ran.stderr


def grown(*paths: Path) -> HegmError:
    return HegmError(REFUSED, "it has grown", "cut it back", {"grown": [[str(path), 4] for path in paths]})


def test_the_first_of_two_files_stayed_cut_when_the_second_could_not_be_cut(tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    longer.write_text("0123456789")
    refused = grown(longer, tmp_path / "gone")
    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: failing(refused)}) as daemon:
        ran = hegmctl("restore", "/images/one", "--truncate-outputs", socket=daemon.path)
    assert (ran.returncode, longer.read_text()) == (REFUSED.exit_status, "0123456789")
    assert "gone cannot be truncated to 4 bytes" in ran.stderr


READING = OperationProgress(id="7", phase="reading", moved_bytes=1 << 20, size_bytes=2 << 20)
SUSPENDED = OperationProgress(id="7", phase="suspended")


def restoring(output: Path, *progress_events: OperationProgress) -> dict[type[m.Request], Answerer]:
    """Return answers of a daemon that refuses a grown output, and whose restore does not end after the file was cut."""

    def as_it_is(caller: Caller, request: IncomingRequest) -> Record | None:
        if output.stat().st_size != 4:
            return failing(grown(output))(caller, request)
        for progress in progress_events:
            caller.event(request.id, progress)
        return None

    return {**node.answers(), m.Restore: as_it_is, m.Cancel: cancelling}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_left_a_cut_output_of_a_job_that_was_not_restored(tmp_path: Path, number: signal.Signals) -> None:
    """hegmctl knows that the restore failed only after the daemon has undone it."""
    output = tmp_path / "output"
    output.write_text("0123456789")
    with (
        FakeDaemon(tmp_path / "hegmd.sock", restoring(output, READING)) as daemon,
        Terminal("restore", "/images/one", "--truncate-outputs", socket=daemon.path) as terminal,
    ):
        terminal.until(lambda lines: "reading  1.0 MiB of 2.0 MiB" in lines[-1])
        assert output.read_text() == "0123"
        assert terminal.end(number) == -number
        shown = "\n".join(terminal.picture.lines)
    assert "the files are restored" in shown
    assert [path.read_text() for path in tmp_path.glob("output*")] == ["0123456789"]


def test_a_restore_under_nohup_ended_with_its_terminal(tmp_path: Path) -> None:
    """It handled SIGHUP to put the outputs back, also where it was to be ignored. requeue.sh ignores SIGTERM so."""
    output = tmp_path / "output"
    output.write_text("0123456789")

    def as_it_is(caller: Caller, request: IncomingRequest) -> Record:
        if output.stat().st_size != 4:
            raise grown(output)
        (pid,) = struct.unpack_from("i", caller.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        os.kill(pid, signal.SIGHUP)
        return m.OperationReply(operation=DONE)

    words = ["nohup", *command("restore", "/images/one", "--truncate-outputs")]
    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: as_it_is}) as daemon:
        ran = subprocess.run(
            words,
            env=environment(daemon.path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=HANG_S,
        )
    assert (ran.returncode, output.read_text()) == (0, "0123")


def test_ctrl_c_leaves_the_output_of_a_restored_job_unchanged(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.write_text("0123456789")
    with (
        FakeDaemon(tmp_path / "hegmd.sock", restoring(output, READING, SUSPENDED)) as daemon,
        Terminal("restore", "/images/one", "--truncate-outputs", socket=daemon.path) as terminal,
    ):
        terminal.until(lambda lines: "suspended" in lines[-1])
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(lambda lines: "Cancel operation 7?" in lines[-1])
        assert terminal.end(signal.SIGINT) == -signal.SIGINT
    (kept,) = tmp_path.glob("output.hegm-cut-*")
    assert (output.read_text(), kept.read_text()) == ("0123", "456789")
    shown = " ".join("".join(f"{line} " for line in terminal.picture.lines).split())
    assert "output stays truncated, and the removed part is in" in shown


def test_outputs_were_put_back_under_a_job_whose_resume_was_cancelled(tmp_path: Path) -> None:
    """The job is suspended with the files at that length. The same happens if the daemon stops at that moment."""
    output = tmp_path / "output"
    output.write_text("0123456789")
    stopping = HegmError(UNAVAILABLE, "hegmd is stopping", "ask again in a moment")

    def as_it_is(caller: Caller, request: IncomingRequest) -> Record | None:
        if output.stat().st_size == 4:
            caller.event(request.id, SUSPENDED)
        return failing(stopping if output.stat().st_size == 4 else grown(output))(caller, request)

    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: as_it_is}) as daemon:
        ran = hegmctl("restore", "/images/one", "--truncate-outputs", socket=daemon.path)
    assert (ran.returncode, output.read_text()) == (UNAVAILABLE.exit_status, "0123")
    assert "stays truncated, and the removed part is in" in ran.stderr


def test_outputs_are_opened_by_the_caller_and_sent_along(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    kept.write_text("before\n")

    def write(caller: Caller, request: IncomingRequest) -> Record:
        for number, fd in enumerate(caller.fds):
            os.write(fd, f"from {number}\n".encode())
        return m.OperationReply(operation=DONE)

    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: write}) as daemon:
        ran = hegmctl("restore", "/images/one", "--stdout", str(log), "--stderr", str(kept), socket=daemon.path)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert daemon.wait_for(m.Restore) == m.Restore(path="/images/one", outlets=("stdout", "stderr"))
        assert log.read_text() == "from 0\n"
        assert kept.read_text() == "before\nfrom 1\n"
        refused = hegmctl("restore", "/images/one", "--stdout", str(tmp_path), socket=daemon.path)
    assert refused.returncode == REFUSED.exit_status
    assert f"{tmp_path} cannot be opened for --stdout: Is a directory" in refused.stderr


def test_a_restore_that_was_refused_or_only_planned_left_an_empty_file_for_its_output(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    kept.touch()
    plan = m.OperationReply(plan=PLAN.replace(kind="restore"))

    def answer(caller: Caller, request: IncomingRequest) -> Record | None:
        assert log.exists(), "it is sent along"
        is_dry = request.request.dry_run if isinstance(request.request, m.Restore) else False
        refused = HegmError(REFUSED, "its number is taken", "end that process")
        return (saying(plan) if is_dry else failing(refused))(caller, request)

    with FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: answer}) as daemon:
        words = ("restore", "/images/one", "--stdout", str(log), "--stderr", str(kept))
        statuses = [hegmctl(*words, *more, socket=daemon.path).returncode for more in ([], ["--dry-run"])]
    assert statuses == [REFUSED.exit_status, 0]
    assert (log.exists(), kept.exists()) == (False, True)


def test_ctrl_c_while_an_image_is_read_leaves_the_image_without_a_question(tmp_path: Path) -> None:
    """There is no operation yet that could be cancelled, or continue."""
    reading = OperationProgress(id="7", phase="reading", moved_bytes=1 << 30, size_bytes=2 << 30)

    def never(caller: Caller, request: IncomingRequest) -> Record | None:
        caller.event(request.id, reading)
        return None

    with (
        FakeDaemon(tmp_path / "hegmd.sock", {**node.answers(), m.Restore: never}) as daemon,
        Terminal("restore", "/images/one", socket=daemon.path) as terminal,
    ):
        terminal.until(lambda lines: "reading  1.0 GiB of 2.0 GiB" in lines[-1])
        assert terminal.end(signal.SIGINT) == -signal.SIGINT
        shown = "\n".join(terminal.picture.lines)
        assert "the processes restored so far are ended; the image is unchanged" in shown
        assert "Cancel" not in terminal.picture.raw
