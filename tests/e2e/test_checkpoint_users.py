"""Images of a user who is not root, under root's daemon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hegmd.images.criu.privileges import rights_missing
from hegmd.node.processes.process_set import population_of
from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import ENDS_WITHIN_S, ImageJob, as_user, daemon_with_criu, losses_alone
from tests.needs import need_a_clone_for_all, need_torch

pytestmark = [pytest.mark.e2e]
need_torch()

BOB = 54712


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can enter, unlike those below pytest's own."""
    need_a_clone_for_all()
    with tempfile.TemporaryDirectory(prefix="hegm-users-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def daemon(folder: Path) -> Iterator[RunningDaemon]:
    daemon = daemon_with_criu(folder)
    with (folder / "hegmd.toml").open("a") as config:
        config.write('[daemon]\nsocket_mode = "0666"\n')
    with daemon as running:
        yield running


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, preloaded: None) -> list[str]:
    """The output of an undisturbed run."""
    return losses_alone(tmp_path_factory.mktemp("alone") / "job")


def reply_of(job: ImageJob, uid: int, *words: str) -> tuple[int, dict[str, Any]]:
    """The status and the last words of hegmctl, asked by that user."""
    ran = subprocess.run(
        [*as_user(uid), sys.executable, "-m", "hegmctl", "--json", *words],
        env=job.environ,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    return ran.returncode, json.loads((ran.stdout or ran.stderr).splitlines()[-1])


def handed_to(uid: int, path: Path) -> None:
    """Everything in there belongs to that user now."""
    for each in (path, *path.rglob("*")):
        os.chown(each, uid, uid)


def test_only_root_dumps_or_restores_jobs_of_other_users(daemon: RunningDaemon, folder: Path) -> None:
    """A user has root's image, with this node's signature."""
    image, theirs = folder / "image", folder / "theirs"
    with ImageJob(folder / "job", daemon.socket_path) as job:
        job.await_steps(20)
        refused = reply_of(job, BOB, "checkpoint", str(job.pid), str(folder / "mine"))[1]
        assert refused["error"]["code"] == "denied"
        job.operation("checkpoint", str(job.pid), str(image))
        job.process.wait(ENDS_WITHIN_S)
        refused = reply_of(job, BOB, "restore", str(image))[1]
        assert refused["error"]["code"] in {"denied", "not-found", "refused"}, refused
        shutil.copytree(image, theirs)
        handed_to(BOB, theirs)
        refused = reply_of(job, BOB, "restore", str(theirs))[1]
        assert "belongs to uid 0" in refused["error"]["message"], refused
        manifest = theirs / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"uid": 0', b'"uid": %d' % BOB))
        refused = reply_of(job, BOB, "restore", str(theirs))[1]
        assert refused["error"]["code"] in {"denied", "unavailable"}, refused
        assert job.pid not in population_of([job.pid]).start_ticks
        job.operation("restore", str(image))
        assert job.losses


@pytest.mark.parametrize("asker", [BOB, pytest.param(0, marks=pytest.mark.wide)], ids=["by its user", "by root"])
def test_a_users_job_goes_into_an_image_and_back_with_its_own_rights_and_every_loss_the_same(
    daemon: RunningDaemon, folder: Path, asker: int, expected: list[str]
) -> None:
    """CRIU has the job's user's rights for dump and restore, also if root requests it: no link of the user leads it to
    root's files.
    """
    missing = rights_missing(frozenset({BOB}), as_user=True, in_unit=False)
    if missing is not None:
        pytest.skip(missing.message)
    with ImageJob(folder / "job", daemon.socket_path, uid=BOB) as job:
        job.await_steps(20)
        images = folder / "images"
        images.mkdir(mode=0o700)
        os.chown(images, asker, asker)
        status, done = reply_of(job, asker, "checkpoint", str(job.pid), str(images / "one"))
        assert status == 0, done.get("operation", done).get("failure", done)
        assert job.process.wait(ENDS_WITHIN_S) == -9
        assert {os.stat(path).st_uid for path in (images / "one").rglob("*")} == {asker}
        losses, were = folder / "job" / "losses", folder / "job" / "were"
        losses.rename(were)
        (folder / "secret").write_text("x" * 4711)
        (folder / "secret").chmod(0o600)
        losses.symlink_to(folder / "secret")
        refused = reply_of(job, asker, "restore", "--dry-run", str(images / "one"))[1]["error"]
        assert "a link now leads to another file" in refused["message"]  # and not how large root's file is
        assert "4711" not in refused["message"]
        were.rename(losses)
        status, done = reply_of(job, asker, "restore", str(images / "one"))
        assert status == 0, done.get("operation", done).get("failure", done)
        assert job.output() == expected
        assert not list((folder / "state" / "images").iterdir())
