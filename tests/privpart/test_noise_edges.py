"""The noise stream at its seams: pieces, threads, buffers, bad arguments, interruptions."""

import numpy as np
import pytest
import torch

from accounting import BinaryTree, BufferedToeplitz, ConfigError, Dense, Independent, Toeplitz
from privpart import NoiseStream, SecretSource, SeededSource
from privpart.noise.source import BLOCK

BLT3 = {"decay": (0.703864, 0.970182, 0.998105), "scale": (0.295937, 0.131099, 0.057899)}
LAW = [
    BinaryTree(7),
    BinaryTree(7, 3, estimator="online", completed=True),
    BufferedToeplitz(5, **BLT3),
    Toeplitz.square_root(6, bands=3, normalize_columns=True),
    Independent(3),
    Dense([[2.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [0.5, 0.25, 3.0]]),
]


class Fake:
    """A source but for its draws."""

    private = False
    identity = "fake"

    def __init__(self):
        self.asked = []

    def claim(self, stream): ...


@pytest.mark.parametrize("mechanism", LAW, ids=repr)
def test_pieces_threads_and_buffers_change_no_bit(mechanism):
    dim, before = 2 * BLOCK + 5, torch.get_num_threads()

    def run(dim, out=None):
        stream = NoiseStream(mechanism, dim=dim, stddev=1.5, source=SeededSource(2))
        return [stream.next(out=out).clone() for _ in range(mechanism.rounds)]

    try:
        torch.set_num_threads(1)
        noises = run(dim)
        torch.set_num_threads(3)
        threaded = run(dim, out=torch.full((dim,), float("nan")))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    for noise, other, block in zip(noises, threaded, run(BLOCK), strict=True):
        assert torch.equal(noise, other)
        assert torch.equal(noise[:BLOCK], block)


def test_pieces_follow_each_other():
    """Every piece has draws of its own: a stream of fresh noise is the source's draw, whole."""
    source, dim = SeededSource(4), 2 * BLOCK + 5
    noise = NoiseStream(Independent(1), dim=dim, stddev=0.3, source=source).next()
    assert torch.equal(noise, source.normal(0, dim, stddev=0.3))
    assert len(torch.unique(noise)) > 0.95 * dim


class ThreadCount(Fake):
    def normal(self, index, count, *, stream=0, start=0, stddev=1.0, out=None):
        self.asked.append(torch.get_num_threads())
        return out.zero_()


def test_a_round_runs_on_one_thread():
    """So that no library splits a piece where its last bits would depend on the split."""
    before = torch.get_num_threads()
    source = ThreadCount()
    try:
        torch.set_num_threads(3)
        NoiseStream(Independent(1), dim=4, stddev=1.0, source=source).next()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert source.asked == [1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mechanism", LAW, ids=repr)
def test_a_stream_on_another_device(mechanism):
    fields = {"dim": BLOCK + 5, "stddev": 1.5, "source": SeededSource(2)}
    here, there = (NoiseStream(mechanism, device=device, **fields) for device in ("cpu", "cuda"))
    for _ in range(mechanism.rounds):
        resumed = NoiseStream(mechanism, device="cuda", **fields)
        resumed.load_state_dict(there.state_dict())
        noise = there.next()
        assert torch.equal(resumed.next(), noise)
        torch.testing.assert_close(noise.cpu(), here.next(), rtol=1e-5, atol=1e-5)


def test_no_noise_beyond_the_plan():
    stream = NoiseStream(BinaryTree(3), dim=4, stddev=1.0, source=SeededSource(0))
    for _ in range(3):
        stream.next()
    with pytest.raises(ConfigError, match="all 3 planned rounds is used up"):
        stream.next()


@pytest.mark.parametrize(
    "bad",
    [
        {"dim": 0},
        {"stddev": 0.0},
        {"stddev": 1e-16},
        {"stddev": 1e16},
        {"stddev": float("nan")},
        {"stream": -1},
        {"dtype": torch.float16},
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
    [torch.empty(5), torch.empty(4).double(), torch.empty(8)[::2], torch.empty(4, device="meta")],
    ids=["length", "dtype", "stride", "device"],
)
def test_bad_buffers(out):
    stream = NoiseStream(BinaryTree(3), dim=4, stddev=1.0, source=SeededSource(0))
    with pytest.raises(ConfigError, match="out: has shape"):
        stream.next(out=out)
    assert stream.next().shape == (4,)


class Failing(Fake):
    """Breaks down in the middle of a round."""

    def normal(self, index, count, *, stream=0, start=0, stddev=1.0, out=None):
        if start:
            raise MemoryError
        return out.normal_(generator=torch.Generator().manual_seed(index))


def test_an_interrupted_round_ends_the_stream():
    """Half of its state has moved: to go on would break the correlation without a sign."""
    stream = NoiseStream(BinaryTree(3), dim=BLOCK + 1, stddev=1.0, source=Failing())
    with pytest.raises(MemoryError):
        stream.next()
    for use in (stream.next, stream.cumulative, stream.state_dict):
        with pytest.raises(ConfigError, match="round 0 was interrupted halfway"):
            use()


@pytest.mark.parametrize(
    "growing",
    [
        Toeplitz(9, (1.0, 1e6)),
        Toeplitz(3, (1e-40,)),
        BufferedToeplitz(60, decay=(1.0,), scale=(30.0,)),
        Dense(np.tril(np.full((9, 9), 1e6), -1) + np.eye(9)),
    ],
    ids=lambda m: m.name,
)
def test_noise_that_grows_without_bound_is_refused_before_the_run(growing):
    with pytest.raises(ConfigError, match=r"grows (to|without bound)"):
        NoiseStream(growing, dim=4, stddev=1.0, source=SeededSource(0))
