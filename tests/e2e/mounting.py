"""Mount namespaces in which a test may mount what it likes, where this machine lets it."""

from __future__ import annotations

import os
import shutil
import subprocess

NAMESPACE = ("unshare", "--mount", "--propagation", "private")


def why_no_mounts() -> str | None:
    """Why this machine cannot do it, if it cannot."""
    if os.geteuid():
        return "mounting takes root"
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return "util-linux has no unshare or nsenter here"
    tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"nothing can be mounted here: {tried.stderr.decode().strip()}"
