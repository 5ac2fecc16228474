"""A compiled model, whose functions PyTorch compiles again in the second worker."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(3)
inputs = torch.randn(240, 32)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
forward = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
for _epoch in range(4):
    for _step, (batch, target) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(forward(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        print("batch", batch.sum().item().hex(), rate.hex(), loss.item().hex(), flush=True)
