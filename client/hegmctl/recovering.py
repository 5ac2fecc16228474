"""The options of `hegmctl run --recover`, and which exits of its command are failures.

Only a protected job is recovered: one of which the daemon holds a snapshot. An intended exit (status 0, SIGTERM or
SIGINT from outside, a status that the user named) is no failure. The daemon chooses the snapshot and the GPU for the
next start, and how often it tries.
"""

from __future__ import annotations

import signal

from hegmd.errors import USAGE, HegmError
from hegmd.protocol.supervision import RecoveryWish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from hegmctl.answers import RecoveryPlan
    from hegmctl.arguments import Arguments
    from hegmctl.cli import Session
    from hegmctl.tables import Style

SIGNAL, ERROR = "signal", "error"
CAUSES = (SIGNAL, ERROR)
AUTO, OFF = "auto", "off"
_MIN_INTERVAL_S = 0.1
# These signals mean that the user wants the job to end. A shell or a launcher that was ended so reports it as 128 and
# the signal's number.
_WANTED = frozenset((signal.SIGINT, signal.SIGTERM))
_BY_SHELL = 128
_LAST_SIGNAL = 64


class Recovery:
    """Owns whether the job is protected. `wish` is for the daemon."""

    def __init__(
        self, wish: RecoveryWish, causes: Collection[str] = CAUSES, final_statuses: Collection[int] = ()
    ) -> None:
        self.wish = wish
        self.causes = tuple(causes)
        self._causes = frozenset(causes)
        self._final = frozenset(final_statuses)
        #: Whether the daemon has a snapshot of the job.
        self.is_protected = False

    def is_failure(self, status: int, sent_signal: int | None) -> bool:
        """True if the exit of the command is a failure. `sent_signal` is the signal that asked it to end."""
        ending = -status if status < 0 else status - _BY_SHELL
        if status == 0 or sent_signal is not None or ending in _WANTED or status in self._final:
            return False
        is_signal = status < 0 or _BY_SHELL < status <= _BY_SHELL + _LAST_SIGNAL
        return (SIGNAL if is_signal else ERROR) in self._causes


def ended_how(status: int) -> str:
    """Return how a command ended, in words."""
    return f"ended with exit status {status}" if status >= 0 else f"was ended by signal {-status}"


def recovery_asked(arguments: Arguments) -> Recovery | None:
    """Return the recovery options of the command line; None without `--recover`. Raises HegmError."""
    text, most = arguments.text("recover"), arguments.whole("max-recoveries")
    causes, final, hang = (arguments.text(key) for key in ("recover-from", "final-status", "hang-limit"))
    if text is None:
        most = None if arguments.whole("ranks") is not None else most
        values = {"max-recoveries": most, "recover-from": causes, "final-status": final, "hang-limit": hang}
        given = [f"--{name} {value}" for name, value in values.items() if value is not None]
        given += [f"--{name}" for name in ("truncate-outputs", "dry-run") if arguments.flag(name)]
        if given:
            hint = f"run: hegmctl run --recover {' '.join(given)} -- COMMAND"
            raise HegmError(USAGE, f"{given[0].split()[0]} is for --recover", hint)
        return None
    named = CAUSES if causes is None else tuple(causes.split(","))
    if not named or set(named) - set(CAUSES):
        raise HegmError(USAGE, f"--recover-from {causes} is no list of causes", f"write some of: {','.join(CAUSES)}")
    wish = RecoveryWish(interval_s=_interval_s(text), max_recoveries=most, hang_limit_s=_hang_limit_s(hang))
    return Recovery(wish, named, _statuses(final))


def tell_plan(session: Session, recovery: Recovery) -> None:
    """Say what `hegmctl run --recover` would do with that command."""
    from hegmctl.answers import RecoveryPlan
    from hegmctl.isolation import leaves_out

    arguments = session.arguments
    word = leaves_out(arguments.tail)
    against = [] if word is None else [f"`{word}` keeps hegmd's agent out of {arguments.tail[0]}: remove it"]
    plan = RecoveryPlan(
        command=tuple(arguments.tail),
        interval_s=recovery.wish.interval_s,
        truncates=arguments.flag("truncate-outputs"),
        causes=recovery.causes,
        against=tuple(against),
    )
    session.sink.answer(plan, _plan_text)


def _plan_text(plan: RecoveryPlan, _style: Style) -> list[str]:
    from hegmctl.quantities import duration
    from hegmctl.tables import printable

    every = "100 times what a snapshot costs" if plan.interval_s is None else duration(plan.interval_s)
    repeats = (
        "files that the script appends to are cut back to their length at the snapshot"
        if plan.truncates
        else "repeated steps print and append their lines again: --truncate-outputs cuts files back"
    )
    return [
        f"command: {printable(' '.join(plan.command))}",
        f"snapshots: every {every}; two states of each process in host memory",
        f"recovered from: {', '.join(plan.causes)}",
        f"output: {repeats}",
        *(f"not protected: {printable(why)}" for why in plan.against),
        "whether its state can be saved is known at its first batch: hegmctl recovery, and docs/restarts.md",
    ]


def _interval_s(text: str) -> float | None:
    from hegmctl.arguments import seconds_of

    if text == AUTO:
        return None
    interval_s = seconds_of(text, "--recover")
    if interval_s < _MIN_INTERVAL_S:
        hint = f"write a time of at least {_MIN_INTERVAL_S:g} s, such as --recover=30s, or --recover alone"
        raise HegmError(USAGE, f"--recover={text} is no interval", hint)
    return interval_s


def _hang_limit_s(text: str | None) -> float | None:
    from hegmctl.arguments import seconds_of

    if text is None:
        return None
    return 0.0 if text == OFF else seconds_of(text, "--hang-limit")


def _statuses(text: str | None) -> tuple[int, ...]:
    words = [] if text is None else text.split(",")
    if not all(word.isdigit() and 0 < int(word) < 256 for word in words):
        raise HegmError(USAGE, f"--final-status {text} is no list of exit statuses", "write numbers from 1 to 255: 3,4")
    return tuple([int(word) for word in words])
