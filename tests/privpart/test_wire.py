"""Messages: what travels, and how many bytes."""

import struct
from itertools import pairwise

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import PartialModel
from privpart.models import MODELS, build_network
from privpart.wire import encode_model, encode_update

PLAN = "0123456789abcdef" * 4
TINY = PartialModel(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), train=["1.*"], seed=7)
SENT = encode_model(TINY, plan=PLAN)
RETURNED = encode_update(TINY, torch.ones(3), plan=PLAN, round_number=258)
HEADER = RETURNED[:64]


def test_the_layout_of_the_header():
    """Byte by byte, as the module's docstring has it."""
    magic, version, direction, generator = struct.unpack("!3sBBB", RETURNED[:6])
    assert (magic, version, direction, generator) == (b"PPM", 1, 1, 2)
    assert RETURNED[6:16].hex() == TINY.trainable_hash
    assert RETURNED[16:32] == (7).to_bytes(16, "big")
    assert RETURNED[32:48].hex() == TINY.fingerprint
    assert RETURNED[48:60].hex() == PLAN[:24]
    assert RETURNED[60:64] == bytes([0, 0, 1, 2])


@pytest.mark.parametrize(
    ("name", "rung", "trained", "ratio"),
    [
        ("emnist_cnn", "freeze-dense1", 84_030, 20.11),
        ("resnet18_gn", "freeze-0-1-2-3", 242_340, 46.33),
        ("word_lm", "freeze-0-1-2", 1_682_016, 1.354),
    ],
)
def test_fedpt_messages_measured_in_bytes(name, rung, trained, ratio):
    """FedPT, Tables 1 to 3: the reductions, from real messages in both directions."""
    arch = MODELS[name]

    def sizes(train):
        partial = PartialModel(
            lambda: build_network(name), train=train, seed=0, initializers=arch.initializers
        )
        return len(encode_model(partial)), len(encode_update(partial, partial.flat))

    down, up = sizes(arch.ladder[rung])
    full_down, full_up = sizes(["*"])
    assert down == up
    assert full_down == full_up
    assert 4 * trained + 64 < down <= 4 * trained + 64 + 128
    assert full_down / down == pytest.approx(ratio, rel=1e-3)


def network(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


@pytest.mark.parametrize("plan", ["", "00", "g" * 32, "A" * 32, None, 7])
def test_bad_plan_hashes(plan):
    with pytest.raises(ConfigError, match="24 or more hex digits"):
        encode_model(TINY, plan=plan)


@pytest.mark.parametrize("round_number", [-1, 2**32, 1.5, None, True])
def test_bad_rounds(round_number):
    with pytest.raises(ConfigError, match="round_number="):
        encode_model(TINY, round_number=round_number)


def test_a_delta_of_another_shape_is_not_sent():
    with pytest.raises(ConfigError, match=r"\(4,\): must be \(3,\)"):
        encode_update(TINY, torch.ones(4))


def test_messages_of_some_groups_hold_those():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model = PartialModel(module, seed=7, overwrite=True, groups=[["0.*"], ["2.*"]])
    whole, second = encode_model(model), encode_model(model, active=(1,))
    assert len(whole) - len(second) >= 4 * 15 - 8  # two headers may differ by a digit
    for wrong in (torch.zeros(15), torch.zeros(23)):
        with pytest.raises(ConfigError, match=r"must be \(8,\)"):
            encode_update(model, wrong, active=(1,))
