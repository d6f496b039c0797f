"""DP-FTRL against DP-SGD on examples: accuracy at equal epsilon, and the cost of a step.

Fashion-MNIST, the CNN of Opacus's MNIST example (26,010 parameters), 10 epochs in batches of 512,
clip norm 1, delta 1e-5. Each arm has the same six trials (learning rate, momentum) at each epsilon,
judged on 6,000 training images that are held out of training and count as public. The best one then
trains on three other seeds, and is tested on the 10,000 test images.

    python benchmarks/example_level.py accuracy results.csv [--device cuda] [--jobs 8]
    python benchmarks/example_level.py table results.csv
    python benchmarks/example_level.py cost

``accuracy`` appends a row per run, and skips runs whose row is there. ``cost`` adds opake's BLT
where it is installed (``pip install "opake[dpftrl]"``).
"""

import argparse
import csv
import json
import statistics
import time
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from machine import machine
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from privpart.data.tasks.images import DEBIAN_FOLDER, fashion_mnist
from privpart.example_level import FTRLEngine

EPSILONS = (0.5, 2.0, 8.0)
DELTA = 1e-5
ARMS = ("DP-SGD, Poisson", "independent, fixed passes", "tree", "BLT", "BandMF")
TRIALS = ((0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (0.05, 0.9), (0.1, 0.9), (0.2, 0.9))
SEEDS = (1, 2, 3)
EPOCHS, BATCH, CLIP, HELD_OUT = 10, 512, 1.0, 6000
FIELDS = ("epsilon", "arm", "rate", "momentum", "seed", "tested_on", "accuracy", "seconds")


def cnn(seed: int) -> nn.Module:
    """Return the network of Opacus's MNIST example."""
    torch.manual_seed(seed)  # noqa: TID251  the start weights, as Opacus's example makes them
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def mechanism(arm: str) -> MechanismChoice:
    """Return the mechanism of an arm of DP-FTRL."""
    if arm == "tree":
        return MechanismChoice(name=MechanismName.TREE)
    if arm == "BLT":
        return MechanismChoice(name=MechanismName.BLT, buffers=4)
    if arm == "BandMF":
        return MechanismChoice(name=MechanismName.TOEPLITZ, bands=64, fit=True)
    return MechanismChoice(name=MechanismName.INDEPENDENT)


class Numbers(Dataset[tuple[torch.Tensor]]):
    """The numbers of the examples; ``collate`` takes a whole batch at once from the device."""

    def __init__(self, size: int) -> None:
        self._numbers = torch.arange(size)[:, None]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (self._numbers[index],)


def private(
    arm: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    collate: Any,  # noqa: ANN401  of a DataLoader
    size: int,
    *,
    epsilon: float,
    seed: int,
) -> Any:  # noqa: ANN401  three things
    """Return module, optimizer and loader of an arm."""
    if arm == ARMS[0]:
        loader = DataLoader(Numbers(size), batch_size=BATCH, collate_fn=collate)
        return PrivacyEngine().make_private_with_epsilon(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=epsilon,
            target_delta=DELTA,
            epochs=EPOCHS,
            max_grad_norm=CLIP,
        )
    return FTRLEngine().make_private(
        module=module,
        optimizer=optimizer,
        dataset=Numbers(size),
        batch_size=BATCH,
        epochs=EPOCHS,
        max_grad_norm=CLIP,
        target_epsilon=epsilon,
        delta=DELTA,
        mechanism=mechanism(arm),
        order_seed=seed,
        collate_fn=collate,
    )


def accuracy(job: tuple) -> dict:
    """Train one arm once; return its row."""
    epsilon, arm, rate, momentum, seed, tested_on, device, folder = job
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    task = fashion_mnist(folder)
    x, y = task.train_x.to(device), task.train_y.to(device)
    held = slice(len(x) - HELD_OUT, None)
    test = (x[held], y[held]) if tested_on == "held out" else (task.test_x, task.test_y)
    x, y = x[:-HELD_OUT], y[:-HELD_OUT]

    def collate(numbers: list[tuple[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.cat([number for (number,) in numbers]).to(device)
        return x[rows], y[rows]

    began = time.perf_counter()
    module = cnn(seed).to(device)
    sgd = torch.optim.SGD(module.parameters(), lr=rate, momentum=momentum)
    made = private(arm, module, sgd, collate, len(x), epsilon=epsilon, seed=seed)
    wrapped, optimizer, loader = made
    for _ in range(EPOCHS):
        for some, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(some), labels).backward()
            optimizer.step()
    module.eval()
    with torch.no_grad():
        right = sum(
            int((module(a.to(device)).argmax(1) == b.to(device)).sum())
            for a, b in zip(test[0].split(2000), test[1].split(2000), strict=True)
        )
    seconds = time.perf_counter() - began
    values = (
        epsilon,
        arm,
        rate,
        momentum,
        seed,
        tested_on,
        right / len(test[0]),
        round(seconds, 1),
    )
    return dict(zip(FIELDS, values, strict=True))


def run(path: Path, device: str, jobs: int, folder: Path) -> None:
    """Run what is missing in ``path``: first all trials, then the best of each arm."""
    _run(
        [(e, a, r, m, 0, "held out") for e in EPSILONS for a in ARMS for r, m in TRIALS],
        path,
        device,
        jobs,
        folder,
    )
    best = chosen(rows_of(path))
    _run(
        [(e, a, *best[e, a], s, "test") for s in SEEDS for e in EPSILONS for a in ARMS],
        path,
        device,
        jobs,
        folder,
    )


def _run(settings: list[tuple], path: Path, device: str, jobs: int, folder: Path) -> None:
    done = {tuple(row[name] for name in FIELDS[:6]) for row in rows_of(path)}
    todo = [(*own, device, folder) for own in settings if own not in done]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for number, future in enumerate(as_completed([pool.submit(accuracy, job) for job in todo])):
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(future.result())
            print(f"{number + 1} of {len(todo)}", flush=True)


def rows_of(path: Path) -> list[dict]:
    """Return the finished runs."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        numbers = ("epsilon", "rate", "momentum", "accuracy", "seconds")
        return [
            row | {name: float(row[name]) for name in numbers} | {"seed": int(row["seed"])}
            for row in csv.DictReader(file)
        ]


def chosen(rows: list[dict]) -> dict:
    """Return the best trial of each arm at each epsilon, by the images that are held out."""
    best = {}
    for row in rows:
        key = row["epsilon"], row["arm"]
        if row["tested_on"] == "held out" and row["accuracy"] > best.get(key, (-1.0,))[0]:
            best[key] = row["accuracy"], row["rate"], row["momentum"]
    return {key: found[1:] for key, found in best.items()}


def table(path: Path) -> None:
    """Print mean, least and greatest test accuracy over the seeds."""
    rows, best = rows_of(path), chosen(rows_of(path))
    found = defaultdict(list)
    for row in rows:
        if row["tested_on"] == "test":
            found[row["epsilon"], row["arm"]].append(row["accuracy"])
    print("| arm | " + " | ".join(f"epsilon {e:g}" for e in EPSILONS) + " |")
    print("|---|" + "---|" * len(EPSILONS))
    for arm in ARMS:
        cells = []
        for epsilon in EPSILONS:
            own = [100 * a for a in found[epsilon, arm]]
            rate, momentum = best[epsilon, arm]
            cells.append(
                f"{statistics.mean(own):.2f} ({min(own):.2f} to {max(own):.2f}; "
                f"{rate:g}, {momentum:g})"
                if own
                else ""
            )
        print(f"| {arm} | " + " | ".join(cells) + " |")


def cost(turns: int = 9) -> None:
    """Print CPU seconds of a step, as a ratio to Opacus's DP-SGD with the same batches."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    some = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(2048, 1, 28, 28, generator=some), torch.randint(10, (2048,), generator=some)
    )
    ratios = defaultdict(list)
    others = ("opake's BLT",) if find_spec("opake") else ()
    for _ in range(turns):
        own = {arm: _step_seconds(arm, data) for arm in (*ARMS[2:], "Opacus DP-SGD")}
        own |= {arm: _opake_seconds(data) for arm in others}
        for arm in (*ARMS[2:], *others):
            ratios[arm].append(own[arm] / own["Opacus DP-SGD"])
    print(json.dumps(machine(), indent=1))
    for arm, found in ratios.items():
        print(
            f"{arm}: least {min(found):.2f}, median {statistics.median(found):.2f} of DP-SGD's step"
        )


def _step_seconds(arm: str, data: TensorDataset) -> float:
    module = cnn(0)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    if arm == "Opacus DP-SGD":
        loader = DataLoader(data, batch_size=256)
        made = PrivacyEngine().make_private(
            module=module,
            optimizer=sgd,
            data_loader=loader,
            noise_multiplier=2.0,
            max_grad_norm=CLIP,
            poisson_sampling=False,
        )
    else:
        made = FTRLEngine().make_private(
            module=module,
            optimizer=sgd,
            dataset=data,
            batch_size=256,
            epochs=3,
            max_grad_norm=CLIP,
            noise_multiplier=2.0,
            mechanism=mechanism(arm) if arm != "BandMF" else "toeplitz",
        )
    wrapped, optimizer, loader = made
    for number, (x, y) in enumerate(loader):
        if number == 1:
            began = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    return (time.process_time() - began) / (len(loader) - 1)


def _opake_seconds(data: TensorDataset) -> float:
    """Return the same for opake's functional BLT, of as many buffers as it chooses."""
    from opake.dpftrl.noise import blt_strategy, mf_gaussian_noise
    from opake.dpsgd.clipping import clipped_grad
    from opake.random import key

    module = cnn(0)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}

    def loss(own: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(module, own, (x[None],))  # of one example
        return nn.functional.cross_entropy(out, y[None])

    gradients, clips = clipped_grad(
        loss, clipping_norm=CLIP, batch_argnums=(1, 2), normalize_by=256
    )
    noise, drawn = mf_gaussian_noise(
        weights,
        blt_strategy(),
        n_steps=24,
        min_sep=8,
        max_participations=3,
        noise_multiplier=2.0,
        key=key(0),
    )
    loader = DataLoader(data, batch_size=256)
    for number, (x, y) in enumerate(loader):
        if number == 1:
            began = time.process_time()
        summed, clips = gradients(weights, x, y, state=clips)
        noised, drawn = noise(summed, drawn)
        for name, p in weights.items():
            p.sub_(noised.pytree[name], alpha=0.1)
    return (time.process_time() - began) / (len(loader) - 1)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["accuracy", "table", "cost"])
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data-dir", type=Path, default=DEBIAN_FOLDER)
    given = parser.parse_args()
    if given.what == "cost":
        cost()
    elif given.what == "table":
        table(given.path)
    else:
        run(given.path, given.device, given.jobs, given.data_dir)


if __name__ == "__main__":
    main()
