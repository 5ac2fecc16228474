"""What the daemon and the supervisor of a job say to one another.

A supervisor is the `hegmctl run --allow-restart` that stays as the parent of its command. The daemon tells it when that
command is about to leave its GPU for a restart, and later to start it again with other surroundings; the state of the
training goes along by descriptor. Everybody else reads these from `messages`, which gathers every message there is.
"""

from __future__ import annotations

from .agents import Noted
from .record import Record, field
from .requests import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


# What stands in the file of the lock: the process has put the state back, and has then come to its end. After these
# there is a byte for each rank, or for the one process, that has trained on from its state while no daemon was there.
BACK, OVER, PAST = b"back", b"over", b"+"
PAST_AT = len(BACK + OVER)
# What follows the version of a Python that is started with -E or -I, or without PYTHONPATH, and so finds no agent.
ALONE = "alone"


class SupervisorOrder(Record):
    """What the daemon wants of a supervisor. What has become of it is told by `supervise.report`."""

    order: int = field("number of the order, counted by the daemon on this connection")
    do: str = field(
        "expect: its command may end with the exit code of a restart, and is then to be waited for, and not started "
        "again before that is said; ready: start it in a process that imports these modules, and then waits for its "
        "turn before any line of the script, which `start` gives it if it is for the same surroundings; unready: end "
        "that one; start: start it again, from the state in the descriptor that comes along, or ranks "
        "from theirs; forget: the operation is over, nothing is expected any more; give-up: it cannot be started "
        "again, and its state stays where the operation has it; protect: the job has a snapshot from which it can be "
        "recovered, so a command that fails is reported as `fell`; ask: have the program `python` say which Python it "
        "is, with the environment of a start, and start nothing else; note: whoever watches is to read its message and "
        "its hint. What it does not know it leaves be"
    )
    operation: str = field(
        "the operation that it is about; empty for a note, for ask, and for a process that is kept ready for any"
    )
    launches: bool = field(
        "expect: whether its command is the launcher of ranks, which may end with any exit code then", default=False
    )
    ranks: tuple[int, ...] = field("start: of which ranks the states are that come along, in their order", default=())
    key: str = field("start: which start of the operation it is; the next `supervise` says it again", default="")
    imports: tuple[str, ...] = field("ready: the modules, in their order", default=())
    path: tuple[str, ...] = field("ready: the folders in which the script finds modules", default=())
    set: Mapping[str, str] = field(
        "ready, start, ask: variables of its environment to set, beside those it had", default={}
    )
    unset: tuple[str, ...] = field("ready, start, ask: variables to leave out", default=())
    python: str | None = field("ready, start, ask: the interpreter to take in the place of its own", default=None)
    message: str = field("give-up: why; note: what", default="")
    hint: str = field("give-up, note: the next step", default="")


class RecoveryWish(Record):
    """How a job is to be recovered, as `hegmctl run --recover` was told."""

    interval_s: float | None = field(
        "time between two snapshots; nil for 100 times what the last one cost", default=None
    )
    max_recoveries: int | None = field("how often it is recovered in all; nil for no limit but progress", default=None)
    hang_limit_s: float | None = field(
        "after how long without a boundary it counts as hung; 0 for never, nil for 5 times the longest time between "
        "two boundaries, and at least 60 s",
        default=None,
    )


class SupervisionEnded(Record):
    """The daemon has no more orders on this connection."""


class Supervise(Request, op="supervise", reply=SupervisionEnded, event=SupervisorOrder):
    """A supervisor offers the command that it is the parent of: the daemon's orders come as events until it leaves.

    `start` comes with two descriptors, which the new process inherits: the memory with the state, and one with a lock
    (`flock`, exclusively). The lock is the right to go on from that state. It lasts for as long as anybody has the
    second descriptor open, so that nobody starts from the same state while a process that did lives. Of ranks there is
    a memory for each, before the lock; a launcher leaves no descriptor open for them, so the supervisor hands each its
    own and the lock. Of one process, the file that it is of has `back` in its beginning once that has put the state
    back, and `over` after that once it has ended with 0: nobody is started from that state any more. The ninth byte is
    `+` once it has passed boundaries beyond that state, by the daemon's word or, while its agent had no connection, by
    its own; of ranks there is one for each. However it ends then, its supervisor does not start it again.
    """

    run: str = field("which `hegmctl run` it is, as its agents say it too")
    name: str | None = field("what that was named; nil if it was not", default=None)
    pid: int | None = field("the process that it is the parent of; nil while none runs", default=None)
    python: bool = field("whether its command begins with a Python, so that another one can take its place")
    started: bool = field("whether that one was started from the state of the operation", default=False)
    left: bool = field("whether its command has left for a restart, and it waits for what to do", default=False)
    operation: str | None = field(
        "the operation that it expects a restart from, or whose state it started", default=None
    )
    resumes: str | None = field("a suspended operation that its command wants to continue", default=None)
    gpu: str | None = field("with that, the GPU to continue on; nil for the former one", default=None)
    key: str = field("which start of the operation that was, as the order said", default="")
    asks: bool = field("whether it can ask an interpreter which Python it is", default=False)
    ready: str | None = field(
        "when its next process is to be made ready: in-turn, beforehand or always; nil as the daemon is configured",
        default=None,
    )
    ranks: bool = field("whether it can start several ranks from a state of each", default=False)
    kept: bool = field(
        "whether a process waits beside its command, or is on its way there, for whatever restart may come",
        default=False,
    )
    readies: str | None = field("the operation for whose restart one does", default=None)
    recover: RecoveryWish | None = field("how the job is to be recovered; nil if it is not", default=None)
    fell: int | None = field(
        "how its command failed, by exit status or minus its signal, while the job was protected; it waits for a start "
        "from a snapshot",
        default=None,
    )


class SuperviseReport(Request, op="supervise.report", reply=Noted):
    """What became of an order, or of the command."""

    order: int | None = field("number of the order; nil for what happened by itself", default=None)
    result: str = field(
        "done; failed: it cannot be done; or, without an order, ended: the command has, for a restart or of itself; "
        "fell: the command of a protected job has failed; "
        "ready: the process that was to be made ready waits for its turn, or without a pid, never will"
    )
    pid: int | None = field("start, ready: the new process", default=None)
    was_ready: bool = field("start: whether that process had been made ready before its turn", default=False)
    status: int | None = field("ended, fell: its exit status, or minus the signal that ended it", default=None)
    starts: int = field("failed, ended: how often it was started from that state by now", default=0)
    message: str = field(
        "failed: what and why; of ask: which Python it is, with `alone` after its version if it reads nothing of its "
        "environment or is not given it, or why it is none",
        default="",
    )
    hint: str = field("failed: the next step", default="")
