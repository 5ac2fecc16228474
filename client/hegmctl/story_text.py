"""An operation's story for people: when, how long it took, who, and what they did. The fields are in `--json`.

Owns the sentence for each event of the machine (hegmd/migration/machine/events.py). An event that is not known here, as
one of a newer daemon, is told by its name.
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

# Who, and what they did.
WORDS: dict[str, tuple[str, str]] = {
    "": (HEGMD, "planned it"),
    "begin": (HEGMD, "began"),
    "cancel-requested": (USER, "asked to turn it back"),
    "drop-requested": (USER, "gave up the state that is held"),
    "resume-requested": (USER, "asked for the job to go on"),
    "taken-up": (USER, "asked for something else of the job, which is parked"),
    "image-requested": (USER, "asked for an image of the suspended job"),
    "worker-exited": (PROCESS, "ended"),
    "training-ended": (PROCESS, "came to the end of its training"),
    "came-on": (PROCESS, "came on with its restart"),
    "agent-lost": (AGENT, "lost its connection"),
    "agent-back": (AGENT, "connected again"),
    "deadline-passed": (CLOCK, "the time limit passed"),
    "recovered": (HEGMD, "was started again and took the operation from its journal"),
    "failed": (HEGMD, "a step failed"),
    "reserved": (HEGMD, "reserved memory on the GPU"),
    "reservation-released": (HEGMD, "gave memory on the GPU back"),
    "pool-reserved": (HEGMD, "reserved memory in the pool"),
    "pool-released": (HEGMD, "gave memory of the pool back"),
    "successor-awaited": (HEGMD, "waited for the next process to be ready"),
    "surveyed": (AGENT, "counted what the process holds"),
    "parked": (AGENT, "stopped the training at a batch boundary"),
    "overran": (AGENT, "had passed the boundary that was asked for"),
    "withdrawn": (AGENT, "let the training run on; nothing is asked of it"),
    "disconnected": (AGENT, "disconnected the process from the other ranks"),
    "reconnected": (AGENT, "connected the process to the other ranks again"),
    "locked": (HEGMD, "locked the CUDA calls of the process"),
    "unlocked": (HEGMD, "unlocked the CUDA calls of the process"),
    "offloaded": (AGENT, "the tensors' bytes left the process"),
    "checkpointed": (HEGMD, "took the process off its GPU"),
    "grew": (HEGMD, "found that the process needs more memory than was planned"),
    "held": (HEGMD, "held the job for the time that was asked for"),
    "dumped": (HEGMD, "wrote the image and read it back"),
    "sealed": (HEGMD, "completed the image of the job, which trains again"),
    "scrapped": (HEGMD, "removed what was written of the image"),
    "ended": (PROCESS, "ended, as was asked for"),
    "restored": (HEGMD, "brought the process back onto its GPU"),
    "reloaded": (AGENT, "the tensors' bytes came back into the process"),
    "released": (AGENT, "let the training go on"),
    "verified": (AGENT, "saw the next batch"),
    "inspected": (HEGMD, "looked at how the process is"),
}
# What of the fields is for people: why something failed or ended, and how far a restart is.
_MESSAGE = re.compile(r"\bmessage (.*?), hint ", re.DOTALL)
_WHY = re.compile(r"\bwhy (.*?)(?:, finished |$)", re.DOTALL)
_DOING = re.compile(r"\bdoing (.*)$", re.DOTALL)
_PID = re.compile(r"\bworker (\d+)-")
_BY = re.compile(r"\bby (.+)$")


def whole_story_text(reply: StoryReply, style: Style) -> list[str]:
    """How it ended, and below it a line for each thing that happened."""
    lines = [*outcome(reply.operation, style), ""]
    if reply.untold:
        lines.append(f"({reply.untold} earlier lines are no longer remembered)")
    if not reply.story:
        return lines
    rows: list[list[Cell]] = []
    before_utc = reply.story[0].utc
    for line in reply.story:
        who, what = _told(line)
        rows.append([_clock(line.utc), f"{max(0.0, line.utc - before_utc):.3f} s", who, what])
        before_utc = line.utc
    lines.append(strftime("%Y-%m-%d", localtime(reply.story[0].utc)))
    columns = (Column("TIME"), Column("TOOK", right=True), Column("WHO"), Column("WHAT", shrink=24))
    return [*lines, *table(columns, rows, style)]


def _told(line: StoryLine) -> tuple[str, str]:
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
