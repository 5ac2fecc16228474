"""Scripts run whole, and again in two halves with a state between them: `python -m ... FILE...`, results as JSON.

Each has a function `train(begin)` whose loop calls `at(step)` in its head, and which returns what is to be the same.
The second half is a new making of the script, as in a new process. It runs in a thread, whose frames are all there is.
A script with `-` before its name has no second half.
"""

from __future__ import annotations

import json
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from hegmd.agent.state import capture, restore
from hegmd.agent.state.code.position import ThreadPosition
from hegmd.agent.state.script import baseline, capture_points
from tests.unit.agent.state.in_file import through_a_file

#: The step at which the first half ends.
LEFT_AT = 5


#: The run that is under way, by a weak reference: the search for what the script holds does not go through those.
_under_way: list[weakref.ref[Run]] = []


def at(step: int) -> None:
    """The function that the script calls."""
    run = _under_way[-1]()
    assert run is not None
    run.come_to(step, sys._getframe(1))


class Run:
    """One run of a script, with or without a state."""

    def __init__(self, file: Path, state: dict[str, Any] | None) -> None:
        self.is_half = state is not None
        self.state = state
        self.refusals: list[str] = []
        module = types.ModuleType(file.stem)
        module.__file__ = str(file)
        vars(module)["at"] = at
        sys.modules[file.stem] = module
        _under_way.append(weakref.ref(self))
        exec(compile(file.read_text(), file, "exec"), vars(module))
        with ThreadPoolExecutor(1) as threads:
            self.result = threads.submit(vars(module)["train"], LEFT_AT if self.is_half else 0).result()

    def come_to(self, step: int, frame: FrameType) -> None:
        """Remember what there is at the first step, be taken at one, or continue from there."""
        if step == 0:
            place = ThreadPosition(frame)
            baseline.note_place(capture_points.path_of_loop(place), place.frames)
        elif step == LEFT_AT and not self.is_half:
            taken, against = capture.capture(threading.get_ident(), frame)
            self.refusals = [found.what for found in against if not found.passes]
            self.state = through_a_file(taken)
        elif step == LEFT_AT:
            restore.put_back(self.state or {}, frame)


def main(files: list[str]) -> None:
    """Run each; results by name."""
    results: dict[str, Any] = {}
    for given in files:
        file = Path(given.removeprefix("-"))
        whole = Run(file, None)
        halves = Run(file, whole.state) if given == str(file) else whole
        del sys.modules[file.stem]
        own = (whole.state or {})["own"]
        fields = {"refusals": whole.refusals, "anew": own["anew"], "unseen": own["unseen"]}
        results[file.stem] = {"whole": whole.result, "halves": halves.result, **fields}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
