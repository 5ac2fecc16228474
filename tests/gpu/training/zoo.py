"""Trainings of many kinds on one GPU that know nothing of hegm; every loss is printed bit for bit, and digests.

    python zoo.py KIND STEPS [pace=SECONDS] [digest=STEPS] [addresses=FILE]

A kind is a function below: it makes a training, and gives what makes a step and all tensors that a digest is of. Each
is the same in every run: what PyTorch can do deterministically it does so, and cuDNN's benchmark tries one algorithm,
since which of several is the fastest is chance. After each digest these tensors' addresses go to the file of that name.
"""

import ctypes
import os
import sys
import threading
import time
import types

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

GPU = torch.device("cuda:0")


def trained(model, loss_of, optimizer=None, **also):
    """The usual step: `loss_of` makes the loss of the next batch."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss

    def tensors():
        state = [v for one in optimizer.state.values() for v in one.values() if torch.is_tensor(v) and v.is_cuda]
        return [*model.parameters(), *state, *also.get("more", [])]

    return step, tensors


def recurrent(kind):
    """Two layers with dropout, whose state cuDNN keeps where Python does not see it."""
    model = nn.Sequential()
    model.rnn, model.head = kind(256, 512, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(512, 16)
    model.to(GPU)
    data = torch.randn(32, 24, 256, device=GPU)
    wanted = torch.randint(0, 16, (32,), device=GPU)
    return trained(model, lambda: functional.cross_entropy(model.head(model.rnn(data)[0][:, -1]), wanted))


def lstm():
    return recurrent(nn.LSTM)


def gru():
    return recurrent(nn.GRU)


def conv():
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 1
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    model.to(GPU, memory_format=torch.channels_last)
    data = torch.randn(32, 3, 64, 64, device=GPU).contiguous(memory_format=torch.channels_last)
    wanted = torch.randint(0, 10, (32,), device=GPU)
    return trained(model, lambda: functional.cross_entropy(model(data), wanted), more=list(model.buffers()))


def sparse():
    model = nn.Sequential(nn.Embedding(50_000, 128, sparse=True)).to(GPU)
    head = nn.Linear(128, 8).to(GPU)
    rows = torch.randint(0, 50_000, (64, 32), device=GPU)

    def loss_of():
        nonlocal rows
        rows = (rows * 31 + 7) % 50_000
        return functional.cross_entropy(head(model(rows).mean(1)), rows[:, 0] % 8)

    return trained(model, loss_of, torch.optim.SparseAdam(list(model.parameters()), lr=1e-3), more=[rows])


def layers(width=512, depth=3):
    parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*parts, nn.Linear(width, 10)).to(GPU)


def classified(model, width=512, call=None):
    data, wanted = torch.randn(64, width, device=GPU), torch.randint(0, 10, (64,), device=GPU)
    return lambda: functional.cross_entropy((call or model)(data), wanted)


def compiled(mode):
    model = layers(256, 2)
    step = torch.compile(model, mode=mode)
    loss_of = classified(model, 256, step)

    def marked():
        torch.compiler.cudagraph_mark_step_begin()
        return loss_of()

    return trained(model, marked)


def attention(backend):
    projected, head = nn.Linear(256, 768).to(GPU), nn.Linear(256, 10).to(GPU)
    model = nn.ModuleList([projected, head])
    data, wanted = torch.randn(16, 128, 256, device=GPU), torch.randint(0, 10, (16,), device=GPU)

    def loss_of():
        with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel(backend):
            q, k, v = projected(data).view(16, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return functional.cross_entropy(head(mixed.transpose(1, 2).reshape(16, 128, 256).mean(1)), wanted)

    return trained(model, loss_of)


def fp16():
    model = layers()
    loss_of, optimizer, scaler = classified(model), torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step, lambda: [*model.parameters(), *[s["exp_avg"] for s in optimizer.state.values()]]


def optimized(**how):
    model = layers()
    return trained(model, classified(model), torch.optim.AdamW(model.parameters(), lr=1e-3, **how))


def graphed():
    """Forward and backward in one CUDA graph; a training that is one graph as a whole has no boundary to stand at."""
    model = layers()
    optimizer, loss_of = torch.optim.AdamW(model.parameters(), capturable=True), classified(model)

    def plain():
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which still makes the weights
    with torch.cuda.stream(side):
        for _ in range(3):
            plain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = plain()

    def step():
        graph.replay()
        optimizer.step()
        return kept

    return step, lambda: [*model.parameters()]


class EightBitAdam(torch.optim.Optimizer):
    """Adam whose moments are kept in 8 bits, by blocks of 256 with a scale of their own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @staticmethod
    def packed(value):
        flat = functional.pad(value.flatten(), (0, -value.numel() % 256)).view(-1, 256)
        scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-12)
        return (flat / scale * 127).round().to(torch.int8), scale

    @staticmethod
    def unpacked(kept, like):
        return (kept[0].float() / 127 * kept[1]).flatten()[: like.numel()].view_as(like)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                for name, decay, seen in (("m", 0.9, one.grad), ("v", 0.95, one.grad.square())):
                    old = self.unpacked((state[name], state[name + "s"]), one) if name in state else 0
                    new = old * decay + seen * (1 - decay)
                    codes, scales = self.packed(new)
                    if name in state:
                        state[name].copy_(codes)
                        state[name + "s"].copy_(scales)
                    else:
                        state[name], state[name + "s"] = codes, scales
                m, v = (self.unpacked((state[n], state[n + "s"]), one) for n in "mv")
                one.sub_(group["lr"] * m / (v.clamp(min=0).sqrt() + 1e-4))


def eight_bit():
    model = layers()
    return trained(model, classified(model), EightBitAdam(model.parameters()))


def lbfgs():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(GPU)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=4, history_size=6)
    data, wanted = torch.randn(256, 64, device=GPU), torch.randn(256, 1, device=GPU)

    def closure():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(data), wanted)
        loss.backward()
        return loss

    return lambda: optimizer.step(closure), lambda: [*model.parameters()]


def ema():
    model = layers()
    means = [parameter.detach().clone() for parameter in model.parameters()]
    step, tensors = trained(model, classified(model), more=means)

    def both():
        loss = step()
        torch._foreach_lerp_(means, [parameter.detach() for parameter in model.parameters()], 0.01)
        return loss

    return both, tensors


def lora():
    frozen = layers(1024).requires_grad_(requires_grad=False)
    down, up = nn.Linear(1024, 8, bias=False).to(GPU), nn.Linear(8, 10, bias=False).to(GPU)
    model = nn.ModuleList([down, up])
    return trained(model, classified(model, 1024, lambda x: frozen(x) + up(down(x))), more=list(frozen.parameters()))


def pinned():
    model = layers()
    data = TensorDataset(torch.randn(2048, 512), torch.randint(0, 10, (2048,)))
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)

    def batches():
        while True:
            yield from loader

    given = batches()

    def loss_of():
        inputs, wanted = (part.to(GPU, non_blocking=True) for part in next(given))
        return functional.cross_entropy(model(inputs), wanted)

    return trained(model, loss_of)


def streams():
    model, sides = layers(), [torch.cuda.Stream() for _ in range(3)]
    beside = []
    for side in sides:
        with torch.cuda.stream(side):
            beside.append(torch.zeros(1 << 20, device=GPU))
    torch.cuda.synchronize()
    step, tensors = trained(model, classified(model), more=beside)

    def many():
        loss = step()
        for side, kept in zip(sides, beside, strict=True):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kept.add_(loss.detach()).mul_(0.5)
        for side in sides:
            torch.cuda.current_stream().wait_stream(side)
        return loss

    return many, tensors


def pointer():
    """Writes where it knows a tensor to be, past PyTorch."""
    model, kept = layers(), torch.zeros(1 << 18, dtype=torch.int32, device=GPU)
    step, tensors = trained(model, classified(model), more=[kept])
    known = types.SimpleNamespace(address=kept.data_ptr(), count=0)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemsetD32_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t]

    def both():
        loss = step()
        known.count += 1
        torch.cuda.synchronize()
        if driver.cuMemsetD32_v2(known.address, known.count, kept.numel()):
            sys.exit("its memory is not there any more")
        return loss

    return both, tensors


KINDS = {
    "pointer": pointer,
    "lstm": lstm,
    "gru": gru,
    "conv": conv,
    "sparse": sparse,
    "compile": lambda: compiled("default"),
    "compile-overhead": lambda: compiled("reduce-overhead"),
    "compile-autotune": lambda: compiled("max-autotune"),
    "compile-no-graphs": lambda: compiled("max-autotune-no-cudagraphs"),
    "flash": lambda: attention(SDPBackend.FLASH_ATTENTION),
    "efficient": lambda: attention(SDPBackend.EFFICIENT_ATTENTION),
    "fp16": fp16,
    "fused": lambda: optimized(fused=True),
    "foreach": lambda: optimized(foreach=True),
    "capturable": lambda: optimized(capturable=True),
    "graphed": graphed,
    "eight-bit": eight_bit,
    "lbfgs": lbfgs,
    "ema": ema,
    "lora": lora,
    "pinned": pinned,
    "streams": streams,
}


def main():
    kind, steps = sys.argv[1], int(sys.argv[2])
    given = dict(word.split("=", 1) for word in sys.argv[3:])
    pace_s, digest_every = float(given.get("pace", 0)), int(given.get("digest", steps))
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.cuda.set_device(GPU)
    step, tensors = KINDS[kind]()
    pause, due = threading.Event(), time.monotonic()
    for count in range(steps):
        loss = step()
        print(count, float(loss.detach()).hex(), flush=True)
        if (count + 1) % digest_every == 0:
            torch.cuda.synchronize()
            print("digest", *[tensor.detach().double().sum().item().hex() for tensor in tensors()], flush=True)
            if "addresses" in given:
                with open(given["addresses"] + ".new", "w") as file:
                    file.write(" ".join(str(tensor.untyped_storage().data_ptr()) for tensor in tensors()))
                os.replace(given["addresses"] + ".new", given["addresses"])
        due = max(time.monotonic(), due + pace_s)
        pause.wait(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
