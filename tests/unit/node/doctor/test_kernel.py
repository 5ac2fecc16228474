"""Checks of the kernel over nodes made of files."""

from __future__ import annotations

import errno
import gzip

import pytest

from hegmd.node.doctor import kernel
from tests.unit.node.doctor.node import FileNode

RELEASE = "6.8.0-45-generic"
ALL_OPTIONS = (
    "CHECKPOINT_RESTORE NAMESPACES PID_NS FHANDLE EVENTFD EPOLL INOTIFY_USER UNIX_DIAG INET_DIAG PACKET_DIAG "
    "NETLINK_DIAG MEMFD_CREATE HUGETLBFS MEMCG"
).split()


def running(node: FileNode, release: str = RELEASE) -> None:
    node.write("proc/sys/kernel/osrelease", f"{release}\n")


def config(*left_out: str) -> str:
    lines = [f"# CONFIG_{name} is not set" if name in left_out else f"CONFIG_{name}=y" for name in ALL_OPTIONS]
    return "\n".join([*lines, "CONFIG_LOCALVERSION=y", ""]).replace("UNIX_DIAG=y", "UNIX_DIAG=m")


@pytest.mark.parametrize(
    ("release", "status"), [(RELEASE, "ok"), ("5.3.0", "ok"), ("5.2.21", "fail"), ("4.18.0-553.el8", "fail")]
)
def test_the_version(node: FileNode, release: str, status: str) -> None:
    running(node, release)
    found = kernel.version(node.facts())
    assert found.status == status
    assert release in found.summary


def test_a_kernel_that_reports_nothing(node: FileNode) -> None:
    assert kernel.version(node.facts()).status == "skip"


def test_a_sandbox_that_refuses_pidfd_open(node: FileNode) -> None:
    def refused(_pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    running(node)
    found = kernel.version(node.facts(pidfd_open=refused))
    assert found.status == "fail"
    assert "pidfd_open is refused: Operation not permitted" in found.summary


@pytest.mark.parametrize(
    "place", ["proc/config.gz", f"boot/config-{RELEASE}", f"lib/modules/{RELEASE}/config"], ids=["proc", "boot", "lib"]
)
def test_options_are_found_in_all_places(node: FileNode, place: str) -> None:
    running(node)
    text = config().encode()
    node.write(place, gzip.compress(text) if place.endswith(".gz") else text)
    found = kernel.options(node.facts())
    assert (found.status, found.summary) == ("ok", "all 14 options that CRIU and the host pool need")


@pytest.mark.parametrize(
    ("left_out", "words", "fix"),
    [
        (("CHECKPOINT_RESTORE",), "CRIU misses CONFIG_CHECKPOINT_RESTORE", "CONFIG_CHECKPOINT_RESTORE=y"),
        (("MEMFD_CREATE", "EPOLL"), "the host pool misses CONFIG_MEMFD_CREATE", "CONFIG_MEMFD_CREATE=y"),
        (("EVENTFD", "EPOLL", "FHANDLE"), "CONFIG_FHANDLE, CONFIG_EVENTFD and 1 more", "CONFIG_EPOLL=y"),
    ],
)
def test_options_that_are_missing(node: FileNode, left_out: tuple[str, ...], words: str, fix: str) -> None:
    running(node)
    node.write(f"boot/config-{RELEASE}", config(*left_out))
    found = kernel.options(node.facts())
    assert found.status == "warn"
    assert words in found.summary
    assert found.fix is not None
    assert fix in found.fix


def test_options_that_cannot_be_read(node: FileNode) -> None:
    running(node)
    node.write("boot/config-5.4.0", config())  # from another kernel
    assert kernel.options(node.facts()).status == "skip"


@pytest.mark.parametrize(("scope", "status"), [(None, "ok"), ("0", "ok"), ("1", "ok"), ("2", "ok"), ("3", "warn")])
def test_yama(node: FileNode, scope: str | None, status: str) -> None:
    if scope is not None:
        node.write("proc/sys/kernel/yama/ptrace_scope", f"{scope}\n")
    assert kernel.ptrace(node.facts()).status == status


def proc_mount(node: FileNode, options: str, capabilities: int = 0) -> None:
    node.write("proc/self/mountinfo", f"22 28 0:21 / /proc rw,nosuid shared:12 - proc proc {options}\n")
    node.write("proc/self/status", f"Name:\thegmd\nCapEff:\t{capabilities:016x}\n")


@pytest.mark.parametrize(
    ("options", "capabilities", "user_mode", "status"),
    [
        ("rw", 0, False, "ok"),
        ("rw,hidepid=0", 0, False, "ok"),
        ("rw,hidepid=off", 0, False, "ok"),
        ("rw,hidepid=2", 1 << 19, False, "ok"),
        ("rw,hidepid=invisible", 0, False, "warn"),
        ("rw,hidepid=noaccess", 0, True, "ok"),
    ],
)
def test_hidepid(node: FileNode, options: str, capabilities: int, user_mode: bool, status: str) -> None:
    proc_mount(node, options, capabilities)
    assert kernel.hidepid(node.facts(user_mode=user_mode)).status == status


def test_the_last_mount_on_proc_counts(node: FileNode) -> None:
    lower = "22 28 0:21 / /proc rw - proc proc rw,hidepid=2\n"
    node.write("proc/self/mountinfo", f"{lower}99 22 0:50 / /proc rw - proc proc rw\n")
    assert kernel.hidepid(node.facts()).status == "ok"


@pytest.mark.parametrize(
    ("namespace", "simulated", "status"),
    [
        ("pid:[4026531836]", False, "ok"),
        ("pid:[4026533210]", False, "warn"),
        ("pid:[4026533210]", True, "skip"),
        (None, False, "skip"),
    ],
)
def test_pid_namespaces(node: FileNode, namespace: str | None, simulated: bool, status: str) -> None:
    if namespace is not None:
        node.link("proc/self/ns/pid", namespace)
    assert kernel.pid_namespace(node.facts(simulated=simulated)).status == status


@pytest.mark.parametrize(
    ("limit", "status"), [("1024", "warn"), ("16384", "ok"), ("1048576", "ok"), ("unlimited", "ok"), (None, "skip")]
)
def test_open_files(node: FileNode, limit: str | None, status: str) -> None:
    if limit is not None:
        node.write(
            "proc/self/limits", f"Limit   Soft Limit  Hard Limit  Units\nMax open files  {limit}  1048576  files\n"
        )
    found = kernel.descriptors(node.facts())
    assert found.status == status
    if status == "warn":
        assert found.fix == "ulimit -n 16384, before hegmd is started"
        under_systemd = kernel.descriptors(node.facts(under_systemd=True)).fix
        assert under_systemd is not None
        assert "LimitNOFILE=65536" in under_systemd
