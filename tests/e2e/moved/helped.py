"""A training beside the threads of a library that is named: it shows, writes or tells how the training comes on."""

import os
import sys
from contextlib import nullcontext

import torch

STEPS = 400


def tqdm():
    from tqdm import tqdm as bar

    bar.monitor_interval = 0.05
    return bar(total=STEPS, mininterval=1e9)


def rich():
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr, force_terminal=True)
    progress = Progress(console=console, refresh_per_second=50, redirect_stdout=False)
    progress.add_task("training", total=STEPS)
    return progress


def tensorboard():
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter("events", flush_secs=1)


def wandb():
    os.environ.update(WANDB_SILENT="true", WANDB_CONSOLE="off", WANDB_DISABLE_GIT="true")
    import wandb as library

    return library.init(mode="offline", dir=".", project="p")


def tell(library, shown, step, loss):
    if library == "tqdm":
        shown.update()
    elif library == "rich":
        shown.update(shown.task_ids[0], advance=1)
    elif library == "tensorboard":
        shown.add_scalar("loss", loss, step)
    elif library == "wandb":
        shown.log({"loss": loss})


def main(library):
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.Adam(model.parameters())
    made = {"tqdm": tqdm, "rich": rich, "tensorboard": tensorboard, "wandb": wandb}.get(library, nullcontext)
    with made() as shown:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 32)).square().mean()
            loss.backward()
            optimizer.step()
            tell(library, shown, step, loss.item())
            print("step", step, loss.item().hex(), flush=True)


main(sys.argv[1])
