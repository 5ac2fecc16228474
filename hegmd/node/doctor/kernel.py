"""Checks of the kernel: version, options, and settings that keep one process from seeing or tracing another."""

from __future__ import annotations

import gzip
import os
import re

from hegmd.node.doctor.disk import mounts
from hegmd.node.doctor.facts import CheckResult, NodeFacts, fail, listed, ok, skip, version_numbers, warn
from hegmd.node.doctor.permissions import CAP_SYS_PTRACE, has_capability

OLDEST = (5, 3)

# The kernel options that CRIU needs (criu.org/Linux_kernel), without what only its network and lazy-page features need.
_CRIU_OPTIONS = (
    "CHECKPOINT_RESTORE",
    "NAMESPACES",
    "PID_NS",
    "FHANDLE",
    "EVENTFD",
    "EPOLL",
    "INOTIFY_USER",
    "UNIX_DIAG",
    "INET_DIAG",
    "PACKET_DIAG",
    "NETLINK_DIAG",
)
_POOL_OPTIONS = ("MEMFD_CREATE", "HUGETLBFS", "MEMCG")

# PROC_PID_INIT_INO: the first pid namespace has had this inode number since Linux 3.8.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

DESCRIPTORS = 16384


def version(facts: NodeFacts) -> CheckResult:
    """The kernel has pidfd_open, and the sandbox allows it."""
    release = facts.kernel_release
    if not release:
        return skip("/proc does not report the kernel's version")
    if version_numbers(release) < OLDEST:
        return fail(f"Linux {release} has no pidfd_open", "boot Linux 5.3 or newer")
    try:
        os.close(facts.pidfd_open(os.getpid()))
    except OSError as error:
        return fail(
            f"Linux {release}, but pidfd_open is refused: {error.strerror}",
            "allow pidfd_open in the container's seccomp profile: newer runtimes do by default",
        )
    return ok(f"Linux {release}")


def options(facts: NodeFacts) -> CheckResult:
    """The kernel was built with what CRIU and the host pool need."""
    text = _config_text(facts)
    if text is None:
        return skip("neither /proc/config.gz nor a config in /boot or /lib/modules can be read")
    built = set(re.findall(r"^CONFIG_(\w+)=[ym]$", text, re.MULTILINE))
    for required, purpose in ((_POOL_OPTIONS, "the host pool"), (_CRIU_OPTIONS, "CRIU")):
        missing = [f"CONFIG_{name}" for name in required if name not in built]
        if missing:
            fix = f"boot a kernel with {' '.join(f'{name}=y' for name in missing)}; distributions' own have them"
            return warn(f"{purpose} misses {listed(missing, 2)}", fix)
    return ok(f"all {len(_CRIU_OPTIONS) + len(_POOL_OPTIONS)} options that CRIU and the host pool need")


def _config_text(facts: NodeFacts) -> str | None:
    release = facts.kernel_release
    try:
        return gzip.decompress(facts.at("proc/config.gz").read_bytes()).decode("ascii", "replace")
    except OSError:
        pass  # not built in, or hidden from a container: distributions keep a copy on disk
    for path in (f"boot/config-{release}", f"lib/modules/{release}/config"):
        try:
            text = facts.read(path)
        except PermissionError:
            continue
        if text is not None:
            return text
    return None


def ptrace(facts: NodeFacts) -> CheckResult:
    """Yama lets root trace a process, which CRIU needs."""
    scope = facts.read_int("proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        return ok("this kernel has no Yama: only owners and root may trace")
    if scope >= 3:
        return warn(
            "ptrace_scope is 3: no process may trace, so CRIU cannot dump; only a reboot can lower it",
            "echo kernel.yama.ptrace_scope=1 | sudo tee /etc/sysctl.d/60-hegm-ptrace.conf; remove the other; reboot",
        )
    return ok(f"ptrace_scope is {scope}: root may trace")


def hidepid(facts: NodeFacts) -> CheckResult:
    """/proc shows the processes that the daemon needs to see."""
    proc = [mount for mount in mounts(facts) if mount.kind == "proc" and mount.point == "/proc"]
    mode = next((option for option in (proc[-1].options if proc else ()) if option.startswith("hidepid=")), None)
    if mode is None or mode in ("hidepid=0", "hidepid=off"):
        return ok("/proc shows every process")
    if facts.user_mode:
        return ok(f"/proc is mounted with {mode}: a user's own processes are seen")
    if has_capability(facts, CAP_SYS_PTRACE):
        return ok(f"/proc is mounted with {mode}, which does not bind the daemon (CAP_SYS_PTRACE)")
    return warn(
        f"/proc is mounted with {mode}: other users' processes cannot be seen",
        "run hegmd as root with CAP_SYS_PTRACE, or: sudo mount -o remount,hidepid=0 /proc",
    )


def pid_namespace(facts: NodeFacts) -> CheckResult:
    """The driver's pids mean the same processes here."""
    if facts.simulated:
        return skip("simulated GPUs name pids of the daemon's own namespace")
    try:
        namespace = os.readlink(facts.at("proc/self/ns/pid"))
    except OSError:
        return skip("/proc does not report the pid namespace")
    if namespace == _FIRST_PID_NAMESPACE:
        return ok("hegmd sees the same pids as the driver")
    return warn(
        "hegmd runs in a pid namespace of its own: hegmd cannot match the driver's pids to processes",
        "run hegmd on the host itself, or its container with the host's pid namespace (--pid=host)",
    )


def descriptors(facts: NodeFacts) -> CheckResult:
    """The daemon may open enough descriptors: for clients, processes and offloaded bytes."""
    found = re.search(r"^Max open files\s+(\d+|unlimited)", facts.read("proc/self/limits") or "", re.MULTILINE)
    if found is None:
        return skip("/proc does not report the limit")
    if found[1] == "unlimited" or int(found[1]) >= DESCRIPTORS:
        return ok(f"{found[1]} open files are allowed")
    fix = (
        r"sudo systemctl edit hegmd, with the lines [Service] and LimitNOFILE=65536; sudo systemctl restart hegmd"
        if facts.under_systemd
        else f"ulimit -n {DESCRIPTORS}, before hegmd is started"
    )
    return warn(f"only {found[1]} open files are allowed; a full node needs up to {DESCRIPTORS}", fix)
