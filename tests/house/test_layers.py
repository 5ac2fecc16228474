"""The table of allowed imports, which every module of the product has to be in.

Lowest first. A package imports what its row names and nothing else, whether the import is at the top, inside a function
or for type checkers only. A package's row holds for every module in it, unless a longer name has a row of its own. A
new package gets a row here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.cells import in_one_test
from tests.house import rules
from tests.house.source import PACKAGES, Module, is_within, modules

pytestmark = [pytest.mark.xdist_group("source")]  # as in test_shape

# The imports allowed to the agent and the client: the client has to start fast, and may be newer or older than the
# daemon.
OUTSIDE = ("hegmd", "hegmd.errors", "hegmd.protocol")
# The layers below the operations of a node, each of which may use those to its left.
SYSTEM = (*OUTSIDE, "hegmd.system")
TELEMETRY = (*SYSTEM, "hegmd.telemetry")
NODE = (*TELEMETRY, "hegmd.node")
HELPER = (*NODE, "hegmd.gpu_helper")
# Memory and workers do not know one another.
MEMORY = (*HELPER, "hegmd.memory")
WORKERS = (*MEMORY, "hegmd.workers")
# The pure part of a migration, from values to a plan.
MACHINE = ("hegmd.errors", "hegmd.protocol", "hegmd.memory.sizes", "hegmd.node.gpu_sets")
PLANNED = (*MACHINE, "hegmd.migration.machine.*", "hegmd.migration.model")
CARRIED = (*WORKERS, "hegmd.migration.contracts", "hegmd.migration.methods")
# For the modules that put the daemon together. The client is not in it.
EVERYTHING = ("hegmd.*",)
# The agent's state, lowest first.
VALUES = ("hegmd.protocol", "hegmd.errors", "hegmd.agent", "hegmd.agent.state.storage")
FRAMEWORKS = (*VALUES, "hegmd.agent.state.values")
CODE = (*FRAMEWORKS, "hegmd.agent.state.frameworks")
LOADERS = (*CODE, "hegmd.agent.state.code")

LAYERS: dict[str, tuple[str, ...]] = {
    # shared by daemon, client and agent
    "hegmd": (),
    "hegmd.errors": (),
    "hegmd.protocol": ("hegmd", "hegmd.errors"),
    # Inside workers, under a private name; nothing else imports it
    "hegmd.agent": OUTSIDE,
    "hegmd.agent.state.storage": ("hegmd.errors", "hegmd.agent"),
    "hegmd.agent.state.values": VALUES,
    "hegmd.agent.state.frameworks": FRAMEWORKS,
    "hegmd.agent.state.code": CODE,
    "hegmd.agent.state.loaders": LOADERS,
    "hegmd.agent.state.script": (*LOADERS, "hegmd.agent.state.loaders"),
    # Imported by scripts; it calls the agent, or this package's own copy of the agent's replies
    "hegm": (),
    # The daemon, lowest first
    "hegmd.system": OUTSIDE,
    "hegmd.telemetry": SYSTEM,
    "hegmd.node": TELEMETRY,
    "hegmd.gpu_helper": NODE,
    "hegmd.gpu_helper.cuda": (),
    "hegmd.memory": HELPER,
    # A process of its own, which takes the standard library and no more
    "hegmd.memory.keeper": (),
    "hegmd.memory.keeper.client": (*OUTSIDE, "hegmd.memory.keeper"),
    "hegmd.workers": HELPER,
    "hegmd.migration": (),
    "hegmd.migration.contracts": WORKERS,
    "hegmd.migration.machine": MACHINE,
    "hegmd.migration.machine.wording": (*MACHINE, "hegmd.migration.machine", "hegmd.migration.model"),
    "hegmd.migration.model": (*MACHINE, "hegmd.migration.machine"),
    "hegmd.migration.journal": (*TELEMETRY, "hegmd.migration.machine"),
    "hegmd.migration.plan": PLANNED,
    "hegmd.migration.methods": (*WORKERS, "hegmd.migration.contracts"),
    "hegmd.migration.carriers": CARRIED,
    "hegmd.migration.run": (
        *(*CARRIED, "hegmd.migration.carriers", "hegmd.migration.machine.*", "hegmd.migration.model"),
        *("hegmd.migration.journal", "hegmd.migration.plan"),
    ),
    "hegmd.images": (*WORKERS, "hegmd.migration.*"),
    "hegmd.images.criu": NODE,
    # A program of its own, started by path
    "hegmd.images.criu.parent": (),
    "hegmd.images.files": HELPER,
    # Snapshots of jobs and starts from them. Knows no operations
    "hegmd.recovery": CARRIED,
    "hegmd.operations": (*WORKERS, "hegmd.migration.*", "hegmd.images", "hegmd.images.files", "hegmd.recovery"),
    "hegmd.sharing": (*WORKERS, "hegmd.workers", "hegmd.migration.*", "hegmd.operations", "hegmd.sharing.*"),
    # The pure part of sharing, lowest first
    "hegmd.sharing.model": (),
    "hegmd.sharing.wanted": ("hegmd.sharing.model",),
    "hegmd.sharing.room": ("hegmd.sharing.model", "hegmd.sharing.wanted"),
    "hegmd.sharing.clearing": ("hegmd.sharing.model", "hegmd.sharing.wanted", "hegmd.sharing.room"),
    "hegmd.sharing.wording": (
        *("hegmd.node", "hegmd.migration.machine.wording"),
        *("hegmd.sharing.model", "hegmd.sharing.wanted", "hegmd.sharing.room"),
    ),
    "hegmd.sharing.policy": (
        *("hegmd.sharing.model", "hegmd.sharing.wanted", "hegmd.sharing.room"),
        *("hegmd.sharing.clearing", "hegmd.sharing.wording"),
    ),
    "hegmd.server": (
        *(*NODE, "hegmd.workers", "hegmd.operations", "hegmd.recovery"),
        *("hegmd.sharing", "hegmd.sharing.model"),
    ),
    "hegmd.server.auth": ("hegmd.errors", "hegmd.protocol"),
    # The composition of all parts
    "hegmd.setting_types": (),
    "hegmd.settings": ("hegmd.setting_types", "hegmd.protocol"),
    "hegmd.config": (*OUTSIDE, "hegmd.setting_types", "hegmd.settings", "hegmd.system.toml_lines"),
    "hegmd.wiring": EVERYTHING,
    "hegmd.app": EVERYTHING,
    "hegmd.__main__": EVERYTHING,
    # The client
    "hegmctl": OUTSIDE,
    # Images take no daemon; this one command loads what the daemon has for them
    "hegmctl.images": (*OUTSIDE, "hegmctl", "hegmd.images.files"),
    # HeGM's outside, kept: programs of their own, which need no daemon
    "hegmcompat": (*OUTSIDE, "hegmctl"),
}

# Packages from outside and modules of the standard library that only some modules may touch: the hardware, other
# programs and the network each have one door.
FENCES: dict[str, tuple[str, ...]] = {
    "amdsmi": ("hegmd.node.devices.amd_binding",),
    "cuda": ("hegmd.gpu_helper.cuda",),
    "pynvml": ("hegmd.node.devices.nvml",),
    "textual": ("hegmctl.top",),
    "subprocess": ("hegmd.system.detached_programs", "hegmd.system.programs"),
    "asyncio": (),
    "multiprocessing": (),
    "concurrent.futures": (),
    "urllib": (),
    "http": ("hegmcompat.rest",),
    "requests": (),
}

# Same arguments, same answer: these are tested without a clock, a network or a process.
PURE = (
    "hegmd.errors",
    "hegmd.protocol",
    "hegmd.server.auth",
    "hegmd.memory.sizes",
    "hegmd.node.gpu_sets",
    "hegmd.node.workloads",
    "hegmd.images.criu.command_line",
    "hegmd.images.criu.error_messages",
    "hegmd.migration.journal.records",
    "hegmd.migration.machine",
    "hegmd.migration.model",
    "hegmd.migration.plan",
    "hegmd.sharing.model",
    "hegmd.sharing.wanted",
    "hegmd.sharing.room",
    "hegmd.sharing.clearing",
    "hegmd.sharing.wording",
    "hegmd.sharing.policy",
    "hegmd.recovery.policy",
)

# Parts get values. Only these read the configuration file's form.
READS_CONFIG = ("hegmd.app", "hegmd.wiring", "hegmd.__main__", "hegmd.config")


@functools.cache
def row_of(name: str) -> str | None:
    """The longest name in the table that the module is or lies under; the row of `hegmd` holds for its version only."""
    rows = [row for row in LAYERS if is_within(name, row) and (row != "hegmd" or name == "hegmd")]
    return max(rows, key=len, default=None)


def _covers(room: str, target: str) -> bool:
    """Whether a name in a row permits that module: `x.*` is all below x, `x` what has no row of its own below x."""
    if room.endswith(".*"):
        return is_within(target, room.removesuffix(".*"))
    return row_of(target) == room if room in LAYERS else is_within(target, room)


def layer_violations(module: Module, known: frozenset[str]) -> Iterator[str]:
    row = row_of(module.name)
    if row is None:
        yield "has no row in LAYERS: say what it may import"
        return
    allowed = LAYERS[row]
    for found in module.imports(known):
        if found.target.split(".")[0] not in PACKAGES:
            continue
        if row_of(found.target) == row or is_within(found.target, row):
            continue
        if not any(_covers(room, found.target) for room in allowed):
            yield f"{found.line}: imports {found.target}, which is not in its row"


def fence_violations(module: Module) -> Iterator[str]:
    for found in module.imports():
        for fenced, rooms in FENCES.items():
            if is_within(found.target, fenced) and not any(is_within(module.name, room) for room in rooms):
                yield f"{found.line}: imports {found.target}; only {', '.join(rooms) or 'nobody'} may"


def config_violations(module: Module) -> Iterator[str]:
    if module.name not in READS_CONFIG:
        for found in module.imports(frozenset({"hegmd.config"})):
            if is_within(found.target, "hegmd.config"):
                yield f"{found.line}: imports {found.target}; parts get values"


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(module.name for module in modules())


def test_every_module_imports_only_what_its_row_names() -> None:
    names = _names()
    _expect_none(
        modules(),
        lambda module: [*layer_violations(module, names), *fence_violations(module), *config_violations(module)],
    )


def test_the_pure_parts_touch_nothing_outside() -> None:
    _expect_none(modules(*PURE), rules.purity)


def _expect_none(judged: Iterable[Module], offences: Callable[[Module], Iterable[str]]) -> None:
    found = [f"{module.where}: {line}" for module in judged for line in offences(module)]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


def test_the_table_has_no_row_without_a_module() -> None:
    stale = [row for row in LAYERS if not any(is_within(name, row) for name in _names())]
    assert not stale


def test_imports_go_one_way() -> None:
    rows = {row: {room for room in allowed if room != row} for row, allowed in LAYERS.items()}
    order = list(TopologicalSorter(rows).static_order())  # raises CycleError, naming the rooms
    assert order.index("hegmd.errors") < order.index("hegmd.protocol") < order.index("hegmd.server")


KNOWN = frozenset(
    {"hegmd", "hegmd.errors", "hegmd.protocol", "hegmd.server.auth", "hegmd.node.inventory", "hegmd.config"}
)


@in_one_test(
    ("name", "text"),
    [
        ("hegmd.protocol.frames", "from hegmd.server import listener"),
        ("hegmd.protocol.frames", "from hegmd.node import inventory"),
        ("hegmd.protocol.frames", "def late():\n    import hegmd.node.inventory"),
        ("hegmd.protocol.frames", "from ..server import listener"),
        ("hegmd.server.auth", "import hegmd.node.inventory"),
        ("hegmctl.cli", "from hegmd.server import listener"),
        ("hegmd.unheard_of", ""),
        ("hegmd.node.inventory", "import hegmctl.cli"),
    ],
)
def test_an_import_against_the_table_is_found(name: str, text: str) -> None:
    assert list(layer_violations(Module.parse(name, Path("x.py"), text), KNOWN))


@in_one_test(
    ("name", "text"),
    [
        ("hegmd.protocol.frames", "from hegmd.errors import Bug\nfrom hegmd.protocol import codec\nimport os"),
        ("hegmd.protocol.frames", "from . import codec"),
        ("hegmd.server.listener", "from hegmd import __version__\nfrom hegmd.server.auth import Peer"),
        ("hegmd.app", "from hegmd.node import inventory\nfrom hegmd.config import load"),
        ("hegmctl.cli", "from hegmd import errors, protocol"),
    ],
)
def test_an_import_along_the_table_is_let_through(name: str, text: str) -> None:
    assert not list(layer_violations(Module.parse(name, Path("x.py"), text), KNOWN))


def test_fences_and_configuration_are_held() -> None:
    reader = Module.parse("hegmd.server.listener", Path("x.py"), "import subprocess, pynvml\nfrom hegmd import config")
    assert [line.split()[2].rstrip(";") for line in fence_violations(reader)] == ["subprocess", "pynvml"]
    assert list(config_violations(reader))
    owner = Module.parse("hegmd.node.devices.nvml", Path("x.py"), "import pynvml")
    assert not list(fence_violations(owner))


def test_only_declared_packages_are_imported() -> None:
    _expect_none(modules(), _undeclared)


def _undeclared(module: Module) -> Iterator[str]:
    ours = set(PACKAGES)
    declared = {"amdsmi", "anyio", "cuda", "msgpack", "pynvml", "textual", "tomli", "tomllib"}
    # The last two are one, by version.
    imported = {found.target.split(".")[0] for found in module.imports() if not found.for_types_only}
    for found in sorted(imported - sys.stdlib_module_names - ours - declared):
        yield f"imports {found}, which pyproject.toml does not declare"
