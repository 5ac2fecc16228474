"""Mixed precision with a gradient scaler, and accumulation over three batches."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(2)
inputs = torch.randn(240, 32)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=7)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
for _epoch in range(4):
    for step, (batch, target) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(batch), target)
        scaler.scale(loss / 3).backward()
        rate = scheduler.get_last_lr()[0]
        if step % 3 == 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        print("batch", batch.sum().item().hex(), rate.hex(), loss.item().hex(), scaler.get_scale(), flush=True)
