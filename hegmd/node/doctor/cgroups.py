"""Checks of control groups: the version, and the memory limit of the daemon's own group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from hegmd.node.doctor.facts import CheckResult, NodeFacts, clipped, ok, size_text, skip, warn

_ROOT = "sys/fs/cgroup"
# Version 1 writes "no limit" as the largest multiple of a page that fits: anything near it is none.
_NO_LIMIT_BYTES = 1 << 60


def hierarchy(facts: NodeFacts) -> CheckResult:
    """Version 2 is mounted and counts memory."""
    controllers = facts.read(f"{_ROOT}/cgroup.controllers")
    if controllers is not None:
        if "memory" in controllers.split():
            return ok(f"version 2 with {' '.join(controllers.split())}")
        return warn(
            "version 2 is mounted, but does not count memory: a job's own limit cannot be seen",
            "remove cgroup_disable=memory from the kernel's command line; in a container, pass the controller on",
        )
    if facts.at(f"{_ROOT}/memory").exists() or facts.at(f"{_ROOT}/unified").exists():
        return warn(
            "version 1 is in use: jobs are recognised, but CRIU and memory limits work best with version 2",
            "boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line",
        )
    return warn(f"no control groups are mounted at /{_ROOT}", f"sudo mount -t cgroup2 cgroup2 /{_ROOT}")


def own_memory(facts: NodeFacts) -> CheckResult:
    """The daemon may use enough memory for the bytes of one GPU."""
    limits = sorted(_limits(facts))
    if not limits:
        return ok("the daemon's control group has no memory limit")
    limit_bytes, group, knob = limits[0]
    gpu = facts.largest_gpu()
    text = f"limited to {size_text(limit_bytes)} by {clipped(group, 40)}"
    if gpu is None or gpu.memory_total_bytes is None:
        return skip(f"{text}; there is no GPU to compare with")
    if limit_bytes >= gpu.memory_total_bytes:
        return ok(f"{text}: enough for the {size_text(gpu.memory_total_bytes)} of {gpu.id}")
    unit = PurePosixPath(group).name
    fix = (
        f"sudo systemctl set-property {unit} MemoryMax=infinity MemoryHigh=infinity"
        if unit.endswith((".service", ".scope", ".slice"))
        else f"raise {knob} of that group, or give the container more memory"
    )
    return warn(f"{text}: less than the {size_text(gpu.memory_total_bytes)} of {gpu.id}", fix)


def _limits(facts: NodeFacts) -> Iterator[tuple[int, str, str]]:
    """Return every limit of this process: bytes, group and file name."""
    for line in (facts.read("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, knobs = _ROOT, "memory.max memory.high"
        elif "memory" in controllers.split(","):
            base, knobs = f"{_ROOT}/memory", "memory.limit_in_bytes"
        else:
            continue
        # The group itself and its ancestors. In a container the path may be the host's and not exist; then the
        # container's own group is mounted at the top.
        group = PurePosixPath(path)
        for each in (group, *group.parents):
            for knob in knobs.split():
                limit_bytes = facts.read_int(f"{base}/{str(each).lstrip('/')}/{knob}")
                if limit_bytes is not None and limit_bytes < _NO_LIMIT_BYTES:
                    yield limit_bytes, str(each), knob
