import math

import pytest
import torch

from privpart.clip import add_in_place, l2_norm


@pytest.mark.parametrize("length", [0, 1, 5, 2**16, 2**16 + 1, 3 * 2**16 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_as_in_one_piece(length, dtype):
    generator = torch.Generator().manual_seed(length)
    vector = torch.randn(length, generator=generator, dtype=dtype)
    exact = math.sqrt(math.fsum(x * x for x in vector.tolist()))
    assert l2_norm(vector) == pytest.approx(exact, rel=1e-14)
    total = torch.randn(length, generator=generator, dtype=torch.float64)
    expected = total + vector.double()
    add_in_place(total, vector)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2**16 - 1, 2**16, 2**17])
def test_what_is_not_finite_is_seen_in_every_part(bad, place):
    vector = torch.zeros(2**17 + 1)
    vector[place] = bad
    assert not math.isfinite(l2_norm(vector))
