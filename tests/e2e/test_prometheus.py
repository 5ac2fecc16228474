"""The real Prometheus with our configuration, alerts and dashboard, on a simulated node with a job."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.e2e.test_moving import LONG, Job
from tests.looks import pause
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "contrib/prometheus"
DASHBOARD = ROOT / "contrib/grafana/hegmd.json"
UNPACKED = ROOT / "build/prometheus/bin"
GPUS = """
[[gpu]]
count = 2
memory = "8GiB"
temperature_celsius = 41
power_watts = 120
power_limit_watts = 700
utilisation_percent = 87
"""


def program(name: str) -> str:
    found = shutil.which(name, path=f"{UNPACKED}:{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"there is no {name}; tools/prometheus.sh fetches it, which takes a network")
    return found


def promtool(*words: str, text: str | None = None) -> str:
    argv = [program("promtool"), *words]
    done = subprocess.run(argv, cwd=SHIPPED, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_shipped_rules_and_each_alert_fires_for_its_cause() -> None:
    assert "9 rules found" in promtool("check", "rules", "hegmd.rules.yml")
    assert "valid" in promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "hegmd.rules.test.yml")


def free_ports(count: int) -> list[int]:
    """Ports that are free now. Each of these is handed to one program at once."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


class Node:
    """A simulated node whose metrics a Prometheus scrapes every second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics_port, self.port = free_ports(2)
        spec = folder / "gpus.toml"
        spec.write_text(GPUS)
        config = folder / "hegmd.toml"
        config.write_text(f"[metrics]\nport = {self.metrics_port}\n")
        self.daemon = RunningDaemon(folder, "--config", str(config), "--simulate", str(spec))

    def start(self) -> subprocess.Popen[bytes]:
        shutil.copy(SHIPPED / "hegmd.rules.yml", self.folder)
        text = (SHIPPED / "prometheus.yml").read_text()
        for shipped, here in (("localhost:9426", f"127.0.0.1:{self.metrics_port}"), ("15s", "1s")):
            assert shipped in text
            text = text.replace(shipped, here)
        (self.folder / "prometheus.yml").write_text(text)
        argv = [program("prometheus"), f"--config.file={self.folder / 'prometheus.yml'}"]
        argv += [f"--storage.tsdb.path={self.folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}"]
        return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def metrics(self) -> str:
        words = [sys.executable, "-m", "hegmctl", "metrics", "--socket", str(self.daemon.socket_path)]
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout

    def query(self, expression: str) -> list[Any]:
        """Return Prometheus' answer; empty while it starts, too."""
        argv = [program("promtool"), "query", "instant", "-o", "json", f"http://127.0.0.1:{self.port}", expression]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        answer: list[Any] = json.loads(done.stdout) if done.returncode == 0 else []
        return answer


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    with made.daemon, made.start() as prometheus:
        try:
            yield made
        finally:
            prometheus.terminate()


def panels() -> dict[str, list[str]]:
    """The queries of each panel, with what Grafana puts in the place of its variables."""
    dashboard = json.loads(DASHBOARD.read_text())
    found: dict[str, list[str]] = {}
    for panel in dashboard["panels"]:
        texts = [target["expr"] for target in panel["targets"]]
        found[panel["title"]] = [
            re.sub(r"\$instance\b", ".*", text.replace("$__rate_interval", "1m")) for text in texts
        ]
    return found


def test_every_panel_of_the_dashboard_has_data_from_a_node(node: Node) -> None:
    queries_by_panel = panels()
    assert len(queries_by_panel) > 15
    assert not [query for queries in queries_by_panel.values() for query in queries if "$" in query]
    with Job(node.daemon, [LONG, "0"], "--gpu", "gpu0") as job:
        job.await_gpu()
        assert job.operation("migrate", str(job.process.pid), "--to", "gpu1")["phase"] == "done"
        _until_all_have_data(node, queries_by_panel)
        promtool("check", "metrics", text=node.metrics())
        assert [each["value"][1] for each in node.query("hegmd_gpu_utilisation_ratio")] == ["0.87", "0.87"]
        assert node.query('ALERTS{alertstate="firing"}') == []


def _until_all_have_data(node: Node, queries_by_panel: dict[str, list[str]]) -> None:
    empty = dict(queries_by_panel)
    deadline = time.monotonic() + HANG_S
    while empty and time.monotonic() < deadline:
        empty = {title: queries for title, queries in empty.items() if not all(map(node.query, queries))}
        pause()
    assert not empty, "these have no data"
