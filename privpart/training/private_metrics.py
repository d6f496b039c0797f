"""Private metrics of a plan: who evaluates, what they measure, and when a run releases it.

``privpart.noise.metrics`` adds the noise. Here each user's numbers are computed, from the model
that a round released and from the user's own examples alone; and the noised means are committed to
the run, and written to a file that may be published.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.client import Loss, batch_loss, called, inputs_and_labels
from privpart.data.batches import Batch, count_rows, take
from privpart.data.clients import Clients
from privpart.engines.methods import client_generator, fetched, naming
from privpart.loop import Callback, RoundRecord
from privpart.messages import ClientId, id_order
from privpart.model import PartialModel, logits_of
from privpart.noise.metrics import MetricsRelease, evaluation_users
from privpart.noise.source import NoiseSource
from privpart.run.folder import RunFolder
from privpart.run.noised_metrics import noised_metrics
from privpart.run.store import write_durably
from privpart.server import Server
from privpart.training.metric import number_of
from privpart.training.plan_file import MetricsTable
from privpart.training.task_data import chosen, holders

FILE = "noised-metrics.jsonl"
Measure = Callable[[nn.Module, Batch], float]
"""Maps a module, in evaluation mode, and the examples of one user to a number."""
Restore = Callable[[Server], None]
"""Puts a server into the state of a run that is resumed."""
_ROWS = 500
"""Examples of one user that are computed together."""


@dataclass(frozen=True, slots=True)
class Evaluators:
    """The users who evaluate, and what each measures.

    Attributes:
        users: who evaluate.
        measures: what measures, by name of the metric.
        data_seed: of the random numbers that fetching examples may draw.
        also_train: whether they train, too.
    """

    users: Clients
    measures: Mapping[str, Measure]
    data_seed: int
    also_train: bool

    def vectors(
        self, model: PartialModel, flat: Tensor, round_: int
    ) -> Iterator[tuple[ClientId, Tensor]]:
        """Yield each user's numbers about the model with the flat vector, shape (m,)."""
        whole = flat.clone()
        for client in self.users.ids:
            generator = client_generator(self.data_seed, round_, client)
            examples = fetched(self.users, client, generator)
            # Lent, so that nothing that one user leaves in the module reaches the next one.
            with model.lent(whole), naming(client):
                numbers = [
                    number_of(partial(_of_user, measure, examples), model.module, name)
                    for name, measure in self.measures.items()
                ]
            yield client, torch.tensor(numbers, dtype=torch.float64)
        model.verify()

    def rehearse(self, model: PartialModel, flat: Tensor) -> None:
        """Measure two users in turn, twice.

        Raises:
            ConfigError: a metric fails, does not return a number, or keeps something of a user:
                then one user would change what another one sends.
        """
        pair = islice(holders(self.users, self.users.ids, self.data_seed, 0), 2)
        few = replace(self, users=chosen(self.users, [client for client, *_ in pair]))
        first, second = (list(few.vectors(model, flat, 0)) for _ in range(2))
        for (client, before), (_, after) in zip(first, second, strict=True):
            if not torch.equal(before.nan_to_num(), after.nan_to_num()):
                raise ConfigError(
                    f"privacy.metrics.measures: client {client!r} was measured twice, with another "
                    "one in between, and gave two different numbers. A metric must keep nothing "
                    "between users, and draw nothing at random."
                )


def _of_user(measure: Measure, examples: Batch, module: nn.Module) -> float:
    # Of a user without examples there is no number; NaN counts as 0.
    return measure(module, examples) if count_rows(examples) else math.nan


def split(
    clients: Clients,
    table: MetricsTable,
    loss: str | Loss,
    code: Mapping[str, Callable[..., Any]],
    data_seed: int,
) -> tuple[Clients, Evaluators]:
    """Return the clients who train, and those who evaluate, who do not unless asked to.

    Args:
        clients: the population.
        table: of the plan.
        loss: of the clients' training, which the metric "loss" measures.
        code: what the plan names, by key.
        data_seed: of the plan.
    """
    evaluate = frozenset(evaluation_users(clients.ids, table.users))
    builtin: dict[str, Measure] = {
        "accuracy": _accuracy,
        "loss": partial(_loss, loss=loss, bound=table.loss_bound or 1.0),
    }
    evaluators = Evaluators(
        chosen(clients, sorted(evaluate, key=id_order)),
        {name: builtin.get(key) or code[key] for name, key in table.by_name().items()},
        data_seed,
        table.also_train,
    )
    if table.also_train:
        return clients, evaluators
    return chosen(clients, [one for one in clients.ids if one not in evaluate]), evaluators


def _accuracy(module: nn.Module, examples: Batch) -> float:
    """Return the share of right labels; NaN, which counts as 0, of a user without labels."""
    right = total = 0
    for batch in _batches(examples):
        inputs, labels = inputs_and_labels(batch, "accuracy")
        outputs = logits_of(called(module, inputs))
        right += int((outputs.argmax(dim=-1) == labels).sum())
        total += int((labels >= 0).sum())
    return right / total if total else math.nan


def _loss(module: nn.Module, examples: Batch, *, loss: str | Loss, bound: float) -> float:
    """Return the mean loss as a share of the bound, which one that is not finite counts as."""
    total = 0.0
    for batch in _batches(examples):
        # which refuses a loss that no parameter reaches
        with torch.enable_grad():
            total += float(batch_loss(module, batch, loss).detach()) * count_rows(batch)
    share = total / count_rows(examples) / bound
    # As 0 it would be the best of all: that of a model that diverged.
    return share if math.isfinite(share) else 1.0


def _batches(examples: Batch) -> Iterator[Batch]:
    for rows in torch.split(torch.arange(count_rows(examples)), _ROWS):
        yield take(examples, rows)


def released_metrics(
    run: RunFolder,
    evaluators: Evaluators | None,
    model: PartialModel,
    whole: Callable[[Tensor], Tensor],
    source: NoiseSource,
    restore: Restore,
) -> tuple[list[Callback], Restore]:
    """Return callbacks of ``fit`` that release what is due, and what restores a server.

    None and ``restore`` if nobody evaluates. ``whole`` makes the model's flat vector of the
    server's parameters; ``source`` is that of the run's noise.
    """
    if evaluators is None:
        return [], restore
    release = MetricsRelease(run.plan, source, evaluators.users.ids, done=len(run.evaluations))
    servers: list[Server] = []

    def evaluate(_: RoundRecord | None = None) -> None:
        """Measure, noise and commit the newest model if that is due; only then show it."""
        if run.evaluation_due:
            newest, flat = run.rounds - 1, whole(servers[-1].parameters)
            release.release(newest, evaluators.vectors(model, flat, newest))
            run.commit_metrics(release)
            write(run)

    def resume(server: Server) -> None:
        restore(server)
        servers.append(server)
        # What a crash left open is evaluated under new noise, before another round.
        evaluate()
        # A crash may have come between a commit and the file.
        if run.evaluations:
            write(run)

    return [evaluate], resume


def write(run: RunFolder) -> None:
    """Write all committed metrics into a file that may be published, a line per evaluation."""
    lines = (json.dumps(row, allow_nan=False) for row in noised_metrics(run.path).rows())
    write_durably(run.path / FILE, "".join(f"{line}\n" for line in lines).encode())
