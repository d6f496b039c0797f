"""The state of a noise stream: resumed bit for bit, and refused where it does not belong."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from accounting import BinaryTree, ConfigError, Independent, Toeplitz
from privpart import NoiseStream, SecretSource, SeededSource
from privpart.noise.source import BLOCK


class QuickSource:
    """Draws that cost little, for the many rounds below."""

    private = False
    identity = "quick"

    def claim(self, stream): ...

    def normal(self, index, count, *, stream=0, start=0, stddev=1.0, out=None):
        seed = (index * 7 + stream) * 1000 + start // BLOCK
        return out.normal_(0, stddev, generator=torch.Generator().manual_seed(seed))


TREE = BinaryTree(8, 5, estimator="online")


def stream(mechanism=TREE, **change):
    fields = {"dim": 6, "stddev": 0.1, "source": SeededSource(5)} | change
    return NoiseStream(mechanism, **fields)


def through_a_file(state, path):
    """Tensors as safetensors, the rest as the strings of its header."""
    text = {key: str(value) for key, value in state.items() if key != "state"}
    save_file({"state": state["state"]}, path, metadata=text)
    with safe_open(path, "pt") as file:
        return {**file.metadata(), **load_file(path)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resumed_stream_is_the_undisturbed_one(mechanism, dtype):
    fields = {"stream": 3, "dtype": dtype, "source": QuickSource()}
    undisturbed = stream(mechanism, **fields)
    states, noises = [undisturbed.state_dict()], []
    for _ in range(mechanism.rounds):
        noises.append(undisturbed.next())
        states.append(undisturbed.state_dict())
    for start, state in enumerate(states):
        resumed = stream(mechanism, **fields)
        resumed.load_state_dict(state)
        assert resumed.round == start
        for t in range(start, mechanism.rounds):
            assert torch.equal(resumed.next(), noises[t])
        assert torch.equal(resumed.cumulative(), undisturbed.cumulative())


def test_a_state_survives_a_file(mechanism, tmp_path):
    first, second = stream(mechanism), stream(mechanism)
    for _ in range(mechanism.rounds):
        fresh = stream(mechanism)
        fresh.load_state_dict(through_a_file(first.state_dict(), tmp_path / "noise"))
        noise = second.next()
        assert torch.equal(fresh.next(), noise)
        assert torch.equal(first.next(), noise)


def test_long_vectors_resume_as_well():
    first = stream(dim=2 * BLOCK + 9)
    for _ in range(4):
        first.next()
    resumed = stream(dim=2 * BLOCK + 9)
    resumed.load_state_dict(first.state_dict())
    for _ in range(4):
        assert torch.equal(resumed.next(), first.next())


def test_a_state_is_a_copy():
    """The stream works in place; what was saved must stay what it was."""
    one = stream(Toeplitz.square_root(8, bands=2))
    one.next()
    state = one.state_dict()
    kept = state["state"].clone()
    one.next()
    assert torch.equal(state["state"], kept)
    state["state"].zero_()
    assert one.state_dict()["state"].any()


def test_only_the_vectors_in_use_are_saved():
    one = stream(BinaryTree(8))
    lengths = []
    for _ in range(8):
        one.next()
        lengths.append(len(one.state_dict()["state"]))
    assert lengths == [1, 1, 2, 1, 2, 2, 3, 1]


def test_what_a_state_says():
    one = stream(stream=2)
    one.next()
    state = one.state_dict()
    assert {key: value for key, value in state.items() if key not in ("mechanism", "state")} == {
        "schema": "privpart/noise/1",
        "dim": 6,
        "stddev": 0.1,
        "stream": 2,
        "dtype": "float32",
        "round": 1,
        "source": "seeded:5",
    }


def used():
    one = stream()
    for _ in range(3):
        one.next()
    return one


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"mechanism": BinaryTree(8, 5)}, "mechanism"),
        ({"mechanism": BinaryTree(9, 5, estimator="online")}, "mechanism"),
        ({"mechanism": Independent(8)}, "mechanism"),
        ({"dim": 7}, "dim"),
        ({"stddev": 0.1 * (1 + 1e-15)}, "stddev"),
        ({"stream": 1}, "stream"),
        ({"dtype": torch.float64}, "dtype"),
    ],
    ids=repr,
)
def test_a_state_goes_on_only_in_its_like(other, message):
    fresh = stream(**other)
    with pytest.raises(ConfigError, match=rf"state\['{message}'\]"):
        fresh.load_state_dict(used().state_dict())
    assert fresh.round == 0
    assert not fresh.cumulative().any()


def not_finite(value):
    state = used().state_dict()["state"]
    state[-1, -1] = value
    return state


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", "privpart/noise/2", "schema"),
        ("round", 9, "whole number from 0 to 8"),
        ("round", -1, "whole number from 0 to 8"),
        ("round", 3.0, "whole number from 0 to 8"),
        ("round", True, "whole number from 0 to 8"),
        ("round", "²", "whole number from 0 to 8"),
        ("round", float("nan"), "whole number from 0 to 8"),
        ("round", 4, r"has shape \(2, 6\); after that many rounds it is \(1, 6\)"),
        ("round", 0, "has shape"),
        ("stddev", float("nan"), "stddev"),
        ("source", 5, "must be a string"),
        ("state", torch.zeros(0, 6), "has shape"),  # lost buffers are not fresh ones
        ("state", torch.zeros(12), "has shape"),
        ("state", torch.zeros(2, 6, dtype=torch.float64), "float64"),
        ("state", torch.zeros(2, 6).to_sparse(), "dense tensor"),
        ("state", [[0.0] * 6] * 2, "dense tensor"),
        ("state", not_finite(float("nan")), "finite"),
        ("state", not_finite(float("inf")), "finite"),
    ],
)
def test_damaged_states_are_refused(key, value, message):
    fresh = stream()
    with pytest.raises(ConfigError, match=message):
        fresh.load_state_dict(used().state_dict() | {key: value})
    assert fresh.round == 0
    assert not fresh.state_dict()["state"].any()


@pytest.mark.parametrize("key", sorted(used().state_dict()))
def test_every_key_is_needed_and_no_other(key):
    state = used().state_dict()
    value = state.pop(key)
    with pytest.raises(ConfigError, match=f"missing {key}"):
        stream().load_state_dict(state)
    with pytest.raises(ConfigError, match="unknown extra"):
        stream().load_state_dict({**state, key: value, "extra": 1})


def test_a_running_stream_never_goes_back():
    one = stream()
    state = one.state_dict()
    one.next()
    with pytest.raises(ConfigError, match="going back would repeat"):
        one.load_state_dict(state)


def test_fresh_buffers_are_another_noise():
    """What the refusals protect: without its state the stream's correlation would be gone."""
    whole, lost = used(), stream()
    lost.load_state_dict(whole.state_dict())
    lost._state.zero_()
    assert not torch.equal(lost.next(), whole.next())


def test_a_new_secret_source_may_go_on_with_new_draws():
    """A round that was drawn and never released can be run again without the same noise."""
    first = stream(source=SecretSource())
    first.next()
    state = first.state_dict()
    assert state["source"].startswith("secret:")
    noise = first.next()
    resumed = stream(source=SecretSource())
    resumed.load_state_dict(state)
    assert not torch.equal(resumed.next(), noise)
    with pytest.raises(ConfigError, match="another source"):
        resumed.cumulative()
    again = stream(source=SecretSource())
    again.load_state_dict(resumed.state_dict())
    with pytest.raises(ConfigError, match="another source"):
        again.cumulative()


def test_the_same_key_goes_on_with_the_same_draws():
    key = bytes(range(32))
    first = stream(source=SecretSource(key))
    first.next()
    resumed = stream(source=SecretSource(key))
    resumed.load_state_dict(first.state_dict())
    assert torch.equal(resumed.next(), first.next())
    assert torch.equal(resumed.cumulative(), first.cumulative())
