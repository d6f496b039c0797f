"""Models of an audit of extraction: whose text gets a secret, and what each model says of secrets.

For each model, half of the users are carriers. A fair coin decides of each whether it takes part,
with its secret among its examples, or stays out, which is the zero of the plan's guarantee; all
other users take part as they are. Secrets, and the reference that they are compared with, are
sequences of tokens drawn at random, anew for each model.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.cli.audit.membership_models import Coins, Draw, Population, released, trained
from privpart.client import called, inputs_and_labels
from privpart.data.arrays import from_tensors
from privpart.data.batches import Batch, count_rows, leaves_of, map_leaves, map_tensors, take
from privpart.engines.embedded import EmbeddedEngine
from privpart.model import logits_of

Array = NDArray[np.float64]
REFERENCE = 4095
"""Random sequences that a secret is ranked among: exposure ends at 12 bits."""
COPIES = (1, 8)
"""How often a secret stands among a user's examples; carriers take turns."""
_SECRETS = 200  # in all models, at least
_LABELS = 8  # of a secret, where an example has a single label
_LEAST = 4  # tokens that have to be continued, for an example to count
_ROWS = 256  # examples that a network gets at once
_MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class Text:
    """How the examples of a plan hold text.

    Attributes:
        length: tokens of an example, T.
        labels: T if there is a label for each position, 1 if only for what follows the last.
        shifted: whether the label of a position is the token after it (else that token itself,
            which the network shifts).
        vocabulary: outputs of the network, of which each is a token.
        like: an example, (1, ...).
    """

    length: int
    labels: int
    shifted: bool
    vocabulary: int
    like: Batch

    @classmethod
    def of(cls, population: Population) -> "Text":
        """Return how a plan holds text.

        Raises:
            ConfigError: it does not predict a next token, or its examples differ in length.
        """
        setup = population.setup
        shapes, repeats, largest = set(), True, 0
        for x, y in map(_parted, map(setup.clients.examples, population.users)):
            shapes.add((x.shape[1], 1 if y.dim() == 1 else y.shape[1]))
            repeats &= x.shape == y.shape and bool(((y == x) | (y < 0)).all())
            largest = max(largest, int(x.max()), int(y.max()))
        if len(shapes) > 1 or (sizes := shapes.pop())[1] not in (1, sizes[0]):
            raise ConfigError(
                "clients: secrets need examples of one length, with a label for each token or one "
                f"in all; tokens and labels of an example are {sorted(shapes) or sizes}."
            )
        like = map_tensors(lambda t: t[:1], setup.clients.examples(population.users[0]))
        module = released(setup, setup.start)
        with torch.no_grad():
            outputs = logits_of(called(module, inputs_and_labels(like, "extraction")[0])).shape
        tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
        tokens = outputs[-1] > largest and (sizes[1] > 1 or {*tables} <= {outputs[-1]})
        if not tokens or outputs[:-1].numel() != sizes[1] or sizes[0] < 2 * _LEAST:
            raise _no_text(f"the network returns {tuple(outputs)} for tokens of (1, {sizes[0]})")
        return cls(*sizes, not repeats, outputs[-1], like)

    @property
    def size(self) -> int:
        """Tokens of a secret."""
        return self.length + (_LABELS if self.labels == 1 else int(self.shifted))

    def examples(self, sequences: Tensor) -> Batch:
        """Return sequences, (m, size), as examples: of each, one or ``_LABELS``."""
        if self.labels == 1:
            x = sequences.unfold(1, self.length, 1)[:, :-1].flatten(0, 1)
            y = sequences[:, self.length :].flatten()
        else:
            x, y = sequences[:, : self.length], sequences[:, -self.length :]
        _, labels = inputs_and_labels(self.like, "extraction")

        def filled(leaf: Tensor, name: str) -> Tensor:
            if leaf is labels:
                return y
            return torch.ones_like(x, dtype=leaf.dtype) if _MASK in name else x.to(leaf.dtype)

        return map_leaves(filled, self.like)

    @torch.no_grad()
    def read(self, module: nn.Module, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield labels, their log-likelihoods and whether each is the likeliest, all (n, labels).

        Labels that do not count are below 0, and so is the first where the network shifts.
        """
        x, _ = _parted(batch)
        for rows in torch.split(torch.arange(len(x)), _ROWS):
            inputs, y = inputs_and_labels(take(batch, rows), "extraction")
            logits = logits_of(called(module, inputs)).log_softmax(-1)
            y = y.reshape(len(rows), -1)
            logits = logits.reshape(len(rows), y.shape[1], -1)
            if not self.shifted and self.labels > 1:
                logits, y = logits[:, :-1], y[:, 1:]
            chosen = logits.gather(2, y.clamp(min=0).unsqueeze(2)).squeeze(2)
            yield y, chosen, logits.argmax(2) == y


@dataclass(frozen=True, slots=True)
class Planted:
    """Secrets of one model.

    Attributes:
        carriers: places of the users that carry one, (m,).
        copies: of each carrier's secret, (m,).
        secrets: (m, size) tokens.
        reference: (N, size) tokens.
    """

    carriers: NDArray[np.int64]
    copies: NDArray[np.int64]
    secrets: Tensor
    reference: Tensor

    @classmethod
    def of(cls, text: Text, users: int, seed: int) -> "Planted":
        """Draw the secrets of a model, by a seed of its own."""
        draws = np.random.default_rng([seed, 1])  # 1: the noise has this seed, too
        carriers = draws.permutation(users)[: users // 2]
        tokens = draws.integers(text.vocabulary, size=(len(carriers) + REFERENCE, text.size))
        copies = np.resize(COPIES, len(carriers))
        drawn = torch.from_numpy(tokens)
        return cls(carriers, copies, drawn[: len(carriers)], drawn[len(carriers) :])

    def members(self, coins: Coins) -> Coins:
        """Return who takes part: whoever carries nothing, and of the carriers whom a coin chose."""
        members = np.ones_like(coins)
        members[self.carriers] = coins[self.carriers]
        return members

    def population(self, population: Population, text: Text) -> Population:
        """Return the population with each carrier's secret among its examples."""
        setup, users = population.setup, population.users
        parts = [setup.clients.examples(user) for user in users]
        owners = [u for u, own in zip(users, parts, strict=True) for _ in range(count_rows(own))]
        for place, copies, secret in zip(self.carriers, self.copies, self.secrets, strict=True):
            parts.append(text.examples(secret.repeat(int(copies), 1)))
            owners += [users[place]] * count_rows(parts[-1])
        columns = zip(*(dict(leaves_of(part)).values() for part in parts), strict=True)
        joined = map(torch.cat, columns)
        clients = from_tensors(map_tensors(lambda _: next(joined), text.like), user=owners)
        engine = setup.engine
        assert isinstance(engine, EmbeddedEngine)  # noqa: S101  setup_of refuses others
        trainer = EmbeddedEngine(
            engine.model,
            clients,
            local=engine.local,
            data_seed=engine.data_seed,
            report=lambda _: None,
            **asdict(engine.options),
        )
        return replace(population, setup=replace(setup, trainer=trainer))


def models_needed(users: int) -> int:
    """Return how many models have enough secrets in all."""
    return -(-_SECRETS // (users // 2))


def said_of_secrets(
    population: Population, text: Text, draw: Draw, number: int
) -> dict[str, Array]:
    """Train a model with secrets; return what it says of them and of the users' own text.

    ``secrets`` (m,) and ``reference`` (N,) are log-likelihoods; ``reproduced`` (m,) is 1 for a
    secret whose second half is what greedy decoding makes of its first; ``windows`` (2, users) are
    examples of each user that were continued, and how many of them word for word.
    """
    seed = draw.seed + number
    planted = Planted.of(text, len(population.users), seed)
    members = planted.members(draw.coins[number])
    setup = population.setup
    module = released(setup, trained(planted.population(population, text), members, seed))
    sequences = torch.cat([planted.secrets, planted.reference])
    read = [*text.read(module, text.examples(sequences))]
    y, likely, greedy = (torch.cat(parts) for parts in zip(*read, strict=True))
    scores = likely.double().reshape(len(sequences), -1).sum(1).numpy()
    if text.labels == 1:
        y, greedy = (values.reshape(len(sequences), -1) for values in (y, greedy))
        right = greedy.all(1)
    else:
        right = _continued(y, greedy)[1]
    m = len(planted.secrets)
    windows = np.zeros((2, len(population.users)))
    if text.labels > 1:
        for place, user in enumerate(population.users):
            for labels, _, hits in text.read(module, setup.clients.examples(user)):
                counted, same = _continued(labels, hits)
                windows[:, place] += int(counted.sum()), int((counted & same).sum())
    return {
        "secrets": scores[:m],
        "reference": scores[m:],
        "reproduced": right[:m].double().numpy(),
        "windows": windows,
    }


def _continued(y: Tensor, greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows have a second half to continue, and where greedy decoding has all of it.

    As long as the tokens before are right, the likeliest token is the one that is decoded next.
    """
    counts = (y >= 0).cumsum(1)
    second = (y >= 0) & (2 * counts > counts[:, -1:])
    return second.sum(1) >= _LEAST, (greedy | ~second).all(1)


def _parted(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return tokens, (n, T), and labels of examples; refuse what does not hold tokens."""
    inputs, y = inputs_and_labels(batch, "extraction")
    if isinstance(inputs, dict):
        inputs = [value for name, value in inputs.items() if name != _MASK]
        inputs = inputs[0] if len(inputs) == 1 else inputs
    whole = isinstance(inputs, Tensor) and not inputs.is_floating_point() and inputs.dim() == 2
    if not whole or y.is_floating_point() or y.dim() > 2:
        raise _no_text("examples hold no token ids of shape (n, T) with labels (n, T) or (n,)")
    return inputs, y


def _no_text(why: str) -> ConfigError:
    return ConfigError(
        f"plan: is not one of next tokens: {why}. Secrets are planted in text, {2 * _LEAST} tokens "
        "an example or more, whose next tokens a network predicts; audit other plans with "
        "privpart audit membership."
    )
