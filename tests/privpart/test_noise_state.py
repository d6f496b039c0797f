"""The state of a noise stream: resumed to the last integer, and refused where it is not its own."""

import json

import numpy as np
import pytest
import torch
from every_mechanism import FILTERS, GROUPS, GROUPS_ACTIVE, TREES, short
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Grouped,
    Independent,
    Scheduled,
    Toeplitz,
)
from accounting.mechanisms.mechanism import prefix_sums
from privpart import NoiseStream, SecretSource, SeededSource
from privpart.noise import stream as module
from privpart.noise.stream import Executor

BLT = BufferedToeplitz(8, (0.9, 0.4), (0.3, 0.2))


GROUPED = [Grouped(GROUPS_ACTIVE, mechanisms, (1, 3, 2)) for mechanisms in GROUPS.values()]


def stream(mechanism=BLT, **change):
    fields = {"dim": 6, "stddev": 1000.25, "source": SeededSource(5)} | change
    return NoiseStream(mechanism, **fields)


def saved(one):
    """A copy of the state: it shares memory with the stream."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in one.state_dict().items()
    }


def through_a_file(state, path):
    """Tensors as safetensors, the others as the strings of its header."""
    tensors = {key: v.contiguous() for key, v in state.items() if isinstance(v, torch.Tensor)}
    text = {key: str(value) for key, value in state.items() if key not in tensors}
    save_file(tensors, path, metadata=text)
    with safe_open(path, "pt") as file:
        return {**file.metadata(), **load_file(path)}


@pytest.mark.parametrize("mechanism", [*TREES, *FILTERS, *GROUPED], ids=short)
def test_a_resumed_stream_is_the_undisturbed_one(mechanism, tmp_path):
    undisturbed = stream(mechanism, stream=3)
    states, noises = [saved(undisturbed)], []
    for _ in range(mechanism.rounds):
        noises.append(undisturbed.next())
        states.append(saved(undisturbed))
    for start, state in enumerate(states):
        if start > 16 and start % 7:  # of the longest one, a seventh
            continue
        for since in {None, 0, start // 2}:  # the registers are its own, none, or older ones
            resumed = stream(mechanism, stream=3)
            mixed = state if since is None else older(state, states, since)
            resumed.load_state_dict(through_a_file(mixed, tmp_path / "noise"), since=since)
            assert resumed.round == start
            for t in range(start, mechanism.rounds):
                assert torch.equal(resumed.next(), noises[t])


def older(state, states, since):
    """A state with the registers after fewer rounds."""
    values = {key: v for key, v in state.items() if not isinstance(v, torch.Tensor)}
    registers = states[since] if since else {}
    return values | {k: v for k, v in registers.items() if isinstance(v, torch.Tensor)}


@pytest.mark.parametrize("mechanism", [BLT, *GROUPED], ids=short)
def test_registers_that_are_saved_bound_what_is_run_again(mechanism, monkeypatch):
    monkeypatch.setattr(module, "MOST_SECONDS", 4e-4)
    one = stream(mechanism)
    spent = np.cumsum(module._seconds(one._parts, mechanism.rounds))
    assert one.checkpoint == 0
    saved_after = []
    for t in range(1, mechanism.rounds + 1):
        one.next()
        saved_after += [t] if one.checkpoint == t else []
        assert one.checkpoint == max(saved_after, default=0)
        assert spent[t] - spent[one.checkpoint] < 4e-4
    assert bool(one.registers) <= len(saved_after) < mechanism.rounds / 2


@pytest.mark.parametrize("since", [-1, 4, True, "1", None])
def test_registers_of_no_round_are_refused(since):
    state = saved(used()) | ({"state": torch.zeros(0, 6)} if since is None else {})
    with pytest.raises(ConfigError, match="since" if since is not None else "has shape"):
        stream().load_state_dict(state, since=since)


def test_a_state_shares_the_stream_s_memory_and_a_loaded_one_does_not():
    """Saving takes no memory; whoever keeps a state copies it."""
    one = stream(Toeplitz.square_root(8, bands=2))
    one.next()
    state = one.state_dict()
    kept = state["state"].clone()
    other = stream(Toeplitz.square_root(8, bands=2))
    other.load_state_dict(state)
    one.next()
    assert not torch.equal(state["state"], kept)
    assert torch.equal(other.state_dict()["state"], kept)


def test_draws_that_can_be_made_again_are_not_saved(mechanism):
    """Nodes of a vanilla tree are draws; sums of them, filtered ones and buffers are not."""
    again = isinstance(mechanism, Independent | Scheduled) or (
        isinstance(mechanism, BinaryTree) and mechanism.estimator == "vanilla"
    )
    one = stream(mechanism)
    for _ in range(mechanism.rounds):
        one.next()
        assert ("state" in one.state_dict()) == (not again)


def test_what_a_state_says():
    one = stream(stream=2)
    one.next()
    state = one.state_dict()
    assert {key: value for key, value in state.items() if key not in ("mechanism", "state")} == {
        "schema": "privpart/noise/2",
        "dim": 6,
        "stddev": 1000.25,
        "stream": 2,
        "round": 1,
        "source": "seeded:5",
        "salts": "[]",
    }
    assert state["state"].dtype is torch.float64
    filtered = stream(Toeplitz.square_root(8))
    assert filtered.state_dict()["state"].dtype is filtered.dtype is torch.int32


def run_on(one, rounds):
    return [one.next() for _ in range(rounds)]


def used():
    one = stream()
    run_on(one, 3)
    return one


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"mechanism": BufferedToeplitz(8, (0.9, 0.5), (0.3, 0.2))}, "mechanism"),
        ({"mechanism": BufferedToeplitz(9, (0.9, 0.4), (0.3, 0.2))}, "mechanism"),
        ({"dim": 7}, "dim"),
        ({"stddev": 1000.25 * (1 + 1e-15)}, "stddev"),
        ({"stream": 1}, "stream"),
        ({"source": SeededSource(6)}, "source"),
    ],
    ids=repr,
)
def test_a_state_goes_on_only_in_its_like(other, message):
    fresh = stream(**other)
    with pytest.raises(ConfigError, match=rf"state\['{message}'\]"):
        fresh.load_state_dict(used().state_dict())
    assert fresh.round == 0
    assert not fresh._parts[0].state.any()


def with_entry(value):
    state = saved(used())["state"]
    state[-1, -1] = value
    return state


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "privpart/noise/1", "schema"),
        ("round", 9, "whole number from 0 to 8"),
        ("round", True, "whole number from 0 to 8"),
        ("round", "²", "whole number from 0 to 8"),
        ("round", 0, r"has shape \(2, 6\); after that many rounds it is \(0, 6\)"),
        ("salts", '[[0, "00112233445566778899aabbccddeeff"]]', "seeded source has no salts"),
        ("salts", "", "list of rounds and salts"),
        ("state", torch.zeros(0, 6), "has shape"),  # lost buffers are not fresh ones
        ("state", torch.zeros(2, 6, dtype=torch.float32), "float32"),
        ("state", torch.zeros(2, 6).to_sparse(), "dense tensor"),
        ("state", [[0.0] * 6] * 2, "dense tensor"),
        ("state", with_entry(float("nan")), "every number must lie between"),
        ("state", with_entry(-1e9), "every number must lie between"),
    ],
)
def test_damaged_states_are_refused(key, value, message):
    fresh = stream()
    with pytest.raises(ConfigError, match=message):
        fresh.load_state_dict(saved(used()) | {key: value})
    assert fresh.round == 0
    assert not fresh.state_dict()["state"].any()


def test_every_key_is_needed_and_no_other():
    state = used().state_dict()
    for key in state:
        with pytest.raises(ConfigError, match=f"missing {key}"):
            stream().load_state_dict({name: state[name] for name in state.keys() - {key}})
    with pytest.raises(ConfigError, match="unknown extra"):
        stream().load_state_dict({**state, "extra": 1})


def test_a_running_stream_never_goes_back():
    one = stream()
    state = one.state_dict()
    one.next()
    with pytest.raises(ConfigError, match="going back would repeat"):
        one.load_state_dict(state)


# Salts: a secret stream never has one noise under two sums.

KEY = bytes(range(32))
KINDS = [BLT, BinaryTree(8), BinaryTree(8, 3), Toeplitz.square_root(8), Independent(8)]


def secret(mechanism, state=None, since=None):
    """A stream of the one key, as a new process would have it."""
    one = stream(mechanism, source=SecretSource(KEY))
    if state is not None:
        one.load_state_dict(state, since=since)
    return one


@pytest.mark.parametrize("mechanism", [*KINDS, *GROUPED], ids=short)
def test_a_round_that_is_drawn_twice_has_another_noise(mechanism):
    first = secret(mechanism)
    run_on(first, 3)
    state = saved(first)
    lost = first.next()  # a round that was never committed
    again, other = secret(mechanism, state).next(), secret(mechanism, state).next()
    assert not torch.equal(again, lost)
    assert not torch.equal(again, other)
    assert not torch.equal(secret(mechanism).next(), secret(mechanism).next())


@pytest.mark.parametrize("mechanism", KINDS, ids=repr)
def test_the_draws_of_committed_rounds_are_still_those(mechanism):
    """After any number of attempts: the stack of a tree, and doubts that look back, need them."""
    one, committed = secret(mechanism), []
    states = [saved(one)]
    for rounds, since in ((2, None), (1, 1), (0, 0), (3, 2), (1, 0)):
        for _ in range(rounds):
            committed += run_on(one, 1)
            states.append(saved(one))
        state = saved(one) if since is None else older(saved(one), states, since)
        one.next()  # lost
        one = secret(mechanism, state, since)
    committed += run_on(one, 1)
    noises = torch.stack(committed).double().numpy()
    draws, program = {}, one.mechanism.noise_program()
    for t in range(8):
        for op in program.round(t):
            for index, _ in op.draws:
                z = np.zeros(6)
                one.source.draws(0, one.salt_of(t)).real(index, 0, z)
                draws[index] = z
    mixed = program.matrix() @ np.stack([draws[i] for i in range(len(draws))]) * 1000.25
    assert np.abs(noises - mixed).max() < 9  # roundings of a step, filtered
    assert 1000.25 > 100 * 9


@pytest.mark.parametrize("mechanism", [BinaryTree(40), BinaryTree(80, 40)], ids=repr)
def test_a_node_that_is_drawn_again_is_that_of_its_round(mechanism):
    """After any number of attempts: else the old node would stay in the sum, and a new one join."""
    one, committed = secret(mechanism), []
    for t in range(mechanism.rounds):
        if t % 5 == 3:
            state = saved(one)
            one.next()  # lost
            one = secret(mechanism, state)
        committed += run_on(one, 1)
    nodes = np.zeros((mechanism.rounds, 6), np.int64)
    for t, node in enumerate(nodes):
        one.source.draws(0, one.salt_of(t)).rounded(t, 0, node, weight=1000.25)
    sums = torch.stack(committed).long().numpy().cumsum(axis=0)
    matrix = prefix_sums(mechanism.rounds) @ mechanism.noise_program().matrix()
    np.testing.assert_array_equal(sums, matrix.astype(int) @ nodes)


def test_salts_of_attempts_are_kept_and_of_lost_ones_are_not():
    one = secret(BinaryTree(8))
    run_on(one, 2)
    for _ in range(3):  # three attempts, of which none commits a round
        one = secret(BinaryTree(8), saved(one))
    run_on(one, 1)
    salts = json.loads(one.state_dict()["salts"])
    assert [first for first, _ in salts] == [0, 2]
    assert len({salt for _, salt in salts}) == 2
    assert all(len(bytes.fromhex(salt)) == 16 for _, salt in salts)
    assert json.loads(secret(BinaryTree(8)).state_dict()["salts"]) == []
    assert KEY.hex() not in json.dumps(one.state_dict())


GOOD = "00112233445566778899aabbccddeeff"


@pytest.mark.parametrize(
    "salts",
    [
        [],  # the salt of rounds 0 to 2 is lost
        [[1, GOOD]],
        [[0, GOOD], [3, GOOD]],  # of a round that was not committed
        [[0, GOOD], [0, GOOD]],
        [[0, GOOD[2:]]],
        [[False, GOOD]],
        [[0, "xy"]],
        [0, GOOD],
        {"0": GOOD},
    ],
    ids=repr,
)
def test_damaged_salts_are_refused(salts):
    one, fresh = secret(BLT), secret(BLT)
    run_on(one, 3)
    with pytest.raises(ConfigError, match=r"state\['salts'\]"):
        fresh.load_state_dict(saved(one) | {"salts": json.dumps(salts)})
    assert fresh.round == 0
    fresh.load_state_dict(saved(one))


def test_an_interrupted_recall_leaves_no_stream(monkeypatch):
    one = stream(BinaryTree(8))
    run_on(one, 3)

    fresh = stream(BinaryTree(8))
    with monkeypatch.context() as patched:
        patched.setattr(Executor, "recall", None)
        with pytest.raises(TypeError):
            fresh.load_state_dict(one.state_dict())
    for use in (fresh.next, fresh.state_dict):
        with pytest.raises(ConfigError, match="interrupted halfway"):
            use()
