"""An operation's history for people: when, how long it took, who did what. `--json` has the fields.

Has the sentence for each event of the machine (hegmd/migration/machine/events.py). An unknown event, such as one of a
newer daemon, is shown by its name.
"""

from __future__ import annotations

import re
from time import localtime, strftime

from hegmctl.operating_text import outcome
from hegmctl.tables import Column, Style, printable, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.tables import Cell
    from hegmd.protocol.messages import StoryReply
    from hegmd.protocol.operations import StoryLine

HEGMD, AGENT, PROCESS, USER, CLOCK = "hegmd", "agent", "process", "user", "clock"

# For each event: the actor and the action.
WORDS: dict[str, tuple[str, str]] = {
    "": (HEGMD, "planned it"),
    "begin": (HEGMD, "began"),
    "cancel-requested": (USER, "asked for a rollback"),
    "drop-requested": (USER, "dropped the state"),
    "resume-requested": (USER, "asked to resume the job"),
    "taken-up": (USER, "sent another request for the parked job"),
    "image-requested": (USER, "asked for an image of the suspended job"),
    "worker-exited": (PROCESS, "ended"),
    "training-ended": (PROCESS, "finished its training"),
    "came-on": (PROCESS, "made progress with its restart"),
    "agent-lost": (AGENT, "lost its connection"),
    "agent-back": (AGENT, "connected again"),
    "deadline-passed": (CLOCK, "the time limit passed"),
    "recovered": (HEGMD, "restarted and took the operation from its journal"),
    "failed": (HEGMD, "a step failed"),
    "reserved": (HEGMD, "reserved memory on the GPU"),
    "reservation-released": (HEGMD, "released memory on the GPU"),
    "pool-reserved": (HEGMD, "reserved memory in the pool"),
    "pool-released": (HEGMD, "released memory of the pool"),
    "successor-awaited": (HEGMD, "waited for the prestarted process"),
    "surveyed": (AGENT, "surveyed the storages of the process"),
    "parked": (AGENT, "stopped the training at a batch boundary"),
    "overran": (AGENT, "had already passed the requested boundary"),
    "withdrawn": (AGENT, "let the training continue"),
    "disconnected": (AGENT, "disconnected the process from the other ranks"),
    "reconnected": (AGENT, "connected the process to the other ranks again"),
    "locked": (HEGMD, "locked the CUDA calls of the process"),
    "unlocked": (HEGMD, "unlocked the CUDA calls of the process"),
    "offloaded": (AGENT, "offloaded the tensors"),
    "checkpointed": (HEGMD, "checkpointed the process"),
    "grew": (HEGMD, "found that the process needs more memory than planned"),
    "held": (HEGMD, "held the job for the requested time"),
    "dumped": (HEGMD, "wrote the image and read it back"),
    "sealed": (HEGMD, "completed the image of the job, which trains again"),
    "scrapped": (HEGMD, "removed the incomplete image"),
    "ended": (PROCESS, "exited as requested"),
    "restored": (HEGMD, "restored the process on its GPU"),
    "reloaded": (AGENT, "reloaded the tensors"),
    "released": (AGENT, "resumed the training"),
    "verified": (AGENT, "confirmed the next batch"),
    "inspected": (HEGMD, "inspected the process"),
}
# The fields to show: why something failed or ended, and how far a restart is.
_MESSAGE = re.compile(r"\bmessage (.*?), hint ", re.DOTALL)
_WHY = re.compile(r"\bwhy (.*?)(?:, finished |$)", re.DOTALL)
_DOING = re.compile(r"\bdoing (.*)$", re.DOTALL)
_PID = re.compile(r"\bworker (\d+)-")
_BY = re.compile(r"\bby (.+)$")


def whole_story_text(reply: StoryReply, style: Style) -> list[str]:
    """Return the result, and a line for each event."""
    lines = [*outcome(reply.operation, style), ""]
    if reply.untold:
        lines.append(f"({reply.untold} earlier lines are no longer remembered)")
    if not reply.story:
        return lines
    rows: list[list[Cell]] = []
    before_utc = reply.story[0].utc
    for line in reply.story:
        who, what = _who_and_what(line)
        rows.append([_clock(line.utc), f"{max(0.0, line.utc - before_utc):.3f} s", who, what])
        before_utc = line.utc
    lines.append(strftime("%Y-%m-%d", localtime(reply.story[0].utc)))
    columns = (Column("TIME"), Column("TOOK", right=True), Column("WHO"), Column("WHAT", shrink=24))
    return [*lines, *table(columns, rows, style)]


def _who_and_what(line: StoryLine) -> tuple[str, str]:
    if line.event not in WORDS:
        return HEGMD, printable(line.event)
    who, what = WORDS[line.event]
    pid = _PID.search(line.detail)
    if who == USER:
        by = _BY.search(line.detail)
        asked_by = by.group(1) if by else line.cause
        who = asked_by if asked_by not in ("", "request") else who
    elif pid is not None and who == HEGMD:
        what = f"{what} (process {pid.group(1)})"
    elif pid is not None:
        who = f"{who} {pid.group(1)}"
    return printable(who), printable(f"{what}{_why(line)}")


def _why(line: StoryLine) -> str:
    pattern = {"failed": _MESSAGE, "worker-exited": _WHY, "came-on": _DOING}.get(line.event)
    found = None if pattern is None else pattern.search(line.detail)
    return "" if found is None else f": {found.group(1)}"


def _clock(utc: float) -> str:
    seconds, milliseconds = divmod(round(utc * 1000), 1000)
    return f"{strftime('%H:%M:%S', localtime(seconds))}.{milliseconds:03d}"
