"""Scripts that know nothing of hegm leave their state at a boundary that is a case of its own, and continue from it.

Longer than 400 lines because all of them share one Python that has imported PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.agent.state.capture import FORM
from tests.e2e.agented import SCRIPTS
from tests.e2e.forms import form_of
from tests.e2e.restarted import LEFT_STATUS, REFUSED_STATUS, UNRESTORED_STATUS, Restarts

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("restarts")]


@pytest.mark.parametrize(
    ("script", "at"),
    [
        pytest.param("epochs.py", (1, 4), id="before-the-first-batch"),
        pytest.param("gan.py", (150, 20), id="two-optimizers-at-the-end-of-an-epoch"),
        pytest.param("no_loader.py", (50, 1), id="no-loader-and-so-from-the-middle-of-the-body-to-the-loop"),
        pytest.param("averaged_by_hand.py", (50, 7, 20), id="tensors-of-its-own-in-a-loop-without-a-loader"),
        pytest.param("evaluated.py", (3, 12, 13), id="asked-in-an-evaluation-it-stands-in-the-next-epoch"),
        pytest.param("traced.py", (5,), id="a-model-that-is-traced-whole"),
        pytest.param("hidden_variables.py", (4, 4, 7), id="what-hooks-and-closures-count-and-what-variables-refer-to"),
    ],
)
def test_training_continues_bit_for_bit(restarts: Restarts, tmp_path: Path, script: str, at: tuple[int, ...]) -> None:
    argv = (str(SCRIPTS / script), str(tmp_path))
    output, ends = restarts.restarted(*argv, at=at)
    assert [ended.status for ended in ends] == [*[LEFT_STATUS] * len(at), 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(*argv).splitlines()


_BEST = """
import functools
import torch

torch.manual_seed(3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)


def trainer():
    first, best = None, float("inf")

    def train(step, *, scale):
        nonlocal first, best
        loss = model(torch.randn(2, 4)).square().mean() * scale
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            best = loss.item()
        return loss.item(), first, best

    return functools.partial(train, scale=0.5)


train = trainer()
for step in range(9):
    print(step, *train(step), flush=True)
"""


def test_values_of_a_closure_began_again_at_the_second_restart_without_a_loader(
    restarts: Restarts, tmp_path: Path
) -> None:
    """The record of the second process had the restored ones, so none seemed to have changed; the first process's had
    those that the first batch had set before its step."""
    script = tmp_path / "best.py"
    script.write_text(_BEST)
    output, ends = restarts.restarted(str(script), at=(3, 3))
    assert [ended.status for ended in ends] == [LEFT_STATUS, LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(str(script)).splitlines()


_SEEDED = """
import torch

torch.manual_seed(3)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in reversed(range(3)):
    for step in range(3):
        drawn = torch.Generator().manual_seed(step)
        loss = model(torch.randn(2, 4) + torch.randn(2, 4, generator=drawn)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, step, loss.item().hex(), flush=True)
"""


def test_a_generator_made_in_each_batch_ended_the_restarted_script(restarts: Restarts, tmp_path: Path) -> None:
    """Without a loader, the record of the first batch is made after it: the generator seemed to be there before."""
    script = tmp_path / "seeded.py"
    script.write_text(_SEEDED)
    output, ends = restarts.restarted(str(script), at=(2, 3))
    assert [ended.status for ended in ends] == [LEFT_STATUS, LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(str(script)).splitlines()


def test_a_stream_that_cannot_be_redirected_is_refused_with_the_reason(restarts: Restarts) -> None:
    _output, ends = restarts.restarted(str(SCRIPTS / "iterable.py"), at=(20,))
    assert [ended.status for ended in ends] == [REFUSED_STATUS]
    assert "an iterable dataset that does not report its position" in ends[0].errors


TRAINING = """
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

starts = Path(sys.argv[1], "starts")
start = int(starts.read_text()) if starts.exists() else 0
starts.write_text(str(start + 1))
torch.manual_seed(3)
model = torch.nn.Linear(4, {width})
optimizer = torch.optim.Adam(model.parameters())
rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(4))
loader = DataLoader(TensorDataset(rows), batch_size=4)


def train(epochs):
    for epoch in {epochs}:
        for (rows,) in loader:
            model(rows).pow(2).mean().backward()
            optimizer.step()
            {after}
            print("step", flush=True)


{body}
"""


READ_AHEAD = """
def read():
    for _ in range(20):
        for (rows,) in loader:
            ahead.put(rows)


import queue, threading
ahead = queue.Queue(2)
threading.Thread(target=read, daemon=True).start()
for _ in range(60):
    model(ahead.get()).pow(2).mean().backward()
    optimizer.step()
    print("step", flush=True)
"""


# Its thread has ended a pass, and begins the next one after the state is saved.
READ_AHEAD_BETWEEN = """
def read():
    for _ in range(20):
        for (rows,) in loader:
            ahead.put(rows)
        is_between.set()
        ahead.join()


import queue, threading
ahead, is_between = queue.Queue(), threading.Event()
loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
{first}
threading.Thread(target=read, daemon=True).start()
is_between.wait()
for _ in range(60):
    model(ahead.get()).pow(2).mean().backward()
    optimizer.step()
    print("step", flush=True)
    ahead.task_done()
"""


READ_ONCE = """
def read():
    seen.extend(loader)
    is_read.set()
    is_over.wait()


import threading
seen, is_read, is_over = [], threading.Event(), threading.Event()
threading.Thread(target=read, daemon=True).start()
is_read.wait()
for _ in range(20):
    model(seen[0][0]).pow(2).mean().backward()
    optimizer.step()
    print(model.weight.sum().item().hex(), flush=True)
"""


REMADE = """




for epoch in range(4):
    for (rows,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2):
        model(rows).pow(2).mean().backward()
        optimizer.step()
        print("step", flush=True)
"""


MADE_FIRST = """
for epoch in range(4):
    for (batch,) in batches if epoch else (batches := DataLoader(TensorDataset(rows), batch_size=4)):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        print("step", flush=True)
"""


DRAWN = """
def mixed(found):
    return torch.stack([row for (row,) in found]) + torch.randn(4)


for outer in DataLoader(TensorDataset(rows), batch_size=4, collate_fn=mixed):
    for (rows,) in loader:
        model(rows + outer).pow(2).mean().backward()
        optimizer.step()
        print("step", flush=True)
"""


PROBED = """
for epoch in range(4):
    read = iter(loader)
    (first,) = next(read)
    for (rows,) in read:
        model(rows).pow(2).mean().backward()
        optimizer.step()
        print("step", flush=True)
"""


ASIDE = """
read = {begun}
for epoch in range(4):
    {before}
    for (rows,) in loader:
        model(rows).pow(2).mean().backward()
        optimizer.step()
        {after}
        print("step", flush=True)
"""


FIXED = """
read = iter(loader)
(fixed,) = next(read)
for epoch in range(3):
    for (rows,) in loader:
        model(rows + fixed).pow(2).mean().backward()
        optimizer.step()
        print(rows.sum().item().hex(), model.weight.sum().item().hex(), flush=True)
"""


GROWING = """
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.numbers = [0, 1, 2, 3]

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return (rows[self.numbers[index]],)


data = Data()
loader = DataLoader(data, batch_size=2, shuffle=True)
for epoch in range(4):
    for (batch,) in loader:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        print(len(data), batch.sum().item().hex(), model.weight.sum().item().hex(), flush=True)
    data.numbers += [4 + 2 * epoch, 5 + 2 * epoch]
"""


WORKED = """
import random


class Turned:
    rng = None

    def __call__(self, row):
        self.rng = self.rng or random.Random(5)
        return row + self.rng.random()


class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.turned = Turned()
        {made}

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return (self.turned(rows[index]),)


loader = DataLoader(torch.utils.data.Subset(Data(), range(12)), batch_size=4, num_workers=1)
train(4)
"""


def written(tmp_path: Path, **parts: str) -> tuple[str, str]:
    """A script with these parts, and the folder that it counts its starts in."""
    usual = {"width": "2", "epochs": "range(epochs)", "after": "pass", "body": "train(4)"}
    script = tmp_path / "script.py"
    script.write_text(TRAINING.format(**{**usual, **parts}))
    return str(script), str(tmp_path)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (
            {"after": "globals().setdefault('late', torch.nn.Linear(1, 1))"},
            "late, a Linear, was created after the first",
        ),
        ({"body": "train(1)\ntrain(3)"}, "has trained before the one at line"),
        ({"body": "list(map(train, (1, 3)))"}, "has trained before, in an earlier call"),
        ({"body": "train(1), train(3)"}, "has trained before the one at line"),
        (
            {"body": "for _ in range(4):\n    start += train(1) or 1"},
            "in an expression that has computed another value",
        ),
        ({"body": "[train(1) for turn in range(4)]"}, "collects values that no variable has yet"),
        ({"epochs": "['a', 'b', 'c']"}, "goes over a tuple_iterator, whose position cannot be set"),
        (
            {"body": "turns = iter(range(9))\nwhile next(turns, start) < 8:\n    train(3)"},
            "the while loop at line 29 of __main__ depends on variables",
        ),
        ({"body": READ_AHEAD}, "another thread reads the loader at line 30 of __main__ in read() ahead"),
        (
            {"body": READ_AHEAD_BETWEEN.format(first="pass")},
            "another thread reads the loader at line 30 of __main__ in",
        ),
        (
            {"body": READ_AHEAD_BETWEEN.format(first="optimizer.step()")},
            "another thread reads the loader at line 30 of __main__ in read() ahead",
        ),
        ({"body": REMADE}, "the loader at line 33 of __main__ is over newly created data"),
        ({"body": MADE_FIRST}, "batches was made at line 29 of __main__ in an earlier iteration of the loop"),
        ({"body": DRAWN}, "a batch of an outer loop is in use, and its dataset draws random numbers"),
        ({"body": PROBED}, "line 31 of __main__ was first asked at line 30 of __main__"),
        (
            {"body": ASIDE.format(begun="iter(loader)", before="next(read, None)", after="pass")},
            "a loader was asked for a batch at line 30 of __main__, above the loop at line 31 of __main__",
        ),
        (
            {"body": ASIDE.format(begun="[]", before="pass", after="read = iter(loader); next(read)")},
            "a pass over a loader that began at line 34 of __main__, within the loop at line 31",
        ),
        ({"body": WORKED.format(made="self.turned.rng = random.Random(6)")}, "draw from a random generator that"),
        ({"body": WORKED.format(made="pass")}, "did not report the state of its random generators"),
        ({"after": "optimizer.state[model.weight]['f'] = print"}, "__main__.optimizer.states[0].f is a function"),
    ],
    ids=[
        "made-later",
        "trained-before",
        "trained-before-in-an-earlier-call",
        "trained-before-in-the-same-line",
        "a-sum-over-calls",
        "a-comprehension",
        "a-list",
        "a-while-loop",
        "read-ahead",
        "read-ahead-before-the-first-step",
        "read-ahead-between-two-passes",
        "data-made-anew",
        "a-loader-made-in-the-first-epoch",
        "a-collator-that-draws",
        "a-batch-taken-above-the-loop-that-goes-on",
        "a-batch-taken-above-the-loop-in-each-epoch",
        "a-pass-that-began-within-the-loop",
        "workers-with-a-generator-deep-in-their-data",
        "workers-that-make-themselves-a-generator",
        "a-function-in-the-state",
    ],
)
def test_state_that_a_restarted_script_would_lack_is_refused(
    restarts: Restarts, tmp_path: Path, parts: dict[str, str], why: str
) -> None:
    output, ends = restarts.restarted(*written(tmp_path, **parts), at=(7,))
    assert [ended.status for ended in ends] == [REFUSED_STATUS], ends[0].errors
    assert why in ends[0].errors
    assert set(output.split()) == {"step"}


def test_a_thread_that_has_read_its_loader_and_lives_is_not_taken_for_one_that_reads_ahead(
    restarts: Restarts, tmp_path: Path
) -> None:
    argv = written(tmp_path, body=READ_ONCE)
    output, ends = restarts.restarted(*argv, at=(7,))
    assert [ended.status for ended in ends] == [LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert output == restarts.undisturbed(*argv)


def test_a_batch_taken_once_above_all_loops_was_another_one_after_a_restart(restarts: Restarts, tmp_path: Path) -> None:
    """Its pass was brought to where it had been, and then asked once more."""
    argv = written(tmp_path, body=FIXED)
    output, ends = restarts.restarted(*argv, at=(5,))
    assert [ended.status for ended in ends] == [LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert output == restarts.undisturbed(*argv)


def test_a_training_whose_data_grew_was_lost_in_a_restart(restarts: Restarts, tmp_path: Path) -> None:
    """It was accepted, and the new process ended: it compared the length before it had the data of then."""
    argv = written(tmp_path, body=GROWING)
    output, ends = restarts.restarted(*argv, at=(4, 5))
    assert [ended.status for ended in ends] == [LEFT_STATUS, LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(*argv).splitlines()


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"width": "2 + start"}, "weight has the shape (3, 4) and had (2, 4)"),
        ({"body": "train(4 - start * 2)"}, "a loop that had range(1, 4) left goes over range(0, 2)"),
        ({"body": "loader = DataLoader(loader.dataset, batch_size=4 - start)\ntrain(4)"}, "batch_size was 4 and is 3"),
        ({"body": "loader.dataset.tensors[0].add_(start)\ntrain(4)"}, "has different data than before"),
        ({"body": "if start == 0:\n    train(4)"}, "the script ended before it reached its saved position"),
        ({"body": "if start:\n    optimizer.step()\ntrain(4)"}, "an optimizer was about to step before"),
        ({"body": "if start:\n    del model\ntrain(4)"}, "model"),
    ],
    ids=[
        "another-model",
        "fewer-epochs",
        "another-loader",
        "other-data",
        "no-such-loop",
        "a-step-of-its-own",
        "no-model",
    ],
)
def test_a_state_that_does_not_fit_ends_the_script_before_any_step(
    restarts: Restarts, tmp_path: Path, parts: dict[str, str], why: str
) -> None:
    output, ends = restarts.restarted(*written(tmp_path, **parts), at=(6,))
    assert [ended.status for ended in ends] == [LEFT_STATUS, UNRESTORED_STATUS], [ended.errors for ended in ends]
    assert why in ends[1].errors
    assert output.split() == ["step"] * 4


@pytest.mark.parametrize("rank", [{}, {"RANK": "0", "WORLD_SIZE": "3"}, {"RANK": "0", "WORLD_SIZE": "2"}])
def test_a_rank_that_cannot_have_its_state_makes_no_step(
    restarts: Restarts, tmp_path: Path, rank: dict[str, str]
) -> None:
    """It says not which rank it is, or is one of more than there are states of, or its supervisor has gone."""
    output, ends = restarts.restarted(*written(tmp_path), at=(), HEGM_STATES="2:hegm-states-nobody", **rank)
    assert [ended.status for ended in ends] == [UNRESTORED_STATUS], ends[0].errors
    assert "Its saved state is unchanged" in ends[0].errors
    assert "step" not in output


def test_variables_that_start_over_are_named(restarts: Restarts) -> None:
    """The counter is restored; the file that the loop opens at times is not, and the plan names its line."""
    _output, ends = restarts.restarted(str(SCRIPTS / "begun_anew.py"), at=(9,))
    assert [ended.status for ended in ends] == [LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert "starts over after the restart: part (TextIOWrapper) at begun_anew.py:18. hegm.keep" in ends[1].errors


def test_unsearched_values_are_reported_after_the_restart_too(restarts: Restarts, tmp_path: Path) -> None:
    body = """
class Player:
    wins = 0


players = [Player() for _ in range(1200)]
for turn in range(4):
    for (rows,) in loader:
        players[turn].wins += 1
        model(rows).pow(2).mean().backward()
        optimizer.step()
"""
    _output, ends = restarts.restarted(*written(tmp_path, body=body), at=(5,))
    assert [ended.status for ended in ends] == [LEFT_STATUS, 0], [ended.errors for ended in ends]
    assert "not searched, and so starts over after the restart: the 1,200 objects of __main__.players" in ends[1].errors


#: An example of a state of each form. A released row is never changed.
FORMS = {3: 0x5BBD34C2, 4: 0x7BEEC3C0}


def test_a_state_of_another_form_has_another_number(restarts: Restarts, tmp_path: Path) -> None:
    """A state outlives the release that wrote it: one that reads it otherwise must not take it for its own."""
    cases = (("evaluated.py", 5), ("tensors.py", 3), ("own_variables.py", 7), ("threaded.py", 9))
    states = [restarts.left(str(SCRIPTS / script), str(tmp_path), at=at) for script, at in cases]
    found, message = form_of(states)
    why = f"the state is another: raise FORM in hegmd/agent/state/capture.py, and add its row here: {found:#x}"
    assert {state["form"]: found for state in states} == {FORM: FORMS.get(FORM)}, f"{why}\n{message}"
