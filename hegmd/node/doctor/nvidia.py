"""Checks of NVIDIA's driver: loaded, in one version, with the calls that migration needs, and reachable.

libcuda is read as a file, never loaded. The GPUs' records carry what NVML reports. Driver 570 introduced process
checkpoints, driver 580 restores on another GPU.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hegmd.node.doctor import pci
from hegmd.node.doctor.facts import (
    CheckResult,
    NodeFacts,
    clipped,
    counted,
    fail,
    listed,
    ok,
    skip,
    version_numbers,
    warn,
)
from hegmd.node.doctor.rights import READ_WRITE, may_use
from hegmd.system import elf

CHECKPOINT_DRIVER = 570
MOVE_DRIVER = 580

CHECKPOINT_CALLS = (
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessGetRestoreThreadId",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
)

_INSTALL = f"install NVIDIA driver {MOVE_DRIVER} or newer and reboot"
_VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")


def absent(facts: NodeFacts) -> str | None:
    """Return why there is nothing of NVIDIA to check, or None."""
    if facts.simulated:
        return "the GPUs are simulated"
    vendor = facts.vendor("nvidia")
    if vendor is not None and vendor.state == "off":
        return "NVIDIA is switched off in the configuration"
    if facts.gpus_of("nvidia") or pci.devices_of(facts, pci.NVIDIA) or module_version(facts) is not None:
        return None
    return "there is no NVIDIA GPU on this node"


def module_version(facts: NodeFacts) -> str | None:
    text = facts.read("proc/driver/nvidia/version")
    found = None if text is None else _VERSION.search(text)
    return None if found is None else found[1]


def driver(facts: NodeFacts) -> CheckResult:
    """The kernel module is loaded and drives the GPUs, and NVML answers for them."""
    vendor = facts.vendor("nvidia")
    # WSL and some sandboxes have no /proc/driver/nvidia, but NVML works.
    version = module_version(facts) or (None if vendor is None else vendor.driver_version)
    devices = pci.devices_of(facts, pci.NVIDIA)
    if version is None:
        return _not_loaded(devices)
    if vendor is None or vendor.state == "absent":
        reason = vendor.message if vendor is not None and vendor.message else "NVML finds no GPU"
        hint = vendor.hint if vendor is not None and vendor.hint else "nvidia-smi"
        return fail(f"driver {version} is loaded, but {reason}", hint)
    if vendor.state != "ok":
        return fail(f"driver {version}: {vendor.message or vendor.state}", vendor.hint or "nvidia-smi")
    unbound = [device.address for device in devices if device.driver is None]
    if unbound:
        return warn(
            f"driver {version} is loaded, but does not drive {listed(unbound)}",
            f"sudo dmesg | grep -i -e NVRM -e {unbound[0]}",
        )
    return ok(f"driver {version} is loaded and answers for {counted(len(facts.gpus_of('nvidia')), 'GPU')}")


def _not_loaded(devices: tuple[pci.PciDevice, ...]) -> CheckResult:
    drivers = {device.driver for device in devices}
    number = counted(len(devices), "NVIDIA GPU")
    if drivers == {"vfio-pci"}:
        return skip(f"{number} passed through to virtual machines (vfio-pci)")
    if "nouveau" in drivers:
        return fail(f"{number} driven by nouveau, which hegmd cannot use", _INSTALL)
    return fail(f"{number} on the PCI bus, but the NVIDIA driver is not loaded", f"sudo modprobe nvidia, or {_INSTALL}")


def library(facts: NodeFacts) -> CheckResult:
    """libcuda is installed in the version of the loaded module."""
    module = module_version(facts)
    path = find_library(facts, "libcuda.so.1")
    if path is None:
        fix = f"install the CUDA driver library (libcuda.so.1) of driver {module or MOVE_DRIVER}"
        return fail("libcuda.so.1 is not in the search path of the loader", fix)
    version = _library_version(path)
    if version is None or module is None:
        return ok(f"{path.name} is installed in {path.parent}; its version is unknown")
    if version != module:
        return fail(
            f"libcuda is {version}, but the loaded driver is {module}: every CUDA program fails",
            "reboot, or with no process on any GPU: "
            "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia; sudo modprobe nvidia nvidia_uvm",
        )
    return ok(f"libcuda and the loaded driver are both {version}")


def _library_version(path: Path) -> str | None:
    found = re.search(r"\.so\.(\d{3,}\.\d+(?:\.\d+)?)$", os.path.realpath(path))
    return None if found is None else found[1]


def checkpoint(facts: NodeFacts) -> CheckResult:
    """The driver can checkpoint processes and restore them on another GPU."""
    path = find_library(facts, "libcuda.so.1")
    if path is None:
        return fail(
            "without libcuda.so.1 there are no checkpoint calls", "install libcuda.so.1: see the check nvidia.library"
        )
    try:
        found = elf.defined_functions(path, CHECKPOINT_CALLS)
    except elf.NotElf as error:
        return fail(f"{clipped(str(path), 45)} cannot be read: {error}", _INSTALL)
    missing = [name for name in CHECKPOINT_CALLS if name not in found]
    version = _library_version(path) or module_version(facts)
    shown = "" if version is None else f" {version}"
    if missing:
        what = "no checkpoint calls" if len(missing) == len(CHECKPOINT_CALLS) else f"no {listed(missing, 1)}"
        return fail(f"libcuda{shown} has {what}; driver {CHECKPOINT_DRIVER} brought them", _INSTALL)
    if version is None:
        return ok("libcuda has the checkpoint calls; its version is unknown")
    if version_numbers(version) < (MOVE_DRIVER,):
        return warn(f"libcuda{shown} can suspend and resume, but not restore onto another GPU", _INSTALL)
    return ok(f"libcuda{shown} has the checkpoint calls and restores onto other GPUs")


def nodes(facts: NodeFacts) -> CheckResult:
    """This user can open the device nodes of CUDA."""
    minors = _minors(facts)
    required = ["nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in minors)]
    missing = [name for name in required if not facts.at(f"dev/{name}").exists()]
    if missing:
        nodes_too = "".join(f" -c {minor}" for minor in minors) or " -c 0"
        return fail(f"missing in /dev: {listed(missing)}", f"sudo nvidia-modprobe -u{nodes_too}")
    closed = [name for name in required if not may_use(facts, facts.at(f"dev/{name}"), READ_WRITE)]
    if closed:
        gid = facts.at(f"dev/{closed[0]}").stat().st_gid
        group = facts.group_name(gid)
        fix = (
            f"sudo usermod -aG {group} $USER, and log in again"
            if group not in (None, "root")
            else "echo options nvidia NVreg_DeviceFileMode=0666 | sudo tee /etc/modprobe.d/nvidia-nodes.conf; reboot"
        )
        return fail(f"closed to this user: /dev/{listed(closed)}", fix)
    return ok(f"{counted(len(required), 'device node')} in /dev, open to this user")


def _minors(facts: NodeFacts) -> list[int]:
    # Only the listed GPUs: in a container, /proc/driver/nvidia may list cards that the container cannot use.
    minors: list[int] = []
    for gpu in facts.gpus_of("nvidia"):
        text = facts.read(f"proc/driver/nvidia/gpus/{gpu.pci_address}/information") if gpu.pci_address else None
        found = None if text is None else re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        if found is not None:
            minors.append(int(found[1]))
    return minors


def persistence(facts: NodeFacts) -> CheckResult:
    """The driver stays loaded when no process uses a GPU."""
    known = [gpu for gpu in facts.gpus_of("nvidia") if gpu.persistence is not None]
    if not known:
        return skip("the driver does not report it")
    off = [gpu.id for gpu in known if not gpu.persistence]
    if off:
        return warn(
            f"off on {listed(off)}: the first process on an idle GPU waits for its initialisation",
            "sudo systemctl enable --now nvidia-persistenced, or until the next boot: sudo nvidia-smi -pm 1",
        )
    return ok(f"on for {counted(len(known), 'GPU')}")


def mig(facts: NodeFacts) -> CheckResult:
    """No GPU has MIG enabled."""
    known = [gpu for gpu in facts.gpus_of("nvidia") if gpu.mig is not None]
    if not known:
        return skip("no GPU here has MIG, or the driver does not report it")
    cut = [gpu for gpu in known if gpu.mig]
    if cut:
        indexes = ",".join(str(gpu.index) for gpu in cut)
        return warn(
            f"on for {listed(gpu.id for gpu in cut)}: the driver does not checkpoint processes there",
            f"when idle: sudo nvidia-smi -i {indexes} -mig 0",
        )
    return ok(f"off for {counted(len(known), 'GPU')}")


def mps(facts: NodeFacts) -> CheckResult:
    """No process uses MPS."""
    known = [gpu for gpu in facts.gpus_of("nvidia") if gpu.mps is not None]
    if not known:
        return skip("the driver does not report it")
    shared = [gpu.id for gpu in known if gpu.mps]
    if shared:
        return warn(
            f"in use on {listed(shared)}: the driver does not checkpoint its clients",
            "when its jobs have ended: echo quit | sudo nvidia-cuda-mps-control",
        )
    return ok(f"not in use on {counted(len(known), 'GPU')}")


def fabric(facts: NodeFacts) -> CheckResult:
    """On a node with NVSwitches, their service is running."""
    switches = pci.devices_of(facts, pci.NVIDIA, pci.BRIDGE_CLASSES)
    if not switches:
        return skip("there is no NVSwitch on this node's PCI bus")
    # The kernel keeps 15 characters of a program's name.
    for pid in facts.names_in("proc"):
        if pid.isdigit() and (facts.read(f"proc/{pid}/comm") or "").startswith("nv-fabricmanage"):
            return ok(f"{counted(len(switches), 'NVSwitch', 'es')}, and the fabric manager is running")
    return warn(
        "there are NVSwitches and no fabric manager is running: CUDA may not start (error 802)",
        "sudo systemctl enable --now nvidia-fabricmanager",
    )


# Return where the dynamic loader would find a library, without loading anything.
# The loader's own directories, and where container runtimes, WSL and NixOS mount the driver's libraries.
_BUILT_IN = (
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "usr/lib64",
    "lib",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
)
_INCLUDES_MAX = 32


def find_library(facts: NodeFacts, name: str) -> Path | None:
    """The library's path, None when it is in none of the directories."""
    for directory in (*_configured(facts, "etc/ld.so.conf", depth=0), *_BUILT_IN):
        path = facts.at(directory) / name
        if path.exists():
            return path
    return None


def _configured(facts: NodeFacts, path: str, depth: int) -> list[str]:
    """Return the directories that ld.so.conf and its included files name, in their order."""
    directories: list[str] = []
    for line in (facts.read(path) or "").splitlines():
        words = line.partition("#")[0].split()
        if len(words) == 2 and words[0] == "include" and depth == 0:
            pattern = words[1].lstrip("/") if words[1].startswith("/") else f"etc/{words[1]}"
            for included in sorted(facts.root.glob(pattern))[:_INCLUDES_MAX]:
                directories += _configured(facts, str(included.relative_to(facts.root)), depth + 1)
        elif len(words) == 1 and words[0].startswith("/"):
            directories.append(words[0].lstrip("/"))
    return directories
