"""Checks of AMD's driver over nodes made of files."""

from __future__ import annotations

import pytest

from hegmd.node.doctor import amd
from tests.unit.node.doctor.node import FileNode, gpu, vendor


def card(index: int = 0) -> object:
    return gpu(index, vendor="amd", chip="gfx942")


def test_it_applies_where_there_is_a_card_or_its_driver(node: FileNode) -> None:
    assert amd.absent(node.facts()) == "there is no AMD GPU on this node"
    assert amd.absent(node.facts(gpus=(card(),))) is None
    node.pci("0000:c1:00.0", 0x1002, 0x120000, None)
    assert amd.absent(node.facts()) is None
    assert amd.absent(node.facts(simulated=True)) == "the GPUs are simulated"
    assert amd.absent(node.facts(vendors=(vendor("amd", state="off"),))) == "AMD is switched off in the configuration"


def test_a_driver_without_a_card_on_the_bus(node: FileNode) -> None:
    (node.root / "sys/class/kfd").mkdir(parents=True)
    assert amd.absent(node.facts()) is None


def test_an_unloaded_driver(node: FileNode) -> None:
    node.pci("0000:c1:00.0", 0x1002, 0x120000, None)
    found = amd.driver(node.facts())
    assert (found.status, found.fix) == ("fail", "sudo modprobe amdgpu")
    assert found.summary == "1 AMD GPU on the PCI bus, but amdgpu is not loaded"


def test_gpus_passed_to_virtual_machines_are_not_a_fault(node: FileNode) -> None:
    node.pci("0000:c1:00.0", 0x1002, 0x120000, "vfio-pci")
    assert amd.driver(node.facts()).status == "skip"


def test_a_loaded_driver_and_its_version(node: FileNode) -> None:
    node.pci("0000:c1:00.0", 0x1002, 0x120000, "amdgpu")
    node.write("sys/module/amdgpu/refcnt", "3\n")
    node.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
    assert amd.driver(node.facts()).summary == "amdgpu of kernel 6.8.0-45-generic is loaded"
    node.write("sys/module/amdgpu/version", "6.12.12\n")
    assert amd.driver(node.facts()).summary == "amdgpu 6.12.12 is loaded"
    node.pci("0000:c2:00.0", 0x1002, 0x120000, None)
    found = amd.driver(node.facts())
    assert found.status == "warn"
    assert "0000:c2:00.0" in found.summary


@pytest.mark.parametrize(
    ("record", "status", "words"),
    [
        (vendor("amd", library_version="25.4"), "ok", "AMD SMI 25.4 answers for 1 GPU"),
        (vendor("amd"), "warn", "AMD SMI is missing: /sys/class/kfd has fewer facts about 1 GPU"),
        (
            vendor("amd", state="failed", message="AMDSMI_STATUS_DRIVER_NOT_LOADED", hint="mend it"),
            "fail",
            "NOT_LOADED",
        ),
        (None, "skip", "no AMD provider"),
    ],
)
def test_the_management_library(node: FileNode, record: object, status: str, words: str) -> None:
    found = amd.library(node.facts(vendors=() if record is None else (record,), gpus=(card(),)))
    assert found.status == status
    assert words in found.summary


def test_device_nodes(node: FileNode) -> None:
    facts = node.facts(uid=54321, gids=frozenset({54321}), group_name=lambda _: "render")
    assert amd.nodes(facts).summary == "missing in /dev: kfd, dri/renderD*"
    node.write("dev/dri/renderD128").chmod(0o660)
    assert amd.nodes(facts).summary == "missing in /dev: kfd"
    node.write("dev/kfd").chmod(0o666)
    found = amd.nodes(facts)
    assert (found.status, found.summary) == ("fail", "closed to this user: /dev/dri/renderD128")
    assert found.fix == "sudo usermod -aG render $USER, and log in again"
    (node.root / "dev/dri/renderD128").chmod(0o666)
    assert amd.nodes(facts).status == "ok"
