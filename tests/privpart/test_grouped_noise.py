"""The noise of groups: each one's own matrix, draws that no two share, exact resumption."""

import pytest
import torch
from every_mechanism import GROUPS, GROUPS_ACTIVE

from accounting import (
    ConfigError,
    Grouped,
    Independent,
)
from privpart import NoiseStream, SecretSource, SeededSource

KINDS = pytest.mark.parametrize("kind", GROUPS)


STDDEV = 2.0**20


def noise_of(kind="mixed", source=None, sizes=(4, 3, 5), **change):
    source = source or SeededSource(1)
    mechanism = Grouped(GROUPS_ACTIVE, GROUPS[kind], sizes)
    return NoiseStream(mechanism, dim=sum(sizes), stddev=STDDEV, source=source, **change)


def test_equal_groups_have_unequal_noise():
    """Under one stream id they would have the same draws, and their difference none."""
    schedule = [(0, 1)]
    both = Grouped(schedule, [Independent(1)] * 2, [50_000] * 2)
    fields = {"mechanism": both, "dim": 100_000, "stddev": STDDEV}
    first, second = NoiseStream(**fields, source=SecretSource()).next().double().chunk(2)
    assert abs(float((first * second).mean())) < STDDEV**2 * 6.2 / 50_000**0.5
    source = SecretSource()
    NoiseStream(**fields, source=source)
    with pytest.raises(ConfigError, match="already feeds"):
        NoiseStream(**fields, source=source, stream=1)


@KINDS
def test_a_group_s_noise_is_that_of_its_own_stream(kind):
    noise = noise_of(kind)
    assert noise.dtype is (torch.int64 if kind == "wide" else torch.int32)
    own = [
        NoiseStream(mechanism, dim=size, stddev=STDDEV, source=SeededSource(1), stream=g)
        for g, (mechanism, size) in enumerate(zip(GROUPS[kind], (4, 3, 5), strict=True))
    ]
    for groups in GROUPS_ACTIVE:
        expected = torch.cat([own[g].next().to(noise.dtype) for g in groups])
        out = torch.full((12,), -1, dtype=noise.dtype)
        assert torch.equal(noise.next(out=out), expected)
        assert torch.equal(out[: len(expected)], expected)
        assert (out[len(expected) :] == -1).all()
    with pytest.raises(ConfigError, match="all 10 planned rounds is used up"):
        noise.next()
