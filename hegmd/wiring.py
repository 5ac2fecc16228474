"""Creates the daemon's parts from the configuration: vendors, policy, memory that outlives the daemon, and migrations.

Knows what each setting means for a part; `app` has the order of their start and end. Besides these two, only `__main__`
reads the configuration.
"""

from __future__ import annotations

import contextlib
import grp
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from hegmd.config import Config
from hegmd.errors import HegmError
from hegmd.memory.descriptor_store import ManagerStore, Store
from hegmd.memory.keeper.client import KeeperStore
from hegmd.memory.pool import MemoryKeeping, Pool
from hegmd.memory.pool_checksums import SumFolder
from hegmd.memory.pool_memory import read_huge_free_bytes
from hegmd.memory.pool_places import PoolDirectory, find_places
from hegmd.memory.ready_memory import ReadyMemory
from hegmd.memory.spill_file import SpillFolder
from hegmd.migration.carriers.prestart import PrestartPolicy
from hegmd.node.doctor.facts import NodeFacts
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.node.inventory.vendors import VendorWatch, providers_for, vendors_off
from hegmd.node.processes import ProcessTable
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.operations.service import ImageSettings, OperationsService
from hegmd.protocol.sharing import BEST_EFFORT, NORMAL, PRODUCTION
from hegmd.server.auth import Policy
from hegmd.sharing import model
from hegmd.sharing.rules import SharingRules
from hegmd.system.programs import start_keeper
from hegmd.system.state_dir import StateDir
from hegmd.system.systemd import PassedDescriptors, ServiceManager
from hegmd.telemetry.events import EventLog
from hegmd.workers.workers import Workers

if TYPE_CHECKING:
    from hegmd.node.devices.node_spec import Topology
    from hegmd.node.devices.simulated import SimulatedProvider

logger = logging.getLogger(__name__)

# This directory exists if systemd is the node's service manager, as in sd_booted(3). Only systemd starts units, even if
# another manager receives our reports.
SYSTEMD_RUNS = "/run/systemd/system"
# Default directory in the state directory. Its disk has the journal, which needs space to grow.
SPILL_NAME = "spill"
SPILL_SPARE_BYTES = 256 << 20
# In the state directory, too: the checksums of bytes that rest in memory.
SUMS_NAME = "sums"


def node_facts(
    config: Config,
    snapshot: NodeSnapshot,
    *,
    simulated: bool,
    user_mode: bool,
    under_systemd: bool,
    systemd_runs: str = SYSTEMD_RUNS,
    ready_bytes: int = 0,
) -> NodeFacts:
    """Return the facts for the doctor. A manager that gets our reports need not be systemd, which starts units."""
    return NodeFacts(
        vendors=snapshot.vendors,
        gpus=snapshot.gpus,
        simulated=simulated,
        user_mode=user_mode,
        under_systemd=under_systemd and os.path.isdir(systemd_runs),
        socket_path=config.daemon.socket,
        state_dir=config.daemon.state_dir,
        image_dir=config.doctor.image_dir,
        criu=config.images.criu,
        group=config.daemon.group,
        ready_bytes=ready_bytes,
        ready_wanted_bytes=config.pool.ready_bytes,
    )


async def look_once(config: Config, topology: Topology | None) -> NodeSnapshot:
    """Take one snapshot of the node without a daemon."""
    async with Inventory(
        [VendorWatch(provider) for provider in providers_for(config.inventory.is_off, topology)],
        query_deadline_s=config.inventory.query_deadline_s,
        events=EventLog(),
        table=ProcessTable(),
        off=vendors_off(config.inventory.is_off, topology),
    ) as inventory:
        return await inventory.refresh()


def simulator_of(vendors: Sequence[VendorWatch], topology: Topology | None) -> SimulatedProvider | None:
    """Return the simulated provider, if there is one; then it is the only one."""
    return None if topology is None else cast("SimulatedProvider", vendors[0].provider)


def policy_for(config: Config, *, user_mode: bool) -> Policy:
    """Return who may do what."""
    gid = None if user_mode else _group_id(config.daemon.group)
    return Policy(daemon_uid=os.geteuid(), admin_gid=gid, own_user_only=user_mode)


def _group_id(name: str) -> int | None:
    """Return the group of administrators; None if the node has no such group, so that only root administers."""
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        logger.warning("there is no group %s; only root may act on other users' processes", name)
        return None


def keep_for(
    config: Config, state: StateDir, manager: ServiceManager | None, passed: PassedDescriptors
) -> MemoryKeeping:
    """Return how jobs' bytes outlive this daemon; `manager` is None if it stores no descriptors."""
    places: tuple[PoolDirectory, ...] = ()
    if config.pool.memory == "named":
        try:
            places = find_places(state.identity())
            for place in places:
                with contextlib.suppress(OSError):  # reported when it is searched for earlier segments
                    place.keep()
        except HegmError as error:
            logger.warning("bytes of jobs get no name: %s; %s", error.message, error.hint)
    store: Store = KeeperStore(state.path, start_keeper) if manager is None else ManagerStore(manager, passed)
    spill_dir = config.pool.spill_dir or state.path / SPILL_NAME
    sums = SumFolder(state.path / SUMS_NAME)
    if config.pool.verify == "off":
        sums.drop_all_but(())  # the segments may be rewritten meanwhile, and later daemons would compare with these
    spill = SpillFolder(spill_dir, spare_bytes=SPILL_SPARE_BYTES)
    return MemoryKeeping(places, store, spill, None if config.pool.verify == "off" else sums)


def sharing_rules(config: Config) -> SharingRules:
    """Return which jobs have priority when they share GPUs, and for how long."""
    own = config.sharing
    return SharingRules(
        priorities={PRODUCTION: own.production, NORMAL: own.normal, BEST_EFFORT: own.best_effort},
        max_user_priority=own.max_user_priority,
        max_lease_s=own.max_lease_s,
        suspends_others=own.users_suspend == "lower",
        method=own.method,
        policy=model.Rules(slices=own.slices == "on", min_quantum_s=own.min_quantum_s),
    )


def moving_for(
    config: Config,
    inventory: Inventory,
    workers: Workers,
    events: EventLog,
    *,
    simulator: SimulatedProvider | None,
    managed: bool,
) -> OperationsService:
    """Return the service that moves jobs. `managed`: a service manager has started the daemon."""
    return OperationsService(
        state_dir=config.daemon.state_dir,
        pool=Pool(
            config.pool.budget_bytes, ready=ReadyMemory(config.pool.ready_bytes, huge_free_bytes=read_huge_free_bytes)
        ),
        simulator=simulator,
        inventory=inventory,
        workers=workers,
        events=events,
        start_ticks=start_ticks_of,
        spill=config.pool.spill,
        max_pause_s=config.other_processes.max_pause_s,
        max_park_s=config.quiesce.max_park_s,
        restart_always=config.restart.allowed == "always",
        ready_helper=config.pool.ready_helper if config.pool.ready_bytes else "off",
        ready=PrestartPolicy(config.restart.ready, config.restart.ready_within_s),
        images_by=ImageSettings(
            config.daemon.socket,
            in_unit=managed and os.path.isdir(SYSTEMD_RUNS),
            criu=config.images.criu,
            key_file=config.images.key_file,
            lock_dir=config.images.lock_dir,
            by_owner=config.images.restored_by == "owner",
            read_back=config.images.verify != "off",
        ),
    )
