"""Two models with an optimizer each, and an average of the weights of one of them."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(5)
maker = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
judge = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LeakyReLU(0.2), torch.nn.Linear(32, 1))
average = AveragedModel(maker, multi_avg_fn=get_ema_multi_avg_fn(0.9))
makers = torch.optim.Adam(maker.parameters(), lr=1e-3)
judges = torch.optim.Adam(judge.parameters(), lr=2e-3)
falling = torch.optim.lr_scheduler.ExponentialLR(makers, 0.99)
loader = DataLoader(TensorDataset(torch.randn(240, 16)), batch_size=8, shuffle=True)
bce = torch.nn.functional.binary_cross_entropy_with_logits
for _epoch in range(4):
    for _step, (real,) in enumerate(loader):
        fake = maker(torch.randn(len(real), 8))
        judged = bce(judge(real), torch.ones(len(real), 1)) + bce(judge(fake.detach()), torch.zeros(len(real), 1))
        judges.zero_grad()
        judged.backward()
        judges.step()
        made = bce(judge(fake), torch.ones(len(real), 1))
        makers.zero_grad()
        made.backward()
        makers.step()
        average.update_parameters(maker)
        rate = falling.get_last_lr()[0]
        falling.step()
        mean = next(average.parameters()).sum().item()
        print("batch", real.sum().item().hex(), rate.hex(), judged.item().hex(), mean.hex(), flush=True)
