"""Who may import whom: one table, which every module of the product has to be in.

Read it from the top: a room sees the rooms named in its row and nothing else, whether the import is at the top, inside
a function or for type checkers only. A package's row holds for all that is in it, unless a module has a row of its own.
A new room gets a row here, and the row is what a reviewer looks at.
Longer than 400 lines because the table is one, and nobody looks for a row in two places.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.house import rules
from tests.house.source import PACKAGES, Module, is_within, modules

pytestmark = [pytest.mark.xdist_group("source")]  # as in test_shape

# What the client may use as well, and what every part of the daemon above the protocol may.
OUTSIDE = ("hegmd", "hegmd.errors", "hegmd.protocol")
GROUND = (*OUTSIDE, "hegmd.news", "hegmd.task_home")
# For the two that put the daemon together. It stays the daemon: the client is not in it.
EVERYTHING = ("hegmd.*",)
# What is looked at from outside: lines, records, figures and events. It knows of nothing that it is told about.
SEEN = ("hegmd.log", "hegmd.audit", "hegmd.metrics", "hegmd.events")
# The node as it is: hardware, workers, and how programs are run on it.
NODE = ("hegmd.devices", "hegmd.external", "hegmd.workers", "hegmd.workloads", "hegmd.ways")
# Where operations, and what no operation has, are asked for.
ASKED = (
    *("hegmd.asking", "hegmd.operations", "hegmd.sequences", "hegmd.checkpoints", "hegmd.restarts"),
    *("hegmd.strays", "hegmd.driver_strays"),
)
# What pieces of the pool are made of, and where.
PIECES = (
    "hegmd.blocks",
    "hegmd.pieces",
    "hegmd.pool_names",
    "hegmd.pool_places",
    "hegmd.pool_memory",
    "hegmd.spill_file",
    "hegmd.pool_sums",
)
POOLED = ("hegmd.errors", *PIECES, "hegmd.store")
# What jobs go into images by, and come out of them.
IMAGED = (
    *("hegmd.agent_orders", "hegmd.concert", "hegmd.criu", "hegmd.detached", "hegmd.external", "hegmd.image"),
    "hegmd.inventory",
    *("hegmd.manifests", "hegmd.meeting", "hegmd.migration"),
)
# What operations are carried out with.
MOVING = (*GROUND, "hegmd.log", "hegmd.workers", "hegmd.rooms", "hegmd.pool", "hegmd.methods")

LAYERS: dict[str, tuple[str, ...]] = {
    # What daemon, client and agent share
    "hegmd": (),
    "hegmd.errors": (),
    "hegmd.protocol": ("hegmd", "hegmd.errors"),
    # Inside workers, under a private name; nobody else imports it
    "hegmd.agent": GROUND,
    # What scripts import; it asks the agent, or this package's own copy of what the agent would answer
    "hegm": (),
    # Foundations: one subject each, usable by all that is below
    "hegmd.journald": (),
    "hegmd.log_forms": ("hegmd.journald",),
    "hegmd.log": (*GROUND, "hegmd.log_forms", "hegmd.journald"),
    "hegmd.audit_file": GROUND,
    "hegmd.audit": (*GROUND, "hegmd.log", "hegmd.audit_file"),
    "hegmd.metrics": (*GROUND, "hegmd.log"),
    "hegmd.events": (*GROUND, "hegmd.log"),
    "hegmd.toml_lines": ("hegmd.errors",),
    "hegmd.setting_kinds": (),
    "hegmd.settings": ("hegmd.setting_kinds",),
    "hegmd.service": GROUND,
    "hegmd.state_dir": ("hegmd.errors",),
    "hegmd.news": (),
    "hegmd.own_memory": ("hegmd.__main__",),
    "hegmd.task_home": (),
    "hegmd.detached": ("hegmd.errors",),
    "hegmd.descriptors": (),
    "hegmd.crew": (),
    "hegmd.elf": (),
    "hegmd.blocks": ("hegmd.errors", "hegmd.crew"),
    "hegmd.stream": (*GROUND, "hegmd.descriptors"),
    # Where descriptors outlive the daemon; the keeper's own process takes the standard library and no more
    "hegmd.store": (*GROUND, "hegmd.service"),
    "hegmd.keeper": (),
    "hegmd.keeper.client": (*GROUND, "hegmd.keeper"),
    # The node
    "hegmd.external": (*GROUND, "hegmd.log", "hegmd.detached", "hegmd.descriptors", "hegmd.scarcity"),
    "hegmd.apart": ("hegmd.errors", "hegmd.detached", "hegmd.external"),
    "hegmd.units": ("hegmd.errors", "hegmd.detached", "hegmd.external"),
    "hegmd.devices": (*GROUND, "hegmd.log", "hegmd.detached", "hegmd.toml_lines"),
    "hegmd.order_link": (),
    "hegmd.agent_orders": (*GROUND, "hegmd.order_link"),
    "hegmd.workers": (*GROUND, "hegmd.log", "hegmd.agent_orders"),
    "hegmd.supervisors": (*GROUND, "hegmd.order_link"),
    "hegmd.job_names": (
        *(*GROUND, "hegmd.detached", "hegmd.processes.surroundings", "hegmd.supervisors", "hegmd.workers"),
    ),
    "hegmd.workloads": GROUND,
    "hegmd.ways": GROUND,
    "hegmd.processes": (*GROUND, *SEEN, *NODE),
    "hegmd.inventory": (*GROUND, *SEEN, *NODE, "hegmd.processes"),
    # CRIU: what a job needs of it, and its runs; the attendant is a program of its own
    "hegmd.concert": ("hegmd.errors",),
    "hegmd.criu": (
        *(
            *GROUND,
            "hegmd.log",
            "hegmd.apart",
            "hegmd.concert",
            "hegmd.detached",
            "hegmd.elf",
            "hegmd.external",
            "hegmd.units",
        ),
        "hegmd.processes.procfs",
    ),
    "hegmd.criu.attendant": (),
    "hegmd.doctor": (*GROUND, "hegmd.log", "hegmd.criu", "hegmd.detached", "hegmd.elf", *NODE, "hegmd.processes"),
    # What moves them: decided without I/O, from values; done by the runner and what it has for hands
    "hegmd.pieces": (),
    "hegmd.places": (),
    # The GPU helper: a process of its own, and the daemon's side of it
    "hegmd.helper": (*GROUND, "hegmd.crew", "hegmd.descriptors"),
    "hegmd.helper.cuda": (),
    "hegmd.helper.session": (*GROUND, "hegmd.log", "hegmd.external", "hegmd.stream", "hegmd.helper"),
    "hegmd.helper.link": (*GROUND, "hegmd.external", "hegmd.helper"),
    "hegmd.helper.route": ("hegmd.errors", "hegmd.helper"),
    "hegmd.vram": (*GROUND, "hegmd.log", "hegmd.helper", "hegmd.pieces", "hegmd.store"),
    # Images on disk: what touches them, in a process with their owner's rights; and the daemon's side of it
    "hegmd.image": (*GROUND, "hegmd.blocks"),
    "hegmd.image.child": (*GROUND, "hegmd.blocks", "hegmd.descriptors", "hegmd.helper", "hegmd.image"),
    "hegmd.image.private": ("hegmd.errors", "hegmd.detached"),
    "hegmd.image.hands": (*GROUND, "hegmd.external", "hegmd.helper"),
    "hegmd.image.in_hand": (*GROUND, "hegmd.descriptors", "hegmd.external", "hegmd.image"),
    "hegmd.image.images": (*GROUND, "hegmd.detached", "hegmd.external", "hegmd.image"),
    "hegmd.pages": ("hegmd.crew", "hegmd.pieces"),
    "hegmd.pool_names": ("hegmd.errors",),
    "hegmd.pool_places": ("hegmd.pieces",),
    "hegmd.pool_memory": ("hegmd.errors", "hegmd.pages", "hegmd.pieces", "hegmd.pool_names", "hegmd.pool_places"),
    "hegmd.spill_file": ("hegmd.errors", "hegmd.blocks", "hegmd.pool_places"),
    "hegmd.pool_sums": ("hegmd.errors", "hegmd.blocks", "hegmd.spill_file"),
    "hegmd.spilling": ("hegmd.errors", "hegmd.detached", "hegmd.pool_memory", "hegmd.spill_file"),
    "hegmd.pool_piece": POOLED,
    "hegmd.pool_found": (*POOLED, "hegmd.pool_piece"),
    "hegmd.pool": (*POOLED, "hegmd.log", "hegmd.pool_piece", "hegmd.spilling"),
    "hegmd.rooms": (*GROUND, "hegmd.log", "hegmd.devices"),
    "hegmd.attendance": (*GROUND, "hegmd.places", "hegmd.rooms", "hegmd.workers"),
    "hegmd.methods": (
        *(*GROUND, "hegmd.log", "hegmd.agent_orders", "hegmd.helper", "hegmd.pieces", "hegmd.places", "hegmd.pool"),
        *("hegmd.rooms", "hegmd.supervisors", "hegmd.vram", "hegmd.workers"),
    ),
    "hegmd.methods.claims": ("hegmd.errors", "hegmd.protocol", "hegmd.processes"),
    "hegmd.methods.launchers": ("hegmd.criu.population", "hegmd.criu.tree", "hegmd.processes"),
    "hegmd.methods.started_ranks": ("hegmd.errors", "hegmd.criu.tree", "hegmd.processes"),
    "hegmd.migration": (*GROUND, "hegmd.pieces", "hegmd.places"),
    "hegmd.migration.ledger": (*GROUND, "hegmd.log", "hegmd.events", "hegmd.migration"),
    "hegmd.migration.cast": (*MOVING, "hegmd.migration"),
    "hegmd.migration.agent_effects": (*MOVING, "hegmd.migration"),
    "hegmd.migration.image_effects": (*MOVING, "hegmd.migration"),
    "hegmd.migration.performer": (*MOVING, "hegmd.migration", "hegmd.pieces", "hegmd.scarcity"),
    "hegmd.migration.runner": (*MOVING, "hegmd.events", "hegmd.migration"),
    "hegmd.found_bytes": (*MOVING, "hegmd.vram"),
    "hegmd.strays": (*MOVING, "hegmd.events", "hegmd.found_bytes", "hegmd.migration.adoption", "hegmd.pool_found"),
    "hegmd.driver_strays": (
        *(*GROUND, "hegmd.detached", "hegmd.helper", "hegmd.methods", "hegmd.migration.adoption", "hegmd.places"),
        "hegmd.processes",
    ),
    "hegmd.resting": (*MOVING, "hegmd.agent_orders", "hegmd.events", "hegmd.helper.mark", "hegmd.migration"),
    "hegmd.lookout": (
        *(*GROUND, "hegmd.detached", "hegmd.inventory", "hegmd.migration", "hegmd.pool", "hegmd.processes"),
        *("hegmd.methods.sight", "hegmd.supervisors", "hegmd.workers"),
    ),
    "hegmd.asking": (*GROUND, "hegmd.lookout", "hegmd.migration"),
    "hegmd.operations": (
        *(*MOVING, "hegmd.asking", "hegmd.found_bytes", "hegmd.inventory", "hegmd.lookout", "hegmd.migration"),
        *("hegmd.job_names", "hegmd.resting", "hegmd.strays"),
    ),
    "hegmd.kept_ready": (*GROUND, "hegmd.events", "hegmd.methods.readying", "hegmd.supervisors", "hegmd.workers"),
    "hegmd.restarts": (
        *(*GROUND, "hegmd.asking", "hegmd.log", "hegmd.migration", "hegmd.operations"),
        *("hegmd.supervisors", "hegmd.workers"),
    ),
    "hegmd.sequences": (*GROUND, "hegmd.asking", "hegmd.log", "hegmd.lookout", "hegmd.migration", "hegmd.operations"),
    # Jobs into images and out of them
    "hegmd.meeting": ("hegmd.errors",),
    "hegmd.manifests": (*GROUND, "hegmd.criu", "hegmd.migration", "hegmd.pieces"),
    "hegmd.lock_files": ("hegmd.errors",),
    "hegmd.handed_tree": (*GROUND, "hegmd.criu", "hegmd.external", "hegmd.migration", "hegmd.pool_names"),
    "hegmd.handed_agents": (
        *(*GROUND, "hegmd.agent_orders", "hegmd.criu.tree", "hegmd.detached", "hegmd.meeting", "hegmd.migration"),
        *("hegmd.pool", "hegmd.workers"),
    ),
    "hegmd.scarcity": ("hegmd.errors",),
    "hegmd.standing_notes": (*GROUND, "hegmd.criu.population", "hegmd.scarcity"),
    "hegmd.dumping": (
        *(*GROUND, "hegmd.concert", "hegmd.criu", "hegmd.detached", "hegmd.external", "hegmd.handed_agents"),
        *("hegmd.handed_tree", "hegmd.helper.mark", "hegmd.image.in_hand", "hegmd.inventory", "hegmd.manifests"),
        *("hegmd.migration", "hegmd.pieces", "hegmd.pool", "hegmd.pool_memory", "hegmd.standing_notes"),
    ),
    "hegmd.handoff": (
        *(*MOVING, *IMAGED, "hegmd.dumping", "hegmd.handed_agents", "hegmd.handed_tree", "hegmd.lock_files"),
        "hegmd.standing_notes",
    ),
    "hegmd.objections": (
        *(*GROUND, "hegmd.criu", "hegmd.detached", "hegmd.external", "hegmd.image.images", "hegmd.manifests"),
        *("hegmd.migration", "hegmd.pieces", "hegmd.pool"),
    ),
    "hegmd.half_revived": (*GROUND, "hegmd.criu", "hegmd.detached", "hegmd.pool", "hegmd.units"),
    "hegmd.reviving": (
        *(*MOVING, *IMAGED, "hegmd.half_revived", "hegmd.helper.mark", "hegmd.objections", "hegmd.pool_memory"),
        "hegmd.processes.procfs",
    ),
    "hegmd.outlets": ("hegmd.criu.ends", "hegmd.errors"),
    "hegmd.checkpoints": (
        *(*GROUND, "hegmd.external", "hegmd.handoff", "hegmd.image", "hegmd.lookout", "hegmd.manifests"),
        *("hegmd.asking", "hegmd.migration", "hegmd.objections", "hegmd.operations", "hegmd.outlets"),
        "hegmd.reviving",
    ),
    "hegmd.periodic": (
        *(*GROUND, "hegmd.detached", "hegmd.events", "hegmd.external", "hegmd.log", "hegmd.migration"),
        *("hegmd.asking", "hegmd.operations", "hegmd.workers"),
    ),
    # Those who ask
    "hegmd.server": (
        *(*GROUND, *SEEN, "hegmd.detached", "hegmd.descriptors", "hegmd.stream"),
        *(*NODE, "hegmd.inventory", "hegmd.doctor", "hegmd.scarcity", *ASKED),
    ),
    "hegmd.server.auth": ("hegmd.errors", "hegmd.protocol"),
    # Where it all comes together
    "hegmd.moving": EVERYTHING,
    "hegmd.config": (*GROUND, "hegmd.setting_kinds", "hegmd.settings", "hegmd.toml_lines"),
    "hegmd.arguments": (*GROUND, "hegmd.settings"),
    "hegmd.wiring": EVERYTHING,
    "hegmd.examination": (*GROUND, "hegmd.doctor"),
    "hegmd.app": EVERYTHING,
    "hegmd.__main__": EVERYTHING,
    # Shipped checks of the interfaces, for whoever implements one; no part of the daemon
    "hegmd.testing": (*GROUND, "hegmd.devices", "hegmd.helper.cuda", "hegmd.helper.processors", "hegmd.methods"),
    # The client, which has to start in no time and may be newer or older than the daemon
    "hegmctl": OUTSIDE,
    # Images take no daemon; this one command loads what the daemon has for them
    "hegmctl.images": (*GROUND, "hegmctl", "hegmd.image"),
    # HeGM's outside, kept: programs of their own, which need no daemon
    "hegmcompat": (
        *("hegmd.errors", "hegmctl.agentless", "hegmctl.become", "hegmctl.claim_notes", "hegmctl.endpoint"),
        *("hegmctl.isolation", "hegmctl.running"),
        *("hegmctl.readying", "hegmctl.restarting", "hegmctl.supervising"),
    ),
    # Manual pages and completions, written when a package is built: from the tables of both programs
    "hegmctl.pages": (*GROUND, "hegmctl", "hegmcompat", "hegmd.arguments", "hegmd.settings"),
}

# Packages from outside and modules of the standard library that only some rooms may touch: the hardware, other
# programs and the network each have one door.
FENCES: dict[str, tuple[str, ...]] = {
    "amdsmi": ("hegmd.devices.amd_binding",),
    "cuda": ("hegmd.helper.cuda",),
    "pynvml": ("hegmd.devices.nvml",),
    "subprocess": ("hegmd.apart", "hegmd.external"),
    "asyncio": (),
    "multiprocessing": (),
    "concurrent.futures": (),
    "urllib": (),
    "http": ("hegmcompat.rest",),
    "requests": (),
}

_PURE_MIGRATION = (
    "actions adoption candidates carriage course departures draft driver_rules effects endings events "
    "forecast itinerary journal machine members operation outlook paces plan restarting stages tagged "
    "targets telling wording"
)

# Same arguments, same answer: these are tested without a clock, a network or a process.
PURE = (
    "hegmd.errors",
    "hegmd.protocol",
    "hegmd.server.auth",
    "hegmd.ways",
    "hegmd.workloads",
    "hegmd.criu.complaints",
    "hegmd.criu.orders",
    *(f"hegmd.migration.{name}" for name in _PURE_MIGRATION.split()),
    "hegmd.pieces",
    "hegmd.places",
)

# Parts get values. Only these read the configuration file's form.
READS_CONFIG = ("hegmd.app", "hegmd.wiring", "hegmd.__main__", "hegmd.config")


def row_of(name: str) -> str | None:
    """The longest name in the table that the module is or lies under; the row of `hegmd` holds for its version only."""
    rows = [row for row in LAYERS if is_within(name, row) and (row != "hegmd" or name == "hegmd")]
    return max(rows, key=len, default=None)


def _covers(room: str, target: str) -> bool:
    if room == "hegmd":  # the version, not the package's rooms
        return target == room
    return is_within(target, room.removesuffix(".*"))


def layer_violations(module: Module, known: frozenset[str]) -> Iterator[str]:
    row = row_of(module.name)
    if row is None:
        yield "has no row in LAYERS: say what it may import"
        return
    seen = LAYERS[row]
    for found in module.imports(known):
        if found.target.split(".")[0] not in PACKAGES:
            continue
        if row_of(found.target) == row or is_within(found.target, row):
            continue
        if not any(_covers(room, found.target) for room in seen):
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
    rows = {row: {room for room in seen if room != row} for row, seen in LAYERS.items()}
    order = list(TopologicalSorter(rows).static_order())  # raises CycleError, naming the rooms
    assert order.index("hegmd.errors") < order.index("hegmd.protocol") < order.index("hegmd.server")


KNOWN = frozenset({"hegmd", "hegmd.errors", "hegmd.protocol", "hegmd.server.auth", "hegmd.inventory", "hegmd.config"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hegmd.protocol.frames", "from hegmd.server import listener"),
        ("hegmd.protocol.frames", "from hegmd import inventory"),
        ("hegmd.protocol.frames", "def late():\n    import hegmd.inventory"),
        ("hegmd.protocol.frames", "from ..server import listener"),
        ("hegmd.server.auth", "import hegmd.inventory"),
        ("hegmctl.cli", "from hegmd.server import listener"),
        ("hegmd.unheard_of", ""),
        ("hegmd.inventory", "import hegmctl.cli"),
    ],
)
def test_an_import_against_the_table_is_found(name: str, text: str) -> None:
    assert list(layer_violations(Module.parse(name, Path("x.py"), text), KNOWN))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hegmd.protocol.frames", "from hegmd.errors import Bug\nfrom hegmd.protocol import codec\nimport os"),
        ("hegmd.protocol.frames", "from . import codec"),
        ("hegmd.server.listener", "from hegmd import __version__\nfrom hegmd.server.auth import Peer"),
        ("hegmd.app", "from hegmd import inventory\nfrom hegmd.config import load"),
        ("hegmctl.cli", "from hegmd import errors, protocol"),
    ],
)
def test_an_import_along_the_table_is_let_through(name: str, text: str) -> None:
    assert not list(layer_violations(Module.parse(name, Path("x.py"), text), KNOWN))


def test_fences_and_configuration_are_held() -> None:
    reader = Module.parse("hegmd.server.listener", Path("x.py"), "import subprocess, pynvml\nfrom hegmd import config")
    assert [line.split()[2].rstrip(";") for line in fence_violations(reader)] == ["subprocess", "pynvml"]
    assert list(config_violations(reader))
    owner = Module.parse("hegmd.devices.nvml", Path("x.py"), "import pynvml")
    assert not list(fence_violations(owner))


def test_only_declared_packages_are_imported() -> None:
    _expect_none(modules(), _undeclared)


def _undeclared(module: Module) -> Iterator[str]:
    ours = set(PACKAGES)
    declared = {"amdsmi", "anyio", "cuda", "msgpack", "pynvml", "tomli", "tomllib"}  # the last two are one, by version
    imported = {found.target.split(".")[0] for found in module.imports() if not found.for_types_only}
    for found in sorted(imported - sys.stdlib_module_names - ours - declared):
        yield f"imports {found}, which pyproject.toml does not declare"
