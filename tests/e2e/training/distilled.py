"""Two models on two GPUs that depend on each other: in each batch the student asks and waits for the teacher."""

import multiprocessing

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS = 400


def begin(seed):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return DataLoader(TensorDataset(torch.randn(STEPS * 4, 32)), batch_size=4)


def teach(pipe):
    batches = begin(16)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for (batch,) in batches:
        answer = model(batch)
        pipe.recv_bytes()
        pipe.send_bytes(answer.detach().numpy().tobytes())
        loss = (answer - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def learn(pipe):
    batches = begin(16)
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step, (batch,) in enumerate(batches):
        pipe.send_bytes(b"what do you say?")
        answer = torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=torch.float32).reshape(-1, 1)
        loss = (model(batch) - answer).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, loss.item().hex(), flush=True)


def main():
    spawn = multiprocessing.get_context("spawn")
    students, teachers = spawn.Pipe()
    teacher = spawn.Process(target=teach, args=(teachers,))
    teacher.start()
    teachers.close()
    learn(students)
    teacher.join()


if __name__ == "__main__":
    main()
