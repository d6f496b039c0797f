"""The noise stream at its seams: pieces, threads, buffers, bad arguments, interruptions, forks."""

import os

import numpy as np
import pytest
import torch
from every_mechanism import LAW
from plans import small_plan

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Dense,
    Independent,
    Toeplitz,
)
from privpart import NoiseStream, SecretSource, SeededSource, Server
from privpart.noise.stream import Executor, NoiseRangeError
from privpart.noise.ziggurat import BLOCK, Draws

STDDEV = 2.0**20
PIECE = 2 * BLOCK


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    """A stream works on pieces of two blocks, so that short vectors have several."""
    monkeypatch.setattr("privpart.noise.stream._PIECE", PIECE)


@pytest.mark.parametrize("mechanism", LAW, ids=repr)
def test_pieces_threads_and_buffers_change_no_integer(mechanism):
    dim, before = 2 * PIECE + 5, torch.get_num_threads()

    def run(dim, out=None):
        stream = NoiseStream(mechanism, dim=dim, stddev=STDDEV, source=SeededSource(2))
        return [stream.next(out=out).clone() for _ in range(mechanism.rounds)]

    try:
        torch.set_num_threads(1)
        noises = run(dim)
        torch.set_num_threads(3)
        threaded = run(dim, out=torch.full((dim,), -7, dtype=noises[0].dtype))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    short = zip(run(BLOCK + 1), run(7), strict=True)
    for noise, other, (block, few) in zip(noises, threaded, short, strict=True):
        assert torch.equal(noise, other)
        assert torch.equal(noise[: BLOCK + 1], block)
        assert torch.equal(noise[:7], few)


def test_pieces_follow_each_other():
    source, dim = SeededSource(4), 2 * PIECE + 5
    noise = NoiseStream(Independent(1), dim=dim, stddev=STDDEV, source=source).next()
    whole = np.zeros(dim, np.int32)
    source.draws(0, b"").rounded(0, 0, whole, weight=STDDEV)
    assert np.array_equal(noise.numpy(), whole)
    assert len(torch.unique(noise)) > 0.8 * dim


@pytest.mark.parametrize("mechanism", LAW, ids=repr)
@pytest.mark.parametrize("start", [2, 100, PIECE - 2])
def test_any_slice_gives_the_same_integers(mechanism, start):
    """The executor looks at each coordinate alone: with the slice's state it makes its part."""
    program = mechanism.noise_program()
    own, draws = Executor(program, STDDEV), SeededSource(6).draws(0, b"")
    whole = np.zeros((program.state_rows(), start + 9), own.state_type)
    part = whole[:, start:].copy()
    for t in range(program.rounds):
        own.begin(t)
        noise, sliced = np.zeros(start + 9, own.integers), np.zeros(9, own.integers)
        own.run(lambda _: draws, 0, whole, noise)
        own.run(lambda _: draws, start, part, sliced)
        assert np.array_equal(noise[start:], sliced)
        assert np.array_equal(whole[:, start:], part)


@pytest.mark.parametrize(
    "bad",
    [
        {"dim": 0},
        {"stddev": 0.999},
        {"stddev": 2.0**30 + 1},
        {"stddev": float("nan")},
        {"stream": -1},
        {"mechanism": "tree"},
    ],
    ids=repr,
)
def test_bad_streams_claim_nothing(bad):
    source = SecretSource()
    fields = {"mechanism": BinaryTree(3), "dim": 3, "stddev": 1.0, "source": source}
    with pytest.raises(ConfigError, match=next(iter(bad))):
        NoiseStream(**(fields | bad))
    NoiseStream(**fields)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(5, dtype=torch.int32),
        torch.empty(4),
        torch.empty(4, dtype=torch.int64),
        torch.empty(8, dtype=torch.int32)[::2],
        torch.empty(4, dtype=torch.int32, device="meta"),
    ],
    ids=["length", "float", "wide", "stride", "device"],
)
def test_bad_buffers(out):
    stream = NoiseStream(BinaryTree(3), dim=4, stddev=1.0, source=SeededSource(0))
    with pytest.raises(ConfigError, match="out: has shape"):
        stream.next(out=out)
    assert stream.next().shape == (4,)


class Source(SeededSource):
    """Draws of another kind."""

    def __init__(self, kind):
        super().__init__(0)
        self.draws = lambda stream, salt: kind(bytes(32))


class Failing(Draws):
    """Breaks down in the middle of a round."""

    def rounded(self, index, start, out, **options):
        if start:
            raise MemoryError
        super().rounded(index, start, out, **options)

    def real(self, index, start, out):
        if start:
            raise MemoryError
        super().real(index, start, out)


@pytest.mark.parametrize("mechanism", [BinaryTree(3), BinaryTree(3, estimator="online")], ids=repr)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupted_round_ends_the_stream(mechanism, threads):
    """Half of its state has moved: to go on would break the correlation without a sign."""
    torch.set_num_threads(threads)
    stream = NoiseStream(mechanism, dim=PIECE + 1, stddev=1.0, source=Source(Failing))
    state = stream.state_dict()
    with pytest.raises(MemoryError):
        stream.next()
    for use in (stream.next, stream.state_dict):
        with pytest.raises(ConfigError, match="round 0 was interrupted halfway"):
            use()
    with pytest.raises(ConfigError, match="Load the state into a new stream"):
        stream.load_state_dict(state)


class Runaway(Draws):
    """What Gaussian draws never are."""

    def rounded(self, index, start, out, *, weight, **options):
        out[:] = 0
        out[-1] = 2**20

    def real(self, index, start, out):
        out[:] = 0.0
        out[0] = -(2.0**20)


@pytest.mark.parametrize("mechanism", LAW, ids=repr)
def test_a_register_out_of_range_ends_the_stream(mechanism):
    stream = NoiseStream(mechanism, dim=5, stddev=4.0, source=Source(Runaway))
    with pytest.raises(NoiseRangeError, match="Nothing was released"):
        stream.next()
    with pytest.raises(ConfigError, match="round 0 was interrupted halfway"):
        stream.next()


# A forked process would repeat the noise of its parent.


def refused_in_a_fork(use):
    """Whether ``use`` raises the error of a forked process, in one."""
    child = os.fork()
    if not child:
        try:
            use()
        except ConfigError as error:
            os._exit(17 if "forked" in str(error) else 18)
        except BaseException:
            os._exit(19)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@needs_fork
def test_a_forked_process_draws_nothing():
    source = SecretSource()
    stream = NoiseStream(BinaryTree(3), dim=4, stddev=1.0, source=source)
    stream.next()
    assert refused_in_a_fork(stream.next)
    assert refused_in_a_fork(lambda: source.draws(7, bytes(16)))
    simulated = NoiseStream(BinaryTree(3), dim=4, stddev=1.0, source=SeededSource(0))
    assert not refused_in_a_fork(simulated.next)
    stream.next()  # the parent goes on


@needs_fork
def test_a_forked_process_runs_no_server():
    """Noise that was drawn before the fork would be added in both processes."""
    server = Server(
        small_plan(Independent(2), noise_multiplier=1.0), torch.zeros(3), source=SecretSource()
    )
    server.task([])
    assert refused_in_a_fork(lambda: server.run_round([]))
    assert refused_in_a_fork(lambda: server.task([]))
    assert server.run_round([server.task([]).update(0, torch.zeros(3))]).released


def filters(powers):
    """Encoders with one entry, or two, that are such powers of two; and whose noise grows."""
    yield BufferedToeplitz(60, decay=(1.0,), scale=(30.0,))
    yield Dense(np.tril(np.full((9, 9), 1e6), -1) + np.eye(9))
    for power in powers:
        yield Dense([[1.0, 0.0], [2.0**power, 1.0]])
        yield Dense([[1.0, 0.0, 0.0], [0.0, 2.0**power, 0.0], [1.0, 2.0**power, 1.0]])
        yield Dense([[2.0**power, 0.0], [1.0, 1.0]])
        yield Dense([[1.0, 0.0], [1.0, 2.0**power]])
        yield Toeplitz(3, (2.0**power, 1.0))
        yield Toeplitz(3, (1.0, 2.0**power), normalize_columns=True)


@pytest.mark.parametrize("stddev", [1.0, 2.0**20, 2.0**30])
def test_a_filter_whose_numbers_do_not_fit_is_refused_when_it_is_made(stddev):
    """A run would die after its first round, whose budget was spent."""
    refused = 0
    for mechanism in filters(range(-500, 500, 9) if stddev == 1 else range(-60, 60)):
        try:
            stream = NoiseStream(mechanism, dim=3, stddev=stddev, source=SeededSource(0))
        except ConfigError as error:
            said = "may grow to", "draws are weighted by", "grows without bound"
            refused += any(sentence in str(error) for sentence in said)
            continue
        assert len([stream.next() for _ in range(mechanism.rounds)]) == mechanism.rounds
    assert refused > 20
