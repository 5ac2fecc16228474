"""Builds the daemon's parts, connects them, and owns the outermost task group, the signals and the shutdown.

Apart from __main__ and `wiring` this is the only module that reads the configuration: everything else gets values.
Order matters at the start (the state directory is locked before anything listens, and systemd gets READY only after the
first inventory) and at the end (peers get a message before their connections close).

Longer than 400 lines because each part is made, started and ended here, in the order of their dependencies.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from hegmd import __version__
from hegmd.config import Config, after_reload, changes
from hegmd.errors import TIMEOUT, HegmError
from hegmd.node.devices.shared_library import return_free_memory
from hegmd.node.doctor.facts import NodeFacts
from hegmd.node.doctor_session import Examination
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.node.inventory.vendors import vendors_off
from hegmd.node.processes import ProcessTable
from hegmd.node.processes.procfs import how_ended, start_ticks_of
from hegmd.protocol.jobs import TRAINING, Job
from hegmd.protocol.messages import PROTOCOL_VERSION, ConfigReply, Limits, ReloadReply
from hegmd.protocol.snapshots import AgentInfo
from hegmd.server.auth import Peer
from hegmd.server.dispatch import Dispatcher
from hegmd.server.handlers import FRESH_S, Handlers, Services
from hegmd.server.listener import Admission, Listener, bind, take_away
from hegmd.server.session import Session, SessionLimits
from hegmd.server.textfile import Textfile
from hegmd.sharing.requests import SharingRequests
from hegmd.sharing.resumes import QueuedResumes
from hegmd.sharing.service import Sharing
from hegmd.system.process_ends import until_ended
from hegmd.system.state_dir import StateDir, note_socket
from hegmd.system.stream import PeerStream
from hegmd.system.systemd import Offer, PassedDescriptors
from hegmd.system.threads import run_detached
from hegmd.telemetry.audit import Audit
from hegmd.telemetry.audit_file import check_openable
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import LogSetup, fields, limited
from hegmd.telemetry.metrics import Build, Counters, JobTally, Tallies, read_own_process, render
from hegmd.wiring import keep_for, moving_for, node_facts, policy_for, sharing_rules, simulator_of
from hegmd.workers.workers import Workers

if TYPE_CHECKING:
    from hegmd.node.devices.node_spec import Topology
    from hegmd.node.inventory.vendors import VendorWatch
    from hegmd.server.scrape import ScrapePort

logger = logging.getLogger(__name__)

SOCKET_NAME = "hegmd"  # FileDescriptorName= in hegmd.socket
# Fewer connections are no burst. A burst is over when fewer are left.
BURST_CONNECTIONS = 100
GOODBYE_S = 3.0
# How often to check whether the socket's file exists.
SOCKET_LOOK_S = 2.0
# How long a daemon that was started for a job waits for the next one before it ends.
LINGER_S = 2.0
READ_CONFIG_S = 5.0


class App:
    """A daemon: made from a configuration, run once. The libraries of `vendors` may have been called already."""

    def __init__(
        self,
        config: Config,
        load_again: Callable[[], Config],
        log: LogSetup,
        offer: Offer,
        topology: Topology | None,
        vendors: Sequence[VendorWatch],
        *,
        user_mode: bool,
        until_pid: int | None = None,
    ) -> None:
        self._config = config
        self._until_pid = until_pid
        self._load_again = load_again
        self._log = log
        self._offer = offer
        self._manager = offer.manager()
        self._user_mode = user_mode
        self._reloading = anyio.Lock()
        self._examination = Examination(self._facts)
        self._events = EventLog(config.events.remembered)
        self._workers = Workers(start_ticks_of, how_ended)
        self._counters = Counters()
        self._ended_at_trim = 0
        self._audit = Audit(config.audit.file)
        self._textfile = Textfile(config.metrics.textfile, config.metrics.textfile_interval_s, self._metrics)
        self._simulator = simulator_of(vendors, topology)
        self._policy = policy_for(config, user_mode=user_mode)
        self._inventory = Inventory(
            vendors,
            query_deadline_s=config.inventory.query_deadline_s,
            events=self._events,
            table=ProcessTable(),
            agents=self._agents,
            held=self._held_bytes,
            off=vendors_off(config.inventory.is_off, topology),
            on_look=self._count_look,
        )
        self._moving = moving_for(
            config,
            self._inventory,
            self._workers,
            self._events,
            simulator=self._simulator,
            managed=self._manager.present,
        )
        self._moving.evacuation.on = config.evacuate.on
        self._sharing = Sharing(self._moving, self._events, sharing_rules(config), start_ticks_of)
        self._admission = Admission(self._policy, config.limits.clients, config.limits.clients_per_uid)
        self._dispatcher = Dispatcher(Handlers(self._services()).table(), self._policy, self._counters, self._audit)

    # -- up and down ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises HegmError when it cannot start."""
        _raise_descriptor_limit()
        with contextlib.ExitStack() as held:
            held.callback(self._manager.close)
            held.callback(self._audit.close)
            state = held.enter_context(StateDir(self._config.daemon.state_dir))
            passed = held.enter_context(self._offer.descriptors())
            scrape_port = self._scrape_port(held)
            held.callback(self._moving.close)
            keeping = self._manager if self._offer.keeps_descriptors else None
            self._moving.keep_by(keep_for(self._config, state, keeping, passed))
            await self._moving.open()
            await anyio.to_thread.run_sync(self._sharing.open, state.path)
            listeners = [self._listener(listening) for listening in self._listening_sockets(passed, held)]
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
                async with self._inventory, anyio.create_task_group() as background:
                    await background.start(self._inventory.run, self._config.inventory.refresh_s)
                    await background.start(self._moving.run)
                    await background.start(self._sharing.run)
                    background.start_soon(self._keep_alive)
                    background.start_soon(self._textfile.run)
                    if scrape_port is not None:
                        await background.start(scrape_port.run)
                    background.start_soon(self._leave_when_done)
                    for listener in listeners:
                        background.start_soon(self._keep_socket, listener, held)
                    await self._serve(listeners, signals)
                    self._moving.stop()
                    background.cancel_scope.cancel()
        logger.info("stopped")

    async def _serve(self, listeners: list[Listener], signals: AsyncIterator[signal.Signals]) -> None:
        """Serve until a signal requests the stop; then until every peer was notified, or a short limit."""
        async with anyio.create_task_group() as serving:
            for listener in listeners:
                await serving.start(listener.run)
            self._manager.ready(self._status())
            if not gc.isenabled():  # since the imports
                gc.freeze()
                gc.enable()
            places = ", ".join(listener.path for listener in listeners)
            logger.info("hegmd %s serves at %s", __version__, places)
            async for number in signals:
                if number != signal.SIGHUP:
                    logger.info("stopping on %s", number.name)
                    break
                await self._reload_on_signal()
            self._manager.stopping("telling clients")
            self._sharing.stop()
            for listener in listeners:
                listener.stop()
            serving.cancel_scope.deadline = anyio.current_time() + GOODBYE_S

    def _listening_sockets(self, passed: PassedDescriptors, held: contextlib.ExitStack) -> list[socket.socket]:
        """Return the sockets that systemd passed; without any, bind one, which is unlinked at the end."""
        sockets = passed.take_listeners(SOCKET_NAME)
        if not sockets:
            path = self._config.daemon.socket
            sockets = [self._bind(path)]
            held.callback(take_away, path, path.lstat())
        return sockets

    def _scrape_port(self, held: contextlib.ExitStack) -> ScrapePort | None:
        """Return the port on which metrics are scraped, bound, if there is to be one."""
        port = self._config.metrics.port
        if not port:
            return None
        from hegmd.server.scrape import ScrapePort, bind_loopback  # imports `email`, and most daemons have no port

        return ScrapePort([held.enter_context(one) for one in bind_loopback(port)], self._metrics)

    async def _keep_socket(self, listener: Listener, held: contextlib.ExitStack) -> None:
        """Bind the socket again if its file was removed: no client could connect, and none could start another daemon.

        This includes the service manager's socket, because the manager does not notice that its file was removed. The
        old socket is no longer accepted on, since no client can connect to it.
        """
        while True:
            await anyio.sleep(SOCKET_LOOK_S)
            if not listener.is_found:
                self._bind_again(listener, held)

    def _bind_again(self, listener: Listener, held: contextlib.ExitStack) -> None:
        path = Path(listener.path)
        try:
            listening = self._bind(path)
            held.callback(take_away, path, path.lstat())
        except HegmError as error:
            hint = "systemctl restart hegmd.socket recreates it" if self._manager.present else error.hint
            text = "the socket file %s was removed, and no client can connect: %s; %s"
            limited(logger, "socket", logging.ERROR, text, path, error.message, hint)
            return
        listener.take(listening)
        limited(
            logger, "socket-again", logging.WARNING, "the socket file %s had been removed, and was bound again", path
        )

    def _bind(self, path: Path) -> socket.socket:
        """Bind the socket. Raises HegmError."""
        directory_mode = 0o700 if self._user_mode else 0o755
        mode = self._config.daemon.socket_mode
        listening = bind(path, mode, self._policy.admin_gid, directory_mode=directory_mode)
        note_socket(self._config.daemon.state_dir, path)
        return listening

    def _listener(self, listening: socket.socket) -> Listener:
        limits = self._config.limits
        session_limits = SessionLimits(
            frame_bytes=limits.frame_bytes,
            requests_in_flight=limits.requests_in_flight,
            hello_deadline_s=limits.hello_deadline_s,
            frame_deadline_s=limits.frame_deadline_s,
            send_deadline_s=limits.send_deadline_s,
        )

        def open_session(stream: PeerStream, peer: Peer) -> Session:
            return Session(stream, peer, self._dispatcher.answer, session_limits, self._counters)

        return Listener(listening, self._admission, open_session, self._counters)

    async def _leave_when_done(self) -> None:
        """End a daemon that was started for a job, once that job and all that joined it have ended."""
        if self._until_pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            await until_ended(os.pidfd_open(self._until_pid))
        quiet_since: float | None = None
        while quiet_since is None or anyio.current_time() - quiet_since < LINGER_S:
            await anyio.sleep(LINGER_S / 4)
            if self._admission.current or self._moving.busy:
                quiet_since = None
            elif quiet_since is None:
                quiet_since = anyio.current_time()
        os.kill(os.getpid(), signal.SIGTERM)

    async def _keep_alive(self) -> None:
        """Notify systemd's watchdog from the loop; systemd restarts a daemon whose loop hangs."""
        limit_s = self._offer.watchdog_limit_s
        while limit_s is not None:
            self._manager.alive()
            self._manager.status(self._status())
            await anyio.sleep(limit_s / 3)

    def _status(self) -> str:
        """Return one line for `systemctl status`."""
        latest = self._inventory.latest
        counts = "" if latest is None else f"{len(latest.gpus)} GPUs, {len(latest.processes)} processes on them, "
        return f"{counts}{self._admission.current} clients"

    # -- configuration -------------------------------------------------------------------------------------------------

    async def _reload_on_signal(self) -> None:
        self._manager.reloading()
        try:
            await self.reload()
        except HegmError as error:
            logger.error("the configuration is unchanged")
            for line in (*error.message.splitlines(), error.hint):  # a line for each mistake in it
                logger.error("%s", line)
        self._manager.ready(self._status())

    async def reload(self) -> ReloadReply:
        """Read the configuration again and put in force what can be. Raises HegmError, changing nothing."""
        async with self._reloading:
            new = await self._read_config()
            changed, after_restart = changes(self._config, new)
            in_force = after_reload(self._config, new)
            self._log.configure(in_force.log.level, in_force.log.format)
            self._audit.reopen(in_force.audit.file)
            self._textfile.configure(in_force.metrics.textfile, in_force.metrics.textfile_interval_s)
            self._inventory.set_query_deadline(in_force.inventory.query_deadline_s)
            self._inventory.set_refresh(in_force.inventory.refresh_s)
            self._moving.evacuation.on = in_force.evacuate.on
            self._config = in_force
            logger.info("configuration read again", extra=fields(changed=changed, after_restart=after_restart))
            self._events.record("config.reloaded", "info", "configuration read again", facts={"changed": list(changed)})
            return ReloadReply(changed=changed, after_restart=after_restart)

    async def _read_config(self) -> Config:
        try:
            with anyio.fail_after(READ_CONFIG_S):
                return await run_detached(lambda _: self._read_and_check(), name="hegmd-config")
        except TimeoutError:
            raise HegmError(
                TIMEOUT,
                f"the configuration could not be read within {READ_CONFIG_S:g} s; the previous one stays in effect",
                f"see whether its disk answers: ls -l {self._config.path or '/etc/hegm'}",
            ) from None

    def _read_and_check(self) -> Config:
        """Read the configuration again. Raises HegmError if it could not be used. Blocks."""
        new = self._load_again()
        if new.audit.file is not None and new.audit.file != self._config.audit.file:
            check_openable(new.audit.file)
        return new

    def _show_config(self) -> ConfigReply:
        path = self._config.path
        return ConfigReply(path=None if path is None else str(path), settings=self._config.describe())

    # -- wiring --------------------------------------------------------------------------------------------------------

    def _held_bytes(self) -> Mapping[int, int]:
        return self._moving.attendance.held_bytes()

    def _agents(self) -> Mapping[int, AgentInfo]:
        return self._moving.agents()

    def _services(self) -> Services:
        limits = self._config.limits
        return Services(
            policy=self._policy,
            inventory=self._inventory,
            events=self._events,
            workers=self._workers,
            operations=self._moving.operations,
            ways=self._moving.operations.ways,
            sequences=self._moving.sequences,
            checkpoints=self._moving.checkpoints,
            orphans=self._moving.orphans,
            restarts=self._moving.restarts,
            jobs=self._moving.job_requests,
            recoveries=self._moving.recoveries,
            proving=self._moving.proving,
            sharing=SharingRequests(
                *(self._sharing, self._moving.jobs, self._moving.job_requests, self._inventory),
                start_ticks=start_ticks_of,
                owner_of=owner_of,
            ),
            queued_resumes=QueuedResumes(self._sharing, self._moving.operations, self._moving.job_requests),
            simulator=self._simulator,
            limits=Limits(frame_bytes=limits.frame_bytes, requests_in_flight=limits.requests_in_flight),
            doctor=self._examination.examine,
            show_config=self._show_config,
            reload=self.reload,
            metrics=self._metrics,
        )

    async def _facts(self) -> NodeFacts:
        """Return the current facts for the doctor."""
        return node_facts(
            self._config,
            await self._inventory.fresh(0),
            simulated=self._simulator is not None,
            user_mode=self._user_mode,
            under_systemd=self._manager.present,
            ready_bytes=self._moving.pool.ready.size_bytes,
        )

    def _count_look(self, snapshot: NodeSnapshot, took_s: float) -> None:
        self._counters.refreshed(took_s)
        self._moving.evacuation.see(snapshot.gpus)
        for vendor in snapshot.vendors:
            if vendor.state in {"failed", "stale"}:
                self._counters.vendor_failed(vendor.vendor)
        self._trim_memory()

    def _trim_memory(self) -> None:
        """Return free memory to the kernel after a burst of connections; it takes some 20 ms.

        Python keeps an arena as long as one object in it exists, so some of the burst's memory remains.
        """
        ended = self._counters.connections_total - self._counters.connections
        if ended - self._ended_at_trim >= BURST_CONNECTIONS > self._counters.connections:
            gc.collect()  # drops Python's lists of spare tuples, each of which keeps a page
            return_free_memory()
            self._ended_at_trim = ended

    async def _metrics(self) -> str:
        """Return the metrics as text, for the socket, the loopback port and the textfile alike."""
        snapshot = await self._inventory.fresh(FRESH_S)
        jobs = await self._moving.job_requests.jobs((), lambda _: True, ended=False)
        build = Build(__version__, PROTOCOL_VERSION, sys.version.split()[0])
        tallies = Tallies(
            events=self._events.counts,
            log_dropped=self._log.dropped,
            log_held_back=self._log.held_back,
            audit_lost=self._audit.lost,
            pool_bytes=self._moving.pool_figures(),
            orphans=len(self._moving.orphans.all()),
            images_missed=self._moving.periodic.missed,
            operations=self._moving.runner.ended_counts,
            operations_now=self._moving.runner.states(),
            jobs=tuple([tally_of(job) for job in jobs]),
            sharing=self._sharing.figures(),
            recovery=self._moving.recoveries.tally,
        )
        return render(snapshot, self._counters, build=build, own=read_own_process(), tallies=tallies)


def owner_of(pid: int) -> int | None:
    """Return the user of that process; None if it does not exist."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def tally_of(job: Job) -> JobTally:
    """Return what the metrics report of a job."""
    return JobTally(job.id, job.name, job.state == TRAINING, job.boundary)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit on descriptors: every client and process takes one, and the default is for select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
