"""Where the dynamic loader would find a library, without asking it to load anything."""

from __future__ import annotations

from pathlib import Path

from hegmd.node.doctor.facts import NodeFacts

# The loader's own directories, and where container runtimes, WSL and NixOS mount the driver's libraries.
_BUILT_IN = (
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "usr/lib64",
    "lib",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "usr/lib/wsl/lib",
    "run/opengl-driver/lib",
)
_INCLUDES_MAX = 32


def find_library(facts: NodeFacts, name: str) -> Path | None:
    """The library's path, None when it is in none of the directories."""
    for directory in (*_configured(facts, "etc/ld.so.conf", depth=0), *_BUILT_IN):
        path = facts.at(directory) / name
        if path.exists():
            return path
    return None


def _configured(facts: NodeFacts, path: str, depth: int) -> list[str]:
    """The directories that ld.so.conf and what it includes name, in their order."""
    directories: list[str] = []
    for line in (facts.read(path) or "").splitlines():
        words = line.partition("#")[0].split()
        if len(words) == 2 and words[0] == "include" and depth == 0:
            pattern = words[1].lstrip("/") if words[1].startswith("/") else f"etc/{words[1]}"
            for included in sorted(facts.root.glob(pattern))[:_INCLUDES_MAX]:
                directories += _configured(facts, str(included.relative_to(facts.root)), depth + 1)
        elif len(words) == 1 and words[0].startswith("/"):
            directories.append(words[0].lstrip("/"))
    return directories
