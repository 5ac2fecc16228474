"""AMD GPUs through AMD SMI's Python binding.

Interprets the library's answers: what is unknown, and whether one GPU or the whole library failed. If a GPU does not
report its memory, the PCI bus tells whether it is lost. While the library is open, only fixed facts of a GPU (name,
chip, links) are kept. The library knows the GPUs of its start, so it is restarted when the driver has others.
"""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hegmd.node.devices.amd_binding import AmdSmiUnusable, check_fit
from hegmd.node.devices.amd_facts import AmdFacts, AmdLink, BadPages, celsius, gfx_name, percent, watts
from hegmd.node.devices.base import DeviceAbsent, DeviceError, ProcessUse
from hegmd.node.devices.kfd import Kfd
from hegmd.protocol.snapshots import GpuUse

_log = logging.getLogger(__name__)

# amdsmi_status_t. Numbers, because the binding has a name for each only in its newest versions.
_OK = 0
_NOT_TOLD = frozenset({2, 3, 10, 55})  # not supported, not yet implemented, no permission, setting unavailable
_NO_PERMISSION = 10
_OUT_OF_RESOURCES = 15
_NOT_INITIALISED = 32
_NO_DRIVER = 34

_MAX_PROCESSES = 1 << 16
_UNTOLD = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


class AmdSmi:
    """The library behind its binding. Every call goes through `_ask`, or through `_answer` if its failure concerns all
    GPUs."""

    def __init__(self, binding: Any, kfd: Kfd) -> None:
        self._binding = binding
        self._wrapper = binding.amdsmi_wrapper
        self._kfd = kfd
        self._handles: dict[str, Any] = {}
        self._fixed: dict[str, AmdFacts] = {}
        self._driven: tuple[str, ...] | None = None  # None: not started
        self.library_version = ""
        self.driver_version: str | None = None

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the library. Raises Unfit before any call that depends on layouts, and DeviceError if it does not
        start."""
        driven = self._kfd.driven_gpus()
        self._answer("amdsmi_init", self._binding.AmdSmiInitFlags.INIT_AMD_GPUS)
        try:
            self.library_version = check_fit(self._binding)
            self._handles = {self._address(handle): handle for handle in self._answer("amdsmi_get_processor_handles")}
            if not self._handles:
                raise DeviceAbsent(
                    "AMD SMI finds no GPU", "compare with `sudo amd-smi list` and `dmesg | grep -i amdgpu`"
                )
        except BaseException:
            self.stop()
            raise
        self._fixed = {}
        self._driven = driven

    def stop(self) -> None:
        """Stop the library; its errors are ignored."""
        self._handles = {}
        self._driven = None
        try:
            self._binding.amdsmi_shut_down()
        except self._binding.AmdSmiException as error:
            _log.debug("AMD SMI did not shut down: %s", error)

    def start_again_if_gpus_changed(self) -> None:
        """Restart the library if the driver has other GPUs. Raises DeviceError."""
        if self._kfd.driven_gpus() == self._driven:
            return
        self.stop()
        try:
            self.start()
        except AmdSmiUnusable as unfit:
            raise DeviceError(f"AMD SMI changed while it was in use: {unfit}", "sudo systemctl restart hegmd") from None

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _answer(self, function: str, *arguments: Any) -> Any:
        """Return the answer to a call that everything depends on. Raises DeviceError."""
        try:
            return getattr(self._binding, function)(*arguments)
        except self._binding.AmdSmiLibraryException as error:
            raise _library_error(function, error) from None

    def _ask(self, what: str, facts: AmdFacts, function: str, *arguments: Any) -> Any:
        """Return the answer to a call about one GPU, or None. Failures other than "unknown" are recorded in the
        facts."""
        try:
            return getattr(self._binding, function)(*arguments)
        except self._binding.AmdSmiLibraryException as error:
            code = int(error.get_error_code())
            if code in {_NOT_INITIALISED, _NO_DRIVER}:
                raise _library_error(function, error) from None
            if code not in _NOT_TOLD:
                facts.failures[what] = _words(error)
        except (AttributeError, KeyError, TypeError, UnicodeError, ValueError) as error:
            # The binding parses the library's text and numbers, and fails on unexpected ones. A function may also be
            # missing in it.
            facts.failures[what] = f"the binding: {type(error).__name__}"
        return None

    def _ask_map(self, what: str, facts: AmdFacts, function: str, *arguments: Any) -> dict[str, Any]:
        """Return the fields of the answer; empty without an answer."""
        return self._ask(what, facts, function, *arguments) or {}

    def _address(self, handle: Any) -> str:
        return str(self._answer("amdsmi_get_gpu_device_bdf", handle)).lower()

    # ---- GPUs -------------------------------------------------------------------------------------------------------

    def facts(self) -> list[AmdFacts]:
        """All GPUs in the library's order."""
        return [self._facts(address, handle) for address, handle in self._handles.items()]

    def _facts(self, address: str, handle: Any) -> AmdFacts:
        fixed = self._fixed.get(address) or self._read_fixed(address, handle)
        facts = replace(fixed, failures=dict(fixed.failures))
        memory = self._binding.AmdSmiMemoryType.VRAM
        facts.memory_total_bytes = (
            _known_number(self._ask("memory", facts, "amdsmi_get_gpu_memory_total", handle, memory)) or None
        )
        facts.memory_used_bytes = _known_number(
            self._ask("used memory", facts, "amdsmi_get_gpu_memory_usage", handle, memory)
        )
        if facts.memory_total_bytes is None and facts.memory_used_bytes is None:
            if self._kfd.is_lost(address):
                facts.state = "lost"
                return facts
            if facts.failures:
                facts.state = "unknown"
                return facts
        self._read_sensors(handle, facts)
        self._read_errors(handle, facts)
        return facts

    def _read_fixed(self, address: str, handle: Any) -> AmdFacts:
        """Read what does not change while the library is open, until all of it is known."""
        facts = AmdFacts(address)
        asic = self._ask_map("chip", facts, "amdsmi_get_gpu_asic_info", handle)
        known = self._kfd.properties_of(address)
        # The kernel helps out, so that a GPU in trouble keeps its identity.
        facts.unique_id = _hexadecimal(asic.get("asic_serial")) or known.get("unique_id")
        facts.device_id = _hexadecimal(asic.get("device_id")) or known.get("device_id")
        facts.gfx = _gfx(asic.get("target_graphics_version")) or gfx_name(known.get("gfx_target_version", 0))
        facts.name = _text(asic.get("market_name"))
        numa_node = self._ask("NUMA node", facts, "amdsmi_get_gpu_topo_numa_affinity", handle)
        facts.numa_node = numa_node if numa_node is not None and numa_node >= 0 else None
        facts.links = self._read_links(address, handle, facts)
        if self.driver_version is None:
            driver = self._ask_map("driver version", facts, "amdsmi_get_gpu_driver_info", handle)
            self.driver_version = _text(driver.get("driver_version"))
        if not facts.failures:
            self._fixed[address] = facts
        return facts

    def _read_links(self, address: str, handle: Any, facts: AmdFacts) -> tuple[AmdLink, ...]:
        """Read links: XGMI to connected GPUs, PCIe to those reachable without host memory."""
        types = self._binding.AmdSmiLinkType
        metrics = self._ask_map("links", facts, "amdsmi_get_link_metrics", handle)
        wired = [each for each in metrics.get("links", []) if each["link_type"] == types.AMDSMI_LINK_TYPE_XGMI]
        lanes = Counter(str(each["bdf"]).lower() for each in wired)
        links: list[AmdLink] = []
        for other, remote in self._handles.items():
            if other == address:
                continue
            link = self._ask("links", facts, "amdsmi_topo_get_link_type", handle, remote)
            if link is None:
                continue
            if link["type"] == types.AMDSMI_LINK_TYPE_XGMI:
                function = "amdsmi_get_minmax_bandwidth_between_processors"
                bandwidth = self._ask_map("link bandwidth", facts, function, handle, remote)
                mb_per_s = _known_number(bandwidth.get("max_bandwidth")) or 0
                links.append(AmdLink(other, "xgmi", lanes[other] or None, mb_per_s * 1_000_000 or None))
            elif link["type"] == types.AMDSMI_LINK_TYPE_PCIE and self._ask(
                "peer access", facts, "amdsmi_is_P2P_accessible", handle, remote
            ):
                links.append(AmdLink(other, "pcie"))
        return tuple(links)

    def _read_sensors(self, handle: Any, facts: AmdFacts) -> None:
        """Read the temperature at the hottest spot if it has a sensor, as amd-smi does; else at the edge."""
        activity = self._ask_map("utilisation", facts, "amdsmi_get_gpu_activity", handle)
        facts.utilisation_percent = percent(_known_number(activity.get("gfx_activity")))
        now = self._binding.AmdSmiTemperatureMetric.CURRENT
        for sensor in ("HOTSPOT", "EDGE"):
            kind = self._binding.AmdSmiTemperatureType[sensor]
            facts.temperature_celsius = celsius(
                self._ask("temperature", facts, "amdsmi_get_temp_metric", handle, kind, now)
            )
            if facts.temperature_celsius is not None:
                break
        power = self._ask_map("power", facts, "amdsmi_get_power_info", handle)
        drawn = [_known_number(power.get(f"{kind}socket_power")) for kind in ("current_", "average_", "")]
        facts.power_watts = next((value for value in map(watts, drawn) if value is not None), None)
        cap = self._ask_map("power limit", facts, "amdsmi_get_power_cap_info", handle)
        microwatts = _known_number(cap.get("power_cap"))
        facts.power_limit_watts = None if microwatts is None else watts(microwatts / 1_000_000)

    def _read_errors(self, handle: Any, facts: AmdFacts) -> None:
        """Read the errors of the memory alone: for each block the library asks the hardware again, which is slow."""
        block = self._binding.AmdSmiGpuBlock.UMC
        counts = self._ask_map("memory errors", facts, "amdsmi_get_gpu_ecc_count", handle, block)
        facts.ecc_corrected = _known_number(counts.get("correctable_count"))
        facts.ecc_uncorrected = _known_number(counts.get("uncorrectable_count"))
        facts.ecc_deferred = _known_number(counts.get("deferred_count"))
        pages = self._ask("bad pages", facts, "amdsmi_get_gpu_bad_page_info", handle)
        if pages is not None:
            states = Counter(int(page["status"]) for page in pages)
            kinds = self._binding.AmdSmiMemoryPageStatus
            facts.bad_pages = BadPages(states[kinds.RESERVED], states[kinds.PENDING], states[kinds.UNRESERVABLE])

    # ---- processes --------------------------------------------------------------------------------------------------

    def uses(self, gpus: Sequence[AmdFacts], uuids: Mapping[str, str]) -> tuple[ProcessUse, ...]:
        """Return which processes use these GPUs. A GPU that does not report them has that in its facts."""
        return tuple(
            ProcessUse(pid, GpuUse(gpu=uuids[facts.pci_address], vram_bytes=vram_bytes))
            for facts in gpus
            if facts.state == "ok"
            for pid, vram_bytes in self._processes(facts).items()
        )

    def _processes(self, facts: AmdFacts) -> dict[int, int | None]:
        """Read the list past the binding's function, which takes at most 1,024 and fails on names that are not
        UTF-8."""
        room = 256
        while True:
            entries = (self._wrapper.amdsmi_proc_info_t * room)()
            count = ctypes.c_uint32(room)
            status = self._wrapper.amdsmi_get_gpu_process_list(
                self._handles[facts.pci_address], ctypes.byref(count), entries
            )
            if status != _OUT_OF_RESOURCES or not room < count.value <= _MAX_PROCESSES:
                break
            room = count.value + 64
        if status not in {_OK, _NO_PERMISSION, _OUT_OF_RESOURCES}:
            facts.failures["processes"] = f"status {status}"
            return {}
        listed = {int(each.pid): int(each.memory_usage.vram_mem) for each in entries[: min(count.value, room)]}
        if status == _NO_PERMISSION:  # then the library knows the process and not its memory, which it gives as 0
            return {pid: _known_number(vram_bytes) or None for pid, vram_bytes in listed.items() if pid}
        return {pid: _known_number(vram_bytes) for pid, vram_bytes in listed.items() if pid}


def _library_error(function: str, error: Any) -> DeviceError:
    code = int(error.get_error_code())
    if code == _NO_DRIVER:
        return DeviceAbsent("AMD SMI finds no amdgpu driver", "sudo modprobe amdgpu")
    return DeviceError(
        f"AMD SMI fails: {function} says {_words(error)}",
        "compare with `sudo amd-smi list` and `dmesg | grep -i amdgpu`; hegmd tries again",
    )


def _words(error: Any) -> str:
    """`NOT_FOUND - Device Not found` out of the binding's own text, and the number where it has none."""
    text = str(error.get_error_info()).replace("AMDSMI_STATUS_", "")
    return f"{text} (status {error.get_error_code()})" if text.startswith("UNKNOWN") else text


def _known_number(value: Any) -> int | None:
    """Return the number, or None for the values that mean "unknown" in the library or the binding."""
    return value if isinstance(value, int) and value >= 0 and value not in _UNTOLD else None


def _text(value: Any) -> str | None:
    text = str(value or "").strip()
    return text if text and text.isprintable() and text != "N/A" else None


def _gfx(value: Any) -> str | None:
    """`gfx942`; the binding writes so whatever number it gets, and zero or all ones when the library has none."""
    text = str(value or "")
    return text if text.startswith("gfx") and text.strip("gfx0") else None


def _hexadecimal(value: Any) -> int | None:
    try:
        return _known_number(int(str(value), 16))
    except ValueError:
        return None
