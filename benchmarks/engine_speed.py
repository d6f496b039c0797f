"""Engine speed: rounds of simulated clients compared with a plain PyTorch loop.

Run: ``python benchmarks/engine_speed.py``; writes benchmarks/results/engine.json.

All ways of a case take turns in one run, so that other load affects all of them alike. A round
trains each client of the cohort from the same start, clips its update, and sums the updates. The
plain loop is one process that copies the parameters in and uses ``torch.optim.SGD`` and
``cross_entropy``, with frozen parameters without gradients, on one thread and on two. The engine
runs in one process and with two workers of one thread each, after a first round that builds models,
probes and caches.

Times are wall-clock seconds and, because the machine may be shared, processor seconds of all
processes of a way. ``ratio_cpu`` compares processor seconds on one thread each: the effect of the
way of computing, without that of the second processor. The plain loop's are those of its faster
layout of images, which two processes of one thread would spend, too.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import machine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users
from privpart.data.tasks import fashion_mnist
from privpart.engines.options import Precision
from privpart.models import MODELS, emnist_cnn, mcmahan_2nn, small_cnn, word_lm

RESULT = Path(__file__).parent / "results" / "engine.json"
CLIP = 1.0
_TURN = 0.5
_WORDS = 1000
_BATCH = 16


@dataclass(frozen=True)
class Case:
    """A network, its trainable part and a cohort; ``target`` is the intended speed-up."""

    network: Callable[[], nn.Module]
    train: str
    clients: int
    examples: int
    rate: float
    target: float | None
    precision: Precision = "float32"
    words: bool = False
    length: int = 20
    batch: int = _BATCH
    seed: int | None = 0

    def model(self) -> PartialModel:
        """Return the network with its trainable part."""
        initializers = MODELS["word_lm"].initializers if self.words and self.seed == 0 else None
        return PartialModel(
            self.network, train=[self.train], seed=self.seed, initializers=initializers
        )

    def local(self) -> LocalTraining:
        """Return the local training: one epoch, which may be a single step."""
        if self.examples > self.batch:
            return LocalTraining(self.rate, batch_size=self.batch)
        return LocalTraining(self.rate, batch_size=self.examples, steps=1)

    def users(self) -> Users:
        """Return images, or sequences of words, drawn at random; only their shape matters."""
        n = self.clients * self.examples
        rows = torch.arange(n).split(self.examples)
        if self.words:
            text = torch.randint(
                _WORDS, (n, self.length + 1), generator=torch.Generator().manual_seed(0)
            )
            return Users(text[:, :-1].contiguous(), text[:, 1:].contiguous(), rows)
        task = fashion_mnist()
        return Users(task.train_x[:n], task.train_y[:n], rows)


def _transformer() -> nn.Module:
    return word_lm(vocabulary=_WORDS, width=64, heads=4, hidden=256, layers=2)


def _wide_transformer() -> nn.Module:
    return word_lm(vocabulary=_WORDS, width=128, heads=4, hidden=512, layers=4)


def _adapted_transformer() -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)  # noqa: TID251  peft draws the adapters from it
    adapters = LoraConfig(r=8, target_modules=["query", "value"])
    adapted: nn.Module = inject_adapter_in_model(adapters, _wide_transformer())
    return adapted


class _Recurrent(nn.Module):
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


def _tiny_cnn() -> nn.Module:
    return small_cnn(channels=(4, 8), hidden=32, image_size=28)


def _one_step_network() -> nn.Module:
    return small_cnn(channels=(8, 16), hidden=256, image_size=28, kernel=5)


CASES = {
    "one step, full": Case(_one_step_network, "*", 100, 2, 0.1, 5),
    "one step, partial": Case(_one_step_network, "!dense1.*", 100, 2, 0.1, 5),
    "MLP, full": Case(lambda: mcmahan_2nn(classes=10), "*", 20, 100, 0.05, None),
    "MLP, partial": Case(lambda: mcmahan_2nn(classes=10), "!dense1.*", 20, 100, 0.05, 2.5),
    "EMNIST CNN, last layer": Case(lambda: emnist_cnn(classes=10), "dense2.*", 20, 100, 0.05, 8),
    "EMNIST CNN, partial": Case(lambda: emnist_cnn(classes=10), "!dense1.*", 20, 100, 0.05, 1.45),
    "EMNIST CNN, full": Case(lambda: emnist_cnn(classes=10), "*", 20, 100, 0.05, 1.4),
    "EMNIST CNN, full, bfloat16": Case(
        lambda: emnist_cnn(classes=10), "*", 20, 100, 0.05, None, precision="bfloat16"
    ),
    "tiny CNN, full": Case(_tiny_cnn, "*", 20, 20, 0.05, None, batch=10),
    "LSTM, full": Case(_Recurrent, "*", 4, 32, 0.05, 1.3, words=True, seed=None),
    "wide transformer, full": Case(
        _wide_transformer, "*", 2, 32, 0.05, 1.3, words=True, length=64, seed=None
    ),
    "wide transformer, LoRA": Case(
        _adapted_transformer, "*lora_*", 2, 32, 0.05, 2.0, words=True, length=64, seed=None
    ),
    "wide transformer, LoRA, batches of 2": Case(
        _adapted_transformer, "*lora_*", 8, 4, 0.05, 2.0, words=True, length=64, batch=2, seed=None
    ),
    "transformer, full": Case(_transformer, "*", 20, 32, 0.05, None, words=True),
    "transformer, partial": Case(_transformer, "!*layers*linear*", 20, 32, 0.05, None, words=True),
}


class Plain:
    """A plain PyTorch loop over the clients."""

    def __init__(
        self,
        case: Case,
        users: Users,
        clients: Sequence[int],
        threads: int,
        *,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        model = case.model()
        self.case, self.users, self.clients, self.threads = case, users, clients, threads
        self.module = model.module
        self.layout = layout
        for parameter in self.module.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        self.module.to(memory_format=layout)  # type: ignore[call-overload]
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
            for batch in torch.randperm(len(rows)).split(self.case.batch):
                optimizer.zero_grad()
                logits = self.module(x[batch])
                cross_entropy(logits.flatten(0, -2), y[batch].flatten()).backward()
                optimizer.step()
            with torch.no_grad():
                updates = [p - s for p, s in zip(self.trained, self.start, strict=True)]
                norm = torch.stack([d.norm() for d in updates]).norm()
                factor = min(1.0, CLIP / float(norm))
                for into, update in zip(total, updates, strict=True):
                    into.add_(factor * update)
        torch.set_num_threads(1)
        return torch.cat([t.flatten() for t in total])

    def cpu(self) -> float:
        """Return the processor seconds so far."""
        return time.process_time()

    def close(self) -> None:
        """Do nothing: there are no workers."""


class Engine:
    """The same work with the engine."""

    def __init__(self, case: Case, users: Users, clients: Sequence[int], workers: int) -> None:
        model = case.model()
        self.start = model.flat.clone()
        self.task = RoundTask(0, tuple(clients), CLIP, "benchmark")
        self.said: list[str] = []
        self.engine = EmbeddedEngine(
            model,
            users,
            local=case.local(),
            data_seed=0,
            workers=workers,
            precision=case.precision,
            sums=True,
            report=self.said.append,
        )

    def round(self) -> Tensor:
        """Return the sum of the clipped updates."""
        total = torch.zeros(len(self.start), dtype=torch.float64)
        sums = self.engine.sums(self.task, self.start)
        if sums is not None:
            for part in sums:
                total += part.total
            return total
        for update in self.engine.run(self.task, self.start):
            total += update.update
        return total

    def cpu(self) -> float:
        """Return the processor seconds so far."""
        pool = self.engine._pool
        pids = [w.process.pid for w in pool._workers] if pool else []
        return time.process_time() + sum(_cpu_of(pid) for pid in pids)

    def close(self) -> None:
        """End the workers."""
        self.engine.close()


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(case: Case, repeats: int, *, one_thread: bool = False) -> dict[str, Any]:
    """Measure all ways of a case in turns; of those on one thread, processor seconds alone."""
    users = case.users()
    clients = range(case.clients)
    ways: dict[str, Plain | Engine] = {
        "plain, 1 thread": Plain(case, users, clients, 1),
        "plain, 1 thread, channels last": Plain(
            case, users, clients, 1, layout=torch.channels_last
        ),
        "engine, 1 process": Engine(case, users, clients, 1),
    }
    if not one_thread:
        ways["plain, 2 threads"] = Plain(case, users, clients, 2)
        ways["engine, 2 workers"] = Engine(case, users, clients, 2)
    first, seconds_of, cpu = {}, {name: [] for name in ways}, {name: [] for name in ways}
    for name, way in ways.items():
        began = time.perf_counter()
        way.round()
        first[name] = time.perf_counter() - began
    for _ in range(repeats):
        for name, way in ways.items():
            seconds, processors = _turn(way)
            seconds_of[name].append(seconds)
            cpu[name].append(processors)
    said = list(ways.values())[-1].said
    for way in ways.values():
        way.close()
    rows = [
        {
            "way": name,
            "first_round_seconds": first[name],
            "wall_least": min(seconds_of[name]),
            "wall_median": statistics.median(seconds_of[name]),
            "wall_most": max(seconds_of[name]),
            "cpu_least": min(cpu[name]),
            "cpu_median": statistics.median(cpu[name]),
            "cpu_most": max(cpu[name]),
        }
        for name in ways
    ]
    by = {row["way"]: row for row in rows}
    alone = by["engine, 1 process"]
    layouts = [row for row in rows if row["way"].startswith("plain, 1 thread")]
    plain = {key: min(row[key] for row in layouts) for key in ("cpu_least", "cpu_median")}
    wall = {
        f"ratio_to_{name.replace(', ', '_').replace(' ', '_')}": by[name]["wall_least"]
        / by["engine, 2 workers"]["wall_least"]
        for name in ("plain, 2 threads", "plain, 1 thread")
        if not one_thread
    }
    return wall | {
        "ratio_cpu": plain["cpu_least"] / alone["cpu_least"],
        "ratio_cpu_median": plain["cpu_median"] / alone["cpu_median"],
        "target": case.target,
        "engine": said,
        "rows": rows,
    }


def _turn(way: Plain | Engine) -> tuple[float, float]:
    """Return wall-clock and processor seconds of a round, the mean over at least half a second.

    A first round is not counted, because threads of the previous way may still be spinning.
    """
    way.round()
    began, began_cpu, rounds = time.perf_counter(), way.cpu(), 0
    while rounds == 0 or time.perf_counter() - began < _TURN:
        way.round()
        rounds += 1
    return (time.perf_counter() - began) / rounds, (way.cpu() - began_cpu) / rounds


def main() -> None:
    """Write the results and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument(
        "--one-thread", action="store_true", help="only ratio_cpu, for a machine that is busy"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = {}
    for name in options.cases:
        cases[name] = measure(CASES[name], options.repeats, one_thread=options.one_thread)
        ratios = {k: v for k, v in cases[name].items() if k.startswith("ratio")}
        print(name, {k: round(v, 2) for k, v in ratios.items()}, flush=True)
        _write(options.result, cases, options.repeats)


def _write(path: Path, cases: dict[str, Any], repeats: int) -> None:
    document = {
        "method": {
            "round": "20 clients of 100 images, batches of 16, one epoch; or 100 clients of two "
            "images and one step; SGD, every update clipped to 1 and added up",
            "seconds": f"least, median and most of {repeats} turns of each way; a turn is half a "
            "second of rounds, after one that is not counted; ratios are of the least",
            "load": "load_average, on so many cores, says how shared the machine was. Two threads "
            "wait for each other on a busy machine: there ratio_to_plain_2_threads flatters the "
            "engine, and ratio_cpu is the one to trust",
        },
        "repeats": repeats,
        "machine": machine("torch") | {"threads": "as each row says"},
        "cases": cases,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
