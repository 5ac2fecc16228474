"""Every setting of the daemon: one row each, with its type, default, bounds, meaning, and whether a reload changes it.

`setting_types` has the types of values; `config` decides where values come from, and reports invalid ones. A row is a
field of one of the section classes below, so that the program sees typed attributes and a setting is added in one
place. The check of a file, `hegmctl config` and the shipped example are derived from the rows. Sections are records:
for dataclasses Python would compile the methods of each at every start of the daemon.

Longer than 400 lines because every setting is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hegmd.protocol.record import Field, Record
from hegmd.setting_types import SOCKET_PATH_BYTES, Amount, GroupName, Mode, OneOf, PathName, SettingType, SomeOf


class Row(NamedTuple):
    """One setting. Defaults are written as in the file; `$XDG_...` in them is filled in by `config`."""

    section: str
    name: str
    kind: SettingType
    default: str | int | float | tuple[str, ...]
    user_default: str | int | float | tuple[str, ...]
    doc: str
    reloads: bool
    variable: str | None
    flag: str | None

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"


class _SettingField(Field):
    """A field of a section: its row, without its key."""

    __slots__ = ("row",)

    def __init__(self, row: Row) -> None:
        super().__init__(row.doc, row.kind.parse(row.default))
        self.row = row


def setting(
    kind: SettingType,
    default: str | float | tuple[str, ...],
    doc: str,
    *,
    reloads: bool,
    user_default: str | float | None = None,
    variable: str | None = None,
    flag: str | None = None,
) -> Any:
    """Declare a row. Its key is the name of the field behind that of the section."""
    row = Row("", "", kind, default, default if user_default is None else user_default, doc, reloads, variable, flag)
    return _SettingField(row)


class DaemonSettings(Record):
    """The socket and the directories of the daemon."""

    socket: Path = setting(
        PathName(most_bytes=SOCKET_PATH_BYTES),
        "/run/hegm/hegmd.sock",
        "The Unix socket at which the daemon listens; a socket from systemd comes first.",
        user_default="$XDG_RUNTIME_DIR/hegm/hegmd.sock",
        variable="HEGM_SOCKET",
        flag="--socket",
        reloads=False,
    )
    state_dir: Path = setting(
        PathName(),
        "/var/lib/hegm",
        "The directory for data that must survive a restart of the daemon.",
        user_default="$XDG_STATE_HOME/hegm",
        variable="HEGM_STATE_DIR",
        flag="--state-dir",
        reloads=False,
    )
    group: str = setting(
        GroupName(),
        "hegm",
        "The group that owns the socket; its members may act on every process, as root may.",
        user_default="",
        reloads=False,
    )
    socket_mode: int = setting(
        Mode(),
        "0660",
        "Permissions of the socket; with 0666 everybody may connect and act on processes of their own.",
        user_default="0600",
        reloads=False,
    )


class InventorySettings(Record):
    """How GPUs and their processes are watched."""

    refresh_s: float = setting(
        Amount(1, 3600, whole=False),
        10.0,
        "Seconds between two reads of the GPUs without requests; a request that needs newer facts gets them.",
        reloads=True,
    )
    query_deadline_s: float = setting(
        Amount(0.05, 10, whole=False),
        1.0,
        "Seconds that a vendor's library may take; after that, older data is shown and marked as old.",
        reloads=True,
    )
    nvidia: str = setting(
        OneOf(("auto", "off")), "auto", "NVIDIA GPUs, through NVML: detected, or ignored.", reloads=False
    )
    amd: str = setting(
        OneOf(("auto", "off")),
        "auto",
        "AMD GPUs, through AMD SMI or, without it, through the kernel: detected, or ignored.",
        reloads=False,
    )

    def is_off(self, vendor: str) -> bool:
        """Return True if that vendor is switched off. Each vendor has a setting here with its name."""
        switch: str = getattr(self, vendor)
        return switch == "off"


class LimitSettings(Record):
    """Limits for each caller, so that no caller slows down the others."""

    frame_bytes: int = setting(
        Amount(4096, 16777216), 262144, "The largest frame that is accepted, in bytes.", reloads=False
    )
    clients: int = setting(
        Amount(1, 65536),
        4096,
        "Connections at a time, from all users together; one in 16 is reserved for administrators.",
        reloads=False,
    )
    clients_per_uid: int = setting(Amount(1, 65536), 1024, "Connections at a time from one user.", reloads=False)
    # An agent has one open as long as it lives, and sends its reports without waiting for replies.
    requests_in_flight: int = setting(
        Amount(32, 1024), 32, "Requests of one connection that may be unanswered at a time.", reloads=False
    )
    hello_deadline_s: float = setting(
        Amount(0.05, 600, whole=False), 5.0, "Seconds after connecting within which a caller says hello.", reloads=False
    )
    frame_deadline_s: float = setting(
        Amount(0.05, 600, whole=False), 10.0, "Seconds within which a started frame must be complete.", reloads=False
    )
    send_deadline_s: float = setting(
        Amount(0.05, 600, whole=False), 10.0, "Seconds within which a caller must read its answers.", reloads=False
    )


class LogSettings(Record):
    """The log, and its form."""

    level: str = setting(
        OneOf(("debug", "info", "warning", "error")),
        "info",
        "The least important records that are kept.",
        variable="HEGM_LOG_LEVEL",
        flag="--log-level",
        reloads=True,
    )
    format: str = setting(
        OneOf(("auto", "journal", "json", "text")),
        "auto",
        "The journal with its fields, lines of JSON, or lines of text; auto is the journal if stderr goes there.",
        variable="HEGM_LOG_FORMAT",
        flag="--log-format",
        reloads=True,
    )


class AuditSettings(Record):
    """The audit record of changes."""

    file: Path | None = setting(
        PathName(optional=True),
        "",
        "A file to which each request that changes something is appended as a line of JSON, in addition to the log.",
        reloads=True,
    )


class MetricsSettings(Record):
    """Prometheus metrics besides those at the socket (`hegmctl metrics`)."""

    textfile: Path | None = setting(
        PathName(optional=True, ending=".prom"),
        "",
        "A file for node_exporter's textfile collector, which reads files of that ending only.",
        reloads=True,
    )
    textfile_interval_s: float = setting(
        Amount(1, 3600, whole=False), 15.0, "Seconds between two writings of that file.", reloads=True
    )
    port: int = setting(
        Amount(0, 65535),
        0,
        "A TCP port on the loopback addresses that answers GET /metrics to every local user; 0 for none.",
        reloads=False,
    )


class EventsSettings(Record):
    """The history for `hegmctl events`."""

    remembered: int = setting(Amount(1, 100000), 1000, "Events that are kept in memory.", reloads=False)


class DoctorSettings(Record):
    """The subjects of `hegmctl doctor`."""

    image_dir: Path | None = setting(
        PathName(optional=True),
        "",
        "The directory planned for images of processes, whose free space is checked.",
        reloads=True,
    )


class PoolSettings(Record):
    """The memory in which the bytes of jobs are held while they are on no GPU."""

    budget_bytes: int = setting(
        Amount(0, 1 << 50),
        0,
        "The most memory that the pool may hold, in bytes; 0 for half of what is available when it is needed.",
        reloads=False,
    )
    ready_bytes: int = setting(
        Amount(0, 1 << 50),
        0,
        "Host memory kept ready for the next suspend, in bytes: a job's bytes and 4 %; 0 to allocate it on request.",
        reloads=False,
    )
    ready_helper: str = setting(
        OneOf(("started", "contexts", "pinned", "off")),
        "started",
        "With ready_bytes: a started GPU helper; also contexts (0.5 GiB) on GPUs with jobs; also pins memory; or off.",
        reloads=False,
    )
    memory: str = setting(
        OneOf(("named", "nameless")),
        "named",
        "Memory with a name, in hugetlbfs or /dev/shm, which outlives every process; or held by descriptors alone.",
        reloads=False,
    )
    spill: str = setting(
        OneOf(("asked", "full", "always")),
        "asked",
        "When bytes of suspended jobs go to disk: on request (--spill), also if the budget is full, or always.",
        reloads=False,
    )
    spill_dir: Path | None = setting(
        PathName(optional=True),
        "",
        'The directory on disk for the bytes of suspended jobs; "" for `spill` in the state directory.',
        reloads=False,
    )
    verify: str = setting(
        OneOf(("rest", "off")),
        "rest",
        "Whether suspended bytes in memory have checksums, compared before a job gets its bytes back; or off.",
        reloads=False,
    )


class ImagesSettings(Record):
    """Images of jobs on disk."""

    key_file: Path | None = setting(
        PathName(optional=True),
        "",
        "The key that signs images, to be shared by nodes that restore one another's; \"\" for one of this node's own.",
        reloads=False,
    )
    criu: Path | None = setting(
        PathName(optional=True),
        "",
        'The CRIU to use; "" for the system\'s own, or the one that contrib/criu/install.sh has unpacked.',
        reloads=False,
    )
    verify: str = setting(
        OneOf(("read-back", "off")),
        "read-back",
        "Whether a new image is read back from the disk before its job ends; or off, which trusts the disk's sync.",
        reloads=False,
    )
    restored_by: str = setting(
        OneOf(("root", "owner")),
        "owner",
        "Who may restore an image: its owner, with no rights but their own, or root alone.",
        reloads=False,
    )
    lock_dir: Path | None = setting(
        PathName(optional=True),
        "",
        'Where controllers look for PPID/lock of a job that was written into an image, as in /checkpoint; "" for none.',
        reloads=False,
    )


class QuiesceSettings(Record):
    """Jobs that are quiesced at a batch boundary."""

    max_park_s: float = setting(
        Amount(0.05, 60, whole=False),
        0.5,
        "Seconds that a training thread stays parked while another of its threads is busy; hegmd tries again later.",
        reloads=False,
    )


class OtherProcessesSettings(Record):
    """Other processes on a GPU, which are paused while GPU memory passes to a job."""

    max_pause_s: float = setting(
        Amount(0, 60, whole=False),
        2.0,
        "Seconds that other processes' CUDA calls may wait for an allocation; a restore may take longer. 0: no pause.",
        reloads=False,
    )


class RestartSettings(Record):
    """Jobs that leave, and are started again elsewhere from their state."""

    allowed: str = setting(
        OneOf(("asked", "always")),
        "asked",
        "When a move may be a restart, if no better method is possible: on request, or always.",
        reloads=False,
    )
    ready: str = setting(
        OneOf(("beforehand", "in-turn", "always")),
        "beforehand",
        "When the next process imports PyTorch: once a restart is requested, in its turn, or from the first batch on.",
        reloads=False,
    )
    ready_within_s: float = setting(
        Amount(0, 45, whole=False),
        15.0,
        "Seconds that a job may train on after a restart was requested, until the next process is ready.",
        reloads=False,
    )


class SharingSettings(Record):
    """Jobs that share GPUs: who goes first, who has to leave, and for how long."""

    production: int = setting(
        Amount(0, 100), 80, "The number of the priority `production`; jobs below it can be suspended.", reloads=False
    )
    normal: int = setting(
        Amount(0, 100), 50, "The number of the priority `normal`, which a job has by default.", reloads=False
    )
    best_effort: int = setting(Amount(0, 100), 20, "The number of the priority `best-effort`.", reloads=False)
    max_user_priority: int = setting(
        Amount(0, 100),
        50,
        "The highest priority that users may set for jobs and leases; root and the daemon's group may set any.",
        reloads=False,
    )
    users_suspend: str = setting(
        OneOf(("lower", "own")),
        "lower",
        "Whose jobs of lower priority are suspended for a user's jobs: those of all users, or only their own.",
        reloads=False,
    )
    max_lease_s: float = setting(
        Amount(1, 31536000, whole=False),
        86400.0,
        "Seconds after which a lease without a process and without a time limit ends.",
        reloads=False,
    )
    slices: str = setting(
        OneOf(("off", "on")),
        "off",
        "Whether jobs of equal priority that do not fit on a GPU together take turns.",
        reloads=False,
    )
    min_quantum_s: float = setting(
        Amount(0.1, 86400, whole=False),
        30.0,
        "Seconds that a turn lasts at least; it also lasts 20 times as long as changing the jobs takes.",
        reloads=False,
    )
    method: str = setting(
        OneOf(("auto", "keep-context", "whole")),
        "auto",
        "How jobs are suspended for others: with their CUDA contexts kept if that frees enough, always, or never.",
        reloads=False,
    )


class EvacuateSettings(Record):
    """GPUs that are failing."""

    on: tuple[str, ...] = setting(
        SomeOf(("uncorrected", "corrected", "rows", "link", "driver")),
        (),
        "For which causes the jobs of a GPU that is failing are moved to other GPUs: uncorrected or rising corrected "
        "memory errors, rows of memory that have to be replaced, errors of a link, a reset that the driver asks for.",
        reloads=True,
    )


SECTIONS: dict[str, type[Record]] = {
    "daemon": DaemonSettings,
    "inventory": InventorySettings,
    "limits": LimitSettings,
    "log": LogSettings,
    "audit": AuditSettings,
    "metrics": MetricsSettings,
    "events": EventsSettings,
    "doctor": DoctorSettings,
    "pool": PoolSettings,
    "images": ImagesSettings,
    "quiesce": QuiesceSettings,
    "other_processes": OtherProcessesSettings,
    "restart": RestartSettings,
    "sharing": SharingSettings,
    "evacuate": EvacuateSettings,
}


def rows_of(sections: Mapping[str, type[Record]]) -> dict[str, Row]:
    """Return the rows in the classes of those sections, by key."""
    declared = [(section, each) for section, cls in sections.items() for each in cls.fields]
    rows = [
        each.row._replace(section=section, name=each.name)
        for section, each in declared
        if isinstance(each, _SettingField)
    ]
    return {row.key: row for row in rows}


ROWS: dict[str, Row] = rows_of(SECTIONS)
