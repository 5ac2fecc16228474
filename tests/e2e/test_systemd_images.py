"""Images under a real systemd: written for a user out of a sandbox that can write to no disk and become nobody."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import SERVICE, drop_in

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PROGRAM = Path(__file__).with_name("sandboxed") / "imaging.py"
IMAGE = "/home/outsider/image"


def test_a_users_image_is_written_by_a_unit_of_theirs_and_nothing_of_it_by_root(node: SystemdNode) -> None:
    shutil.copy(PROGRAM, node.root / "run/imaging.py")
    python = node.run("sh", "-c", "head -1 $(readlink -f /usr/bin/hegmd)").stdout.removeprefix("#!").split()
    # In the daemon's place, so that its sandbox is exactly the one that is shipped.
    drop_in(
        node, "Type=exec", "ExecStart=", f"ExecStart={' '.join(python)} /run/imaging.py outsider {IMAGE}", "Restart=no"
    )
    started = node.run("systemctl", "start", "--wait", SERVICE, check=False)
    seen_at = node.root / "var/lib/hegm/seen.json"
    assert seen_at.exists(), started.stderr + node.run("journalctl", "-n", "60", "-o", "cat").stdout
    seen = json.loads(seen_at.read_text())
    seen_at.unlink()
    uid, gid = (int(node.run("id", option, "outsider").stdout) for option in ("-u", "-g"))
    assert seen["same"] is True
    assert seen["criu"] == ["core-1.img"]
    assert seen["refused"] == "denied"
    assert seen["unit"].startswith("hegm-image-")
    assert int(seen["capabilities"], 16) == 0
    assert seen["groups"].split() == [str(gid)]
    for path in ((image := node.root / IMAGE.lstrip("/")), *image.rglob("*")):
        assert (path.lstat().st_uid, path.lstat().st_gid) == (uid, gid), path
    assert "hegm-image-" not in node.run("systemctl", "list-units", "--all", "--plain").stdout
    assert list((node.root / "var/lib/hegm/images").iterdir()) == []
