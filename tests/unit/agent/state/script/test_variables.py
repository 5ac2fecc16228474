"""Variables of a script over a restart, by running it twice in one process: as it was left, and as it starts over.

Longer than 400 lines because each test has its script beside it.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from hegmd.agent.state.code.drift import Drift
from hegmd.agent.state.code.position import is_users_module
from hegmd.agent.state.code.script_objects import Instances, users_modules
from hegmd.agent.state.script import restore_variables, variables

#: The module's own name: a script's.
NAME = "a_script_that_is_left"


class Left(BaseException):
    """The script has left, with its state."""


class Scripts:
    """Runs scripts with a function train(), whose loops begin at `first` and `second` and call ask()."""

    def run(self, text: str) -> Any:
        """Return the result of an undisturbed run."""
        return self._run(text, {}, lambda: None)

    def restarted(self, text: str, at: int, kept: tuple[str, ...] = (), **begin: int) -> tuple[Any, list[str]]:
        """Return the variables and messages when it is left at that call of ask(). Its loops continue at `begin`."""
        with pytest.raises(Left) as left:
            self._run(text, {}, _leaving(at, kept).__next__)
        state = pickle.loads(pickle.dumps(left.value.args[0]))
        starts_over = variables.begin_anew({variables.KEY: state})
        due = [state]

        def put_back() -> None:
            if due:
                frames = _frames(sys._getframe(1))
                assert restore_variables.misfits(due[0], frames) == []
                starts_over.extend(restore_variables.put_back(due.pop(), frames, lambda _reference: None))

        return self._run(text, begin, put_back), starts_over

    def _run(self, text: str, begin: dict[str, int], ask: Any) -> Any:
        module = types.ModuleType(NAME)
        module.__file__ = f"/home/somebody/{NAME}.py"
        vars(module).update({"ask": ask, "first": 0, "second": 0, **begin})
        sys.modules[NAME] = module
        exec(compile(text, module.__file__, "exec"), vars(module))
        return vars(module)["train"]()


def _leaving(at: int, kept: tuple[str, ...]) -> Iterator[None]:
    """A generator, since what a function counts would be mistaken for the script's."""
    first = Drift(Instances(_frames(sys._getframe(1))))
    for _call in range(at - 1):
        yield
    raise Left(variables.capture(_frames(sys._getframe(1)), {}, kept, drift=first))


def _frames(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None:
        if frame.f_globals.get("__name__") == NAME and frame.f_code.co_name != "<module>":
            found.insert(0, frame)
        frame = frame.f_back
    return found


@pytest.fixture
def scripts() -> Iterator[Scripts]:
    """Hide the modules of the test run, which would be searched with the script."""
    others = {name: module for name, module in list(sys.modules.items()) if is_users_module(module)}
    for name in others:
        del sys.modules[name]
    yield Scripts()
    sys.modules.pop(NAME, None)
    sys.modules.update(others)


EPOCHS = """
def train():
    history = []
    for epoch in range(first, 3):
        losses = []
        history.append(losses)
        for batch in range(second if epoch == first else 0, 4):
            ask()
            losses.append(10 * epoch + batch)
    return history
"""


def test_a_list_of_each_epochs_losses_was_restored_into_the_list_of_the_current_epoch(scripts: Scripts) -> None:
    """The first epoch's losses were put into the second's list, whose own were put there too."""
    assert scripts.restarted(EPOCHS, 7, first=1, second=2) == (scripts.run(EPOCHS), [])


HELD_TWICE = """
class Meter:
    def __init__(self, log):
        self.log = log
        self.last = log

    def add(self, value):
        self.log.append(value)

log = []
by_name = {}

def train():
    best = worst = log
    meter = Meter(log)
    rows = [log, log, []]
    other = log
    for batch in range(first, 4):
        ask()
        meter.add(batch)
        by_name.setdefault("all", log).append(-batch)
        rows[2].append(batch)
        rows[1] = other
        other = rows[2]
    return log, meter.log, by_name["all"], rows, other, [found is log for found in (best, meter.last, rows[0])]
"""


def test_an_object_with_several_holders_was_duplicated(scripts: Scripts) -> None:
    """An object that a global, an object, a dict and a list share is shared again, also one that two came to share."""
    result, starts_over = scripts.restarted(HELD_TWICE, 3, first=2)
    log, of_meter, of_name, rows, other, _same = result
    assert (result, starts_over) == (scripts.run(HELD_TWICE), [])
    assert of_meter is log
    assert of_name is log
    assert other is rows[2] is rows[1]


TWO_METERS = """
class Meter:
    def __init__(self):
        self.total = self.best = 0

    def update(self, value):
        self.total += 1
        self.best = max(self.best, value)

class Trainer:
    def train(self, epoch):
        meter = Meter()
        for batch in range(second if epoch == first else 0, 4):
            ask()
            meter.update(10 * epoch + batch)
        return meter

def train():
    meter = Meter()
    last = None
    inner = []
    for epoch in range(first, 3):
        last = Trainer().train(epoch)
        inner.append((last.total, last.best))
        meter.update(100)
    return meter.total, meter.best, inner
"""


def test_variables_of_two_functions_of_one_name_are_distinguished(scripts: Scripts) -> None:
    """The meter of a function had what that of a method of the same name had, or that of the epoch before."""
    assert scripts.restarted(TWO_METERS, 7, first=1, second=2) == (scripts.run(TWO_METERS), [])


def test_an_attribute_below_a_kept_name_is_reported_as_starting_over(scripts: Scripts) -> None:
    assert scripts.restarted(TWO_METERS, 7, ("best", "meter"), first=1, second=2) == (scripts.run(TWO_METERS), [])


OPENED = """
def train():
    view = memoryview(b"")
    for batch in range(first, 4):
        ask()
        view, before = memoryview(b"a"), view
"""


def test_a_variable_that_cannot_be_saved_was_not_named_if_another_is_kept_by_its_name(scripts: Scripts) -> None:
    where = f"view (memoryview) in train() at {NAME}.py:6"
    assert scripts.restarted(OPENED, 2, first=1)[1] == [where]
    assert scripts.restarted(OPENED, 2, ("view",), first=1)[1] == [f"{where}, except what hegm.keep('view') keeps"]


BEGUN_AGAIN = """
def train():
    start = {"n": 0}
    state = start
    seen = []
    for batch in range(first, 6):
        ask()
        state = {"n": state["n"] + 1}
        if batch == 4:
            state = start
        seen.append(state["n"])
    return seen, start
"""


def test_the_first_value_of_a_variable_was_overwritten_with_its_last(scripts: Scripts) -> None:
    assert scripts.restarted(BEGUN_AGAIN, 3, first=2) == (scripts.run(BEGUN_AGAIN), [])


BYTES = """
def train():
    last = begun = bytearray(b"0")
    for batch in range(first, 4):
        ask()
        begun = begun + bytes([batch]) if batch == 1 else begun
        begun[0] += batch
        last = begun
    return last, last is begun
"""


def test_bytes_that_two_variables_hold_ended_the_restart(scripts: Scripts) -> None:
    assert scripts.restarted(BYTES, 3, first=2) == (scripts.run(BYTES), [])


SETS = """
def train():
    left, right, odd = set(range(9)), set(range(9)), {0}
    for batch in range(first, 4):
        ask()
        left.difference_update([batch])
        right.intersection_update(range(batch, 9))
        odd.symmetric_difference_update([batch])
    return left, right, odd
"""


def test_sets_that_only_their_updates_alter_were_as_at_the_beginning(scripts: Scripts) -> None:
    assert scripts.restarted(SETS, 3, first=2) == (scripts.run(SETS), [])


WARMING = """
import torch

class Schedule:
    def __init__(self):
        self.asked = 0

    def rate(self, calls):
        self.asked += 1
        return 0.01 * calls

class Warming(torch.optim.Optimizer):
    def __init__(self):  # nothing of PyTorch's, which would import its compiler
        self.param_groups, self.state = [{"lr": 1.0}], {}
        self._calls = 0
        self.rates = []
        self.schedule = Schedule()

    def warm(self):
        self._calls += 1
        self.rates.append(self.schedule.rate(self._calls))
        self.param_groups[0]["lr"] = self.rates[-1]

optimizer = Warming()

def train():
    for batch in range(first, 4):
        ask()
        optimizer.warm()
    return optimizer._calls, optimizer.rates, optimizer.schedule.asked
"""


def test_the_counts_of_a_scripts_own_optimizer_are_kept(scripts: Scripts) -> None:
    assert scripts.restarted(WARMING, 3, first=2) == (scripts.run(WARMING), [])


COMMUNICATING = """
import torch
from torch._C._distributed_c10d import _create_work_from_future

def train():
    waited = 0
    for batch in range(first, 4):
        ask()
        waited += work.wait() if batch else 0
        done = torch.futures.Future()
        done.set_result([])
        work = _create_work_from_future(done)  # what `all_reduce(..., async_op=True)` returns
    return waited
"""


def test_communication_that_is_waited_for_in_the_next_batch_was_missing(scripts: Scripts) -> None:
    """Each start of the restarted ranks ended with an UnboundLocalError."""
    assert scripts.restarted(COMMUNICATING, 3, first=2) == (scripts.run(COMMUNICATING), [])


MIXED_PRECISION = """
import torch

def train():
    weight, told = torch.nn.Parameter(torch.ones(())), []
    for _ in range(first, 3):
        ask()
        with torch.autocast("cpu"):
            loss = weight * 2
        loss.backward()
        told.append(float(weight.grad))
    return len(told)
"""


def test_a_loss_within_autocast_does_not_count_as_one_with_gradients_to_compute(scripts: Scripts) -> None:
    """A `with` may suppress an exception, and then the former loss would be read: a `while` around it was refused."""
    assert scripts.restarted(MIXED_PRECISION, 2, first=1) == (3, [])


GENERATED = """
class Schedule:
    def __init__(self):
        self.rates = (0.5**step for step in range(9))
        self.unused = (0.5**step for step in range(9))

    def rate(self):
        return next(self.rates)

def train():
    schedule = Schedule()
    for step in range(first, 3):
        ask()
        rate = schedule.rate()
    return rate
"""


def test_a_generator_of_rates_in_an_object_started_over_and_was_not_announced(scripts: Scripts) -> None:
    """Only generators in variables of the loop were named."""
    result, starts_over = scripts.restarted(GENERATED, 2, first=1)
    assert (scripts.run(GENERATED), result) == (0.25, 0.5)
    assert starts_over == ["train().schedule.rates (generator)"]


QUEUED = """
import queue
results = queue.Queue()
written = queue.Queue()

class Batches:
    def __init__(self):
        self.ready = queue.SimpleQueue()

    def take(self):
        return self.ready.get()

def result():
    return results.get()

def train():
    fed, batches, log = queue.Queue(), Batches(), queue.Queue()
    for number in range(9):
        fed.put(number), results.put(number), batches.ready.put(number)
    for step in range(first, 3):
        ask()
        total = fed.get() + result() + batches.take()
        log.put(total), written.put({}.get(total))
    return total
"""


def test_queues_that_the_training_takes_from_started_over_and_were_not_announced(scripts: Scripts) -> None:
    """A thread or process that makes batches begins with its first one again, and every later loss differed."""
    result, starts_over = scripts.restarted(QUEUED, 2, first=1)
    assert (scripts.run(QUEUED), result) == (6, 3)
    assert sorted(line.partition(" at ")[0] for line in starts_over) == [
        "fed (Queue) in train()",
        "results (Queue) of a_script_that_is_left",
        "train().batches.ready (SimpleQueue)",
    ]


CONTAINERS = """
import array, collections, numpy, weakref

class Model:
    pass

class Settings(dict):
    def __getattr__(self, name):
        return self[name]

settings = Settings(rate=1)
shared = collections.ChainMap({"steps": 0})

class Trainer:
    def __init__(self):
        self.model = Model()
        self.uses = weakref.WeakKeyDictionary({self.model: 0})

def train():
    trainer, counts, raw = Trainer(), array.array("q", [0]), bytearray(1)
    rows, objects = numpy.zeros(1, dtype=[("n", "i4")]), numpy.array([0, None])
    for step in range(first, 3):
        ask()
        options = collections.UserDict()
        counts[0] += 1; raw[0] += 1; rows["n"][0] += 1; objects[0] += 1
        trainer.uses[trainer.model] += 1
        shared["steps"] += 1
        options["step"] = step
    return [trainer.uses[trainer.model], shared["steps"], counts[0], raw[0], int(rows["n"][0]), objects[0]]
"""


def test_containers_without_a_form_started_over_and_were_not_announced(scripts: Scripts) -> None:
    """Only lists, dictionaries, sets, tensors and plain arrays were looked at; a bytearray has a form and was left out.

    A dictionary that has its keys as attributes ended the search, and so the training, with its KeyError.
    """
    result, starts_over = scripts.restarted(CONTAINERS, 3, first=2)
    assert (scripts.run(CONTAINERS), result) == ([3] * 6, [1, 1, 1, 3, 1, 1])
    assert sorted(line.partition(", set at ")[0].partition(" at ")[0] for line in starts_over) == [
        "counts (array) in train()",
        "objects (ndarray) in train()",
        "rows (ndarray) in train()",
        "shared (ChainMap) of a_script_that_is_left",
        "uses (WeakKeyDictionary) of train().trainer",
    ]


RECORDS = """
import numpy

table = numpy.zeros(1, dtype=[("n", "i4")])

def train():
    rows = table[:]
    for step in range(first, 3):
        ask()
        rows["n"][0] += 1
        rows["n"][0] -= 0
        count()

def count():
    table["n"][0] += 1
"""


def test_a_record_array_was_named_twice_by_its_code_and_by_its_content(scripts: Scripts) -> None:
    """And once for each line that altered it."""
    _result, starts_over = scripts.restarted(RECORDS, 3, first=2)
    assert [line.partition(", set at ")[0].partition(" at ")[0] for line in starts_over] == [
        "rows (ndarray) in train()",
        "table (ndarray) of a_script_that_is_left",
    ]


FILLED = """
import ctypes, io, threading
from multiprocessing.sharedctypes import synchronized

class Pair(ctypes.Structure):
    _fields_ = [("steps", ctypes.c_int)]

here = threading.local()
here.steps = 0

class Trainer:
    def __init__(self):
        self.total = synchronized(ctypes.c_int(), threading.RLock())

    def step(self):
        with self.total.get_lock():
            self.total.value += 1
        here.steps += 1

def train():
    trainer, text, row = Trainer(), io.StringIO(), synchronized((ctypes.c_int * 1)(), threading.RLock())
    number, pair, numbers = ctypes.c_int(), Pair(), (ctypes.c_int * 1)()
    unchanged = io.StringIO("header")
    for step in range(first, 3):
        ask()
        line = io.StringIO()
        line.write(unchanged.getvalue())
        text.write("x")
        number.value += 1; pair.steps += 1; numbers[0] += 1; row[0] += 1
        trainer.step()
    counts = [number.value, pair.steps, numbers[0], row[0], trainer.total.value, here.steps]
    return [*counts, len(text.getvalue())]
"""


def test_values_of_c_and_of_threads_started_over_and_were_not_announced(scripts: Scripts) -> None:
    """They are no containers: the script sets attributes of them, or writes into them as into a file."""
    result, starts_over = scripts.restarted(FILLED, 3, first=2)
    assert (scripts.run(FILLED), result) == ([3] * 7, [1] * 7)
    assert sorted(line.partition(", set at ")[0].partition(" at ")[0] for line in starts_over) == [
        "here (_local) of a_script_that_is_left",
        "number (c_int) in train()",
        "numbers (c_int_Array_1) in train()",
        "pair (Pair) in train()",
        "row (SynchronizedArray) in train()",
        "text (StringIO) in train()",
        "total (Synchronized) of train().trainer",
    ]


def test_a_module_of_the_user_was_missed_that_got_the_address_of_another() -> None:
    """The script had removed the other, of a package, since the last capture."""
    other, own = "of_a_package", "of_the_user"
    for _ in range(20):
        sys.modules[other] = types.ModuleType(other)
        assert sys.modules[other] not in users_modules()
        del sys.modules[other]
        sys.modules[own] = module = types.ModuleType(own)
        module.__file__ = "/home/user/of_the_user.py"
        found = users_modules()
        del sys.modules[own]
        assert module in found
