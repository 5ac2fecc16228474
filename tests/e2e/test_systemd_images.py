"""Images under a real systemd: written for a user from a sandbox that cannot write to a disk or change its user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.real_criu import UNPACKED, criu_or_skip
from tests.e2e.systemd_jobs import hegmctl_reply, trains_at
from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import CONFIGURATION, SERVICE, drop_in
from tests.looks import COMMAND_MS, pause

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("packages")]

PROGRAM = Path(__file__).with_name("sandboxed") / "imaging.py"
IMAGE = "/home/outsider/image"


def test_a_users_image_is_written_by_a_unit_of_that_user_and_not_by_root(node: SystemdNode) -> None:
    shutil.copy(PROGRAM, node.root / "run/imaging.py")
    python = node.run("sh", "-c", "head -1 $(readlink -f /usr/bin/hegmd)").stdout.removeprefix("#!").split()
    # In the daemon's place, so that its sandbox is exactly the one that is shipped.
    drop_in(
        node, "Type=exec", "ExecStart=", f"ExecStart={' '.join(python)} /run/imaging.py outsider {IMAGE}", "Restart=no"
    )
    started = node.run("systemctl", "start", "--wait", SERVICE, check=False)
    seen_at = node.root / "var/lib/hegm/seen.json"
    assert seen_at.exists(), started.stderr + node.run("journalctl", "-n", "60", "-o", "cat").stdout
    result = json.loads(seen_at.read_text())
    seen_at.unlink()
    uid, gid = (int(node.run("id", option, "outsider").stdout) for option in ("-u", "-g"))
    assert result["same"] is True
    assert result["criu"] == ["core-1.img"]
    assert result["refused"] == "denied"
    assert result["unit"].startswith("hegm-image-")
    assert int(result["capabilities"], 16) == 0
    assert result["groups"].split() == [str(gid)]
    for path in ((image := node.root / IMAGE.lstrip("/")), *image.rglob("*")):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (uid, gid), path
    assert "hegm-image-" not in node.run("systemctl", "list-units", "--all", "--plain").stdout
    assert list((node.root / "var/lib/hegm/images").iterdir()) == []


# Counts its boundaries, on standard output and error alike, until it gets the command to end.
COUNTS = """
import os, sys, time
import hegm
at = 0
while not os.path.exists("/home/member/enough"):
    at += 1
    print(at, flush=True)
    print(at, file=sys.stderr, flush=True)
    hegm.boundary()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("user", ["root", "member"])
def test_the_output_of_a_job_in_a_unit_continues_in_the_file_that_a_restore_names(node: SystemdNode, user: str) -> None:
    """Before, the output went to the journal, through a socket that a restored job cannot have. CRIU is a unit; so is
    the restored job. Another user's job got no image: the sandbox does not let hegmd change the mode of CRIU's files.
    """
    criu = criu_or_skip().path
    if UNPACKED.exists():  # the clone may be below a folder that is another one inside, or hidden from the service
        criu = "/opt/criu/bin/criu"
        if not (node.root / "opt/criu").exists():
            shutil.copytree(UNPACKED.parents[1], node.root / "opt/criu", symlinks=True)
    (node.root / CONFIGURATION).write_text(f'[images]\ncriu = "{criu}"\n')
    (node.root / "home/member/counts.py").write_text(COUNTS)
    drop_in(node, "ExecStart=", "ExecStart=/usr/bin/hegmd --simulate 2x8GiB")
    node.run("systemctl", "start", SERVICE)
    try:
        run = ["hegmctl", "run", "--gpu", "gpu0", "--", "python3", "/home/member/counts.py"]
        node.run("systemd-run", "--quiet", f"--unit=counts-{user}", "--collect", f"--uid={user}", *run)
        pid, _ = trains_at(node)
        assert hegmctl_reply(node, "checkpoint", str(pid), "/root/image").get("operation", {}).get("phase") == "done"
        back = hegmctl_reply(node, "restore", "/root/image", "--stderr", "/root/said")
        assert back.get("operation", {}).get("phase") == "done", back
        # The output of a restored job, which another process copies, kept a second image from being written.
        assert hegmctl_reply(node, "checkpoint", str(pid), "/root/again").get("operation", {}).get("phase") == "done"
        back = hegmctl_reply(node, "restore", "/root/again", "--stderr", "/root/said")
        assert back.get("operation", {}).get("phase") == "done", back
        unit = node.run("ps", "-o", "unit=", "-p", str(pid)).stdout.strip()
        assert unit.startswith(f"hegm-job-{pid}-")
        assert node.show(unit, "ActiveState") == "active"
        (node.root / "home/member/enough").touch()
        while node.show(unit, "ActiveState") == "active":
            pause(COMMAND_MS)
        journal = node.run("journalctl", f"--unit=counts-{user}", "--output=cat").stdout.split()
        last = max(int(word) for word in journal if word.isdigit())
        output = [int(line) for line in (node.root / "root/said").read_text().split()]
        assert output
        # Both streams of a unit have one end, and with one of them named both lead there.
        assert output == [at for at in range(last + 1, output[-1] + 1) for _ in range(2)]
    finally:
        (node.root / "home/member/enough").unlink(missing_ok=True)
        (node.root / "root/said").unlink(missing_ok=True)
        node.run("systemctl", "stop", f"counts-{user}", "hegm-job-*", SERVICE, check=False)
        for image in ("image", "again"):
            shutil.rmtree(node.root / "root" / image, ignore_errors=True)
