import pickle
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from accounting import ConfigError
from privpart.wire import decode_update, encode_update


def test_round_trip_and_size():
    delta = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    message = encode_update(delta)
    assert torch.equal(decode_update(message, dim=1000), delta)
    assert 4000 < len(message) < 4100


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error_and_nothing_else(message):
    with pytest.raises(ConfigError, match=r"not an update|holds"):
        decode_update(message, dim=3)


@given(cut=st.integers(0, 75), flip=st.integers(0, 75))
def test_damaged_messages_are_an_error_or_a_vector(cut, flip):
    message = bytearray(encode_update(torch.ones(3)))
    message[min(flip, len(message) - 1)] ^= 255
    with suppress(ConfigError):
        assert decode_update(bytes(message), dim=3).shape == (3,)
    with pytest.raises(ConfigError):
        decode_update(encode_update(torch.ones(3))[:cut], dim=3)


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps([1.0, 2.0, 3.0]),
        save({"delta": torch.ones(4)}),
        save({"delta": torch.ones(3, dtype=torch.float64)}),
        save({"other": torch.ones(3)}),
        save({"delta": torch.ones(3), "more": torch.ones(1)}),
    ],
)
def test_other_messages_say_what_is_wrong(message):
    with pytest.raises(ConfigError, match="message"):
        decode_update(message, dim=3)
