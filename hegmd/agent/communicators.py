"""The communicator groups of this process: disconnected before the driver's checkpoint, connected again after it.

The driver loses a process that has live communicators with other processes. With the training thread parked, and all
ranks at the same boundary, every rank takes its groups down and later brings them up, in the same order. If CUDA is
in use, these are the groups on GPUs. Elsewhere gloo's groups play NCCL's, on simulated GPUs.

Both steps begin and end with an agreement of all ranks. A rank that cannot take part says so before any rank has
changed anything. After a failure in between, each rank states how its groups are, and groups that are not in the same
state on all ranks get new backends. Every step ends at its limit (`group_step`).

Owns the groups' state. `orders` decides when each step runs.

Longer than 400 lines because the steps down and up share one state: each has to know what the other left undone.
"""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep

from ..errors import HegmError
from ..protocol.agents import Communicators
from . import cuda_state, uncovered_groups
from .group_backend import (
    GLOO,
    NCCL,
    NONE,
    REPLACE,
    SUSPEND,
    SUSPENDED,
    UP,
    GroupBackend,
    backends_of,
    kind_of,
    torch_distributed,
)
from .group_step import HINT_AGAIN, Step, no_news
from .messages import MessageCounts, awaited_messages, behind, positions_of
from .notes import note
from .rank_agreement import Agreement, DisagreementError, Ranks, require_server
from .refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .nccl_library import Library

# How long a rank whose groups are connected waits for questions of other ranks.
_UP_LIMIT_S = 15.0
# NCCL's watchdog checks finished work every 100 ms, and must not make a CUDA call during the driver's checkpoint.
_WATCHDOG_S = 0.2
_MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
_MULTICAST = "NCCL may use NVLink multicast (NVLS), and the driver's checkpoint hangs with live multicast memory"
_HINT_PIPELINE = (
    "if it is a pipeline: gloo counts messages too, which an agent knows only if `hegmctl run` has started the job"
)
_HINT_UNCOVERED = "nothing was changed; use a restart instead: hegmctl run --allow-restart"


class ProcessGroups:
    """Every communicator group of this process that has other ranks."""

    def __init__(self) -> None:
        self._known: list[GroupBackend] = []
        self._is_down = False
        self._is_unsure = False  # another rank may believe that this one is down
        self._has_failed = False  # a disconnect failed, and the other ranks may get an order to undo it
        # The last generation that this rank completed. Ranks that did not complete it are asked to connect in a later
        # one.
        self._generation: int | None = None
        self._step: Step | None = None
        self._reported: Communicators | None = None

    @property
    def is_down(self) -> bool:
        """True while a group of this process is disconnected, or may be."""
        return self._is_down or self._is_unsure or self._is_stepping

    @property
    def _is_stepping(self) -> bool:
        return self._step is not None and not self._step.has_ended

    # ---- what there is -----------------------------------------------------------------------------------------------

    def kinds(self) -> tuple[type[object], ...]:
        """Return the classes whose objects `inventory` looks at."""
        return () if self.is_down or torch_distributed() is None else uncovered_groups.kinds(_torch())

    def inventory(self, alive: list[Any] | None = None) -> Communicators | None:
        """Return what the plan needs to know of the groups; None without any. Fast enough for a boundary.

        `alive` are the objects of `kinds`, if they were looked for already.
        """
        if self.is_down:
            return self._reported
        world = torch_distributed()
        if world is None:
            uncovered = uncovered_groups.of_rpc()
            return Communicators(mechanism=NONE, uncovered=tuple(uncovered)) if uncovered else None
        try:
            library = _library()
            return self._tell(self._groups(_torch(), world), library, alive)
        except Exception as error:  # noqa: BLE001 - another release may have other names; then nothing is disconnected
            note(f"the groups cannot be inspected: {error!r}")
            return Communicators(mechanism=NONE, uncovered=(f"the groups cannot be inspected: {error!r}",))

    def _tell(self, groups: list[GroupBackend], library: Library | None, alive: list[Any] | None) -> Communicators:
        torch = _torch()
        nvls = _may_use_multicast(torch, groups)
        mechanism = SUSPEND if all(group.can_suspend(library) for group in groups) else REPLACE
        self._reported = Communicators(
            mechanism=mechanism if groups else NONE,
            groups=len(groups),
            backends=tuple(sorted({group.kind for group in groups})),
            library=None if library is None else library.text,
            nvls=nvls,
            pending=0,
            uncovered=tuple(uncovered_groups.reasons(torch, groups, library, alive)),
        )
        return self._reported

    def _groups(self, torch: Any, world: Any) -> list[GroupBackend]:
        """Return the groups that have other ranks, in an order that is the same on all ranks."""
        on_gpus = cuda_state.in_use() is not None
        found: list[GroupBackend] = []
        for group, (_, store) in list(world._world.pg_map.items()):
            if int(group.size()) < 2:
                continue
            for backend, devices in backends_of(group):
                matters = _is_on_gpu(backend, devices) if on_gpus else kind_of(backend) == GLOO
                if matters:
                    known = next((one for one in self._known if one.is_of(group, backend)), None)
                    found.append(known or GroupBackend(torch, group, store, backend, devices))
        found.sort(key=lambda group: (group.name, group.kind))
        self._known = found
        return found

    def positions(self) -> dict[str, list[Any]]:
        """Return how far this rank is in each group: its rank there, its collectives, and its messages by peer."""
        world = torch_distributed()
        groups = [] if world is None else self._groups(_torch(), world)
        return {group.name: list(_position(group)) for group in groups}

    @property
    def has_other_ranks(self) -> bool:
        world = torch_distributed()
        return world is not None and int(world._get_default_group().size()) > 1

    def ranks(self) -> Ranks:
        """Return the ranks of this job, by an own connection to their store if possible. Raises OSError.

        The connection costs 4 ms, and is not kept: it would keep a store's server that the script has given up. A
        server that is stopped has it wait, so it is made in a thread that may wait.
        """
        world: Any = torch_distributed()
        group = world._get_default_group()
        store = world._world.pg_map[group][1]
        require_server(store)
        return _ranks_in(store.clone() if hasattr(store, "clone") else store, group)

    # ---- down --------------------------------------------------------------------------------------------------------

    def disconnect(self, limit_s: float | None) -> Communicators | None:
        """Disconnect all groups, and wait until they are. Raises what the step of `begin_disconnect` raises."""
        return self.begin_disconnect(limit_s, no_news).result()

    def begin_disconnect(
        self,
        limit_s: float | None,
        on_end: Callable[[], object],
        *,
        abort: bool = False,
        alive: list[Any] | None = None,
    ) -> Step:
        """Start to disconnect all groups together with the other ranks. Raises HegmError.

        `abort` suspends none: CRIU cannot dump the connections of a suspended communicator. The step has ended already
        if the groups are disconnected. After a failure `reconnect` has to follow on all ranks, unless the message says
        that nothing was changed. `alive` is that of `inventory`.
        """
        self._require_idle()
        world = torch_distributed()
        if self._is_down or world is None:
            return Step.ended(self._reported if self._is_down else None)
        step = self._step = Step(limit_s, on_end)
        return step.start(lambda: self._disconnect(world, step, abort=abort, alive=alive))

    def _disconnect(self, world: Any, step: Step, *, abort: bool, alive: list[Any] | None) -> Communicators:
        self._has_failed = True  # until it has not
        torch, library = _torch(), _library()
        groups = self._groups(torch, world)
        told = self._tell(groups, library, alive)
        mine = {
            "groups": {
                group.name: [group.mechanism(None if abort else library), *_position(group)] for group in groups
            },
            "refusal": next(iter(told.uncovered), _MULTICAST if told.nvls else ""),
        }
        agreed = self._agree(world, "disconnect", mine, step)
        self._has_failed = self._is_unsure = False  # all ranks have read the same, and refuse it for the same reason
        _require_agreement(agreed, groups)
        self._has_failed = True
        _finish_work(torch, groups)
        # A peer may still read what this rank has sent: all must be finished before the first one ends a group.
        _require_all(self._agree(world, "finished", {"refusal": ""}, step))
        self._is_down = True
        failures: list[HegmError] = []
        suspends = False
        for group in groups:
            mechanism = _mechanism_of(group.name, agreed)
            step.require_time()
            try:
                if mechanism == SUSPEND and library is not None:
                    suspends = True
                    group.suspend(library)
                elif mechanism == REPLACE:
                    group.abort()
            except HegmError as error:
                failures.append(error)
                break
        if suspends:
            sleep(_WATCHDOG_S)
        self._generation = None
        self._conclude(world, "disconnected", failures, step)
        self._has_failed = False
        note(f"{len(groups)} groups are disconnected")
        return told

    # ---- up ----------------------------------------------------------------------------------------------------------

    def reconnect(self, generation: int | None, limit_s: float | None) -> Communicators | None:
        """Connect all groups, and wait until they are. Raises what the step of `begin_reconnect` raises."""
        return self.begin_reconnect(generation, limit_s, no_news).result()

    def begin_reconnect(self, generation: int | None, limit_s: float | None, on_end: Callable[[], object]) -> Step:
        """Start to connect all groups together with the other ranks. Raises HegmError.

        The step has ended already if the groups are connected. It can be repeated after a failure: groups whose state
        differs between ranks then get new backends. The generation is part of the names under which new backends meet;
        the agreement makes these names unique.
        """
        self._require_idle()
        is_another = generation is not None and self._generation not in (None, generation)
        if not self.is_down and not self._has_failed and not is_another:
            return Step.ended(self._reported)
        world = torch_distributed()
        if world is None:
            raise refusal("its process group was destroyed and cannot be connected again", "restart the job")
        step = self._step = Step(limit_s, on_end)
        call = self._reconnect if self.is_down else self._confirm_up
        return step.start(lambda: call(world, generation, step))

    def _confirm_up(self, world: Any, generation: int | None, step: Step) -> Communicators | None:
        """Confirm that the groups are connected: no rank can be disconnected without this one's agreement."""
        step.deadline = min(step.deadline, monotonic() + _UP_LIMIT_S)
        try:
            return self._reconnect(world, generation, step)
        except HegmError as error:
            note(f"its groups are up, and the other ranks did not ask: {error.message}")
            self._has_failed, self._is_unsure, self._generation = False, False, generation
            return self._reported

    def _reconnect(self, world: Any, generation: int | None, step: Step) -> Communicators | None:
        library = _library()
        groups = list(self._known)
        states = {group.name: [group.state, 0] for group in groups}
        mine = {"groups": states, "refusal": "", "generation": generation or 0}
        agreed = self._agree(world, "reconnect", mine, step)
        label = f"{max(stated['generation'] for stated in agreed.statements)}/{agreed.label}"
        failures: list[HegmError] = []
        for group in groups:
            found = _stated(group.name, agreed)
            step.require_time()
            try:
                if found == {SUSPENDED} and library is not None:
                    group.resume(library)
                elif found != {UP}:
                    group.replace(f"{label}/{group.name}")
            except HegmError as error:
                failures.append(error)
                break
        self._conclude(world, "reconnected", failures, step)
        self._is_down = self._has_failed = False
        self._generation = generation or 0
        note(f"{len(groups)} groups are connected")
        return self._reported

    def give_up(self) -> None:
        """Leave the groups as they are, since a rank of them has ended: the training fails at its next collective."""
        if self._is_stepping:
            return
        for group in self._known:
            if group.state == SUSPENDED:
                try:
                    group.abort()
                except HegmError as error:
                    note(error.message)
        self._is_down = self._is_unsure = self._has_failed = False

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _agree(self, world: Any, name: str, statement: dict[str, Any], step: Step) -> Agreement:
        """Agree with all ranks of the job. Raises HegmError."""
        group = world._get_default_group()
        ranks = _ranks_in(world._world.pg_map[group][1], group)
        try:
            agreed = ranks.agree(name, statement, step.deadline, lambda: step.is_abandoned)
        except DisagreementError as error:
            # After the first agreement of a disconnect nothing is taken down before the second one.
            if not error.is_known and name != "disconnect":
                self._is_unsure = True
            raise
        return agreed

    def _conclude(self, world: Any, name: str, failures: list[HegmError], step: Step) -> None:
        """Exchange the results of this step with the other ranks. Raises HegmError, first of all the listed failure."""
        message = failures[0].message if failures else ""
        agreed = self._agree(world, name, {"refusal": message}, step)
        if failures:
            raise failures.pop()
        _require_all(agreed)
        self._is_unsure = False

    def _require_idle(self) -> None:
        if self._is_stepping:
            raise refusal(
                "an earlier step of its communicators still waits in a library call",
                "end the job, or wait until the library gives up",
            )
        self._step = None


def _torch() -> Any:
    return sys.modules["torch"]


def _library() -> Library | None:
    """Return the NCCL library of this process; None if there is none, or none that can be called."""
    for path in uncovered_groups.loaded():
        try:
            from .nccl_library import Library

            return Library(path)
        except (HegmError, ImportError) as error:
            note(f"NCCL cannot be called: {error}")
    return None


def _ranks_in(store: Any, group: Any) -> Ranks:
    return Ranks(_torch().distributed.PrefixStore("hegm/ranks/", store), int(group.rank()), int(group.size()))


def _is_on_gpu(backend: Any, devices: list[Any]) -> bool:
    """Return True for a backend with GPU memory of peers. gloo has none, because it copies through the host."""
    inner = getattr(backend, "wrapped_pg", backend)
    return any(device.type == "cuda" for device in devices) and kind_of(inner) != GLOO


def _finish_work(torch: Any, groups: list[GroupBackend]) -> None:
    """Wait until all that the training thread has started on its GPUs is done."""
    if cuda_state.in_use() is None:
        return
    for gpu in sorted({group.gpu for group in groups if group.gpu is not None}):
        torch.cuda.synchronize(gpu)


def _require_agreement(agreed: Agreement, groups: list[GroupBackend]) -> None:
    """Require that no rank refuses, and that all have reached the same point in each group. Raises HegmError."""
    _require_all(agreed)
    for group in groups:
        stated = [one["groups"][group.name][1:] for one in agreed.statements if group.name in one["groups"]]
        if len(stated) != group.size:
            raise refusal(f"group {group.name} has {group.size} ranks, and {len(stated)} know it", _HINT_UNCOVERED)
        positions = positions_of(stated)
        if behind(positions):
            told = ", ".join(f"rank {rank}: {positions[rank].collectives}" for rank in sorted(positions))
            hint = f"{HINT_AGAIN}; {_HINT_PIPELINE}" if group.kind == GLOO and group.messages is None else HINT_AGAIN
            raise refusal(f"collectives of group {group.name} are not finished ({told})", hint)
        for rank, other in awaited_messages(positions).items():
            message = f"messages between ranks {rank} and {other} of group {group.name} are not received yet"
            raise refusal(message, HINT_AGAIN)


def _position(group: GroupBackend) -> tuple[int, int, list[tuple[int, int]], list[tuple[int, int]]]:
    """Return this rank in the group, and how far it is. Unknown messages are none."""
    messages = group.messages or MessageCounts()
    return group.rank, group.collectives, list(messages.sent.items()), list(messages.received.items())


def _require_all(agreed: Agreement) -> None:
    """Raise HegmError for the first rank that refuses."""
    for rank, stated in enumerate(agreed.statements):
        if stated["refusal"]:
            raise refusal(f"rank {rank}: {stated['refusal']}", _HINT_UNCOVERED)


def _stated(name: str, agreed: Agreement) -> set[str]:
    """Return what the ranks of a group stated for it."""
    return {stated["groups"][name][0] for stated in agreed.statements if name in stated["groups"]}


def _mechanism_of(name: str, agreed: Agreement) -> str:
    """Return what all ranks of a group do: the best that all of them can do."""
    stated = _stated(name, agreed)
    if stated == {NONE}:
        return NONE
    return SUSPEND if stated == {SUSPEND} else REPLACE


def _may_use_multicast(torch: Any, groups: list[GroupBackend]) -> bool:
    """Return True if NCCL may have NVLink multicast memory, which it uses by default if the GPUs support it."""
    if os.environ.get("NCCL_NVLS_ENABLE") == "0" or not any(group.kind == NCCL for group in groups):
        return False
    try:
        from .cuda_driver import Driver

        driver = Driver()
        return any(driver.attribute(_MULTICAST_SUPPORTED, gpu) for gpu in range(int(torch.cuda.device_count())))
    except (HegmError, ImportError) as error:
        note(f"whether its GPUs can do multicast is not known: {error}")
        return True
