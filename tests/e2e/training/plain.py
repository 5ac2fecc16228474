"""A plain loop: shuffle, dropout, AdamW, a cosine schedule; views and a cached tensor in the script's own variables.

Most who run it look at something else, so the compiler stays out.
"""

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
inputs = torch.randn(480, 64)
targets = inputs.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
first_row = inputs[0]
for _epoch in range(4):
    for batch, target in loader:
        loss = torch.nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(loss.item().hex(), flush=True)
versions = [parameter._version for parameter in model.parameters()]
print(first_row.sum().item().hex(), first_row.data_ptr() == inputs.data_ptr(), versions)
