"""A few short epochs whose lines say where they are: epoch, batch as enumerate counts it, loss."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4, shuffle=True)
for epoch in range(4):
    for index, (batch,) in enumerate(loader):
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, index, loss.item().hex(), batch.sum().item().hex(), flush=True)
    scheduler.step()
    print("rate", scheduler.get_last_lr()[0].hex(), flush=True)
print([parameter.sum().item().hex() for parameter in model.parameters()])
