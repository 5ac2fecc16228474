"""The service on a machine of the tests: its names, and the few things that every test of it does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.e2e.systemd_node import SystemdNode

SERVICE = "hegmd.service"
SOCKET = "hegmd.socket"
CONFIGURATION = "etc/hegm/hegmd.toml"
DROP_IN = "run/systemd/system/hegmd.service.d/test.conf"


def install(node: SystemdNode, package: Path) -> None:
    """Install the package there, over any version that is installed."""
    shutil.copy(package, node.root / "root")
    node.run("dpkg", "--install", f"/root/{package.name}")


def drop_in(node: SystemdNode, *lines: str) -> None:
    """Change lines of the service, until the end of the test."""
    path = node.root / DROP_IN
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[Service]\n" + "\n".join(lines) + "\n")
    node.run("systemctl", "daemon-reload")


def as_installed(node: SystemdNode, configuration: bytes) -> None:
    """Stop the daemon, and take back what a test did to its unit and configuration."""
    node.run("systemctl", "kill", "--kill-who=all", "--signal=CONT", SERVICE, check=False)
    node.run("systemctl", "stop", SERVICE)
    node.run("systemctl", "reset-failed", SERVICE, check=False)
    (node.root / CONFIGURATION).write_bytes(configuration)
    if (node.root / DROP_IN).exists():
        (node.root / DROP_IN).unlink()
        node.run("systemctl", "daemon-reload")


def main_pid(node: SystemdNode) -> int:
    """The daemon's pid inside; 0 when it does not run."""
    return int(node.show(SERVICE, "MainPID"))


def ask(node: SystemdNode, *verb: str, user: str | None = None) -> Any:
    """Return hegmctl's reply, as JSON."""
    return json.loads(node.run("hegmctl", "--json", *verb, user=user).stdout)


def setting(node: SystemdNode, key: str) -> object:
    """A setting that is in force in the daemon."""
    (value,) = [each["value"] for each in ask(node, "config")["settings"] if each["key"] == key]
    return value
