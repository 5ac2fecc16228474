"""A model that TorchDynamo has to trace whole, loops over `range` and `enumerate` in it and around it."""

import inspect

import torch
from torch.utils.data import DataLoader, TensorDataset


class Repeated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, rows):
        for index, layer in enumerate(self.layers):
            for _ in range(index + 1):
                rows = layer(rows).tanh()
        return rows


torch.manual_seed(12)
model = Repeated()
optimizer = torch.optim.Adam(model.parameters())
forward = torch.compile(model, backend="eager", fullgraph=True)
data = TensorDataset(torch.randn(12, 8))
for epoch in range(3):
    for (rows,) in DataLoader(data, batch_size=4, shuffle=True):
        loss = forward(rows).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item().hex(), isinstance(range(3), range), inspect.isclass(range), range is type(range(1)))
