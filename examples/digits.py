"""Trains a small convolutional net on scikit-learn's handwritten digits, on any number of ranks.

Run it with ``gradsync run -n 2 examples/digits.py``, or alone with ``python examples/digits.py``.
``DistributedDataParallel`` averages the gradients while backward goes on.
"""

import time

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn

import gradsync as dist

EPOCHS = 15
BATCH = 64  # over all ranks together


def load() -> tuple[torch.Tensor, ...]:
    """Return training and test images with their labels, shuffled alike on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1440], order[1440:]
    return images[train], labels[train], images[test], labels[test]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def progress_bar() -> Progress:
    return Progress(
        TextColumn("epoch {task.fields[epoch]:>2}/" + str(EPOCHS)),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("accuracy {task.fields[accuracy]:.1%}"),
        TimeElapsedColumn(),
        disable=dist.get_rank() != 0,
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    train_x, train_y, test_x, test_y = load()
    model = dist.DistributedDataParallel(make_model())  # every rank starts from rank 0's weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    steps_per_epoch = len(train_y) // BATCH
    score, steps, start = 0.0, 0, time.perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("", total=EPOCHS * steps_per_epoch, epoch=1, loss=0.0, accuracy=0.0)
        for epoch in range(EPOCHS):
            order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(epoch))
            for i in range(steps_per_epoch):
                batch = order[i * BATCH : (i + 1) * BATCH][rank::size]  # this rank's share
                loss = nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
                bar.update(task, advance=1, epoch=epoch + 1, loss=loss.item(), accuracy=score)
            score = accuracy(model, test_x, test_y)
            bar.update(task, accuracy=score)
            if rank == 0 and not bar.console.is_terminal:  # a log: a line for each epoch
                print(
                    f"epoch {epoch + 1:>2}/{EPOCHS}  loss {loss.item():.4f}  accuracy {score:.1%}"
                )
    seconds = time.perf_counter() - start

    drift = torch.stack([p.double().sum() for p in model.parameters()]).sum()
    largest = drift.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if not torch.equal(drift, largest):
        raise SystemExit(f"rank {rank}: the replicas are not the same: {drift} and {largest}")
    if rank == 0:
        speed = steps / seconds
        print(f"accuracy {score:.1%} after {steps} steps on {size} ranks, {speed:.0f} steps/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
