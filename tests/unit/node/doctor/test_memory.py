"""Checks of host memory and control groups over nodes made of files."""

from __future__ import annotations

import pytest

from hegmd.node.doctor import cgroups, memory
from tests.unit.node.doctor.node import GIB, FileNode, gpu

POOL = "hugepages/hugepages-2048kB"


def meminfo(node: FileNode, *, total_gib: int, available_gib: int, huge_free: int = 0) -> None:
    node.write(
        "proc/meminfo",
        f"MemTotal:       {total_gib * 1024**2} kB\n"
        f"MemAvailable:   {available_gib * 1024**2} kB\n"
        f"HugePages_Free: {huge_free:8}\n"
        "Hugepagesize:       2048 kB\n",
    )


def pool(node: FileNode, pages: int, *by_node: int) -> None:
    node.write(f"sys/kernel/mm/{POOL}/nr_hugepages", f"{pages}\n")
    node.write(f"sys/kernel/mm/{POOL}/free_hugepages", f"{pages // 2}\n")
    for index, count in enumerate(by_node):
        node.write(f"sys/devices/system/node/node{index}/{POOL}/nr_hugepages", f"{count}\n")


# -- huge pages --------------------------------------------------------------------------------------------------------


def test_a_pool_for_the_largest_gpu(node: FileNode) -> None:
    meminfo(node, total_gib=2048, available_gib=1800)
    pool(node, 73728, 36864, 36864)
    found = memory.hugepages(node.facts(gpus=(gpu(0, numa_node=0), gpu(1, numa_node=1))))
    assert found.status == "ok"
    assert found.summary == "73728 pages of 2 MiB (144 GiB), 36864 free; node 0: 36864, node 1: 36864"


def test_too_small_a_pool_and_the_command_that_mends_it(node: FileNode) -> None:
    meminfo(node, total_gib=2048, available_gib=1800)
    pool(node, 128)
    found = memory.hugepages(node.facts(gpus=(gpu(0, memory_total_bytes=80 * GIB), gpu(1))))
    assert found.status == "warn"
    assert found.summary == "128 of 72192 pages of 2 MiB for the 141 GiB of gpu1: offloading is slower without"
    assert found.fix == (
        "echo vm.nr_hugepages=72192 | sudo tee /etc/sysctl.d/60-hegm.conf && sudo sysctl -p /etc/sysctl.d/60-hegm.conf"
    )


def test_at_most_half_of_the_host_memory_is_required(node: FileNode) -> None:
    meminfo(node, total_gib=64, available_gib=60)
    pool(node, 0)
    found = memory.hugepages(node.facts(gpus=(gpu(0),)))
    assert found.fix is not None
    assert f"vm.nr_hugepages={32 * 512} " in found.fix


def test_a_pool_on_the_wrong_node(node: FileNode) -> None:
    meminfo(node, total_gib=2048, available_gib=1800)
    pool(node, 72192, 72192, 0)
    found = memory.hugepages(node.facts(gpus=(gpu(0, numa_node=0), gpu(1, numa_node=1))))
    assert found.status == "warn"
    assert "none on NUMA node 1" in found.summary
    assert found.fix == f"echo 36096 | sudo tee /sys/devices/system/node/node1/{POOL}/nr_hugepages"


def test_huge_pages_do_not_apply(node: FileNode) -> None:
    assert memory.hugepages(node.facts(gpus=(gpu(0),))).summary == "this kernel has no pages of 2 MiB"
    pool(node, 7)
    assert memory.hugepages(node.facts()).summary == "7 pages of 2 MiB; there is no GPU to size them for"
    assert memory.hugepages(node.facts(gpus=(gpu(0),), simulated=True)).status == "skip"


def test_the_driver_gets_huge_pages_only_if_the_kernel_always_gives_them(node: FileNode) -> None:
    assert memory.transparent_pages(node.facts()).summary == "this kernel has no transparent huge pages"
    node.write("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n")
    assert memory.transparent_pages(node.facts()).status == "ok"


@pytest.mark.parametrize("modes", ["always [madvise] never\n", "always madvise [never]\n"])
def test_other_settings_of_huge_pages_and_the_command_that_changes_them(node: FileNode, modes: str) -> None:
    node.write("sys/kernel/mm/transparent_hugepage/enabled", modes)
    found = memory.transparent_pages(node.facts())
    assert found.status == "warn"
    assert "up to 0.2 s longer" in found.summary
    assert found.fix == (
        "echo 'w /sys/kernel/mm/transparent_hugepage/enabled - - - - always' | sudo tee /etc/tmpfiles.d/60-hegm.conf "
        "&& sudo systemd-tmpfiles --create /etc/tmpfiles.d/60-hegm.conf"
    )


# -- host memory -------------------------------------------------------------------------------------------------------


def test_free_memory_is_counted_in_gpus(node: FileNode) -> None:
    meminfo(node, total_gib=512, available_gib=300)
    found = memory.host(node.facts(gpus=(gpu(0), gpu(1), gpu(2))))
    assert (found.status, found.summary) == ("ok", "300 GiB of host memory: enough to suspend 2 of 3 full GPUs")


def test_free_huge_pages_count_as_free_memory(node: FileNode) -> None:
    meminfo(node, total_gib=512, available_gib=100, huge_free=50 * 512)
    assert "150 GiB of host memory: enough to suspend 1 of 1" in memory.host(node.facts(gpus=(gpu(0),))).summary


def test_too_little_memory_for_a_full_gpu(node: FileNode) -> None:
    meminfo(node, total_gib=128, available_gib=31)
    found = memory.host(node.facts(gpus=(gpu(0),)))
    assert found.status == "warn"
    assert found.summary == "31 GiB of host memory for offloaded jobs; the smallest GPU has 141 GiB"


def test_free_memory_is_unknown(node: FileNode) -> None:
    assert memory.host(node.facts(gpus=(gpu(0),))).status == "skip"
    meminfo(node, total_gib=128, available_gib=31)
    assert memory.host(node.facts()).status == "skip"
    assert memory.host(node.facts(gpus=(gpu(0, memory_total_bytes=None),))).status == "skip"


# -- control groups ----------------------------------------------------------------------------------------------------

SERVICE = "/system.slice/hegmd.service"


def test_no_limit(node: FileNode) -> None:
    node.write("proc/self/cgroup", f"0::{SERVICE}\n")
    node.write(f"sys/fs/cgroup{SERVICE}/memory.max", "max\n")
    assert cgroups.own_memory(node.facts(gpus=(gpu(0),))).summary == "the daemon's control group has no memory limit"


def test_a_limit_that_is_too_small(node: FileNode) -> None:
    node.write("proc/self/cgroup", f"0::{SERVICE}\n")
    node.write(f"sys/fs/cgroup{SERVICE}/memory.max", f"{GIB}\n")
    found = cgroups.own_memory(node.facts(gpus=(gpu(0),)))
    assert found.status == "warn"
    assert found.summary == f"limited to 1 GiB by {SERVICE}: less than the 141 GiB of gpu0"
    assert found.fix == "sudo systemctl set-property hegmd.service MemoryMax=infinity MemoryHigh=infinity"


def test_a_limit_further_up_binds_too(node: FileNode) -> None:
    node.write("proc/self/cgroup", f"0::{SERVICE}\n")
    node.write(f"sys/fs/cgroup{SERVICE}/memory.max", f"{200 * GIB}\n")
    facts = node.facts(gpus=(gpu(0),))
    assert cgroups.own_memory(facts).summary.endswith("enough for the 141 GiB of gpu0")
    node.write("sys/fs/cgroup/system.slice/memory.high", f"{2 * GIB}\n")
    assert cgroups.own_memory(facts).summary.startswith("limited to 2 GiB by /system.slice")


def test_version_1_in_a_container(node: FileNode) -> None:
    node.write("proc/self/cgroup", "5:devices:/x\n4:cpu,memory:/docker/abc\n0::/\n")
    node.write("sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    found = cgroups.own_memory(node.facts(gpus=(gpu(0),)))
    assert found.status == "warn"
    assert found.fix == "raise memory.limit_in_bytes of that group, or give the container more memory"
    assert cgroups.own_memory(node.facts()).status == "skip"


def test_version_1_without_a_limit(node: FileNode) -> None:
    node.write("proc/self/cgroup", "4:memory:/\n")
    node.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroups.own_memory(node.facts(gpus=(gpu(0),))).status == "ok"


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({"cgroup.controllers": "cpuset cpu io memory pids\n"}, "ok", "version 2 with cpuset cpu io memory pids"),
        ({"cgroup.controllers": "cpu pids\n"}, "warn", "does not count memory"),
        ({"memory/memory.limit_in_bytes": "1\n"}, "warn", "version 1 is in use"),
        ({"unified/cgroup.procs": ""}, "warn", "version 1 is in use"),
        ({}, "warn", "no control groups are mounted"),
    ],
)
def test_the_hierarchy(node: FileNode, files: dict[str, str], status: str, words: str) -> None:
    for name, text in files.items():
        node.write(f"sys/fs/cgroup/{name}", text)
    found = cgroups.hierarchy(node.facts())
    assert found.status == status
    assert words in found.summary


# -- memory that is ready ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready_gib", "wanted_gib", "status", "summary"),
    [
        (0, 0, "skip", "pool.ready_bytes is 0: "),
        (8, 36, "warn", "8 GiB of 36 GiB of host memory are ready"),
        (36, 36, "ok", "36 GiB of host memory are ready"),
    ],
)
def test_memory_that_is_ready(node: FileNode, ready_gib: int, wanted_gib: int, status: str, summary: str) -> None:
    found = memory.ready(node.facts(ready_bytes=ready_gib * GIB, ready_wanted_bytes=wanted_gib * GIB))
    assert found.status == status
    assert found.summary.startswith(summary)
    assert (found.fix is not None) == (status == "warn")
