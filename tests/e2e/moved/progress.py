"""enumerate and a progress bar around the loader, the best weights kept by hand, an evaluation in the middle."""

import copy

import torch
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm import tqdm

torch.set_num_threads(1)
torch.manual_seed(9)
inputs = torch.randn(640, 1, 12, 12)
labels = (inputs.mean((1, 2, 3)) > 0).long()
training, held_out = random_split(TensorDataset(inputs, labels), [560, 80])
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(800, 2)
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(training, batch_size=8, shuffle=True, drop_last=True)
best, best_state = float("inf"), None


def evaluate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for batch, target in tqdm(DataLoader(held_out, batch_size=20), desc="evaluation", leave=False):
            total += torch.nn.functional.cross_entropy(model(batch), target, reduction="sum").item()
    model.train()
    return total


for epoch in range(5):
    bar = tqdm(enumerate(loader), total=len(loader), desc=f"epoch {epoch}")
    for index, (batch, target) in bar:
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=loss.item())
        print("step", epoch, index, loss.item().hex(), flush=True)
        if index % 35 == 34:
            found = evaluate()
            print("step evaluation", found.hex(), flush=True)
            if found < best:
                best, best_state = found, copy.deepcopy(model.state_dict())
model.load_state_dict(best_state)
print("step best", evaluate().hex(), flush=True)
