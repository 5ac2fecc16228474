"""A training that counts for itself: in variables, objects and globals; and accumulates gradients by such a count."""

# ruff: noqa: PLW0603, PYI024 - a counter in a global, and tuples as old as they are, are what is looked at
import heapq
from collections import defaultdict, deque, namedtuple

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

seen = 0
worst = {"loss": 0.0}
DEVICE = "cpu"
Record = namedtuple("Record", "epochs sum")


def log_to(store, key, value):
    store[key].append(value)
    heapq.heappush(store["smallest"], value)


class Meter:
    updates = 0

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total += value
        self.count += 1
        Meter.updates += 1

    @property
    def mean(self):
        return self.total / max(self.count, 1)


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.global_step = 0
        self.losses = []
        self.smooth = torch.zeros(3)
        self.histogram = np.zeros(4, dtype=np.int64)
        self.meters = {"loss": Meter("loss")}
        self.by_epoch = defaultdict(list)

    def fit(self, loader, epochs):
        best, best_weights = None, None
        record = Record(0, 0.0)
        given = {"all": [], "smallest": []}
        for epoch in range(epochs):
            mean = self.train_epoch(loader, epoch, self.global_step, given)
            record = Record(record.epochs + 1, record.sum + mean)
            if best is None or mean < best:
                best = mean
                best_weights = {name: value.clone() for name, value in self.model.state_dict().items()}
            print(record, len(given["all"]), sum(given["all"]), heapq.nsmallest(2, given["smallest"]), Meter.updates)
            print("epoch", epoch, f"{mean:.17g} {best:.17g}", sum(float(v.sum()) for v in best_weights.values()))

    def train_epoch(self, loader, epoch, first_step, given):
        last = deque(maxlen=3)
        meter = Meter("epoch")
        hidden = torch.zeros(2)
        count_pending = 0
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(self.model(x), y)
            (loss / 2).backward()
            count_pending += 1
            if count_pending == 2:
                self.optimizer.step()
                self.optimizer.zero_grad()
                count_pending = 0
            hidden = hidden * 0.9 + loss.detach()
            self.note(loss.item(), epoch)
            last.append(loss.item())
            log_to(given, "all", loss.item())
            meter.update(loss.item())
            print(epoch, self.global_step, first_step, f"{sum(last):.17g} {meter.mean:.17g} {hidden.sum().item():.17g}")
        return meter.mean

    def note(self, value, epoch):
        global seen
        seen += 1
        worst["loss"] = max(worst["loss"], value)
        self.global_step += 1
        self.losses.append(value)
        self.smooth.mul_(0.5).add_(value)
        self.histogram[self.global_step % 4] += 1
        self.meters["loss"].update(value)
        self.by_epoch[epoch].append(value)


def main():
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    trainer.fit(loader, 4)
    print(seen, worst, trainer.smooth.tolist(), trainer.histogram.tolist(), trainer.meters["loss"].mean)
    print(len(trainer.losses), sum(trainer.losses), {key: len(value) for key, value in trainer.by_epoch.items()})


main()
