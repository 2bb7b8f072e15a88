"""The models that the training benchmarks step, and how they are stepped and timed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn


class Block(nn.Module):
    """One block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """A small GPT: 34 MiB of parameters."""

    def __init__(self, vocabulary: int = 10240, width: int = 256, blocks: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(128, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.embed.weight.t()


def conv_net() -> nn.Module:
    """A convolutional net with batch norm: 18 MiB of parameters."""
    widths, layers, before = (64, 128, 256, 512), [], 3
    for width in widths:
        for stride, count in ((2, before), (1, width)):
            layers += [nn.Conv2d(count, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]
            layers.append(nn.ReLU())
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp() -> nn.Module:
    """Four wide layers: 32 MiB of parameters."""
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(1448, 1448), nn.ReLU())))


def small_layers() -> nn.Module:
    """41 layers of 64 x 64: many parameters, little work."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(41)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], int]] = {
    "mlp": (mlp, lambda: torch.randn(64, 1448), 5),
    "gpt": (GPT, lambda: torch.randint(10240, (2, 128)), 3),
    "conv": (conv_net, lambda: torch.randn(16, 3, 32, 32), 5),
    "layers": (small_layers, lambda: torch.randn(32, 64), 60),
}
"""Model, batch, and steps in a round."""


def stepper(name: str, wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    """Return what trains the wrapped model by one step."""
    torch.manual_seed(0)
    make, data, _ = MODELS[name]
    model = wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = data()

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def take_turns(
    steps: dict[str, Callable[[], None]], count: int, rounds: int, barrier: Callable[[], object]
) -> dict[str, list[float]]:
    """Return the seconds of a step of each variant, round by round; the slower rank counts."""
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    for number in range(rounds + 1):
        for variant in list(steps) if number % 2 else reversed(steps):
            barrier()
            start = time.perf_counter()
            for _ in range(count):
                steps[variant]()
            barrier()
            if number:  # the first round warms up, and DDP plans its buckets in it
                times[variant].append((time.perf_counter() - start) / count)
    return times


def gradient_mib(name: str) -> float:
    return sum(p.numel() * p.element_size() for p in MODELS[name][0]().parameters()) / 2**20
