"""Six jobs as people bring them, small: networks, data, losses and metrics of their own.

A test trains them here, and in processes that it kills; so this is a module of its own.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

import privpart
from privpart.data import from_dataset, from_frame, from_tensors
from privpart.models import freeze_batch_norm

ROUNDS, USERS, EACH = 6, 12, 4
EVERY = 2
HALF = torch.bfloat16
Metrics = Callable[[nn.Module], dict[str, float]]


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def half(layer: nn.Module) -> nn.Module:
    """Freeze a layer in bfloat16, with values from a seed."""
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=draws(number))
    return layer.to(HALF).requires_grad_(False)


# Image folders and a residual network whose stem is frozen.


class Folders(torch.utils.data.Dataset):
    """Images in folders: user/label/number.png."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(root.glob("*/*/*.png"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int]:
        pixels = np.asarray(Image.open(self.files[item]), dtype=np.float32) / 255
        return torch.from_numpy(pixels)[None], int(self.files[item].parent.name)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = half(nn.Conv2d(1, 4, 3, padding=1))
        self.norm, self.conv = nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(HALF)).float()
        x = x + self.conv(functional.relu(self.norm(x)))
        return self.head(functional.relu(x).mean(dim=(2, 3)))


def image_clients(folder: Path) -> Any:
    root = folder / "images"
    generator = np.random.default_rng(0)
    for user in range(USERS):
        for number in range(EACH):
            label = (user + number) % 2
            place = root / f"user{user:02}" / str(label)
            place.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 128, (6, 6)) + 100 * label
            if not (place / f"{number}.png").exists():
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    images = Folders(root)
    return from_dataset(images, user=[file.parent.parent.name for file in images.files])


# Texts and low-rank adapters on a frozen encoder.


class Adapted(nn.Module):
    """A frozen layer in bfloat16, and a trained product of two thin matrices beside it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = half(nn.Linear(size, size))
        self.lora_A = nn.Parameter(torch.randn(2, size, generator=draws(9)))
        self.lora_B = nn.Parameter(torch.zeros(size, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.to(HALF)).float() + x @ self.lora_A.T @ self.lora_B.T


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = half(nn.Embedding(20, 8))
        self.query, self.value = Adapted(8), Adapted(8)
        self.classifier = nn.Linear(8, 2)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        x = self.words(input_ids).float()
        near = self.query(x) @ x.transpose(1, 2) - 1e4 * (1 - attention_mask[:, None].float())
        logits = self.classifier((near.softmax(dim=-1) @ self.value(x)).mean(dim=1))
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


def texts(count: int, seed: int = 1) -> dict[str, torch.Tensor]:
    words = torch.randint(1, 20, (count, 5), generator=draws(seed))
    return {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "labels": (words[:, 0] > 9).long(),
    }


def text_clients(_: Path) -> Any:
    return from_tensors(
        texts(USERS * EACH), user=[f"user {i // EACH}" for i in range(USERS * EACH)]
    )


# A table of numbers.


def table(count: int, seed: int = 2) -> pd.DataFrame:
    numbers = np.random.default_rng(seed).normal(size=(count, 3))
    frame = pd.DataFrame(numbers, columns=["age", "height", "rooms"])
    return frame.assign(income=2 * frame.age - frame.rooms, person=np.arange(count) // EACH)


def table_clients(_: Path) -> Any:
    return from_frame(table(USERS * EACH), user="person", x=["age", "height", "rooms"], y="income")


# Words in order, and an LSTM on a frozen embedding.


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = half(nn.Embedding(12, 6))
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x).float())[0])


def sentences(count: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.randint(12, (count, 1), generator=draws(seed))
    words = (start + torch.arange(7)) % 12
    return words[:, :-1], words[:, 1:]


def sentence_clients(_: Path) -> Any:
    return from_tensors(sentences(USERS * EACH), user=torch.arange(USERS * EACH) // EACH)


# Two towers, by a loss and a population of one's own.


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = half(nn.Embedding(15, 6))
        self.of_people, self.of_items = nn.Linear(5, 4), nn.Linear(6, 4)

    def forward(self, person: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        items = self.of_items(self.items(item).float())
        return self.of_people(person) @ items.T


def pairs(client: int) -> dict[str, torch.Tensor]:
    generator = draws(100 + client)
    item = torch.randperm(15, generator=generator)[:EACH]
    person = torch.randn(EACH, 5, generator=generator) + functional.one_hot(item % 5, 5)
    return {"person": person, "item": item}


class Shoppers:
    ids = tuple(range(USERS))

    def examples(self, client: int) -> dict[str, torch.Tensor]:
        return pairs(client)


def contrast(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each person's own item is the right answer among those of the batch."""
    near = module(**batch)
    return functional.cross_entropy(near, torch.arange(len(near)))


# Frozen batch normalisation between frozen convolutions in bfloat16.


def normalised() -> nn.Module:
    below = half(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()))
    below[1].running_mean.uniform_(-0.1, 0.1, generator=draws(5))
    freeze_batch_norm(below)
    return nn.Sequential(below, ToFloat(), nn.Linear(64, 2))


class ToFloat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()


class FromFloat(nn.Module):
    """A network whose lower part computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = normalised()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(HALF))


def squares(count: int, seed: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(count, 1, 6, 6, generator=draws(seed))
    y = (x.mean(dim=(1, 2, 3)) > 0.5).long()
    return x + 0.5 * y[:, None, None, None], y


def square_clients(_: Path) -> Any:
    return from_tensors(squares(USERS * EACH), user=[i // EACH for i in range(USERS * EACH)])


# Metrics.


def classified(x: Any, y: torch.Tensor, module: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        outputs = module(**x) if isinstance(x, dict) else module(x)
        logits = getattr(outputs, "logits", outputs).flatten(0, -2)
    right = (logits.argmax(dim=1) == y.flatten()).double().mean()
    return {"loss": functional.cross_entropy(logits, y.flatten()).item(), "accuracy": right.item()}


def predicted(module: nn.Module) -> dict[str, float]:
    frame = table(40, seed=20)
    x = torch.tensor(frame[["age", "height", "rooms"]].to_numpy(), dtype=torch.float32)
    with torch.no_grad():
        error = module(x)[:, 0] - torch.tensor(frame.income.to_numpy())
    return {"mse": error.square().mean().item(), "worst": error.abs().max().item()}


def matched(module: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        near = [module(**pairs(1000 + client)) for client in range(5)]
    answers = torch.arange(EACH)
    losses = [functional.cross_entropy(each, answers).item() for each in near]
    right = [(each.argmax(dim=1) == answers).double().mean().item() for each in near]
    return {"loss": sum(losses) / 5, "top 1": sum(right) / 5}


def texts_classified(module: nn.Module) -> dict[str, float]:
    batch = texts(40, seed=10)
    return classified({k: v for k, v in batch.items() if k != "labels"}, batch["labels"], module)


def images_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.arange(30) % 2
    pixels = torch.randint(128, (30, 1, 6, 6), generator=draws(seed))
    return (pixels + 100 * y[:, None, None, None]) / 255, y


# The jobs.


@dataclass(frozen=True)
class Job:
    """What its author writes; ``frozen`` is the type of the frozen part, None if there is none."""

    network: Callable[[], nn.Module]
    clients: Callable[[Path], Any]
    metric: Metrics
    rates: dict[str, dict[str, Any]]
    loss: Any = "cross_entropy"
    client: dict[str, Any] = field(default_factory=dict)
    frozen: torch.dtype | None = HALF


WARM = {"kind": "cosine", "warmup": 1, "final": 0.1}
STEPS = {"kind": "steps", "at": [2, 4], "factor": 0.5}
JOBS = {
    "image folders": Job(
        Residual, image_clients, partial(classified, *images_of(7)),
        {"client": WARM, "server": STEPS},
    ),
    "texts and LoRA": Job(
        Encoder, text_clients, texts_classified, {"client": {"kind": "linear"}}, "model",
        {"optimizer": "adam", "learning_rate": 0.02, "weight_decay": 0.1},
    ),
    "regression": Job(
        partial(nn.Linear, 3, 1), table_clients, predicted, {"server": WARM}, "mean_squared_error",
        frozen=None,
    ),
    "lstm": Job(
        Words, sentence_clients, partial(classified, *sentences(30, 30)), {"client": STEPS}
    ),
    "two towers": Job(
        Towers, lambda _: Shoppers(), matched, {"server": {"warmup": 3}}, contrast,
        {"momentum": 0.5},
    ),
    "frozen batch norm": Job(
        FromFloat, square_clients, partial(classified, *squares(30, 60)),
        {"client": {"kind": "linear"}},
    ),
}  # fmt: skip


def plan_of(job: Job) -> dict[str, Any]:
    return {
        "privacy": {
            "rounds": ROUNDS, "clip_norm": 1.0, "noise_multiplier": 0.5, "delta": 1e-3,
            "max_participations": 3, "min_separation": 2, "mechanism": {"name": "tree"},
        },
        "data": {"clients_per_round": 6},
        "client": {"learning_rate": 0.2, "batch_size": 2} | job.client,
        "server": {"weight_decay": 0.01},
        "learning_rates": job.rates,
    }  # fmt: skip


def network_of(job: Job) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(0)
        return job.network()


def work(name: str, folder: Path, run: str, **options: Any) -> privpart.Run:
    """Train a job from Python, in a run of this name."""
    job = JOBS[name]
    options = {
        "seed": 1,
        "evaluate_every": EVERY,
        "progress": False,
        "metric": job.metric,
    } | options
    return privpart.train(
        network_of(job),
        job.clients(folder),
        plan=plan_of(job),
        out=folder / run,
        loss=job.loss,
        **options,
    )


def kill(record: privpart.RoundRecord) -> None:
    if record.round == 2:
        os.kill(os.getpid(), signal.SIGKILL)
