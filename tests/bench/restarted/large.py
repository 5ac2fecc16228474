"""200 MiB of parameters, and twice as much of an optimizer's."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(8)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(50)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
loader = DataLoader(TensorDataset(torch.randn(40, 1024)), batch_size=4, shuffle=True)
for _epoch in range(1):
    for _step, (batch,) in enumerate(loader):
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        print("batch", batch.sum().item().hex(), rate.hex(), loss.item().hex(), flush=True)
