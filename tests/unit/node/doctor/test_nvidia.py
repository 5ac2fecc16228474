"""Checks of NVIDIA's driver over nodes made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.node.doctor import nvidia
from hegmd.node.doctor.nvidia import CHECKPOINT_CALLS
from tests.unit.node.doctor.node import FileNode, gpu, shared_library, vendor

LIBRARIES = "usr/lib/x86_64-linux-gnu"


def install_libcuda(node: FileNode, version: str, defines: tuple[str, ...] = CHECKPOINT_CALLS) -> None:
    node.write(f"{LIBRARIES}/libcuda.so.{version}", shared_library(defines=defines))
    node.link(f"{LIBRARIES}/libcuda.so.1", f"libcuda.so.{version}")


# -- does it apply ---------------------------------------------------------------------------------------------------


def test_without_a_card_there_is_nothing_to_check(node: FileNode) -> None:
    node.pci("0000:00:02.0", 0x8086, 0x030000, "i915")
    node.pci("0000:00:1f.0", 0x10DE, 0x0C0330, None)  # the USB part of an NVIDIA card is no GPU
    assert nvidia.absent(node.facts()) == "there is no NVIDIA GPU on this node"


def test_a_card_without_a_driver_is_to_be_checked(node: FileNode) -> None:
    node.pci("0000:3b:00.0", 0x10DE, 0x030200, None)
    assert nvidia.absent(node.facts()) is None


def test_simulation_and_configuration_take_it_out(node: FileNode) -> None:
    node.nvidia_module("580.159.04")
    assert nvidia.absent(node.facts()) is None
    assert nvidia.absent(node.facts(simulated=True)) == "the GPUs are simulated"
    off = nvidia.absent(node.facts(vendors=(vendor(state="off"),)))
    assert off == "NVIDIA is switched off in the configuration"


# -- driver ----------------------------------------------------------------------------------------------------------


def test_a_driver_that_answers(node: FileNode) -> None:
    node.nvidia_module("580.159.04")
    node.pci("0000:01:00.0", 0x10DE, 0x030200, "nvidia")
    found = nvidia.driver(node.facts(vendors=(vendor(),), gpus=(gpu(0), gpu(1))))
    assert (found.status, found.summary) == ("ok", "driver 580.159.04 is loaded and answers for 2 GPUs")


@pytest.mark.parametrize(
    ("driver", "status", "words", "fix"),
    [
        (None, "fail", "1 NVIDIA GPU on the PCI bus, but the NVIDIA driver is not loaded", "sudo modprobe nvidia"),
        ("nouveau", "fail", "driven by nouveau", "install NVIDIA driver 580"),
        ("vfio-pci", "skip", "passed through to virtual machines", None),
    ],
)
def test_an_unloaded_driver(node: FileNode, driver: str | None, status: str, words: str, fix: str | None) -> None:
    node.pci("0000:3b:00.0", 0x10DE, 0x030200, driver)
    found = nvidia.driver(node.facts(vendors=(vendor(state="absent"),)))
    assert found.status == status
    assert words in found.summary
    assert (found.fix is None) if fix is None else (found.fix is not None and fix in found.fix)


def test_a_card_that_the_driver_did_not_take(node: FileNode) -> None:
    node.nvidia_module("580.159.04")
    node.pci("0000:01:00.0", 0x10DE, 0x030200, "nvidia")
    node.pci("0000:3b:00.0", 0x10DE, 0x030200, None)
    found = nvidia.driver(node.facts(vendors=(vendor(),), gpus=(gpu(0),)))
    assert found.status == "warn"
    assert "0000:3b:00.0" in found.summary
    assert found.fix == "sudo dmesg | grep -i -e NVRM -e 0000:3b:00.0"


@pytest.mark.parametrize("state", ["failed", "stale"])
def test_a_library_that_does_not_answer_is_reported_with_the_reason(node: FileNode, state: str) -> None:
    node.nvidia_module("580.159.04")
    ill = vendor(state=state, message="Driver/library version mismatch", hint="sudo reboot")
    found = nvidia.driver(node.facts(vendors=(ill,)))
    assert (found.status, found.fix) == ("fail", "sudo reboot")
    assert found.summary == "driver 580.159.04: Driver/library version mismatch"


def test_a_driver_without_its_management_library(node: FileNode) -> None:
    node.nvidia_module("580.159.04")
    missing = vendor(state="absent", message="libnvidia-ml.so.1 is not installed", hint="install it")
    found = nvidia.driver(node.facts(vendors=(missing,)))
    assert (found.status, found.fix) == ("fail", "install it")
    assert "but libnvidia-ml.so.1 is not installed" in found.summary


def test_nvml_suffices_if_proc_has_no_facts(node: FileNode) -> None:
    found = nvidia.driver(node.facts(vendors=(vendor(driver_version="581.42"),), gpus=(gpu(0),)))
    assert (found.status, found.summary) == ("ok", "driver 581.42 is loaded and answers for 1 GPU")


# -- library and calls -----------------------------------------------------------------------------------------------


def test_library_and_module_of_one_version(node: FileNode) -> None:
    node.nvidia_module("580.159.04")
    install_libcuda(node, "580.159.04")
    assert nvidia.library(node.facts()).summary == "libcuda and the loaded driver are both 580.159.04"


def test_an_upgrade_without_a_reboot(node: FileNode) -> None:
    node.nvidia_module("570.133.20")
    install_libcuda(node, "580.159.04")
    found = nvidia.library(node.facts())
    assert found.status == "fail"
    assert "libcuda is 580.159.04, but the loaded driver is 570.133.20" in found.summary
    assert found.fix is not None
    assert found.fix.startswith("reboot")


def test_no_libcuda(node: FileNode) -> None:
    node.nvidia_module("580.159.04")
    assert nvidia.library(node.facts()).status == "fail"
    assert nvidia.checkpoint(node.facts()).status == "fail"


def test_a_library_without_a_version_in_its_name(node: FileNode) -> None:
    node.nvidia_module("580.159.04")
    node.write("usr/lib/wsl/lib/libcuda.so.1", shared_library(defines=CHECKPOINT_CALLS))
    assert nvidia.library(node.facts()).status == "ok"


def test_the_loaders_configuration_is_followed(node: FileNode) -> None:
    node.write("etc/ld.so.conf", "# first\ninclude /etc/ld.so.conf.d/*.conf\n")
    node.write("etc/ld.so.conf.d/nvidia.conf", "/opt/driver/lib  # where it is here\n")
    node.write("opt/driver/lib/libcuda.so.580.159.04", shared_library(defines=CHECKPOINT_CALLS))
    node.link("opt/driver/lib/libcuda.so.1", "libcuda.so.580.159.04")
    node.nvidia_module("580.159.04")
    assert nvidia.library(node.facts()).status == "ok"


@pytest.mark.parametrize(
    ("version", "defines", "status", "words"),
    [
        ("580.159.04", CHECKPOINT_CALLS, "ok", "has the checkpoint calls and restores onto other GPUs"),
        ("595.10", CHECKPOINT_CALLS, "ok", "libcuda 595.10 has the checkpoint calls"),
        ("575.57.08", CHECKPOINT_CALLS, "warn", "can suspend and resume, but not restore onto another GPU"),
        ("550.90.07", (), "fail", "libcuda 550.90.07 has no checkpoint calls; driver 570 brought them"),
        ("570.86.15", CHECKPOINT_CALLS[:-1], "fail", "has no cuCheckpointProcessUnlock"),
    ],
)
def test_the_checkpoint_calls(node: FileNode, version: str, defines: tuple[str, ...], status: str, words: str) -> None:
    install_libcuda(node, version, defines)
    found = nvidia.checkpoint(node.facts())
    assert found.status == status
    assert words in found.summary
    assert (found.fix is None) == (status == "ok")


def test_a_libcuda_that_is_not_a_library(node: FileNode) -> None:
    node.write(f"{LIBRARIES}/libcuda.so.1", "not a library")
    found = nvidia.checkpoint(node.facts())
    assert found.status == "fail"
    assert "is not a 64-bit" in found.summary


# -- nodes -----------------------------------------------------------------------------------------------------------


def make_nodes(node: FileNode, *names: str, mode: int = 0o666) -> None:
    for name in names:
        node.write(f"dev/{name}").chmod(mode)


def test_device_nodes_by_the_cards_own_minors(node: FileNode) -> None:
    node.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model:\t H200\nDevice Minor: \t 3\n")
    node.write("proc/driver/nvidia/gpus/0000:99:00.0/information", "Device Minor: \t 7\n")  # not given to us
    make_nodes(node, "nvidiactl", "nvidia-uvm", "nvidia3")
    facts = node.facts(gpus=(gpu(0),))
    assert nvidia.nodes(facts).summary == "3 device nodes in /dev, open to this user"
    (node.root / "dev/nvidia3").unlink()
    found = nvidia.nodes(facts)
    assert (found.status, found.summary) == ("fail", "missing in /dev: nvidia3")
    assert found.fix == "sudo nvidia-modprobe -u -c 3"


@pytest.mark.parametrize(("group", "words"), [(44, "usermod -aG video"), (0, "NVreg_DeviceFileMode=0666")])
def test_device_nodes_that_are_closed_to_the_user(node: FileNode, group: int, words: str) -> None:
    make_nodes(node, "nvidiactl", "nvidia-uvm", mode=0o660)
    facts = node.facts(uid=54321, gids=frozenset({54321}), group_name=lambda _: {44: "video", 0: "root"}[group])
    found = nvidia.nodes(facts)
    assert found.status == "fail"
    assert found.summary == "closed to this user: /dev/nvidiactl, nvidia-uvm"
    assert found.fix is not None
    assert words in found.fix


def test_device_nodes_that_are_open_through_a_group(node: FileNode) -> None:
    make_nodes(node, "nvidiactl", "nvidia-uvm", mode=0o660)
    owner = (node.root / "dev/nvidiactl").stat().st_gid
    assert nvidia.nodes(node.facts(uid=54321, gids=frozenset({owner}))).status == "ok"


# -- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "field", "bad", "fix"),
    [
        (nvidia.persistence, "persistence", False, "nvidia-persistenced"),
        (nvidia.mig, "mig", True, "sudo nvidia-smi -i 1 -mig 0"),
        (nvidia.mps, "mps", True, "echo quit | sudo nvidia-cuda-mps-control"),
    ],
)
def test_modes_of_the_cards(node: FileNode, check: object, field: str, bad: bool, fix: str) -> None:
    assert callable(check)
    good = gpu(0, **{field: not bad})
    assert check(node.facts(gpus=(good,))).status == "ok"
    assert check(node.facts(gpus=(gpu(0, **{field: None}),))).status == "skip"
    found = check(node.facts(gpus=(good, gpu(1, **{field: bad}))))
    assert found.status == "warn"
    assert "gpu1" in found.summary
    assert "gpu0" not in found.summary
    assert fix in found.fix


def test_switches_want_their_manager(node: FileNode, tmp_path: Path) -> None:
    facts = node.facts()
    assert nvidia.fabric(facts).status == "skip"
    node.pci("0000:c3:00.0", 0x10DE, 0x068000, None)
    node.pci("0000:c4:00.0", 0x10DE, 0x068000, None)
    node.write("proc/17/comm", "bash\n")
    assert nvidia.fabric(facts).fix == "sudo systemctl enable --now nvidia-fabricmanager"
    node.write("proc/1234/comm", "nv-fabricmanage\n")
    assert nvidia.fabric(facts).summary == "2 NVSwitches, and the fabric manager is running"
