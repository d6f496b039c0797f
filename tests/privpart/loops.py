"""Loops: a small network made private by ``FTRLEngine``, and an ordinary loop that trains it."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from privpart import SeededSource
from privpart.example_level import FTRLEngine
from privpart.noise.stream import NoiseStream

EXAMPLES, BATCH, EPOCHS, CLIP = 11, 4, 3, 0.5
STEPS = 3 * EPOCHS


def data(scale=1.0):
    some = torch.Generator().manual_seed(3)
    x = scale * torch.randn(EXAMPLES, 5, generator=some)
    return TensorDataset(x, torch.randint(3, (EXAMPLES,), generator=some))


def net():
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    some = torch.Generator().manual_seed(1)
    for p in module.parameters():
        p.data = torch.rand(p.shape, generator=some) - 0.5
    return module


class Breaks(torch.optim.SGD):
    """An optimizer whose step fails after it has changed the parameters."""

    def step(self, closure=None):
        super().step()
        raise RuntimeError("a fault")


def private(
    module=None, dataset=None, *, seed=7, engine=None, optimizer=None, loader=None, **options
):
    """Return engine, module, optimizer and loader; ``loader`` has options of the user's loader."""
    module = net() if module is None else module
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.SGD(trained, lr=1.0)
    chosen = {"max_grad_norm": CLIP, "noise_multiplier": 1.0, "epochs": EPOCHS}
    dealt = {"dataset": dataset or data(), "batch_size": BATCH} | (loader or {})
    chosen["data_loader"] = DataLoader(**dealt)
    engine = engine or FTRLEngine(seed=seed)
    made = engine.make_private(module=module, optimizer=optimizer, **chosen | options)
    return engine, *made


def step(module, optimizer, batch):
    optimizer.zero_grad()
    nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()
    optimizer.step()


def released(module):
    """Return the noised sum of the last step, in units of the model."""
    grads = [p.grad.reshape(-1) for p in module.parameters() if p.requires_grad]
    return torch.cat(grads).double() * BATCH


def train(module, optimizer, loader, epochs=EPOCHS):
    """Train; return the noised sum of every step."""
    seen = []
    for _ in range(epochs):
        for batch in loader:
            step(module, optimizer, batch)
            seen.append(released(module))
    return torch.stack(seen)


def sampled(**options):
    chosen = {"poisson_sampling": True, "epochs": 10, "loader": {"batch_size": 2, "shuffle": True}}
    return private(**chosen | options)


def steps_of(made, epochs=10):
    """Train; return the noised sum of every step, also of batches of nobody."""
    _, module, optimizer, loader = made
    seen, own = [], optimizer.passes.step
    size = optimizer.expected_batch_size

    def noised():
        grads = [p.grad.reshape(-1) for p in module.parameters() if p.requires_grad]
        seen.append(torch.cat(grads).double() * size)

    def of_nobody():
        own()
        noised()

    optimizer.passes.step = of_nobody
    for _ in range(epochs):
        for batch in loader:
            step(module, optimizer, batch)
            noised()
    return torch.stack(seen)


def beside_the_noise(made, noised):
    """Return the length of what each step released beside the noise that it should have."""
    optimizer = made[2]
    stream = NoiseStream(
        optimizer.noise.mechanism,
        dim=noised.shape[1],
        stddev=2.0**optimizer._grid.bits,
        source=SeededSource(7),
    )
    drawn = torch.stack([stream.next().double() for _ in noised])
    return (noised - drawn * optimizer._grid.step(CLIP)).norm(dim=1)


def sizes(made):
    passes = made[2].passes
    return torch.tensor([len(passes.batch(t)) for t in range(len(passes._batches))])


def in_turn(made, batch, size=1):
    """Take a batch apart by ``signal_skip_step``."""
    _, module, optimizer, _ = made
    x, y = batch
    for start in range(0, len(x), size):
        optimizer.signal_skip_step(start + size < len(x))
        step(module, optimizer, (x[start : start + size], y[start : start + size]))
