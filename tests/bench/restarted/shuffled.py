"""Epochs of a shuffled loader, dropout, AdamW, a cosine schedule by batch."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(1)
inputs = torch.randn(240, 32)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
for _epoch in range(4):
    for _step, (batch, target) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        print("batch", batch.sum().item().hex(), rate.hex(), loss.item().hex(), flush=True)
