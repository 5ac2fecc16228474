"""Draws STATES.md from the machine's own tables: `python -m tools.docs.states`. A test keeps the page fresh.

Owns the page's form; every word about a phase, an event or an effect comes from where it is defined.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.machine import EVENTS, IGNORE, MOVE, PHASES, REFUSE, TABLE
from hegmd.migration.machine.next_effects import PLANNED, SUSPENDED, TERMINAL
from hegmd.migration.machine.stages import STAGES

PAGE = Path(__file__).parents[2] / "hegmd" / "migration" / "STATES.md"
_MARKS = {MOVE: "→", IGNORE: "·", REFUSE: "✗"}

_INTRO = """\
# The states of a move

<!-- Written by `make docs` from machine.py, stages.py, events.py and effects.py in hegmd/migration/machine. -->

An operation is in the first stage that needs something of its workers. Its direction decides what is needed:
**forward** to the requested state, **back** to the state before the request, or **hold**: neither is possible, and the
job is parked with its bytes. A rollback is no separate path: each worker's target is its first GPU, a worker that was
only parked is released, and an offloaded one is reloaded first.
"""


def page() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRO, *_diagram(), *_stages(), *_effects(), *_events(), *_grid()]
    return "\n".join(parts) + "\n"


def _diagram() -> Iterator[str]:
    walked = [stage.phase for stage in STAGES[1:]]
    away, home = walked[: walked.index("restoring")], walked[walked.index("restoring") :]
    yield "```mermaid\nstateDiagram-v2"
    yield f"    [*] --> {PLANNED}"
    for here, there in zip([PLANNED, *away], [*away, SUSPENDED], strict=False):
        yield f"    {here} --> {there}"
    yield f"    {away[-2]} --> {home[0]}: to another GPU"
    yield f"    {SUSPENDED} --> {walked[0]}: resume"
    for here, there in pairwise(home):
        yield f"    {here} --> {there}"
    for phase in TERMINAL:
        yield f"    {home[-1]} --> {phase}\n    {phase} --> [*]"
    yield "```\n"
    yield "A stage that needs nothing is skipped. If the effects under way are not the needed ones, or the state of"
    yield "a worker is unknown, the operation goes to `settling`, and then to the first stage that needs something.\n"


def _stages() -> Iterator[str]:
    yield "## Stages, in order\n"
    yield "| stage | what happens | effects | limit |\n|---|---|---|---|"
    for stage in STAGES:
        asks = ", ".join(f"`{name}`" for name in stage.asks)
        yield f"| {stage.phase} | {stage.purpose} | {asks} | `{stage.limit}` |"
    yield ""


def _effects() -> Iterator[str]:
    yield "## Effects\n"
    yield "| effect | with | ends with | when cancelled | what it does |\n|---|---|---|---|---|"
    for name, effect in sorted(Effect.register.items()):
        own = [field.name for field in effect.fields if field not in Effect.fields]
        fields = ", ".join(f"`{field}`" for field in own)
        ends = ", ".join(f"`{end}`" for end in effect.ends)
        yield f"| `{name}` | {fields} | {ends} | {effect.on_cancel} | {_doc(effect)} |"
    yield ""


def _events() -> Iterator[str]:
    yield "## Events\n"
    yield "| event | with | what happened |\n|---|---|---|"
    for name, event in sorted(Event.register.items()):
        own = [field.name for field in event.fields if field not in Event.fields]
        yield f"| `{name}` | {', '.join(f'`{field}`' for field in own)} | {_doc(event)} |"
    yield ""


def _doc(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _grid() -> Iterator[str]:
    yield "## Every phase and every event\n"
    yield "→ a move, · ignored, ✗ refused; an ignored or refused event changes nothing.\n"
    yield "| event | " + " | ".join(PHASES) + " |\n|---|" + "---|" * len(PHASES)
    for event in EVENTS:
        yield f"| `{event}` | " + " | ".join(_MARKS[TABLE[phase, event].verdict] for phase in PHASES) + " |"
    yield "\n| event | in | becomes | because |\n|---|---|---|---|"
    for event in EVENTS:
        yield from _reasons(event)


def _reasons(event: str) -> Iterator[str]:
    """Return one line for each different row of the event, with its phases."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for phase in PHASES:
        row = TABLE[phase, event]
        grouped.setdefault((row.verdict, row.why), []).append(phase)
    for (verdict, why), phases in grouped.items():
        yield f"| `{event}` | {', '.join(phases)} | {verdict} | {why} |"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page())
