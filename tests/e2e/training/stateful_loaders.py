"""torchdata's StatefulDataLoader: shuffled rows, a stream that says where it is, and workers that read another."""

import torch
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import hegm


class Counting(IterableDataset):
    """Says where it is, and draws random numbers where it is read by the process that trains."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        worker = get_worker_info()
        while self.at < 12:
            self.at += 1
            yield torch.full((4,), self.at / 12) + (torch.rand(4) if worker is None else worker.id)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def train(name, epoch, index, rows):
    loss = model(rows).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(name, epoch, index, rows.sum().item().hex(), loss.item().hex(), flush=True)


torch.manual_seed(31)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
shuffled = StatefulDataLoader(TensorDataset(torch.randn(22, 4)), batch_size=4, shuffle=True)
stream = StatefulDataLoader(Counting(), batch_size=3)
worked = StatefulDataLoader(Counting(), batch_size=3, num_workers=2)
for epoch in range(3):
    for index, (rows,) in enumerate(shuffled):
        train("shuffled", epoch, index, rows)
        if index == 2:
            print("said", shuffled.state_dict()["_num_yielded"], shuffled.state_dict()["_sampler_iter_yielded"])
    for index, rows in enumerate(stream):
        train("stream", epoch, index, rows)
    for index, rows in hegm.resumable(worked, replay=True):
        train("worked", epoch, index, rows)
