"""Deliveries: bit for bit the same updates, other ledgers, and who saw what."""

import pickle
from functools import cache

import pytest
import torch

from accounting import ConfigError
from privpart import LocalTraining, PartialModel, RoundTask, Users
from privpart.models import small_cnn
from privpart.select import (
    DeviceOnly,
    IndependentKeys,
    SelectEngine,
    SelectLedger,
    SharedKeys,
    broadcast,
    on_demand,
    pregenerated,
    private,
    private_retrieval,
)
from privpart.select.key_spaces import cnn_filters

DELIVERIES = [broadcast, on_demand, pregenerated, private]
X = torch.randn(11, 5, generator=torch.Generator().manual_seed(0))
KEYS = {3: (4, 0, 10), 8: (4,), 5: (2, 1, 0, 4)}


def deliver(delivery, keys=KEYS):
    ledger = SelectLedger()
    fetch = delivery(X, ledger)
    return [fetch(c, "words", DeviceOnly(own)) for c, own in keys.items()], ledger


ROW = 5 * 4  # bytes
SLICES, KEY_LISTS = {3: 3 * ROW, 8: ROW, 5: 4 * ROW}, {3: 12, 8: 4, 5: 16}
ASKED = "number of words keys"


@pytest.mark.parametrize(
    ("delivery", "down", "up", "seen"),
    [
        (broadcast, dict.fromkeys(KEYS, 11 * ROW), {}, {}),
        (on_demand, SLICES, KEY_LISTS, {"server": "words keys"}),
        (pregenerated, SLICES, KEY_LISTS, {"store": "words keys"}),
        # 11 keys are 2 bytes, to each of two stores; the slice comes from both
        (
            private,
            {client: 2 * size for client, size in SLICES.items()},
            KEY_LISTS,
            {"store": ASKED, "second store": ASKED},
        ),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_every_delivery_is_the_primitive_and_has_its_own_price(delivery, down, up, seen):
    slices, ledger = deliver(delivery)
    assert all(map(torch.equal, slices, [X[list(own)] for own in KEYS.values()]))
    assert (dict(ledger.bytes_down), dict(ledger.bytes_up)) == (down, up)
    assert ledger.sightings == set(seen.items())


def test_stores_of_private_retrieval_read_nothing_but_queries(monkeypatch):
    """The same coins and another key: the first store's view is the same, bit for bit."""
    monkeypatch.setattr(private_retrieval.secrets, "token_bytes", lambda n: bytes(range(n)))
    views = []
    answers = private_retrieval.products

    def spy(records, asked):
        views.append(asked.tobytes())
        return answers(records, asked)

    monkeypatch.setattr(private_retrieval, "products", spy)
    for key in (0, 7):
        deliver(private, keys={1: (key,)})
    assert views[0] == views[2]
    assert views[1] != views[3]  # the second sees the same distribution, other bits


def network(filters=8):
    module = small_cnn(channels=(2, filters), hidden=8, image_size=8, groups=0)
    return PartialModel(module, seed=3, overwrite=True)


USERS = Users(
    torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
    torch.arange(12) % 10,
    torch.arange(12).split(3),
)


@cache
def round_of(delivery, chooser):
    server = network()
    engine = SelectEngine(
        server,
        [cnn_filters(8)],
        network,
        USERS,
        local=LocalTraining(0.2, epochs=2, batch_size=2),
        choosers=[chooser],
        data_seed=5,
        delivery=delivery,
    )
    task = RoundTask(1, (2, 0, 3), 0.5, "plan")
    return [u.update for u in engine.run(task, server.flat.clone())], engine.ledger


def test_public_keys_are_a_broadcast_and_nobody_sees_anything():
    _, ledger = round_of(private, SharedKeys(8, 3, seed=4))
    assert not ledger.sightings
    small = network(3).flat.nbytes
    assert set(ledger.bytes_down.values()) == set(ledger.bytes_up.values()) == {small}


def test_bytes_of_a_round_are_those_of_the_small_model_and_its_keys():
    _, ledger = round_of(pregenerated, IndependentKeys(8, 3, data_seed=4))
    small = network(3).flat.nbytes
    assert set(ledger.bytes_down.values()) == {small}
    assert set(ledger.bytes_up.values()) == {small + 2 * 3 * 4}  # keys go to store and aggregator
    _, whole = round_of(broadcast, IndependentKeys(8, 3, data_seed=4))
    assert set(whole.bytes_down.values()) == {network().flat.nbytes}


def test_values_of_a_device_neither_print_nor_pickle():
    value = DeviceOnly("secret")
    assert "secret" not in f"{value} {value!r}"
    with pytest.raises(TypeError, match="must not leave"):
        pickle.dumps(value)
    with pytest.raises(ConfigError, match="newspaper"):
        value.show(SelectLedger(), "newspaper", "keys")
