"""Models, data and a training loop for the tests of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ROWS = 3  # of each rank's batch


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x)


class ConvNorm(nn.Module):
    """Batch norm in eval mode of its own, so that one process on the whole batch agrees."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        self.norm.eval()
        return self.head(self.norm(self.conv(x.unsqueeze(1))).flatten(1))


class Attention(nn.Module):
    """A transformer block over the six features as tokens, with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 8, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        tokens = (x.abs() * 3).long().clamp(max=7)
        h = self.embed(tokens)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        return self.out(h + nn.functional.scaled_dot_product_attention(q, k, v)).mean(1)


class Unused(nn.Module):
    """One branch is never used."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(6, 4)
        self.never = nn.Linear(6, 4)

    def forward(self, x):
        return self.used(x)


class ByRank(nn.Module):
    """Which branch runs depends on the data, so on the rank."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 4) for _ in range(2)])

    def forward(self, x):
        h = self.stem(x)
        # Row by row, so that the whole batch in one process takes the branches of all ranks.
        return torch.stack(
            [self.branches[int(row[0] > 0)](seen) for row, seen in zip(x, h, strict=True)]
        )


class Mixed(nn.Module):
    """Parameters of three types, one of them complex."""

    def __init__(self):
        super().__init__()
        self.single = nn.Linear(6, 4)
        self.wide = nn.Linear(6, 4).double()
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        y = self.single(x) + self.wide(x.double()).float()
        return y * (self.phase * self.phase.conj()).real


class SparseRows(nn.Module):
    """An embedding with sparse gradients below a dense head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 6, sparse=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.embed((x.abs() * 5).long().clamp(max=15)).mean(1))


class Checkpointed(nn.Module):
    """The same layer runs twice, each time in a checkpoint of its own."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)
        self.reentrant = reentrant

    def forward(self, x):
        h = self.first(x)
        for _ in range(2):
            h = checkpoint(self.again, h, use_reentrant=self.reentrant)
        return self.head(h.tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "conv": ConvNorm,
    "attention": Attention,
    "unused": Unused,
    "by_rank": ByRank,
    "mixed": Mixed,
    "sparse": SparseRows,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
}


def make(name: str, seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[name]()


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(3, 2))


def batch(step: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(100 + step))


class Momentum:
    """SGD with momentum, as torch does it, without the second that its import takes."""

    def __init__(self, params, lr=0.1, beta=0.9):
        self.params = list(params)
        self.lr, self.beta = lr, beta
        self.state: dict = {}

    @torch.no_grad()
    def step(self):
        for p in self.params:
            if p.grad is None:
                continue
            grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
            old = self.state.get(p)
            self.state[p] = grad.clone() if old is None else old * self.beta + grad
            p -= self.lr * self.state[p]

    def zero_grad(self, set_to_none=True):
        for p in self.params:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad = p.grad.detach_().zero_() if not p.grad.is_sparse else None


def train(run, params, rows, part, steps=4, optimizer=Momentum, set_to_none=True, start=0):
    """Step on this rank's part of each batch."""
    optim = optimizer(params)
    for step in range(start, start + steps):
        optim.zero_grad(set_to_none=set_to_none)
        out = run(batch(step, rows)[part])
        out.square().mean().backward()
        optim.step()
