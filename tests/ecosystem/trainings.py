"""One small training for each framework; as a script, ``trainings.py NAME BACKEND FILE``.

Rank 0 writes the backend that was in use and the weights at the end to FILE. Frameworks are
imported where they are used: each is slow to import.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    """Two layers that return their loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x).square().mean()


def rows():
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(3))


def loader():
    return torch.utils.data.DataLoader(rows(), batch_size=4)


def write(path, net, more=()):
    if dist.get_rank() == 0:
        weights = [parameter.detach().clone() for parameter in net.parameters()]
        torch.save({"backend": dist.get_backend(), "weights": [*weights, *more]}, path)


def plain(backend, path):
    """torch alone; the group is not destroyed at the end, which must do no harm."""
    dist.init_process_group(backend)
    net = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in rows().split(4)[dist.get_rank() :: 2]:
        optimizer.zero_grad()
        net(batch).backward()
        optimizer.step()
    write(path, net.module)


def spawned_rank(rank, backend, path, meeting):
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=2)
    net = nn.parallel.DistributedDataParallel(Net())
    net(rows()[rank * 16 :][:16]).backward()
    write(path, net.module, [p.grad for p in net.parameters()])
    dist.destroy_process_group()


def spawn(backend, path):
    meeting = f"{path}.{os.getpid()}"  # one that was not used before
    torch.multiprocessing.spawn(spawned_rank, (backend, path, meeting), nprocs=2)


def accelerate(backend, path):
    from accelerate import Accelerator

    dist.init_process_group(backend)  # the line: Accelerate takes the group that it finds
    accelerator = Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, batches = accelerator.prepare(net, optimizer, loader())
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(net(batch))
        optimizer.step()
    gathered = accelerator.gather(torch.tensor([float(accelerator.process_index)]))
    write(path, accelerator.unwrap_model(net), [gathered])
    accelerator.end_training()


def notebook(backend, path):
    from accelerate import notebook_launcher

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    notebook_launcher(accelerate, (backend, path), num_processes=2, use_port=port)


def trainer(backend, path):
    import tempfile

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    dist.init_process_group(backend)  # the line: Trainer takes the group that it finds
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    tokens = torch.randint(50, (16, 8), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            max_steps=3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        Trainer(net, arguments, train_dataset=data).train()
    write(path, net)


def fabric(backend, path):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend)  # the line
    runner = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    runner.launch()
    net = Net()
    net, optimizer = runner.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for batch in runner.setup_dataloaders(loader()):
        optimizer.zero_grad()
        runner.backward(net(batch))
        optimizer.step()
    write(path, net, [runner.all_gather(torch.tensor(float(runner.global_rank)))])


def lightning(backend, path):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, index):
            loss = self.net(batch)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    strategy = DDPStrategy(process_group_backend=backend)  # the line
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    runner = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    runner.fit(module, loader())
    write(path, module)


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, backend, path = sys.argv[1:]
    globals()[name](backend, path)
