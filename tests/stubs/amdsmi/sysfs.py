"""A /sys as the amdgpu driver fills it, in a folder: the same MI300X as in `scenario`, so that both can be compared.

The layout and the values of `properties` are those of a machine with eight MI300X under Linux 6.8; node 0 and 1 are its
two processors.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.stubs.amdsmi.scenario import MI300X_BYTES, MIB, pci, unique_id

CPU_NODES = 2
PCIE, XGMI = 2, 11


def gpu_id(index: int) -> int:
    return 51000 + 13 * index


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def listing(**values: int) -> str:
    return "\n".join(f"{key} {value}" for key, value in values.items())


class FakeSys:
    """One such tree. Every method changes files at once, as the driver does."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kfd = root / "class" / "kfd" / "kfd"
        self.nodes = self.kfd / "topology" / "nodes"
        self.proc = self.kfd / "proc"

    @classmethod
    def of_mi300x(cls, root: Path, count: int) -> FakeSys:
        sys = cls(root)
        sys.load_driver()
        write(sys.kfd / "topology" / "generation_id", 1)
        for node in range(CPU_NODES):
            write(sys.nodes / str(node) / "gpu_id", 0)
            write(sys.nodes / str(node) / "properties", listing(cpu_cores_count=96, simd_count=0, vendor_id=0))
        sys.proc.mkdir()
        for index in range(count):
            sys.plug(index)
        for one in range(count):
            for other in range(count):
                if one != other:
                    sys.link(one, other, XGMI, 64_000)
        return sys

    def load_driver(self) -> None:
        (self.root / "module" / "amdgpu").mkdir(parents=True)
        (self.root / "bus" / "pci" / "drivers" / "amdgpu").mkdir(parents=True, exist_ok=True)

    def unload_driver(self) -> None:
        shutil.rmtree(self.root / "module")
        shutil.rmtree(self.root / "class")

    # ---- where things are -------------------------------------------------------------------------------------------

    def card(self, index: int) -> Path:
        """The card's folder on the PCI bus."""
        return self.root / "bus" / "pci" / "devices" / pci(index)

    def node(self, index: int) -> Path:
        """The GPU's folder in the topology."""
        return self.nodes / str(CPU_NODES + index)

    # ---- GPUs -------------------------------------------------------------------------------------------------------

    def plug(self, index: int, **changed: int) -> None:
        address, minor = pci(index), 128 + 8 * index
        bus = int(address[5:7], 16)
        properties = {
            "cpu_cores_count": 0,
            "simd_count": 1216,
            "gfx_target_version": 90402,
            "vendor_id": 0x1002,
            "device_id": 0x74A1,
            "location_id": bus << 8,
            "domain": 0,
            "drm_render_minor": minor,
            "unique_id": unique_id(index),
            **changed,
        }
        write(self.node(index) / "gpu_id", gpu_id(index))
        write(self.node(index) / "properties", listing(**properties))
        write(self.node(index) / "mem_banks" / "0" / "properties", listing(heap_type=1, size_in_bytes=MI300X_BYTES))
        self._fill(self.card(index), numa_node=index // 4)
        drm = self.root / "class" / "drm" / f"renderD{minor}"
        drm.mkdir(parents=True)
        (drm / "device").symlink_to(self.card(index))
        (self.root / "bus" / "pci" / "drivers" / "amdgpu" / address).symlink_to(self.card(index))

    def _fill(self, card: Path, numa_node: int) -> None:
        for name, text in {
            "vendor": "0x1002",
            "class": "0x120000",
            "numa_node": numa_node,
            "product_name": "AMD Instinct MI300X OAM",
            "mem_info_vram_total": MI300X_BYTES,
            "mem_info_vram_used": 298 * MIB,
            "gpu_busy_percent": 0,
            "hwmon/hwmon7/temp2_label": "junction",
            "hwmon/hwmon7/temp2_input": 41000,
            "hwmon/hwmon7/temp3_label": "mem",
            "hwmon/hwmon7/temp3_input": 35000,
            "hwmon/hwmon7/power1_input": 133_000_000,
            "hwmon/hwmon7/power1_cap": 750_000_000,
            "ras/umc_err_count": "ue: 0\nce: 0\nde: 0",
        }.items():
            write(card / name, text)
        (card / "ras" / "gpu_vram_bad_pages").touch()
        (card / "config").write_bytes(bytes.fromhex("0210a174") + bytes(60))

    def link(self, one: int, other: int, kind: int, mb_per_s: int, group: str = "io_links") -> None:
        """A link from one GPU to the other, as the first one's folder has it."""
        properties = listing(type=kind, node_from=CPU_NODES + one, node_to=CPU_NODES + other, max_bandwidth=mb_per_s)
        write(self.node(one) / group / str(other) / "properties", properties)

    def unlink_all(self) -> None:
        for folder in self.nodes.glob("*/io_links"):
            shutil.rmtree(folder)

    def drop_off_the_bus(self, index: int) -> None:
        """The card does not answer any more; the driver still has it, and its files are of no use."""
        (self.card(index) / "config").write_bytes(b"\xff" * 64)
        for name in ("mem_info_vram_used", "mem_info_vram_total", "gpu_busy_percent"):
            (self.card(index) / name).unlink()

    def unplug(self, index: int) -> None:
        """The card is taken out, and the kernel forgets it."""
        shutil.rmtree(self.card(index))
        shutil.rmtree(self.node(index))
        (self.root / "bus" / "pci" / "drivers" / "amdgpu" / pci(index)).unlink()
        (self.root / "class" / "drm" / f"renderD{128 + 8 * index}" / "device").unlink()
        (self.root / "class" / "drm" / f"renderD{128 + 8 * index}").rmdir()

    # ---- processes --------------------------------------------------------------------------------------------------

    def run(self, pid: int, vram: dict[int, int | None], queues: tuple[int, ...] = ()) -> None:
        """A process with that much memory on each GPU (None: a kernel that does not tell) and queues on some."""
        folder = self.proc / str(pid)
        write(folder / "pasid", 32770)
        for index, vram_bytes in vram.items():
            if vram_bytes is not None:
                write(folder / f"vram_{gpu_id(index)}", vram_bytes)
            write(folder / f"sdma_{gpu_id(index)}", 0)
        (folder / "queues").mkdir()
        for number, index in enumerate(queues):
            write(folder / "queues" / str(number) / "gpuid", gpu_id(index))

    def end(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))
