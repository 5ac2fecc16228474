"""GPUs on the PCI bus, with or without a driver: tells a missing driver from a missing card."""

from __future__ import annotations

import os
from typing import NamedTuple

from hegmd.node.doctor.facts import NodeFacts

NVIDIA = 0x10DE
AMD = 0x1002

# VGA controller, 3D controller, other display controller, processing accelerator.
GPU_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)
# NVSwitches show up as "other bridge".
BRIDGE_CLASSES = (0x0680,)

_DEVICES = "sys/bus/pci/devices"


class PciDevice(NamedTuple):
    """A device and the driver that is bound to it, if any."""

    address: str
    driver: str | None


def devices_of(facts: NodeFacts, vendor_id: int, classes: tuple[int, ...] = GPU_CLASSES) -> tuple[PciDevice, ...]:
    """The devices of that vendor and those classes, by address."""
    found: list[PciDevice] = []
    for address in facts.names_in(_DEVICES):
        if facts.read_int(f"{_DEVICES}/{address}/vendor") != vendor_id:
            continue
        kind = facts.read_int(f"{_DEVICES}/{address}/class")
        if kind is not None and kind >> 8 in classes:
            found.append(PciDevice(address, _driver_of(facts, address)))
    return tuple(found)


def _driver_of(facts: NodeFacts, address: str) -> str | None:
    try:
        return os.path.basename(os.readlink(facts.at(f"{_DEVICES}/{address}/driver")))
    except FileNotFoundError:
        return None
