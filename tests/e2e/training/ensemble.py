"""Two models on two GPUs, as one does it with a process for each: they train side by side, the parent collects."""

import multiprocessing

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset


def train(seed, told):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    inputs = torch.randn(512, 64)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    for _epoch in range(3):
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.put(loss.item().hex())
    torch.save(model.state_dict(), f"member-{seed}.pt")
    told.put(None)


def main():
    spawn = multiprocessing.get_context("spawn")
    members = []
    for seed in (14, 15):
        told = spawn.Queue(maxsize=8)
        member = spawn.Process(target=train, args=(seed, told))
        member.start()
        members.append((member, told))
    while None not in (losses := [told.get() for _, told in members]):
        print("step", *losses, flush=True)
    for member, _ in members:
        member.join()
        print("step member ended with", member.exitcode, flush=True)


if __name__ == "__main__":
    main()
