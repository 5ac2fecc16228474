"""Three schedules, one after the other, with an average of the weights beside them."""

import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(8)
inputs = torch.randn(320, 64)
targets = inputs.sum(1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
for name in ("cosine", "plateau", "one cycle"):
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 192), torch.nn.BatchNorm1d(192), torch.nn.ReLU(), torch.nn.Linear(192, 1)
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    schedule = {
        "cosine": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 30, 2),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3),
        "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=240),
    }[name]()
    for _epoch in range(3):
        for batch, target in loader:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            if name == "plateau":
                schedule.step(loss.detach())
            else:
                schedule.step()
            average.update_parameters(model)
            print("step", name, loss.item().hex(), optimizer.param_groups[0]["lr"].hex(), flush=True)
    update_bn(loader, average)
    average.eval()
    with torch.no_grad():
        print("step average", torch.nn.functional.mse_loss(average(inputs), targets).item().hex(), flush=True)
