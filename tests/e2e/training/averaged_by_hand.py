"""No loader, and tensors of the script's own that a function alters which is given them: an average, a memory."""

import torch

torch.manual_seed(13)
weights = torch.nn.Parameter(torch.randn(8, 8))
optimizer = torch.optim.SGD([weights], lr=0.01, momentum=0.9)
average = [torch.zeros(8, 8)]
memory = {"last": torch.zeros(4)}


def follow(means, kept, weight):
    for mean in means:
        mean.lerp_(weight.detach(), 0.1)
    kept["last"][step % 4] = weight.detach().sum()


for step in range(90):
    follow(average, memory, weights)
    loss = (torch.randn(4, 8) @ weights).pow(2).mean() + (memory["last"].mean() - average[0].sum()).abs() * 0.01
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), average[0].sum().item().hex(), memory["last"].sum().item().hex(), flush=True)
