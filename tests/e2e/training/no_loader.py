"""No loader at all: batches are drawn by hand, and the optimizer's step is all there is to see."""

import bare_torch  # noqa: F401 - it works by being imported
import torch

torch.manual_seed(7)
weights = torch.nn.Parameter(torch.randn(64, 64))
optimizer = torch.optim.SGD([weights], lr=0.01, momentum=0.9)
for _step in range(400):
    batch = torch.randn(16, 64)
    loss = (batch @ weights).tanh().pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
