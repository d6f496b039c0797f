"""DP-FTRL against DP-SGD on examples: accuracy at equal epsilon, and the cost of a step.

Fashion-MNIST, the CNN of Opacus's MNIST example (26,010 parameters), 10 epochs in batches of 512,
clip norm 1, delta 1e-5. Each arm has the same six trials (learning rate, momentum) at each epsilon,
judged on 6,000 training images that are held out of training and count as public. The best one then
trains on three other seeds, and is tested on the 10,000 test images.

    python examples/studies/example_level.py accuracy results.csv [--device cuda] [--jobs 8]
    python examples/studies/example_level.py table results.csv
    python examples/studies/example_level.py cost

``accuracy`` appends a row per run, and skips runs whose row is there. ``cost`` adds opake's BLT
where it is installed (``pip install "opake[dpftrl]"``).
"""

import sys
from pathlib import Path

sys.path += [
    str(Path(__file__).parents[n] / name) for n, name in ((2, "benchmarks"), (1, "opacus"))
]
import frame

import csv
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from statistics import mean, median
from typing import Any

import torch
from mnist import network
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accounting.mechanisms import MechanismChoice
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
    return network()


def mechanism(arm: str) -> MechanismChoice:
    """Return the mechanism of an arm of DP-FTRL."""
    if arm == "tree":
        return MechanismChoice.parse("tree")
    if arm == "BLT":
        return MechanismChoice.parse("blt:buffers=4")
    if arm == "BandMF":
        return MechanismChoice.parse("toeplitz:bands=64,fit")
    return MechanismChoice.parse("independent")


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
    collate: Callable[..., Any],
    size: int,
    *,
    epsilon: float,
    seed: int,
    **trained: Any,
) -> tuple[Any, Any, Any]:
    """Return module, optimizer and loader of an arm; ``trained`` is module and optimizer."""
    common = {"epochs": EPOCHS, "max_grad_norm": CLIP, "target_epsilon": epsilon, **trained}
    loader = DataLoader(Numbers(size), batch_size=BATCH, collate_fn=collate)
    common |= {"data_loader": loader}
    if arm == ARMS[0]:
        return PrivacyEngine().make_private_with_epsilon(target_delta=DELTA, **common)
    options = {"delta": DELTA, "mechanism": mechanism(arm), "order_seed": seed}
    return FTRLEngine().make_private(**options, **common)


def steps(made: tuple[Any, Any, Any], epochs: int) -> Iterator[None]:
    """Train, a step at a time."""
    module, optimizer, loader = made
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
            yield


def accuracy(setting: tuple[Any, ...], device: str, folder: Path) -> dict[str, Any]:
    """Train one arm once; return its row."""
    epsilon, arm, rate, momentum, seed, tested_on = setting
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
    trained = {"module": module, "optimizer": sgd}
    for _ in steps(private(arm, collate, len(x), epsilon=epsilon, seed=seed, **trained), EPOCHS):
        pass
    module.eval()
    with torch.no_grad():
        right = sum(
            int((module(a.to(device)).argmax(1) == b.to(device)).sum())
            for a, b in zip(test[0].split(2000), test[1].split(2000), strict=True)
        )
    measured = right / len(test[0]), round(time.perf_counter() - began, 1)
    return dict(zip(FIELDS, (*setting, *measured), strict=True))


def run(path: Path, device: str, jobs: int, folder: Path) -> None:
    """Run what is missing in ``path``: first all trials, then the best of each arm."""

    def append(settings: list[tuple[Any, ...]]) -> None:
        done = {tuple(row[name] for name in FIELDS[:6]) for row in rows_of(path)}
        todo = [partial(accuracy, own, device, folder) for own in settings if own not in done]
        for number, row in enumerate(frame.finished(todo, jobs), 1):
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(row)
            print(f"{number} of {len(todo)}", flush=True)

    append([(e, a, r, m, 0, "held out") for e in EPSILONS for a in ARMS for r, m in TRIALS])
    best = chosen(rows_of(path))
    append([(e, a, *best[e, a], s, "test") for s in SEEDS for e in EPSILONS for a in ARMS])


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
    reached = defaultdict(list)
    for row in rows:
        if row["tested_on"] == "test":
            reached[row["epsilon"], row["arm"]].append(100 * row["accuracy"])

    def cell(key: tuple[float, str]) -> str:
        own, (rate, momentum) = reached[key], best[key]
        about = f"{min(own):.2f} to {max(own):.2f}; {rate:g}, {momentum:g}" if own else ""
        return f"{mean(own):.2f} ({about})" if own else ""

    head = ["arm", *(f"epsilon {e:g}" for e in EPSILONS)]
    print(frame.markdown(head, [[arm, *(cell((e, arm)) for e in EPSILONS)] for arm in ARMS]))


def cost(turns: int) -> None:
    """Print CPU seconds of a step, as a ratio to Opacus's DP-SGD with the same batches."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    some = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(2048, 1, 28, 28, generator=some), torch.randint(10, (2048,), generator=some)
    )
    ways = {arm: partial(_step_seconds, arm, data) for arm in ("Opacus DP-SGD", *ARMS[2:])}
    if find_spec("opake"):
        ways["opake's BLT"] = partial(_opake_seconds, data)
    facts = frame.machine("torch", "opacus")
    ratios = defaultdict(list)
    for _ in range(turns):
        base, *others = ((arm, way()) for arm, way in ways.items())
        for arm, seconds in others:
            ratios[arm].append(seconds / base[1])
    frame.show("machine", facts)
    for arm, own in ratios.items():
        frame.show(f"{arm}, over DP-SGD's step", {"least": min(own), "median": median(own)})


def _after_the_first(run: Iterator[None]) -> float:
    """Return the CPU seconds of a step, without the first."""
    next(run)
    began = time.process_time()
    count = sum(1 for _ in run)
    return (time.process_time() - began) / count


def _step_seconds(arm: str, data: TensorDataset) -> float:
    module = cnn(0)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    common = {"module": module, "optimizer": sgd, "max_grad_norm": CLIP, "noise_multiplier": 2.0}
    common["data_loader"] = DataLoader(data, batch_size=256)
    if arm == "Opacus DP-SGD":
        made = PrivacyEngine().make_private(poisson_sampling=False, **common)
    else:
        named = mechanism(arm) if arm != "BandMF" else "toeplitz"
        made = FTRLEngine().make_private(mechanism=named, epochs=3, **common)
    return _after_the_first(steps(made, 1))


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

    def stepped() -> Iterator[None]:
        nonlocal clips, drawn
        for x, y in DataLoader(data, batch_size=256):
            summed, clips = gradients(weights, x, y, state=clips)
            noised, drawn = noise(summed, drawn)
            for name, p in weights.items():
                p.sub_(noised.pytree[name], alpha=0.1)
            yield

    return _after_the_first(stepped())


def main() -> None:
    """Run what was asked for."""
    given = frame.options(
        __doc__,
        quick={"turns": 1},
        what={"positional": True, "choices": ["accuracy", "table", "cost"]},
        path={"positional": True, "type": Path, "nargs": "?"},
        device="cpu",
        jobs=2,
        turns=9,
        data_dir=DEBIAN_FOLDER,
    )
    if given.what == "cost":
        cost(given.turns)
    elif given.path is None:
        raise SystemExit(f"{given.what}: name the file of rows, such as results.csv")
    elif given.what == "table":
        table(given.path)
    else:
        run(given.path, given.device, given.jobs, given.data_dir)


if __name__ == "__main__":
    main()
