"""Scripts restarted at boundaries drawn by seed: every batch, rate, loss and weight is that of an undisturbed run.

It compares the output and the record of all computed values (`recorded.py`): inputs of every module, rates, parameters
and optimizers' states after each step, and all that is left at the end, bit for bit. The boundaries of an undisturbed
run are told by their kind: an epoch's first batch, its last, the end of an epoch with the evaluation, the checkpoint
and the schedules after it, within an accumulation, or elsewhere in the epoch. One to three of different kinds are
drawn. Other seeds: `HEGM_TEST_SEED=N`; what fails says its seed.
"""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import pytest

from tests.e2e.agented import SCRIPTS
from tests.e2e.restarted import LEFT_STATUS, Restarts, Spot

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("restarts")]

SEED = int(os.environ.get("HEGM_TEST_SEED", "7"))
MOVED = SCRIPTS.parent / "moved"
#: Boundaries of loaders within an evaluation: asked there, a training continues to the next place of its own.
_NOT_DRAWN = "evaluating"


def drawn(kinds: list[str], seed: str) -> list[tuple[int, str]]:
    """Draw one to three boundaries of different kinds, in their order: their numbers and kinds."""
    draw = random.Random(seed)
    places = {kind: [at for at, found in enumerate(kinds, 1) if found == kind] for kind in sorted(set(kinds))}
    places.pop(_NOT_DRAWN, None)
    chosen = draw.sample(list(places), min(draw.randint(1, 3), len(places)))
    return sorted((draw.choice(places[kind]), kind) for kind in chosen)


def counted_anew(places: list[tuple[int, str]]) -> list[Spot]:
    """The same in the counts of the starts, each of which comes to the boundary it was left at once more."""
    starts = [1, *[at for at, _kind in places]]
    return [Spot(max(at - start, 1), kind) for (at, kind), start in zip(places, starts, strict=False)]


def _compared(output: str) -> list[str]:
    """Its lines, but for counts of the changes of tensors in place, which PyTorch starts over with the process."""
    return [line.split(" True [")[0] for line in output.splitlines()]


@pytest.mark.parametrize(
    ("script", "seed"),
    [
        (SCRIPTS / "epochs.py", SEED),
        (SCRIPTS / "workers.py", SEED),
        (SCRIPTS / "gan.py", SEED),
        (SCRIPTS / "no_loader.py", SEED),
        (SCRIPTS / "tensors.py", SEED),
        (SCRIPTS / "streams.py", SEED),
        (SCRIPTS / "while_loops.py", SEED),
        (MOVED / "in_a_thread.py", SEED),
        (MOVED / "mixed_precision.py", SEED),
        # As epochs.py, in_a_thread.py, gan.py and test_restarts.py go through their code.
        *(
            pytest.param(path, SEED, marks=pytest.mark.wide)
            for path in (
                SCRIPTS / "plain.py",
                SCRIPTS / "threaded.py",
                SCRIPTS / "evaluated.py",
                SCRIPTS / "own_variables.py",
                MOVED / "progress.py",
                MOVED / "two_models.py",
            )
        ),
        *(
            pytest.param(SCRIPTS / name, SEED + 1, marks=pytest.mark.wide)
            for name in ("epochs.py", "evaluated.py", "own_variables.py")
        ),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "" if value == SEED else "again",
)
def test_no_computed_value_differs(restarts: Restarts, tmp_path: Path, script: Path, seed: int) -> None:
    argv = (str(script), str(tmp_path))
    output, record = restarts.computed(*argv, is_recorded=True)
    kinds = restarts.kinds_of(*argv)
    places = drawn(kinds, f"{seed} {script.stem}")
    message = f"HEGM_TEST_SEED={seed}: {script.name} left at {places} of its boundaries"
    found_output, found_record, ends = restarts.recorded(*argv, places=counted_anew(places))
    statuses = [*[LEFT_STATUS] * len(places), 0]
    assert [ended.status for ended in ends] == statuses, f"{message}: {[ended.errors[-500:] for ended in ends]}"
    assert [ended.kinds[-1] for ended in ends[:-1]] == [kind for _at, kind in places], message
    assert _compared(found_output) == _compared(output), message
    assert found_record.splitlines() == record.splitlines(), message


def test_seeds_draw_every_kind_of_boundary_and_one_to_three_restarts() -> None:
    epoch = ["first batch", "accumulating", "within", "last batch", "between epochs", "evaluating"]
    plans = [drawn(epoch * 3, str(seed)) for seed in range(40)]
    assert {len(found) for found in plans} == {1, 2, 3}
    assert {kind for found in plans for _at, kind in found} == set(epoch) - {"evaluating"}
    assert all(at < following for found in plans for (at, _), (following, _) in itertools.pairwise(found))
