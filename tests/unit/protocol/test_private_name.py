"""The protocol can be loaded from its folder under another name, next to nothing else of hegmd: as workers will."""

import subprocess
import sys
from pathlib import Path

from tests.patience import HANG_S

REPO = Path(__file__).parents[3]

SCRIPT = f"""
import importlib, sys, types
package = types.ModuleType("_private")
package.__path__ = [{str(REPO / "hegmd")!r}]
sys.modules["_private"] = package
connection = importlib.import_module("_private.protocol.connection")
messages = importlib.import_module("_private.protocol.messages")
client = connection.ClientConnection()
client.request(messages.Hello(versions=(2,), name="worker", role="agent"))
assert "hegmd" not in sys.modules, "it reached for an installed hegmd"
"""


def test_the_protocol_loads_under_a_private_name(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, check=True, timeout=HANG_S)
