"""Checks of host memory: huge pages for the pool and for the driver, and enough memory of any kind."""

from __future__ import annotations

import math
import re

from hegmd.node.doctor.facts import MIB, CheckResult, NodeFacts, listed, ok, size_text, skip, warn

PAGE_BYTES = 2 * MIB
_POOL = "hugepages-2048kB"
_LASTING = "/etc/sysctl.d/60-hegm.conf"
_TRANSPARENT = "sys/kernel/mm/transparent_hugepage/enabled"
_TRANSPARENT_LASTING = "/etc/tmpfiles.d/60-hegm.conf"


def hugepages(facts: NodeFacts) -> CheckResult:
    """The 2 MiB pages suffice for the largest GPU, near the GPUs."""
    if facts.simulated:
        return skip("the simulation needs no huge pages")
    base = f"sys/kernel/mm/hugepages/{_POOL}"
    total, free = facts.read_int(f"{base}/nr_hugepages"), facts.read_int(f"{base}/free_hugepages")
    if total is None:
        return skip("this kernel has no pages of 2 MiB")
    gpu = facts.largest_gpu()
    if gpu is None or gpu.memory_total_bytes is None:
        return skip(f"{total} pages of 2 MiB; there is no GPU to size them for")
    required = _wanted_pages(facts, gpu.memory_total_bytes)
    if total < required:
        setting = f"echo vm.nr_hugepages={required} | sudo tee {_LASTING} && sudo sysctl -p {_LASTING}"
        return warn(
            f"{total} of {required} pages of 2 MiB for the {size_text(gpu.memory_total_bytes)} of {gpu.id}: "
            "offloading is slower without",
            setting,
        )
    nodes = _pages_by_node(facts)
    bare = sorted({g.numa_node for g in facts.gpus if g.numa_node is not None and nodes.get(g.numa_node) == 0})
    if bare:
        share = math.ceil(required / max(1, len(nodes)))
        file = f"/sys/devices/system/node/node{bare[0]}/hugepages/{_POOL}/nr_hugepages"
        return warn(
            f"{total} pages of 2 MiB, but none on NUMA node {listed(map(str, bare))}, where GPUs are",
            f"echo {share} | sudo tee {file}",
        )
    by_node = f"; {listed(f'node {node}: {pages}' for node, pages in nodes.items())}" if len(nodes) > 1 else ""
    return ok(f"{total} pages of 2 MiB ({size_text(total * PAGE_BYTES)}), {free} free{by_node}")


def _wanted_pages(facts: NodeFacts, gpu_bytes: int) -> int:
    """Return the pages for all memory of the GPU, at most half of the host's memory: jobs need the rest."""
    memory_bytes = meminfo(facts).get("MemTotal")
    most = gpu_bytes if memory_bytes is None else min(gpu_bytes, memory_bytes // 2)
    return math.ceil(most / PAGE_BYTES)


def _pages_by_node(facts: NodeFacts) -> dict[int, int]:
    pages: dict[int, int] = {}
    for name in facts.names_in("sys/devices/system/node"):
        found = re.fullmatch(r"node(\d+)", name)
        count = facts.read_int(f"sys/devices/system/node/{name}/hugepages/{_POOL}/nr_hugepages") if found else None
        if found is not None and count is not None:
            pages[int(found[1])] = count
    return dict(sorted(pages.items()))


def transparent_pages(facts: NodeFacts) -> CheckResult:
    """The kernel gives huge pages to a process that does not ask for them, such as the driver in its checkpoint."""
    modes = facts.read(_TRANSPARENT)
    mode = None if modes is None else re.search(r"\[(\w+)\]", modes)
    if mode is None:
        return skip("this kernel has no transparent huge pages")
    if mode[1] != "always":
        return warn(
            f"transparent huge pages are set to {mode[1]}: a checkpoint by the driver takes up to 0.2 s longer. "
            "The command changes it for all programs of the node",
            f"echo 'w /{_TRANSPARENT} - - - - always' | sudo tee {_TRANSPARENT_LASTING} "
            f"&& sudo systemd-tmpfiles --create {_TRANSPARENT_LASTING}",
        )
    return ok("transparent huge pages are set to always: the driver's checkpoints use them")


def host(facts: NodeFacts) -> CheckResult:
    """The host memory suffices to offload at least one GPU."""
    sizes = sorted(gpu.memory_total_bytes for gpu in facts.gpus if gpu.memory_total_bytes is not None)
    if not sizes:
        return skip("there is no GPU whose memory could be offloaded")
    memory = meminfo(facts)
    available_bytes = memory.get("MemAvailable")
    if available_bytes is None:
        return skip("the kernel does not report how much memory is available")
    # Free huge pages count separately: the kernel does not report them as available.
    usable_bytes = available_bytes + memory.get("HugePages_Free", 0) * memory.get("Hugepagesize", 0)
    fitting, left_bytes = 0, usable_bytes
    for size_bytes in sizes:
        if size_bytes > left_bytes:
            break
        fitting, left_bytes = fitting + 1, left_bytes - size_bytes
    if fitting == 0:
        return warn(
            f"{size_text(usable_bytes)} of host memory for offloaded jobs; the smallest GPU has {size_text(sizes[0])}",
            f"only jobs that hold less than {size_text(usable_bytes)} of GPU memory can be suspended; free host memory",
        )
    return ok(f"{size_text(usable_bytes)} of host memory: enough to suspend {fitting} of {len(sizes)} full GPUs")


def ready(facts: NodeFacts) -> CheckResult:
    """Check that the configured host memory is ready for the next suspend."""
    wanted_bytes, ready_bytes = facts.ready_wanted_bytes, facts.ready_bytes
    if not wanted_bytes:
        return skip("pool.ready_bytes is 0: allocating host memory for a suspend takes up to 0.2 s for each GiB")
    if ready_bytes < wanted_bytes:
        return warn(
            f"{size_text(ready_bytes)} of {size_text(wanted_bytes)} of host memory are ready for the next suspend",
            "wait until hegmd has filled it; otherwise free host memory, raise pool.budget_bytes, or lower "
            "pool.ready_bytes",
        )
    return ok(f"{size_text(ready_bytes)} of host memory are ready for the next suspend")


def meminfo(facts: NodeFacts) -> dict[str, int]:
    """/proc/meminfo: bytes where it gives a unit, plain numbers where it counts pages."""
    values: dict[str, int] = {}
    for line in (facts.read("proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values
