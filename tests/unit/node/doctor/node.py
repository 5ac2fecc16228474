"""A node made of files: what the doctor's checks are shown in place of /proc, /sys and /dev."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from hegmd.node.doctor.facts import NodeFacts
from hegmd.protocol.snapshots import Gpu, Health, PeerLink, Vendor

GIB = 1024**3


class FileNode:
    """Files below a root of its own; `facts` is what a check gets."""

    def __init__(self, root: Path) -> None:
        self.root = root / "node"
        self.root.mkdir()
        self.state_dir = root / "state"
        self.state_dir.mkdir(mode=0o700)
        self.socket_path = root / "hegmd.sock"

    def write(self, path: str, text: str | bytes = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return file

    def link(self, path: str, target: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(target)

    def pci(self, address: str, vendor: int, kind: int, driver: str | None) -> None:
        """A device on the bus."""
        base = f"sys/bus/pci/devices/{address}"
        self.write(f"{base}/vendor", f"{vendor:#06x}\n")
        self.write(f"{base}/class", f"{kind:#08x}\n")
        if driver is not None:
            self.link(f"{base}/driver", f"../../../../bus/pci/drivers/{driver}")

    def nvidia_module(self, version: str) -> None:
        self.write(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (root@builder)\n"
            "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2)\n",
        )

    def facts(self, **changes: Any) -> NodeFacts:
        values: dict[str, Any] = {
            "vendors": (),
            "gpus": (),
            "simulated": False,
            "user_mode": False,
            "under_systemd": False,
            "socket_path": self.socket_path,
            "state_dir": self.state_dir,
            "root": self.root,
            "uid": 0,
            "gids": frozenset({0}),
            "group_id": {"hegm": 991}.get,
            "group_name": {0: "root", 44: "video", 109: "render", 991: "hegm"}.get,
            "pidfd_open": _null_descriptor,
        }
        return NodeFacts(**{**values, **changes})


def _null_descriptor(_pid: int) -> int:
    import os

    return os.open(os.devnull, os.O_RDONLY)


def vendor(name: str = "nvidia", **changes: Any) -> Vendor:
    return Vendor(**{"vendor": name, "state": "ok", **changes})


def gpu(index: int = 0, **changes: Any) -> Gpu:
    """A card as the inventory gives it; all cards are of one chip, each linked to the one before and the one after."""
    values: dict[str, Any] = {
        "id": f"gpu{index}",
        "index": index,
        "uuid": f"GPU-{index}",
        "pci_address": f"0000:{index + 1:02x}:00.0",
        "vendor": "nvidia",
        "chip": "gh100",
        "memory_total_bytes": 141 * GIB,
        "links": tuple(PeerLink(to_uuid=f"GPU-{other}", kind="nvlink") for other in (index - 1, index + 1)),
        "health": Health(state="ok"),
    }
    return Gpu(**{**values, **changes})


def shared_library(*, defines: tuple[str, ...] = (), needs: tuple[str, ...] = ()) -> bytes:
    """The smallest ELF file that has a dynamic symbol table: what a linker leaves of a library after stripping."""
    strings = b"\0"
    symbols = bytes(24)
    for name, section in [*((name, 1) for name in defines), *((name, 0) for name in needs)]:
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0, section, 0x1000 if section else 0, 8)
        strings += name.encode() + b"\0"
    symbols_at = 64
    strings_at = symbols_at + len(symbols)
    sections_at = strings_at + len(strings)
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        struct.pack("<IIQQQQIIQQ", 1, 11, 2, symbols_at, symbols_at, len(symbols), 2, 1, 8, 24),
        struct.pack("<IIQQQQIIQQ", 9, 3, 2, strings_at, strings_at, len(strings), 0, 0, 1, 0),
    ]
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, sections_at, 0, 64, 0, 0, 64, len(sections), 2)
    return ident + header + symbols + strings + b"".join(sections)
