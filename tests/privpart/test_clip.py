"""The clip contract: finite and at most clip_norm, for every input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import ConfigError
from privpart.clip import add_in_place, clip, clip_and_measure, clip_rows, l2_norm

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
VALUES = st.lists(st.floats(width=64), max_size=20)


def exact_norm(vector: torch.Tensor) -> float:
    return math.hypot(*vector.double().tolist()) if vector.numel() else 0.0


@given(values=VALUES, dtype=DTYPES, clip_norm=st.floats(1e-6, 1e6))
def test_finite_and_at_most_clip_norm_whatever_comes(values, dtype, clip_norm):
    update = torch.tensor(values, dtype=torch.float64).to(dtype)
    clipped = clip(update, clip_norm)
    assert clipped.shape == update.shape
    assert torch.isfinite(clipped).all()
    assert exact_norm(clipped) <= clip_norm
    if not torch.isfinite(update).all():
        assert not clipped.any()
    elif exact_norm(update) > clip_norm:  # huge ones are shortened, not dropped
        assert exact_norm(clipped) > 0.99 * clip_norm


@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3), dim=st.integers(1, 3000))
def test_short_updates_pass_unchanged_and_long_ones_keep_their_direction(seed, scale, dim):
    update = torch.randn(dim, generator=torch.Generator().manual_seed(seed)) * scale
    norm = exact_norm(update)
    assert clip(update, norm * 1.000001 + 1e-9) is update
    clipped = clip(update, norm / 3)
    assert exact_norm(clipped) == pytest.approx(norm / 3, rel=1e-6)
    torch.testing.assert_close(clipped * 3, update, rtol=1e-5, atol=0)


@pytest.mark.parametrize("wide", [1, 2**25])
@given(
    rows=st.lists(st.lists(st.floats(width=32), min_size=4, max_size=4), min_size=1, max_size=5),
    clip_norm=st.floats(1e-6, 1e6),
)
def test_rows_are_clipped_at_once_as_each_alone(wide, rows, clip_norm):
    updates = torch.tensor(rows, dtype=torch.float32)
    each = torch.stack([clip(row.clone(), clip_norm) for row in updates])
    norms = torch.tensor([l2_norm(row) for row in updates], dtype=torch.float64)
    norms[norms.isinf()] = torch.nan  # an entry is infinite
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("privpart.clip._WIDE", wide)
        found = torch.tensor(clip_rows(updates, clip_norm), dtype=torch.float64)
    torch.testing.assert_close(found, norms, rtol=1e-12, atol=0, equal_nan=True)
    assert torch.isfinite(updates).all()
    assert all(exact_norm(row) <= clip_norm for row in updates)
    torch.testing.assert_close(updates, each, rtol=2e-7, atol=0)


class Overwritten(torch.Tensor):
    """An update that another thread writes to when its norm, or its largest entry, was read."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*arguments, **(options or {}))
            if function.__name__ == cls.after:
                cls.held.copy_(cls.content)
        return found


@pytest.mark.parametrize("content", [0.0, 1e-45, 1e38, math.inf, math.nan])
@pytest.mark.parametrize("after", ["split", "clone", "abs", "max", "isfinite"])
def test_an_update_that_is_overwritten_while_it_is_clipped_stays_within_the_norm(after, content):
    update = torch.full((4,), 1e38)
    Overwritten.after, Overwritten.held, Overwritten.content = after, update, torch.tensor(content)
    clipped = clip(update.as_subclass(Overwritten), 1.0)
    with torch._C.DisableTorchFunctionSubclass():
        assert torch.isfinite(clipped).all()
        assert exact_norm(clipped) <= 1


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_clip_norms(clip_norm):
    with pytest.raises(ConfigError, match="clip_norm"):
        clip(torch.ones(2), clip_norm)


@pytest.mark.parametrize("clip_norm", [1e-30, 1e-25, 1e-20, 1e-10, 1e-3, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("dim", [1, 7, 10**5])
def test_the_factor_is_never_a_number_that_float32_rounds_away(clip_norm, dim):
    """Updates of huge but finite numbers came out up to twice as long as the clip norm."""
    values = torch.rand(dim, generator=torch.Generator().manual_seed(0)).clamp(min=0.01)
    for exponent in range(-28, 39):
        update = values * (3.3 * 10.0**exponent)
        if not torch.isfinite(update).all() or l2_norm(update) <= clip_norm:
            continue
        assert 1 - 2.0**-20 <= l2_norm(clip(update, clip_norm)) / clip_norm <= 1
    if dim == 10**5:
        for value in (1e38, 2.8e38, 3.1e38, 3.3e38):  # 1.18 times the clip norm, once
            update = torch.full((10**6,), value)
            assert 1 - 2.0**-20 <= l2_norm(clip(update, clip_norm)) / clip_norm <= 1


@pytest.mark.parametrize("update", [[3.0, 4.0], [0.1, 0.2], [float("nan"), 1.0], [3e38, 3e38]])
def test_in_place_it_is_the_same_and_writes_nowhere_else(update):
    update = torch.tensor(update)
    expected, kept = clip(update, 1.0), update.clone()
    assert torch.equal(update.nan_to_num(), kept.nan_to_num())
    found, _ = clip_and_measure(update, 1.0, out=update)
    assert torch.equal(found.nan_to_num(), expected)
    if kept.norm() > 1 and torch.isfinite(kept.norm()):
        assert found is update


@pytest.mark.parametrize("length", [0, 1, 2**16, 2**16 + 1, 3 * 2**16 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_are_added_and_measured_as_in_one_piece_and_none_is_overlooked(length, dtype):
    generator = torch.Generator().manual_seed(length)
    vector = torch.randn(length, generator=generator, dtype=dtype)
    exact = math.sqrt(math.fsum(x * x for x in vector.tolist()))
    assert l2_norm(vector) == pytest.approx(exact, rel=1e-14)
    total = torch.randn(length, generator=generator, dtype=torch.float64)
    expected = total + vector.double()
    add_in_place(total, vector)
    assert torch.equal(total, expected)
    for place in {0, length // 2, length - 1} if length else ():
        vector[place] = math.nan if place else -math.inf
        assert not math.isfinite(l2_norm(vector))
        vector[place] = 0
