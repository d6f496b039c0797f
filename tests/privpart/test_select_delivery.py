"""Deliveries: bit for bit the same updates, other ledgers, and who saw what."""

import pickle
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import ConfigError, Guarantee
from privpart import LocalTraining, PartialModel, RoundTask, Users
from privpart.models import small_cnn
from privpart.select import (
    QUANTIZED_ROWS,
    ROWS,
    DeviceOnly,
    IndependentKeys,
    Released,
    SelectEngine,
    SelectLedger,
    ServerSees,
    SharedKeys,
    broadcast,
    disclosure,
    fed_select,
    on_demand,
    on_demand_uncached,
    pregenerated,
    private,
    private_retrieval,
    publish,
)
from privpart.select.delivery import Request, dequantize_rows, quantize_row
from privpart.select.disclosure import Sighting
from privpart.select.key_spaces import cnn_filters

DELIVERIES = [broadcast, on_demand, on_demand_uncached, pregenerated, private]
X = torch.randn(11, 5, generator=torch.Generator().manual_seed(0))
KEYS = {3: (4, 0, 10), 8: (4,), 5: (2, 1, 0, 4)}


def deliver(delivery, select=ROWS, keys=KEYS):
    ledger = SelectLedger()
    fetch = delivery(X, select, ledger)
    slices = [fetch(Request(2, c, "words", DeviceOnly(own))) for c, own in keys.items()]
    return slices, ledger


@pytest.mark.parametrize("select", [ROWS, QUANTIZED_ROWS], ids=["rows", "quantized"])
@pytest.mark.parametrize("delivery", DELIVERIES, ids=lambda d: d.__name__)
def test_every_delivery_is_the_primitive(delivery, select):
    slices, _ = deliver(delivery, select)
    expected = fed_select(X, list(KEYS.values()), select.slice_of)
    for got, own in zip(slices, expected, strict=True):
        assert got.dtype is torch.float32
        assert torch.equal(got, select.decode(torch.stack(own)))


ROW = 5 * 4  # bytes


@pytest.mark.parametrize(
    ("delivery", "by_server", "on_devices", "down", "up"),
    [
        (broadcast, 0, 8, {3: 11 * ROW, 8: 11 * ROW, 5: 11 * ROW}, {}),
        (on_demand, 5, 0, {3: 3 * ROW, 8: ROW, 5: 4 * ROW}, {3: 12, 8: 4, 5: 16}),
        (on_demand_uncached, 8, 0, {3: 3 * ROW, 8: ROW, 5: 4 * ROW}, {3: 12, 8: 4, 5: 16}),
        (pregenerated, 11, 0, {3: 3 * ROW, 8: ROW, 5: 4 * ROW}, {3: 12, 8: 4, 5: 16}),
        # 11 keys are 2 bytes, to each of two stores; the slice comes from both
        (private, 11, 0, {3: 6 * ROW, 8: 2 * ROW, 5: 8 * ROW}, {3: 12, 8: 4, 5: 16}),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_what_delivery_takes(delivery, by_server, on_devices, down, up):
    _, ledger = deliver(delivery)
    assert (ledger.computed_by_server, ledger.computed_on_devices) == (by_server, on_devices)
    assert (dict(ledger.bytes_down), dict(ledger.bytes_up)) == (down, up)


@pytest.mark.parametrize(
    ("delivery", "seen"),
    [
        (broadcast, {}),
        (on_demand, {"server": "words keys"}),
        (on_demand_uncached, {"server": "words keys"}),
        (pregenerated, {"store": "words keys"}),
        (private, {"store": "number of words keys", "second store": "number of words keys"}),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_who_saw_what(delivery, seen):
    _, ledger = deliver(delivery)
    expected = {Sighting(party, 2, c, what) for party, what in seen.items() for c in KEYS}
    assert ledger.sightings == expected
    for party in ("server", "store", "second store"):
        assert ledger.seen_by(party) == ((seen[party],) if party in seen else ())


def test_the_ledger_is_right_about_what_crosses_the_device(monkeypatch):
    """Everything that leaves a device goes through ``show``: look at the values themselves."""
    crossed = []
    show = DeviceOnly.show

    def spy(self, ledger, party, **at):
        seen = show(self, ledger, party, **at)
        crossed.append((party, seen.at_party()))
        return seen

    monkeypatch.setattr(DeviceOnly, "show", spy)
    for delivery, party in ((broadcast, None), (on_demand, "server"), (pregenerated, "store")):
        crossed.clear()
        deliver(delivery)
        assert crossed == ([(party, own) for own in KEYS.values()] if party else [])
    crossed.clear()
    deliver(private)
    assert Counter(party for party, _ in crossed) == {"store": 3, "second store": 3}
    assert all(
        bits.shape == (len(own), 2)
        for (_, bits), own in zip(crossed[::2], KEYS.values(), strict=True)
    )


def test_stores_of_private_retrieval_read_nothing_but_queries(monkeypatch):
    """The same coins and another key: the first store's view is the same, bit for bit."""
    monkeypatch.setattr(private_retrieval.secrets, "token_bytes", lambda n: bytes(range(n)))
    views = []
    answers = private_retrieval.answers

    def spy(records, asked):
        views.append(asked.tobytes())
        return answers(records, asked)

    monkeypatch.setattr(private_retrieval, "answers", spy)
    for key in (0, 7):
        deliver(private, keys={1: (key,)})
    assert views[0] == views[2]
    assert views[1] != views[3]  # the second sees the same distribution, other bits


def test_duplicates_may_be_selected():
    for delivery in DELIVERIES:
        (slices,), _ = deliver(delivery, keys={0: (3, 3)})
        assert torch.equal(slices, X[[3, 3]])


ROWS_OF_FLOATS = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4), min_size=1, max_size=5
)


@given(ROWS_OF_FLOATS)
def test_quantised_rows_are_half_a_step_off_at_most(rows):
    x = torch.tensor(rows)
    packed = torch.stack([quantize_row(x, k) for k in range(len(x))])
    assert packed.shape == (len(x), 8 + 4)
    spread = x.max(dim=1).values.double() - x.min(dim=1).values.double()
    error = (dequantize_rows(packed).double() - x.double()).abs().max(dim=1).values
    # the least number, the step and their sum are float32 again
    assert bool((error <= spread / 510 * 1.001 + x.abs().max(dim=1).values * 2.0**-22).all())


def test_a_quantised_row_is_four_times_smaller():
    x = torch.rand(3, 1000)
    assert quantize_row(x, 0).nbytes == 1008
    assert not torch.equal(dequantize_rows(quantize_row(x, 0)[None])[0], x[0])


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


@pytest.mark.parametrize("delivery", DELIVERIES[1:], ids=lambda d: d.__name__)
def test_every_delivery_gives_identical_updates(delivery):
    chooser = IndependentKeys(8, 3, data_seed=4)
    expected, _ = round_of(broadcast, chooser)
    updates, _ = round_of(delivery, chooser)
    assert all(delta.abs().sum() > 0 for delta in expected)
    assert all(map(torch.equal, updates, expected))


def test_uploads_show_the_keys_to_whoever_adds_them_up_however_they_were_hidden():
    for delivery in (broadcast, private):
        _, ledger = round_of(delivery, IndependentKeys(8, 3, data_seed=4))
        assert ledger.seen_by("server") == ("random filters keys, with the update",)


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


def test_only_released_values_can_be_published():
    assert publish(Released((1, 2), "public coins")) == (1, 2)
    assert publish(Released(0.5, Guarantee(1.0))) == 0.5
    for wrong in (DeviceOnly((1, 2)), ServerSees((1, 2)), (1, 2)):
        with pytest.raises(ConfigError, match="must not be released"):
            publish(wrong)
    for wrapped in (DeviceOnly(1), ServerSees(1)):
        with pytest.raises(ConfigError, match="must not be wrapped"):
            Released(wrapped, "public coins")
    with pytest.raises(ConfigError, match="why"):
        Released(1, "")


@pytest.mark.parametrize("value", [DeviceOnly("secret"), ServerSees("secret")])
def test_guarded_values_neither_print_nor_pickle(value):
    assert "secret" not in f"{value} {value!r}"
    with pytest.raises(TypeError, match="must not leave"):
        pickle.dumps(value)


MIXED_UP = """
from privpart.select.disclosure import DeviceOnly, Released, SelectLedger, ServerSees, publish

keys = DeviceOnly((1, 2))
publish(keys)
seen = keys.show(SelectLedger(), "server", round_=0, client=0, what="keys")
publish(seen)
on_device: DeviceOnly[tuple[int, int]] = seen
keys.show(SelectLedger(), "newspaper", round_=0, client=0, what="keys")
public: Released[tuple[int, int]] = keys
publish(Released((1, 2), "drawn from public coins"))
"""


def test_the_type_checker_refuses_to_mix_them_up(tmp_path):
    path = tmp_path / "mixed_up.py"
    path.write_text(MIXED_UP)
    types = disclosure.__file__
    options = ["--strict", "--follow-imports=skip", "--cache-dir", tmp_path / "cache", path, types]
    done = subprocess.run([sys.executable, "-m", "mypy", *options], capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if line.startswith(f"{path}:")]
    lines = {int(line.split(":")[1]) for line in errors if ": error:" in line}
    assert lines == {5, 7, 8, 9, 10}, done.stdout + done.stderr
