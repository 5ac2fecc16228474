"""The owner of a process, from its control group: a Kubernetes pod, a Slurm job, a container, a systemd unit.

Knows how each of them names its groups. Pure: the text of /proc/PID/cgroup in, a Workload or None out. It calls no
runtime, so a hanging container daemon cannot block the inventory.

Groups nest (a pod in a container of a test cluster, a container in a Slurm job), and the outermost owner is not always
the right one. So the kinds are tried in the order pod, job, container, unit over all hierarchies of the process, and a
container found on the way goes into the detail. The patterns require whole identifiers (a pod's UUID, 64 hex digits),
because other names look alike: `libpod-conmon-<id>.scope` is podman's monitor, not a container.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hegmd.protocol.snapshots import Workload

_HEX_ID = r"[0-9a-f]{64}"

# The UID of a pod: a UUID, with _ in place of - where systemd's own escaping would get in the way; or, for a static
# pod, the 32 digits that the kubelet makes from its manifest. Podman's own pods (`libpod_pod_<id>`) are not these.
_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|/|$)"
)
_POD_QOS = re.compile(r"(burstable|besteffort)")

# cgroup v1: /slurm/uid_1000/job_7/step_0/task_0, with the node's name appended where several slurmd share a machine.
# cgroup v2: /system.slice/slurmstepd.scope/job_7/step_0/user/task_0, with the node's name in front.
_SLURM = re.compile(
    r"/[^/]*slurm[^/]*/(?:uid_\d+/)?job_(?P<job>\d+)(?:/step_(?P<step>[^/]+))?(?:/(?:[^/]+/)*?task_(?P<task>[^/]+))?"
)

_CONTAINERS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("docker", re.compile(rf"/docker/({_HEX_ID})(?=/|$)")),
    ("docker", re.compile(rf"/docker-({_HEX_ID})\.scope(?=/|$)")),
    ("podman", re.compile(rf"/libpod-({_HEX_ID})(?:\.scope)?(?=/|$)")),
    ("containerd", re.compile(rf"[/:](?:cri-containerd|containerd|nerdctl)[-:]({_HEX_ID})(?:\.scope)?(?=/|$)")),
    ("cri-o", re.compile(rf"[/:]crio[-:]({_HEX_ID})(?:\.scope)?(?=/|$)")),
    # The supervisor of an LXC container lives in lxc.monitor.NAME and is not in the container.
    ("lxc", re.compile(r"/lxc\.payload[./]([^/]+)")),
    ("lxc", re.compile(r"^/lxc/([^/]+)")),
    ("nspawn", re.compile(r"/machine-(?!qemu)([^/]+)\.scope(?=/|$)")),
    ("nspawn", re.compile(r"/systemd-nspawn@([^/]+)\.service(?=/|$)")),
)
# A bare identifier means a container of an unknown runtime.
_NAMELESS_CONTAINER = re.compile(rf"/({_HEX_ID})(?=/|$)")

_UNIT_ENDINGS = (".service", ".scope")
_USER_SLICE = re.compile(r"/user-(\d+)\.slice(?=/|$)")
_SESSION = re.compile(r"^session-(.+)\.scope$")
_USER_MANAGER = re.compile(r"/user@\d+\.service/")
_UNIT_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


def workload_of(cgroup_text: str) -> Workload | None:
    """Return the owner of a process with this /proc/PID/cgroup; None if the groups name none."""
    paths = tuple(_paths(cgroup_text))
    for read in (_kubernetes, _slurm, _container, _systemd):
        for path in paths:
            found = read(path)
            if found is not None:
                return found
    return None


def _paths(cgroup_text: str) -> Iterator[str]:
    """The groups of the process, each once: cgroup v2's first, then systemd's own of v1, then the controllers'."""
    ranked: dict[str, int] = {}
    for line in cgroup_text.splitlines():
        hierarchy, _, rest = line.partition(":")
        # Containerd puts colons into some paths, so only the first two of a line divide it.
        controllers, _, path = rest.partition(":")
        path = path.removesuffix(" (deleted)")
        if path.startswith("/") and path != "/":
            rank = 0 if hierarchy == "0" else 1 if controllers == "name=systemd" else 2
            ranked[path] = min(rank, ranked.get(path, rank))
    yield from sorted(ranked, key=lambda path: ranked[path])


def _kubernetes(path: str) -> Workload | None:
    pod = _POD.search(path)
    if pod is None:
        return None
    qos = _POD_QOS.search(path)
    detail = {"qos": qos[1] if qos else "guaranteed"} if "kubepods" in path else {}
    detail |= _container_detail(path[pod.end() :])
    return Workload(kind="kubernetes", id=pod[1].replace("_", "-"), detail=detail)


def _slurm(path: str) -> Workload | None:
    job = _SLURM.search(path)
    if job is None:
        return None
    detail = {name: job[name] for name in ("step", "task") if job[name] is not None}
    return Workload(kind="slurm", id=job["job"], detail=detail | _container_detail(path[job.end() :]))


def _container(path: str) -> Workload | None:
    found = _find_container(path)
    if found is None:
        return None
    container, runtime = found
    return Workload(kind="container", id=container, detail={} if runtime is None else {"runtime": runtime})


def _container_detail(path: str) -> dict[str, str]:
    found = _find_container(path)
    if found is None:
        return {}
    container, runtime = found
    return {"container": container} if runtime is None else {"container": container, "runtime": runtime}


def _find_container(path: str) -> tuple[str, str | None] | None:
    """Return the outermost container on that path, which the node's own tools know, and its runtime."""
    matches = ((pattern.search(path), runtime) for runtime, pattern in _CONTAINERS)
    named = [(match.start(), match[1], runtime) for match, runtime in matches if match is not None]
    if named:
        _, container, runtime = min(named)
        return _UNIT_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), container), runtime
    nameless = _NAMELESS_CONTAINER.search(path)
    return None if nameless is None else (nameless[1], None)


def _systemd(path: str) -> Workload | None:
    parts = path.strip("/").split("/")
    units = [part for part in parts if part.endswith(_UNIT_ENDINGS)]
    slices = [part for part in parts if part.endswith(".slice")]
    if not units and not slices:
        return None
    # The innermost is the unit that was started for this process; a user's own manager is a service around it.
    unit = units[-1] if units else slices[-1]
    detail: dict[str, str] = {}
    if units and slices:
        detail["slice"] = slices[-1]
    if user := _USER_SLICE.search(path):
        detail["user"] = user[1]
    if session := _SESSION.match(unit):
        detail["session"] = session[1]
    if _USER_MANAGER.search(path):
        detail["manager"] = "user"
    return Workload(kind="systemd", id=unit, detail=detail)
