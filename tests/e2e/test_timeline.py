"""The timeline of an operation that an earlier daemon carried out, as a page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.driven import ROOT, DrivenNode, Watched
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e]


def hegmctl(node: DrivenNode, *words: str) -> str:
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "HEGM_SOCKET": str(node.daemon.socket_path)}
    argv = [sys.executable, "-m", "hegmctl", *words]
    done = subprocess.run(argv, env={**os.environ, **paths}, capture_output=True, text=True, check=True)
    return done.stdout


def in_browser(page: Path, *options: str) -> str:
    """Return the browser's DOM of a page. It has no network: every name it asks for does not exist."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium; on Debian: apt-get install chromium")
    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
    argv += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1160,900", *options, page.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=HANG_S)
    return done.stdout


def test_the_timeline_of_a_killed_daemon_is_drawn_by_the_next_one_and_opens_in_a_browser(tmp_path: Path) -> None:
    node = DrivenNode(tmp_path)
    with node, node.agented(0) as program:
        watched = Watched(program)
        with node.connect() as connection:
            connection.migrate(watched.pid, to="gpu1", carrier="host")
        before = json.loads(hegmctl(node, "op", "1", "--json"))
        assert [step for line in before["story"] for step in line["timings"]]
        node.daemon.stop(signal.SIGKILL)
        node.daemon.start()
        assert hegmctl(node, "ops").splitlines()[1].split()[:3] == ["1", "migrate", "done"]
        assert json.loads(hegmctl(node, "op", "1", "--json"))["story"] == before["story"]
        assert "driver" in hegmctl(node, "op", "1", "--timeline")
        page = tmp_path / "move.html"
        hegmctl(node, "op", "1", "--timeline", "--html", str(page))
    picture = tmp_path / "move.png"
    shown = in_browser(page, "--dump-dom", f"--screenshot={picture}")
    assert len(re.findall(r"<g><title>(?:job|agent|daemon|helper|driver|copies): ", shown)) > 10
    assert "driver: checkpoint (process" in shown
    assert "copies: out (process" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
