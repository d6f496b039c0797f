"""Engine cases: the networks and cohorts of the engine's benchmarks, and plain PyTorch beside it.

A round trains each client of the cohort from the same start, clips its update, and adds the updates
up. Plain PyTorch is what a careful person writes: parameters copied in, frozen ones without
gradients, ``torch.optim.SGD`` and ``cross_entropy``, one client after another. Examples are drawn
at random, because only their shape matters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privpart import LocalTraining, PartialModel, Users
from privpart.engines.options import Precision
from privpart.models import MODELS, emnist_cnn, mcmahan_2nn, resnet18_gn, small_cnn, word_lm

CLIP = 1.0
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
_WORDS = 1000


@dataclass(frozen=True)
class Case:
    """A network, its trainable part and a cohort; ``aim`` is the intended speed-up."""

    network: Callable[[], nn.Module]
    train: str
    clients: int
    examples: int
    rate: float
    aim: float | None
    precision: Precision = "float32"
    image: tuple[int, ...] | None = (1, 28, 28)
    length: int = 20
    batch: int = 16
    seed: int | None = 0

    @property
    def layouts(self) -> list[str]:
        """Memory layouts of images that differ in speed; the last is mostly the faster one."""
        layers = self.network().modules()
        return list(LAYOUTS)[: 2 if any(isinstance(layer, nn.Conv2d) for layer in layers) else 1]

    def model(self) -> PartialModel:
        words = self.image is None and self.seed == 0
        start = MODELS["word_lm"].initializers if words else None
        return PartialModel(self.network, train=[self.train], seed=self.seed, initializers=start)

    def local(self) -> LocalTraining:
        """Return the local training: one epoch, which may be a single step."""
        if self.examples > self.batch:
            return LocalTraining(self.rate, batch_size=self.batch)
        return LocalTraining(self.rate, batch_size=self.examples, steps=1)

    def users(self) -> Users:
        """Return images, or sequences of words."""
        n, generator = self.clients * self.examples, torch.Generator().manual_seed(0)
        rows = torch.arange(n).split(self.examples)
        if self.image is None:
            text = torch.randint(_WORDS, (n, self.length + 1), generator=generator)
            return Users(text[:, :-1].contiguous(), text[:, 1:].contiguous(), rows)
        x = torch.rand(n, *self.image, generator=generator)
        return Users(x, torch.randint(10, (n,), generator=generator), rows)


_emnist = partial(emnist_cnn, classes=10)
_mlp = partial(mcmahan_2nn, classes=10)
_resnet = partial(resnet18_gn, classes=10)
_tiny_cnn = partial(small_cnn, channels=(4, 8), hidden=32, image_size=28)
_one_step = partial(small_cnn, channels=(8, 16), hidden=256, image_size=28, kernel=5)
_transformer = partial(word_lm, vocabulary=_WORDS, width=64, heads=4, hidden=256, layers=2)
_wide_transformer = partial(word_lm, vocabulary=_WORDS, width=128, heads=4, hidden=512, layers=4)


def _adapted_transformer() -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)  # noqa: TID251  peft draws the adapters from it
    adapters = LoraConfig(r=8, target_modules=["query", "value"])
    adapted: nn.Module = inject_adapter_in_model(adapters, _wide_transformer())
    return adapted


class Recurrent(nn.Module):
    """A language model of one LSTM layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, 96)
        self.lstm = nn.LSTM(96, 256, batch_first=True)
        self.head = nn.Linear(256, _WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Map words (B, T) to the logits of the next ones, (B, T, words)."""
        logits: Tensor = self.head(self.lstm(self.embedding(words))[0])
        return logits


def _text(network: Callable[[], nn.Module], train: str, aim: float | None, **sizes: int) -> Case:
    each = {"clients": 2, "examples": 32, "length": 64} | sizes
    return Case(network, train, rate=0.05, aim=aim, image=None, seed=None, **each)


CASES = {
    "EMNIST CNN, full": Case(_emnist, "*", 20, 100, 0.05, 1.25),
    "EMNIST CNN, partial": Case(_emnist, "!dense1.*", 20, 100, 0.05, 1.35),
    "ResNet-18 GN, full": Case(_resnet, "*", 2, 32, 0.05, 1.1, image=(3, 32, 32)),
    "wide transformer, full": _text(_wide_transformer, "*", 1.3),
    "wide transformer, LoRA": _text(_adapted_transformer, "*lora_*", 2.0),
    "LSTM, full": _text(Recurrent, "*", 1.3, clients=4, length=20),
    "one step, full": Case(_one_step, "*", 100, 2, 0.1, 5),
    "one step, partial": Case(_one_step, "!dense1.*", 100, 2, 0.1, 5),
    "EMNIST CNN, last layer": Case(_emnist, "dense2.*", 20, 100, 0.05, 40),
    "MLP, full": Case(_mlp, "*", 20, 100, 0.05, None),
    "MLP, partial": Case(_mlp, "!dense1.*", 20, 100, 0.05, None),
    "wide transformer, LoRA, batches of 2": _text(
        _adapted_transformer, "*lora_*", 2.0, clients=8, examples=4, batch=2
    ),
    "tiny CNN, full": Case(_tiny_cnn, "*", 20, 20, 0.05, None, batch=10),
    "transformer, full": Case(_transformer, "*", 20, 32, 0.05, None, image=None),
    "transformer, partial": Case(_transformer, "!*layers*linear*", 20, 32, 0.05, None, image=None),
    "EMNIST CNN, full, bfloat16": Case(_emnist, "*", 20, 100, 0.05, None, precision="bfloat16"),
}
DEFAULT = list(CASES)[:9]
"""Cases that have an aim or a sibling with one."""
SMALLEST = ["tiny CNN, full"]


class Plain:
    """A plain PyTorch loop over clients, in their order, in a memory layout of images."""

    def __init__(
        self,
        case: Case,
        users: Users,
        clients: Sequence[int],
        *,
        layout: str = "contiguous",
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        model = case.model()
        self.case, self.clients, self.threads = case, clients, threads
        self.layout = LAYOUTS[layout]
        self.users = users.on(torch.device(device))
        self.module = model.module
        for parameter in self.module.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        self.module.to(device).to(memory_format=self.layout)  # type: ignore[call-overload]
        parameters = dict(self.module.named_parameters())
        self.trained = [parameters[name] for name in model.trainable]
        self.start = [p.detach().clone() for p in self.trained]

    def round(self) -> Tensor:
        """Return the sum of the clipped updates."""
        torch.set_num_threads(self.threads)
        total = [torch.zeros_like(p) for p in self.start]
        for client in self.clients:
            rows = self.users.indices[client]
            x, y = self.users.x[rows], self.users.y[rows]
            if x.dim() == 4:
                x = torch.empty_like(x, memory_format=self.layout).copy_(x)
            with torch.no_grad():
                for parameter, start in zip(self.trained, self.start, strict=True):
                    parameter.copy_(start)
            optimizer = torch.optim.SGD(self.trained, lr=self.case.rate)
            for batch in torch.randperm(len(rows), device=x.device).split(self.case.batch):
                optimizer.zero_grad()
                logits = self.module(x[batch])
                cross_entropy(logits.flatten(0, -2), y[batch].flatten()).backward()
                optimizer.step()
            with torch.no_grad():
                updates = [p - s for p, s in zip(self.trained, self.start, strict=True)]
                norm = torch.stack([d.norm() for d in updates]).norm()
                factor = (CLIP / norm).clamp(max=1.0)  # not read, which would wait for a device
                for into, update in zip(total, updates, strict=True):
                    into.add_(factor * update)
        torch.set_num_threads(1)
        return torch.cat([t.flatten() for t in total])

    cpu = staticmethod(process_time)

    def close(self) -> None:
        """Do nothing: there are no workers."""
