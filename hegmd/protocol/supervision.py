"""The messages between the daemon and the supervisor of a job.

A supervisor is the `hegmctl run --allow-restart` that stays as the parent of its command. The daemon tells it before
the command exits for a restart, and later tells it to start the command again in another environment. The training's
state comes along by descriptor. Other code imports these names from `messages`, which gathers all messages.
"""

from __future__ import annotations

from .agents import Noted
from .record import Record, field
from .requests import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


# The content of the lock's file: BACK once the process has restored the state, then OVER once it has exited with 0. One
# byte for each rank follows: PAST if it trained on from its state while no daemon was there.
BACK, OVER, PAST = b"back", b"over", b"+"
# In place of BACK: the process has ended, as its script was edited.
EDITED = b"edit"
# In place of OVER: a process has found that the state does not match its checksums.
DAMAGED = b"torn"
PAST_AT = len(BACK + OVER)
# Follows the version of a Python that finds no agent: it runs with -E or -I, or without PYTHONPATH.
ALONE = "alone"


class SupervisorOrder(Record):
    """An order of the daemon to a supervisor. The supervisor answers each order with `supervise.report`.

    | `do` | what the supervisor does |
    |---|---|
    | `expect` | When the command exits for a restart, it waits for `start`, `forget` or `give-up`. |
    | `ready` | It prestarts a process, which imports `imports` and waits for a `start` with the same environment. |
    | `unready` | It ends the prestarted process. |
    | `start` | It starts the command again from the state in the descriptor that comes along; each rank from its own. |
    | `forget` | The supervisor expects nothing more: the operation is over. |
    | `give-up` | It stops waiting: the command cannot be started again. The operation keeps the state. |
    | `protect` | It reports a failure of the command with `fell` from now on: the job has a snapshot. |
    | `ask` | It asks the program `python` for its version, in the environment of a start. It starts nothing else. |
    | `note` | It shows `message` and `hint` to its user. |

    A supervisor ignores an order that it does not know.
    """

    order: int = field("number of the order, counted by the daemon on this connection")
    do: str = field("one of the orders in the table above")
    operation: str = field(
        "the operation that the order belongs to; empty for `note` and `ask`, and for a prestarted process that any "
        "operation can use"
    )
    launches: bool = field(
        "expect: whether the command is a launcher of ranks, which can then exit with any code", default=False
    )
    ranks: tuple[int, ...] = field("start: the ranks of the states that come along, in their order", default=())
    key: str = field("start: identifies this start of the operation; the next `supervise` repeats it", default="")
    imports: tuple[str, ...] = field("ready: the modules, in import order", default=())
    path: tuple[str, ...] = field("ready: the folders in which the script finds modules", default=())
    set: Mapping[str, str] = field("ready, start, ask: environment variables to set or replace", default={})
    unset: tuple[str, ...] = field("ready, start, ask: environment variables to remove", default=())
    python: str | None = field("ready, start, ask: the interpreter to use instead of the command's own", default=None)
    message: str = field("give-up: the reason; note: the text", default="")
    hint: str = field("give-up, note: the next step", default="")


class RecoveryWish(Record):
    """How to recover a job, from the options of `hegmctl run --recover`."""

    interval_s: float | None = field(
        "time between two snapshots; nil for 100 times the cost of the last one", default=None
    )
    max_recoveries: int | None = field(
        "how often the daemon recovers the job in all; nil for no limit while it makes progress", default=None
    )
    hang_limit_s: float | None = field(
        "the job counts as hung after this time without a boundary; 0 for never, nil for 5 times the longest time "
        "between two boundaries, and at least 60 s",
        default=None,
    )


class SupervisionEnded(Record):
    """The daemon sends no further orders on this connection."""


class Supervise(Request, op="supervise", reply=SupervisionEnded, event=SupervisorOrder):
    """A supervisor offers its command to the daemon. The daemon's orders come as events until the supervisor leaves.

    `start` comes with two descriptors, which the new process inherits: memory with the state, and a file with a lock
    (`flock`, exclusive). The lock is the right to continue from that state. It lasts while any process has its
    descriptor open, so no second process can start from the state while the first one lives. For ranks, one memory for
    each comes before the lock. A launcher leaves no descriptor open for its ranks, so the supervisor gives each rank
    its own memory and the lock.

    The lock's file records whether the state was restored. A single process writes `back` once it has restored the
    state, and `over` after that once it has exited with 0: the state is never used again. Byte 9 becomes `+` once the
    process has passed boundaries beyond the state. The daemon writes it, or the process itself while its agent has no
    connection. Ranks have one byte each. The supervisor does not restart a process with a `+`, however it ends.
    """

    run: str = field("the id of this `hegmctl run`; the agents of its command send the same")
    name: str | None = field("the name given to `hegmctl run`; nil if none", default=None)
    pid: int | None = field("the process that the supervisor is the parent of; nil while none runs", default=None)
    python: bool = field("whether the command is a Python interpreter, so that another one can replace it")
    started: bool = field("whether the process was started from the state of the operation", default=False)
    left: bool = field(
        "whether the command has exited for a restart, and the supervisor waits for an order", default=False
    )
    operation: str | None = field(
        "the operation whose restart the supervisor expects, or whose state it started", default=None
    )
    resumes: str | None = field("a suspended operation that the command asks to resume", default=None)
    gpu: str | None = field("with `resumes`, the GPU to resume on; nil for the former one", default=None)
    key: str = field("the `key` of the last `start`", default="")
    asks: bool = field("whether the supervisor can ask an interpreter for its version", default=False)
    ready: str | None = field(
        "when to prestart the next process: in-turn, beforehand or always; nil for the daemon's setting", default=None
    )
    kept: bool = field(
        "whether a prestarted process that any restart can use waits, or is being started", default=False
    )
    readies: str | None = field("the operation whose restart a prestarted process waits for", default=None)
    recover: RecoveryWish | None = field("how to recover the job; nil if it is not to be recovered", default=None)
    fell: int | None = field(
        "the exit status, or minus the signal, of a protected command that failed; the supervisor waits for a start "
        "from a snapshot",
        default=None,
    )


class SuperviseReport(Request, op="supervise.report", reply=Noted):
    """The result of an order, or the end of the command.

    | `result` | meaning |
    |---|---|
    | `done` | The order was carried out. |
    | `failed` | The order cannot be carried out. |
    | `ready` | The prestarted process waits for its turn; without a pid, it never will. |
    | `ended` | Without an order: the command has exited, for a restart or by itself. |
    | `fell` | Without an order: the command of a protected job has failed. |
    """

    order: int | None = field("number of the order; nil for an event without one", default=None)
    result: str = field("one of the results in the table above")
    pid: int | None = field("start, ready: the new process", default=None)
    was_ready: bool = field("start: whether the process had been prestarted", default=False)
    status: int | None = field("ended, fell: exit status, or minus the signal", default=None)
    starts: int = field("failed, ended: how often the command was started from that state so far", default=0)
    message: str = field(
        "failed: what failed and why; the answer to ask: the version of the Python, followed by `alone` if it ignores"
        " or lacks PYTHONPATH, or the reason why it is no Python",
        default="",
    )
    hint: str = field("failed: the next step", default="")
