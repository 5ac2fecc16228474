"""Loops that are left at an item and continued from there, with their variables restored; for any Python.

Simulates a restart: the same function is run a second time in one process, its loop continues over the rest, and the
state goes through bytes in between, so that nothing of it can be shared.
"""

# ruff: noqa: PLW0603 - a program of its own, whose globals are what is looked at
import collections
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from hegmd.agent.state.code.position import script_frames
from hegmd.agent.state.script import restore_variables, variables

ITEMS = 12
total_of_all = 0


class Left(BaseException):
    pass


def items_of(leave_at=None, state=None, begin=0):
    """Numbers, from an iterator that has no code of its own to be mistaken for the script's."""
    numbers = iter(range(begin, ITEMS + 1))
    due = [] if state is None else [state]

    def ask():
        frames = script_frames(sys._getframe(1))
        if due:
            state = due.pop()
            assert restore_variables.misfits(state, frames) == []
            assert restore_variables.put_back(state, frames, lambda _reference: None) == []
        number = next(numbers)
        if number == leave_at:
            raise Left(pickle.loads(pickle.dumps(variables.capture(frames, {}))))
        return number

    return iter(ask, ITEMS)


class Meter:
    def __init__(self):
        self.sum = self.count = 0
        self.names = {"first": "configured"}

    def add(self, value):
        self.sum += value
        self.count = self.count + 1


def counting(items):
    global total_of_all
    step, best, running, last = 0, None, 0.5, collections.deque(maxlen=3)
    history, by_kind, device = [], {"odd": 0, "even": 0}, "configured"
    meter = Meter()
    shared = 0

    def share(value):
        nonlocal shared
        shared += value

    for item in items:
        square = item * item
        try:
            if item % 5 == 0:
                raise KeyError(item)
        except KeyError as error:
            step += 100
            best = min(best or error.args[0], error.args[0])
            continue
        step += 1
        running = running * 0.5 + square
        last.append(square)
        history += [square]
        by_kind["odd" if item % 2 else "even"] += 1
        meter.add(item)
        share(item)
        total_of_all += item
    return step, best, running, list(last), history, by_kind, device, (meter.sum, meter.count), shared, total_of_all


def calling(items, step=0):
    pairs = [(step, "begun")]
    while step < 1000:
        step = inner(items, pairs, step)
        step += 500
    return step, pairs


def inner(items, pairs, step):
    observed = set()
    with open(__file__) as _file:
        for item in items:
            step += item
            observed.add(item % 3)
            pairs.append((step, len(observed)))
    return step


def come_back(case):
    global total_of_all
    function, place = case
    total_of_all = 0
    whole = function(items_of())
    total_of_all = 0
    try:
        function(items_of(leave_at=place))
    except Left as left:
        (state,) = left.args
    total_of_all = 0
    again = function(items_of(state=state, begin=place))
    assert again == whole, (function.__name__, place, again, whole)
    assert all(said.startswith("items (callable_iterator) in ") for said in state["anew"]), state["anew"]
    print(function.__name__, place)


# Not in a loop: what loops is the functions'.
list(map(come_back, [(function, place) for function in (counting, calling) for place in (0, 1, 5, 6, ITEMS)]))
