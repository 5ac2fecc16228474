"""A training that keeps its numbers where no code of its loops names them, and has its variables refer to other things.

Hooks, closures, defaults, attributes of functions and of other people's objects, `setattr`, callbacks of a collation;
models, optimizers and objects that are exchanged on the way; records made in the loop; a sampler whose weights change.
"""

import copy
import enum
import functools
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

torch.manual_seed(3)
random.seed(3)


@dataclass
class Record:
    epoch: int
    value: float


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


class Counter:
    def __init__(self):
        self.count = 0

    def add(self, **more):
        for name, value in more.items():
            setattr(self, name, getattr(self, name, 0) + value)


class Average:
    """Has a state that says less than it holds."""

    def __init__(self, model):
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}
        self.updates = 0

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]

    def update(self, model):
        self.updates += 1
        for name, value in model.state_dict().items():
            self.shadow[name].lerp_(value, 1 / self.updates)


class Counting(Dataset):
    """Counts what it gives, and draws from a generator of its own."""

    def __init__(self):
        self.given = 0
        self.own = random.Random(5)
        self.order = list(range(20))

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.given += 1
        return rows[self.order[index]] + self.own.random(), torch.tensor(index)


def factory():
    calls, filled = 0, []

    def hook(*_args):
        nonlocal calls
        calls += 1
        filled.append(calls)

    return hook, filled


steps = 0


def on_step(*_args):
    global steps  # noqa: PLW0603 - what is tried
    steps += 1


def remember(value, cache={}):  # noqa: B006 - what is tried
    cache[len(cache)] = value
    return len(cache)


def called():
    called.times += 1
    return called.times


called.times = 0
collated = {"batches": 0}


def collate(batch):
    collated["batches"] += 1
    return torch.stack([row for row, _index in batch]), torch.stack([index for _row, index in batch])


def tally(into, value):
    into["sum"] += value
    return into["sum"]


def double(value):
    return value * 2


def triple(value):
    return value * 3


rows = torch.randn(20, 3)
first, second = nn.Linear(3, 1), nn.Linear(3, 1)
slow, fast = torch.optim.SGD(first.parameters(), lr=1e-3), torch.optim.SGD(first.parameters(), lr=1e-2)
model, optimizer = first, slow
other = torch.optim.SGD(second.parameters(), lr=1e-2)
hook, filled = factory()
first.register_forward_hook(hook)
slow.register_step_post_hook(on_step)
totals = {"sum": 0.0}
total = functools.partial(tally, totals)
one, two = Counter(), Counter()
counter, phase, scale, best_at = one, Phase.WARM, double, Path("none")
records, best, average, kept = [], None, Average(first), copy.deepcopy(first.state_dict())
weights = WeightedRandomSampler(torch.ones(20), 20)
own = Counting()
loader = DataLoader(own, 4, sampler=weights, collate_fn=collate)
turn = 0

for epoch in range(4):
    for batch, _indices in loader:
        turn += 1
        loss = scale(model(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        counter.count += 1
        counter.add(seen=len(batch))
        records.append(Record(epoch, loss.item()))
        if best is None or loss.item() < best.value:
            best, best_at = Record(epoch, loss.item()), Path(f"step-{turn}")
        loader.mine = getattr(loader, "mine", 0) + 1
        own.order.append(own.order.pop(0))
        weights.weights = weights.weights * 0.9 + 0.1 * torch.rand(20)
        if turn == 6:
            optimizer, counter, phase, scale = fast, two, Phase.MAIN, triple
        if turn == 9:
            model, optimizer = second, other
        said = steps, len(filled), filled[-1], remember(turn), called(), collated["batches"], own.given, loader.mine
        print(epoch, turn, f"{loss.item():.9g} {total(loss.item()):.9g}", *said, one.count, vars(two), phase.name)
        print(len(records), f"{sum(record.value for record in records):.9g}", best, best_at, average.updates)
    print(
        *[f"{value.double().sum():.12g}" for value in (*average.shadow.values(), *kept.values(), *first.parameters())]
    )
print(*[f"{value.double().sum():.12g}" for value in second.parameters()])
