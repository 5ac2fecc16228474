"""An evaluation after each epoch with a loader of its own, and a rate that falls when it does not get better."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(4)
inputs = torch.randn(240, 32)
targets = inputs.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[:40], targets[:40]), batch_size=20)
for _epoch in range(4):
    model.train()
    for _step, (batch, target) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate = optimizer.param_groups[0]["lr"]
        print("batch", batch.sum().item().hex(), rate.hex(), loss.item().hex(), flush=True)
    model.eval()
    with torch.no_grad():
        plateau.step(sum(torch.nn.functional.mse_loss(model(batch), target) for batch, target in held_out))
