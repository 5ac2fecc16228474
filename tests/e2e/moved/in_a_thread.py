"""The training runs in a thread of its own, as services do it; the main thread waits and reports at the end."""

import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
last = {}


def train():
    torch.manual_seed(17)
    inputs = torch.randn(400, 48)
    model = torch.nn.Sequential(
        torch.nn.Linear(48, 192), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(192, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    for epoch in range(3):
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("step", epoch, loss.item().hex(), flush=True)
    last["norm"] = sum(parameter.norm().item() for parameter in model.parameters())


trainer = threading.Thread(target=train, name="trainer")
trainer.start()
trainer.join()
print("step end", last["norm"].hex(), flush=True)
