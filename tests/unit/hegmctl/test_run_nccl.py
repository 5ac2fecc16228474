"""`hegmctl run` sets NCCL so that its ranks can be moved, and leaves alone what the user has set."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.patience import HANG_S
from tests.unit.hegmctl.fake_daemon import FakeDaemon
from tests.unit.hegmctl.running import NCCL, ROOT, command, environment, hegmctl


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "before", "expected"),
    [
        ((), {}, ["0", "0"]),
        (("--nvls", "keep"), {}, [None, "0"]),
        (("--nvls", "off"), {"NCCL_NVLS_ENABLE": "1"}, ["1", "0"]),
        ((), {"NCCL_CUMEM_HOST_ENABLE": "1"}, ["0", "1"]),
    ],
)
def test_nccl_is_set_so_that_its_ranks_can_be_moved_unless_the_user_has_set_it(
    daemon: FakeDaemon, options: tuple[str, ...], before: dict[str, str], expected: list[str | None]
) -> None:
    probe = f"import json, os; print(json.dumps([os.environ.get(name) for name in {NCCL!r}]))"
    ran = subprocess.run(
        command("run", *options, "--", sys.executable, "-I", "-S", "-c", probe),
        env={**environment(daemon.path), **before},
        cwd=ROOT,
        timeout=HANG_S,
        check=True,
        stdout=subprocess.PIPE,
    )
    assert json.loads(ran.stdout) == expected


def test_an_unknown_nvls_setting_is_refused(daemon: FakeDaemon) -> None:
    ran = hegmctl("run", "--nvls", "maybe", "--", "true", socket=daemon.path)
    assert ran.returncode == 2
    assert "write one of: off, keep" in ran.stderr
