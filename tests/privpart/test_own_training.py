"""Losses, batches, populations and models as other people have them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from accounting import ConfigError
from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users
from privpart.client import batch_loss
from privpart.data.index import batch_rows
from privpart.engines.methods import client_generator

pytestmark = pytest.mark.usefixtures("quick_workers")
TASK = RoundTask(0, (0, 1, 2, 3), 0.05, "plan")
LOCAL = LocalTraining(0.3, 2, 2)


class Population:
    """Fetches examples by id; the protocol asks for nothing else."""

    def __init__(self, examples):
        self._examples = examples

    @property
    def ids(self):
        return list(self._examples)

    def examples(self, client):
        return self._examples[client]


class Shifted(Population):
    """Moves every example at random each time that it is fetched."""

    def examples(self, client):
        x, y = self._examples[client]
        return x + torch.rand(()), y


class ByName(nn.Module):
    """Takes its inputs by name and returns an object with logits and a loss, as transformers do."""

    def __init__(self):
        super().__init__()
        self.dense, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, pixels, scale=None, labels=None):
        hidden = self.dense(pixels).tanh()
        logits = self.head(hidden if scale is None else hidden * scale[:, None])
        loss = None if labels is None else 2 * cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


def network():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def margin(module, batch):
    """A loss of one's own."""
    x, y = batch
    return (module(x) - nn.functional.one_hot(y, 3)).square().mean()


def jitter(batch):
    x, y = batch
    return x + 0.1 * torch.randn(x.shape), y


def short(batch):
    x, y = batch
    return x[:, :5], y


def pairs(clients=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        client: (
            torch.randn(3 + client % 3, 6, generator=generator),
            torch.randint(3, (3 + client % 3,), generator=generator),
        )
        for client in range(clients)
    }


def in_memory(examples):
    x, y = (torch.cat(parts) for parts in zip(*examples.values(), strict=True))
    rows = torch.arange(len(x)).split([len(own) for own, _ in examples.values()])
    return Users(x, y, list(rows))


def partial(build=network, **options):
    return PartialModel(build, seed=3, **options)


def engine(clients, model=None, local=LOCAL, **options):
    options = {"data_seed": 5, "report": lambda _: None} | options
    return EmbeddedEngine(model or partial(), clients, local=local, **options)


def updates(clients, model=None, local=LOCAL, task=TASK, **options):
    with engine(clients, model, local, **options) as one:
        return {u.client: u.update for u in one.run(task, one.model.flat.clone())}


def same(found, expected):
    return found.keys() == expected.keys() and all(found[c].equal(expected[c]) for c in found)


# Losses.


def test_losses_by_name_are_those_of_torch():
    x, y = pairs()[2]
    module, named = network(), ByName()
    values, tags = torch.randn(len(x), 3), torch.ones(len(x), 3)
    assert batch_loss(module, (x, y)).equal(cross_entropy(module(x), y))
    found = batch_loss(module, [x, values], "mean_squared_error")
    assert found.equal(mse_loss(module(x), values))
    found = batch_loss(module, (x, tags.long()), "binary_cross_entropy")
    assert found.equal(binary_cross_entropy_with_logits(module(x), tags))
    assert batch_loss(named, {"pixels": x, "labels": y}).equal(cross_entropy(named(x).logits, y))
    scale = torch.rand(len(x))
    expected = cross_entropy(named(x, scale).logits, y)
    assert batch_loss(named, ({"pixels": x, "scale": scale}, y)).equal(expected)
    assert batch_loss(named, {"pixels": x, "scale": scale, "label": y}).equal(expected)
    batch = {"pixels": x, "labels": y}
    assert batch_loss(named, batch, "model").equal(named(x, labels=y).loss)
    assert batch_loss(module, (x, y), margin).equal(margin(module, (x, y)))


def test_a_prediction_is_compared_with_its_own_value_alone():
    """(n, 1) less (n,) is (n, n) in torch, and its mean another loss."""
    module, x, y = nn.Linear(6, 1), torch.randn(4, 6), torch.arange(4)
    expected = mse_loss(module(x)[:, 0], y.float())
    assert batch_loss(module, (x, y), "mean_squared_error").equal(expected)
    with pytest.raises(ConfigError, match=r"shape \(4, 1\) for labels of shape \(4, 2\)"):
        batch_loss(module, (x, torch.rand(4, 2)), "mean_squared_error")


def raising(_module, _batch):
    raise KeyError("weights")


X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
FAULTS = {
    "a vector": (lambda m, b: m(b[0]).sum(dim=1), (X, Y), r"loss=.*shape \(4,\).*must return"),
    "a number": (lambda m, b: 1.0, (X, Y), "returned a float; must return the mean loss"),
    "no graph": (lambda m, b: m(b[0]).mean().detach(), (X, Y), "no parameter that trains"),
    "raises": (
        raising,
        (X, Y),
        r"loss=raising: KeyError: 'weights' \(.*test_own_training.py, line",
    ),
    "label": ("cross_entropy", (X, Y + 1), "label 3 is out of range; the network has 3 outputs"),
    "types": ("cross_entropy", (X.double(), Y), r"RuntimeError.*examples\[0\] float64 \(4, 6\)"),
    "shape": ("cross_entropy", (X[:, :5], Y), r"loss='cross_entropy': RuntimeError.*\(4, 5\)"),
    "alone": ("cross_entropy", X, "must be a pair"),
    "unnamed": ("mean_squared_error", {"x": X, "y": Y}, r"examples\['x'\].*named labels"),
    "no loss": ("model", (X, Y), "TypeError|returned no loss"),
    "a reference": ("./task.py:loss", (X, Y), "names a function that was not loaded"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_a_loss_is_one_sentence(name):
    loss, batch, says = FAULTS[name]
    with pytest.raises(ConfigError, match=says) as caught:
        batch_loss(network(), batch, loss)
    assert "\n" not in str(caught.value)


class Next(nn.Module):
    """A language model."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids, attention_mask=None):
        return SimpleNamespace(logits=self.head(self.table(input_ids)))


def test_a_language_model_that_would_learn_to_copy_is_refused():
    words = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    padded = words.clone()
    padded[1, 3] = -100
    for labels in (words, padded):
        with pytest.raises(ConfigError, match=r"would learn to copy\. Use loss='model'"):
            batch_loss(Next(), {"input_ids": words, "labels": labels})
        with pytest.raises(ConfigError, match="would learn to copy"):
            batch_loss(Next(), (words, labels))
    shifted = words.roll(-1, 1)
    masked = torch.full_like(words, -100)
    masked[0, 1] = 2  # one word to guess, which the mask left as it was
    repeated = torch.ones_like(words)  # the next word is the same one
    for ids, labels in ((words, shifted), (words, masked), (repeated, repeated)):
        assert batch_loss(Next(), {"input_ids": ids, "labels": labels}).isfinite()


@pytest.mark.parametrize("value", ["hinge", 3, None, "", b"a:b"])
def test_a_loss_is_a_name_a_function_or_a_reference(value):
    with pytest.raises(ConfigError, match=r"loss=.*must be one of cross_entropy, .*a function"):
        LocalTraining(0.1, loss=value)
    if value is not None:
        with pytest.raises(ConfigError, match=r"augment=.*must be a function"):
            LocalTraining(0.1, augment=value)
    assert LocalTraining(0.1, loss="./task.py:loss", augment="task:crops").augment == "task:crops"


# Batches that are not pairs.


@pytest.mark.parametrize("loss", ["cross_entropy", "model"])
def test_a_client_with_a_dict_takes_the_steps_of_one_with_a_pair(loss):
    def twice(module, batch):
        return 2 * cross_entropy(module(batch[0]).logits, batch[1])

    dicts = {client: {"pixels": x, "labels": y} for client, (x, y) in pairs().items()}
    model, local = partial(ByName, train=["head.*"]), replace(LOCAL, loss=loss)
    found = updates(Population(dicts), model, local)
    expected = replace(LOCAL, loss=twice if loss == "model" else loss)
    assert same(found, updates(Population(pairs()), model, expected))
    assert min(update.norm() for update in found.values()) > 0.01


# Populations.


@pytest.mark.parametrize(("workers", "loss"), [(1, margin), (2, "cross_entropy"), (2, margin)])
def test_a_population_that_fetches_gets_the_updates_of_users_bit_for_bit(workers, loss):
    local = replace(LOCAL, loss=loss)
    expected = updates(in_memory(pairs()), local=local, deterministic=True)
    found = updates(Population(pairs()), local=local, workers=workers, deterministic=True)
    assert same(found, expected)
    assert sum(update.norm() > 0.02 for update in found.values()) == 4


SUM = LocalTraining(0.3, batch_size=4, steps=1)


@pytest.mark.parametrize(
    ("clients", "local", "options"),
    [
        (in_memory, LOCAL, {"batching": "loop"}),
        (in_memory, LOCAL, {"batching": "loop", "workers": 2}),
        (in_memory, LOCAL, {"batching": "vmap"}),
        (in_memory, SUM, {"batching": "vmap"}),
        (in_memory, SUM, {}),
        (Population, LOCAL, {"workers": 2}),
        (Population, LOCAL, {}),
    ],
)
def test_a_fault_names_the_client(clients, local, options):
    examples = pairs(40) | {33: (torch.randn(4, 6), torch.tensor([0, 1, 3, 0]))}
    task = replace(TASK, clients=tuple(range(40)))
    with pytest.raises(ConfigError, match=r"^client 33: .*label 3 is out of range"):
        updates(clients(examples), local=local, task=task, **options)
    if clients is Population:
        task, words = replace(TASK, clients=(99,)), "its examples cannot be fetched: KeyError: 99"
        with pytest.raises(ConfigError, match=f"^client 99: {words}"):
            updates(clients(examples), task=task, **options)


def test_thousands_of_tensors_reach_the_workers():
    """Each as shared memory of its own would need a file descriptor."""
    many = pairs(1500)
    many[7] = (torch.randn(2**16, 6), torch.randint(3, (2**16,)))  # large enough for its own
    task = replace(TASK, clients=(7, 1499))
    local = LocalTraining(0.3, batch_size=2**15)
    found = updates(Population(many), task=task, local=local, workers=2)
    assert same(found, updates(Population(many), task=task, local=local, deterministic=True))


def test_what_cannot_be_sent_to_workers_is_one_sentence():
    class Here(Population):
        pass

    with pytest.raises(ConfigError, match=r"workers=2: the clients cannot be sent.*top level"):
        updates(Here(pairs()), workers=2)
    local = replace(LOCAL, loss=lambda *both: 2 * margin(*both))
    with pytest.raises(ConfigError, match="workers=2: the loss or augment cannot be sent"):
        updates(Population(pairs()), local=local, workers=2)
    assert updates(Population(pairs()), local=local)


@pytest.mark.parametrize(
    ("clients", "augment", "parts", "words"),
    [
        (Population, None, [], "are fetched or augmented"),
        (in_memory, jitter, [], "are fetched or augmented"),
        (in_memory, None, ["0.*"], "keep a local part"),
    ],
)
def test_clients_that_cannot_be_vectorized_are_refused(clients, augment, parts, words):
    model, local = partial(train=["2.*"], local=parts), replace(LOCAL, augment=augment)
    with pytest.raises(ConfigError, match=words):
        engine(clients(pairs()), model, local, batching="vmap")


# Augmentation.


@pytest.mark.parametrize(
    ("clients", "augment"), [(Shifted, None), (in_memory, jitter), (Population, jitter)]
)
def test_draws_of_fetching_and_augmenting_are_of_round_and_client(clients, augment):
    """All clients hold the same examples and take one step on all of them."""
    local = LocalTraining(0.3, 1, 8, augment=augment)
    alike = {client: (pairs()[2][0].clone(), pairs()[2][1]) for client in range(4)}
    population, second = clients(alike), replace(TASK, round=1, clip_norm=1e6)
    first = replace(TASK, clip_norm=1e6)
    with engine(population, local=local) as one:
        outside = torch.get_rng_state()
        forth = {u.client: u.update for u in one.run(first, one.model.flat.clone())}
        assert torch.get_rng_state().equal(outside)
    back = updates(population, local=local, task=replace(first, clients=(3, 2, 1, 0)))
    assert same(back, forth)
    assert same(updates(population, local=local, task=first, workers=2), forth)
    later = updates(population, local=local, task=second)
    drawn = torch.stack([*forth.values(), *later.values()])
    assert torch.pdist(drawn).min() > 1e-4
    plain = updates(Population(alike), local=replace(local, augment=None), task=second)
    assert torch.pdist(torch.stack([*plain.values()])).max() < 1e-6
    assert alike[0][0].equal(pairs()[2][0])


def test_an_augmented_example_passes_through_the_frozen_layers_again():
    """A cache of their outputs would train on the example that was not augmented."""
    local = [LOCAL, replace(LOCAL, augment=jitter)]
    with engine(in_memory(pairs()), partial(train=["2.*"]), local.__getitem__) as one:
        start = one.model.flat.clone()
        list(one.run(TASK, start))
        assert one._computation.features is not None
        found = {u.client: u.update for u in one.run(replace(TASK, round=1), start)}
    expected = updates(
        Population(pairs()), partial(train=["2.*"]), local[1], replace(TASK, round=1)
    )
    assert same(found, expected)


def test_what_is_wrong_with_an_augmentation_is_one_sentence():
    for augment, says in (
        (lambda batch: (batch[0][:0], batch[1][:0]), "returned no examples"),
        (lambda batch: None, "NoneType"),
        (lambda batch: batch[0].nothing, r"AttributeError.*nothing.*test_own_training"),
        (short, r"\(2, 5\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            updates(Population(pairs()), local=replace(LOCAL, augment=augment))


# Parts that never leave the client.


def personal(**options):
    return partial(train=["0.*"], local=["2.*"], **options)


@pytest.mark.parametrize(
    ("clients", "options"),
    [
        (in_memory, {}),
        (Population, {"momentum": 0.5}),
        (in_memory, {"optimizer": "adam", "learning_rate": 0.05}),
    ],
)
def test_a_local_part_trains_on_from_round_to_round_and_is_not_sent(clients, options):
    local, kept = replace(LOCAL, **options), {}
    with engine(clients(pairs()), personal(), local) as one:
        model = one.model
        first = model.own.clone()
        start = model.flat.clone()
        for number in range(2):
            task = replace(TASK, round=number, clip_norm=1e6)
            for update in one.run(task, start):
                assert update.update.shape == (35,)
                after, kept[update.client] = by_hand(
                    update.client, number, kept.get(update.client), local
                )
                torch.testing.assert_close(update.update, after, rtol=1e-4, atol=1e-6)
                assert model.own.equal(first)  # nobody sees it after the client
            for client, own in kept.items():
                torch.testing.assert_close(one.own_part(client), own, rtol=1e-4, atol=1e-6)
                assert (own - first).norm() > 0.01


def by_hand(client, number, own, local):
    """Train all of it by torch's optimiser; return the first layer's change, and the last layer."""
    module = partial().module
    if own is not None:
        nn.utils.vector_to_parameters(own, module[2].parameters())
    x, y = pairs()[client]
    before = nn.utils.parameters_to_vector(module[0].parameters()).detach().clone()
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    options = {"momentum": local.momentum} if local.momentum else {}
    optimizer = kinds[local.optimizer](module.parameters(), lr=local.learning_rate, **options)
    for rows in batch_rows(local, len(x), client_generator(5, number, client)):
        optimizer.zero_grad()
        cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
    after = nn.utils.parameters_to_vector(module[0].parameters()).detach()
    return after - before, nn.utils.parameters_to_vector(module[2].parameters()).detach()


def test_local_parts_follow_from_a_finished_round_that_did_not_diverge():
    examples = pairs() | {1: (torch.full((3, 6), torch.nan), torch.tensor([0, 1, 2]))}
    with engine(Population(examples), personal()) as one:
        start = one.model.flat.clone()
        interrupted = one.run(TASK, start)
        first = next(interrupted).update
        interrupted.close()
        assert one.own_part(0) is None
        again = {u.client: u.update for u in one.run(TASK, start)}
    assert again[0].equal(first)
    assert [bool(u.isfinite().all()) for u in again.values()] == [True, False, True, True]
    kept = [one.own_part(client) for client in range(4)]
    assert [own is None for own in kept] == [False, True, False, False]
