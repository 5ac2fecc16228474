"""Checks of AMD's driver and management library. The GPUs' records carry what AMD SMI reports."""

from __future__ import annotations

from hegmd.node.doctor import pci
from hegmd.node.doctor.facts import CheckResult, NodeFacts, counted, fail, listed, ok, skip, warn
from hegmd.node.doctor.rights import READ_WRITE, may_use


def absent(facts: NodeFacts) -> str | None:
    """Return why there is nothing of AMD to check, or None."""
    if facts.simulated:
        return "the GPUs are simulated"
    vendor = facts.vendor("amd")
    if vendor is not None and vendor.state == "off":
        return "AMD is switched off in the configuration"
    if facts.gpus_of("amd") or pci.devices_of(facts, pci.AMD) or facts.at("sys/class/kfd").exists():
        return None
    return "there is no AMD GPU on this node"


def driver(facts: NodeFacts) -> CheckResult:
    """The kernel's amdgpu module drives the GPUs."""
    devices = pci.devices_of(facts, pci.AMD)
    if devices and {device.driver for device in devices} == {"vfio-pci"}:
        return skip(f"{counted(len(devices), 'AMD GPU')} passed through to virtual machines (vfio-pci)")
    if not facts.at("sys/module/amdgpu").exists():
        return fail(
            f"{counted(len(devices), 'AMD GPU')} on the PCI bus, but amdgpu is not loaded", "sudo modprobe amdgpu"
        )
    unbound = [device.address for device in devices if device.driver is None]
    if unbound:
        return warn(f"amdgpu is loaded, but does not drive {listed(unbound)}", "sudo dmesg | grep -i amdgpu")
    # Only the driver from AMD's own packages reports a version; the kernel's own has the version of the kernel.
    version = (facts.read("sys/module/amdgpu/version") or "").strip()
    return ok(f"amdgpu {version or f'of kernel {facts.kernel_release}'} is loaded")


def library(facts: NodeFacts) -> CheckResult:
    """AMD SMI answers, or the kernel's files replace it."""
    vendor = facts.vendor("amd")
    if vendor is None:
        return skip("this hegmd has no AMD provider")
    if vendor.state != "ok":
        return fail(vendor.message or f"AMD SMI: {vendor.state}", vendor.hint or "sudo amd-smi list")
    number = counted(len(facts.gpus_of("amd")), "GPU")
    if vendor.library_version is None:
        return warn(
            f"AMD SMI is missing: /sys/class/kfd has fewer facts about {number}",
            "install amd-smi-lib from ROCm 6.2 or newer, and amdsmi into hegmd's own Python",
        )
    return ok(f"AMD SMI {vendor.library_version} answers for {number}")


def nodes(facts: NodeFacts) -> CheckResult:
    """This user can open the device nodes of ROCm."""
    renders = [f"dri/{name}" for name in facts.names_in("dev/dri") if name.startswith("renderD")]
    missing = [*([] if facts.at("dev/kfd").exists() else ["kfd"]), *([] if renders else ["dri/renderD*"])]
    if missing:
        return fail(f"missing in /dev: {listed(missing)}", "sudo modprobe amdgpu")
    closed = [name for name in ("kfd", *renders) if not may_use(facts, facts.at(f"dev/{name}"), READ_WRITE)]
    if closed:
        groups = sorted({facts.group_name(facts.at(f"dev/{name}").stat().st_gid) or "render" for name in closed})
        fix = f"sudo usermod -aG {','.join(groups)} $USER, and log in again"
        return fail(f"closed to this user: /dev/{listed(closed)}", fix)
    return ok(f"/dev/kfd and {counted(len(renders), 'render node')}, open to this user")
