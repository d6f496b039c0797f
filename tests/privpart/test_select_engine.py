"""Select engine: Algorithm 2 of the paper, its limits, and what it must equal exactly."""

import runpy

import numpy as np
import pytest
import torch
from plans import small_plan
from torch import nn
from torch.nn.functional import cross_entropy

from accounting import ConfigError, Independent
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    SeededSource,
    Server,
    ServerOptimizer,
    Users,
    fit,
)
from privpart.models import mcmahan_2nn, small_cnn, word_lm
from privpart.models.transformer import LANGUAGE_START
from privpart.select import (
    IndependentKeys,
    Layout,
    SelectEngine,
    SharedKeys,
    StructuredKeys,
    localize_tokens,
    random_top,
    top,
)
from privpart.select.key_spaces import cnn_filters, dense_neurons, lm_hidden, lm_words
from privpart.select.layout import deselect

BAG = runpy.run_path("examples/federated_select_shakespeare.py")
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = Users(
    torch.rand(18, 1, 8, 8, generator=GENERATOR), torch.arange(18) % 10, torch.arange(18).split(3)
)
WORDS = 15
TOKENS = torch.randint(0, WORDS, (18, 7), generator=GENERATOR)
SENTENCES = Users(TOKENS[:, :-1], TOKENS[:, 1:], torch.arange(18).split(3))
BAGS = Users(
    torch.stack([torch.randperm(WORDS, generator=GENERATOR)[:5] for _ in range(18)]),
    torch.arange(18) % 4,
    torch.arange(18).split(3),
)
LOCAL = LocalTraining(0.3, epochs=2, batch_size=2)


def cnn(filters=8):
    net = small_cnn(channels=(2, filters), hidden=6, image_size=8, groups=0)
    return PartialModel(net, seed=3, overwrite=True)


def two_layers(width=9):
    net = mcmahan_2nn(inputs=64, hidden=5, classes=10)
    net.dense1, net.dense2 = nn.Linear(64, width), nn.Linear(width, 5)
    return PartialModel(net, seed=3, overwrite=True)


def bag(words=WORDS):
    return PartialModel(BAG["WordBag"](words, 4), seed=None)


def lm(words=WORDS, hidden=10):
    net = word_lm(vocabulary=words, width=8, heads=2, hidden=hidden, layers=1)
    return PartialModel(net, seed=3, overwrite=True, initializers=LANGUAGE_START)


def counts(users, size=WORDS):
    def of(client):
        ids = users.x[users.indices[client]]
        return np.bincount(ids[ids >= 0].flatten(), minlength=size)

    return of


TASKS = {
    "cnn": (cnn, [cnn_filters(8)], IMAGES, None, lambda m: [IndependentKeys(8, m, data_seed=1)]),
    "2nn": (two_layers, [dense_neurons()], IMAGES, None, lambda m: [SharedKeys(9, m, seed=1)]),
    "bag": (
        bag,
        [BAG["BAG_WORDS"]],
        BAGS,
        BAG["localize_bags"],
        lambda m: [StructuredKeys(counts(BAGS), m, top, data_seed=1)],
    ),
    "lm": (
        lm,
        [lm_words(), lm_hidden(0)],
        SENTENCES,
        localize_tokens(),
        lambda m, d: [
            StructuredKeys(counts(SENTENCES), m, random_top, data_seed=1, always=(0,)),
            IndependentKeys(10, d, data_seed=1),
        ],
    ),
}


def select_engine(name, *m, **options):
    network, spaces, users, localize, choosers = TASKS[name]
    return SelectEngine(
        network(),
        spaces,
        network,
        **{"users": users, "local": LOCAL, "data_seed": 5, "localize": localize}
        | {"choosers": choosers(*m)}
        | options,
    )


def plain_engine(name, users=None):
    network, _, own, *_ = TASKS[name]
    return EmbeddedEngine(network(), users or own, local=LOCAL, data_seed=5, deterministic=True)


def server(start, *, clip_norm=0.5, rounds=3, goal=4):
    plan = small_plan(Independent(rounds), (rounds,), clip_norm=clip_norm, report_goal=goal)
    optimizer = ServerOptimizer(learning_rate=0.8, momentum=0.9)
    return Server(plan, start, source=SeededSource(0), optimizer=optimizer)


COHORTS = [[0, 1, 2, 3], [5, 2, 4], [1, 0, 3]]


def trained(engine, start, **options):
    own = server(start, **options)
    fit(own, engine, COHORTS)
    return own.parameters.detach()


@pytest.mark.parametrize(
    ("name", "sizes"), [("cnn", [8]), ("2nn", [9]), ("bag", [15]), ("lm", [15, 10])]
)
def test_all_keys_are_plain_federated_averaging_bit_for_bit(name, sizes):
    start = TASKS[name][0]().flat.clone()
    plain = trained(plain_engine(name), start)
    assert not torch.equal(plain, start)
    assert torch.equal(trained(select_engine(name, *sizes), start), plain)


def test_one_example_clients_train_exactly_the_whole_model():
    """Section 2.3, 0 ulp over three rounds of several steps: leaving absent words out is free."""
    users = Users(BAGS.x, BAGS.y, torch.arange(18).split(1))  # 5 words each: their support
    choosers = [StructuredKeys(counts(users), 5, top, data_seed=1)]
    engine = select_engine("bag", 5, users=users, choosers=choosers)
    start = bag().flat.clone()
    cohorts = [range(6), range(6, 12), range(3, 18)]
    results = []
    for one in (engine, plain_engine("bag", users)):
        own = server(start, clip_norm=1e6)
        fit(own, one, cohorts)
        results.append(own.parameters.detach())
    assert torch.equal(*results)
    assert results[0].abs().sum() > 0
    received = engine.ledger.bytes_down[0] / bag().flat.nbytes
    assert received == (5 * 4 + 4) / (WORDS * 4 + 4)


@pytest.mark.parametrize(("name", "sizes"), [("cnn", [3]), ("bag", [6]), ("lm", [6, 4])])
def test_a_round_is_the_papers_algorithm(name, sizes):
    """Server without noise == x + lr sum(deselect(updates, keys)) / N, to rounding."""
    network, spaces, *_ = TASKS[name]
    engine, start = select_engine(name, *sizes), network().flat.clone()
    own = server(start)
    updates = list(engine.run(own.task(COHORTS[0]), start))
    total = torch.zeros_like(start, dtype=torch.float64)
    client_layout = Layout.of(network(*sizes), spaces)
    for update in updates:
        chosen = [choose(0, update.client).for_training() for choose in engine.choosers]
        flat = torch.zeros(client_layout.dim)
        flat[client_layout.shared] = update.update[engine.layout.shared]
        for rows, table in zip(engine.layout.selected(chosen), client_layout.tables, strict=True):
            flat[table] = update.update[rows]
        total += deselect(engine.layout, client_layout, flat, chosen)
        assert flat.count_nonzero() == update.update.count_nonzero()  # nothing outside
    fit(own, engine, COHORTS[:1])
    torch.testing.assert_close(own.parameters.detach(), start + 0.8 * (total / 4).float())


def test_unselected_targets_do_not_count_and_the_softmax_is_over_the_selected():
    model, keys = lm(), (0, 2, 5, 6)
    tokens, targets = torch.tensor([[5, 9, 2]]), torch.tensor([[9, 2, 6]])
    x, y = localize_tokens()(tokens, targets, [keys])
    assert localize_tokens(unknown=6)(tokens, targets, [keys])[0].tolist() == [[2, 3, 1]]
    assert x.tolist() == [[2, 0, 1]]
    assert y.tolist() == [[-100, 1, 3]]
    # an unknown word reads as key 0, which the whole network sees as well
    logits = model.module(torch.tensor([[5, 0, 2]]))[0]
    restricted = logits[1:, list(keys)]
    small = lm(4)
    engine = select_engine("lm", 4, 10)
    rows = engine.layout.selected([keys, tuple(range(10))])
    client = Layout.of(small, [lm_words(), lm_hidden(0)])
    flat = torch.zeros(client.dim)
    flat[client.shared] = model.flat[engine.layout.shared]
    for table, row in zip(client.tables, rows, strict=True):
        flat[table] = model.flat[row]
    small.load(flat)
    ours = cross_entropy(small.module(x)[0], y[0])
    torch.testing.assert_close(ours, cross_entropy(restricted, torch.tensor([1, 3])))


def test_language_models_must_select_the_unknown_word():
    for unknown, keys in ((0, (1, 2)), (3, (0, 2, 4))):
        with pytest.raises(ConfigError, match=f"key {unknown}"):
            localize_tokens(unknown)(TOKENS, TOKENS, [keys])


def test_one_chooser_for_each_key_space():
    with pytest.raises(ConfigError, match="0 choosers for 1 key spaces"):
        select_engine("cnn", 3, choosers=[])
