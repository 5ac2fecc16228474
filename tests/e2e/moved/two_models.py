"""A teacher and a student with optimizers of their own, tied weights, a hand-kept memory of past batches."""

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(10)
tokens = torch.randint(0, 50, (400, 6))


class Tied(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, width)
        self.mixer = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, batch):
        return self.head(self.mixer(self.embedding(batch))[0])


teacher, student = Tied(24), Tied(12)
optimizers = [torch.optim.Adam(teacher.parameters(), lr=1e-3), torch.optim.RMSprop(student.parameters(), lr=1e-3)]
memory = torch.zeros(8, 50)
for epoch in range(3):
    for index, (batch,) in enumerate(DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True)):
        wise = teacher(batch[:, :-1])
        taught = torch.nn.functional.cross_entropy(wise.flatten(0, 1), batch[:, 1:].flatten())
        memory[index % 8] = wise.detach().mean((0, 1))
        eager = student(batch[:, :-1])
        soft = torch.nn.functional.softmax(wise.detach() + memory.mean(0), -1)
        followed = torch.nn.functional.cross_entropy(eager.flatten(0, 1), soft.flatten(0, 1))
        for optimizer, loss in zip(optimizers, (taught, followed)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("step", epoch, index, taught.item().hex(), followed.item().hex(), flush=True)
print("step tied", teacher.head.weight is teacher.embedding.weight, memory.sum().item().hex(), flush=True)
