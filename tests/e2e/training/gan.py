"""Two models, two optimizers, and an average of the weights beside them."""

import copy

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
maker = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
judge = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.LeakyReLU(0.2), torch.nn.Linear(64, 1))
average = copy.deepcopy(maker)
makers = torch.optim.Adam(maker.parameters(), lr=1e-3)
judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(600, 16)), batch_size=4, shuffle=True, drop_last=True)
bce = torch.nn.functional.binary_cross_entropy_with_logits
for _epoch in range(2):
    for (real,) in loader:
        fake = maker(torch.randn(len(real), 8))
        judged = bce(judge(real), torch.ones(len(real), 1)) + bce(judge(fake.detach()), torch.zeros(len(real), 1))
        judges.zero_grad()
        judged.backward()
        judges.step()
        made = bce(judge(fake), torch.ones(len(real), 1))
        makers.zero_grad()
        made.backward()
        makers.step()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), maker.parameters()):
                mean.lerp_(weight, 0.01)
        print(judged.item().hex(), made.item().hex(), next(average.parameters()).sum().item().hex(), flush=True)
