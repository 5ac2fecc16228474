"""Modules that a launcher of ranks must not load, in a real Python with the agent and a stub of PyTorch on its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

INJECT = Path(__file__).parents[3] / "hegmd" / "agent" / "inject"

STORE = """
class TCPStore:
    def __init__(self, host_name, port, world_size=None, is_master=False, timeout=300, wait_for_workers=True,
                 multi_tenant=False, master_listen_fd=None, use_libuv=True):
        '''__init__(host_name: str, port: int, ..., use_libuv: bool = True)'''
        self.said = [host_name, port, is_master, use_libuv]
"""
LAUNCHER = """
import json, sys
import torch.distributed as before
made = before.TCPStore
import torch.distributed.elastic.rendezvous.registry
from torch.distributed import TCPStore
print(json.dumps([
    TCPStore("h", 1, is_master=True).said,
    TCPStore("h", 1, use_libuv=True).said,
    TCPStore("h", 1, 2, False, 300, True, False, None, True).said,
    isinstance(TCPStore("h", 1), made),
]))
"""
CUDA = """
asked = []
class Properties:
    pci_bus_id, name, uuid = 27, "a GPU", b"not plain"
def is_initialized():
    return bool(asked)
def device_count():
    asked.append("device_count")
    return 3
def get_device_properties(gpu):
    asked.append("get_device_properties")
    if gpu > 2:
        raise ValueError(gpu)
    return Properties()
"""
COUNTING = """
import json
import torch.cuda
import torch.distributed.elastic.rendezvous.registry
found = [torch.cuda.device_count(), vars(torch.cuda.get_device_properties(0)), list(torch.cuda.asked)]
try:
    torch.cuda.get_device_properties(3)
except ValueError:
    found.append(list(torch.cuda.asked))
print(json.dumps([*found, torch.cuda.device_count(), torch.cuda.asked]))
"""


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    """A folder with as much of PyTorch as a launcher imports here."""
    folder = tmp_path / "torch" / "distributed" / "elastic" / "rendezvous"
    folder.mkdir(parents=True)
    for package in ("torch", "torch/distributed/elastic", "torch/distributed/elastic/rendezvous"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "torch" / "distributed" / "__init__.py").write_text(STORE)
    (folder / "registry.py").touch()
    (tmp_path / "torch" / "cuda").mkdir()
    (tmp_path / "torch" / "cuda" / "__init__.py").write_text(CUDA)
    return tmp_path


def printed(framework: Path, program: str = LAUNCHER, /, **environ: str) -> list[object]:
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{INJECT}:{framework}", **environ}
    ran = subprocess.run([sys.executable, "-c", program], env=plain, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: list[object] = json.loads(ran.stdout)
    return found


def test_a_launcher_had_io_uring_whatever_was_chosen(framework: Path) -> None:
    """torchrun's stores take no notice of the variable; CRIU refused every job of its."""
    assert printed(framework, USE_LIBUV="0") == [
        ["h", 1, True, False],
        ["h", 1, False, True],
        ["h", 1, False, True],
        True,
    ]


@pytest.mark.parametrize("environ", [{}, {"USE_LIBUV": "1"}])
def test_an_explicit_choice_of_libuv_is_kept(framework: Path, environ: dict[str, str]) -> None:
    assert printed(framework, **environ)[0] == ["h", 1, True, True]


def test_a_pytorch_without_libuv_is_left_alone(framework: Path) -> None:
    old = STORE.replace("use_libuv", "use_other")
    (framework / "torch" / "distributed" / "__init__.py").write_text(old)
    text = LAUNCHER.replace("use_libuv=True", "use_other=True")
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{INJECT}:{framework}", "USE_LIBUV": "0"}
    ran = subprocess.run([sys.executable, "-c", text], env=plain, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)[0] == ["h", 1, True, True]


def test_a_launcher_counts_its_gpus_in_child_processes_and_opens_no_device(framework: Path) -> None:
    """CRIU cannot dump a launcher that has the driver's devices open. A child asks the driver itself."""
    properties = {"pci_bus_id": 27, "name": "a GPU"}
    failed = ["get_device_properties"]
    assert printed(framework, COUNTING) == [3, properties, [], failed, 3, [*failed, "device_count"]]
