"""State in tensors of the script's own: a hand-made average, a parameter in no module, a count; and plain variables."""

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

torch.manual_seed(11)
model = torch.nn.Linear(6, 1)
bias = torch.nn.Parameter(torch.zeros(1))
average = [parameter.detach().clone() for parameter in model.parameters()]
seen = torch.zeros((), dtype=torch.int64)
noise = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(24, 6))
optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [bias], "lr": 1e-2}], lr=1e-3)
decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
batches = BatchSampler(RandomSampler(data, replacement=True, num_samples=20), 4, drop_last=False)
best = float("inf")
for epoch in range(4):
    if epoch == 2:
        model.weight.requires_grad_(False)
    for rows, other in zip(DataLoader(data, batch_sampler=batches), DataLoader(data, batch_size=4, shuffle=True)):
        loss = (model(rows[0]) + bias + torch.randn(1, generator=noise) * 0.1 - other[0].mean()).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for mean, parameter in zip(average, model.parameters()):
            mean.lerp_(parameter.detach(), 0.1)
        seen += len(rows[0])
        best = min(best, loss.item())
        print(epoch, loss.item().hex(), average[0].sum().item().hex(), int(seen), flush=True)
    decay.step()
