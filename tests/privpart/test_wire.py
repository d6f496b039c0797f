"""Messages: what travels, how many bytes, and that no bytes do harm."""

import pickle
import struct
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from accounting import ConfigError
from privpart import PartialModel
from privpart.models import MODELS, build_network
from privpart.wire import decode_model, decode_update, encode_model, encode_update, read_header

PLAN = "0123456789abcdef" * 4
TINY = PartialModel(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), train=["1.*"], seed=7)
SENT = encode_model(TINY, plan=PLAN)
RETURNED = encode_update(TINY, torch.ones(3), plan=PLAN, round_number=258)
HEADER = RETURNED[:64]


def test_a_round_trip_rebuilds_the_model_from_the_message_alone():
    header = read_header(SENT)
    client = PartialModel(
        lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
        train=["1.*"],
        seed=header.seed,
        fingerprint=header.fingerprint,
    )
    assert torch.equal(decode_model(SENT, client, plan=PLAN), TINY.flat)
    assert (header.direction, header.plan, header.round) == ("from server", PLAN[:24], 0)
    delta = torch.tensor([1.0, -2.0, 0.5])
    assert torch.equal(decode_update(encode_update(client, delta), TINY), delta)


def test_the_layout_of_the_header():
    """Byte by byte, as the module's docstring has it."""
    magic, version, direction, generator = struct.unpack("!3sBBB", RETURNED[:6])
    assert (magic, version, direction, generator) == (b"PPM", 1, 1, 2)
    assert RETURNED[6:16].hex() == TINY.trainable_hash
    assert RETURNED[16:32] == (7).to_bytes(16, "big")
    assert RETURNED[32:48].hex() == TINY.fingerprint
    assert RETURNED[48:60].hex() == PLAN[:24]
    assert RETURNED[60:64] == bytes([0, 0, 1, 2])
    assert read_header(RETURNED).round == 258


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


def test_a_pretrained_model_travels_without_a_seed():
    pretrained = PartialModel(nn.Linear(3, 2), train=["bias"], seed=None)
    header = read_header(encode_model(pretrained))
    assert header.seed is None
    assert header.fingerprint == pretrained.fingerprint


def network(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("seed", PartialModel(lambda: network(3, 2, 1), train=["1.*"], seed=8)),
        ("seed", PartialModel(network(3, 2, 1), train=["1.*"], seed=None)),
        pytest.param(
            "trainable_hash",
            PartialModel(lambda: network(3, 2, 1), train=["0.bias", "1.bias"], seed=7),
            id="mask-other2",
        ),
        ("fingerprint", PartialModel(lambda: network(4, 2, 1), train=["1.*"], seed=7)),
    ],
)
def test_a_message_for_another_model_is_refused(field, other):
    with pytest.raises(ConfigError, match=f"message has {field} "):
        decode_update(RETURNED, other, plan=PLAN)


def test_a_message_of_another_plan_or_direction_is_refused():
    with pytest.raises(ConfigError, match="message has plan"):
        decode_update(RETURNED, TINY)
    with pytest.raises(ConfigError, match="direction from server, expected from client"):
        decode_update(SENT, TINY, plan=PLAN)
    with pytest.raises(ConfigError, match="direction from client, expected from server"):
        decode_model(RETURNED, TINY, plan=PLAN)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_of_nan_is_refused_and_an_update_of_nan_is_left_to_the_clip(value):
    broken = PartialModel(lambda: nn.Linear(3, 1), seed=7)
    broken.flat.fill_(value)
    with pytest.raises(ConfigError, match="holds NaN or infinity"):
        decode_model(encode_model(broken), broken)
    assert not decode_update(encode_update(broken, broken.flat), broken).isfinite().any()


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


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (pickle.dumps([1.0, 2.0, 3.0]), "holds no arrays"),
        (b"", "holds no arrays"),
        (save({"trainable": torch.ones(4)}), r"shape \(4,\)"),
        (save({"trainable": torch.ones(3, 1)}), r"shape \(3, 1\)"),
        (save({"trainable": torch.ones(3, dtype=torch.float64)}), "float64"),
        (save({"other": torch.ones(3)}), "other"),
        (save({"trainable": torch.ones(3), "more": torch.ones(1)}), "too long|more"),
        (save({"trainable": torch.ones(3000)}), "too long for 3"),
        (struct.pack("<Q", 2**63) + b"{}", "holds no arrays"),
    ],
)
def test_other_contents_say_what_is_wrong(body, fault):
    with pytest.raises(ConfigError, match=fault):
        decode_update(HEADER + body, TINY, plan=PLAN)


@pytest.mark.parametrize("message", [None, "PPM", bytearray(RETURNED), [1, 2]])
def test_only_bytes_are_messages(message):
    with pytest.raises(ConfigError, match="must be bytes"):
        decode_update(message, TINY, plan=PLAN)


def test_other_versions_and_generators_say_so():
    with pytest.raises(ConfigError, match="not a message of version 1"):
        read_header(b"PPM\x02" + RETURNED[4:])
    with pytest.raises(ConfigError, match="generator 1"):
        read_header(RETURNED[:5] + b"\x01" + RETURNED[6:])
    with pytest.raises(ConfigError, match="generator 0"):
        read_header(RETURNED[:5] + b"\x00" + RETURNED[6:])


@settings(max_examples=1000)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_error_and_nothing_else(message):
    with pytest.raises(ConfigError):
        decode_update(message, TINY, plan=PLAN)


@settings(max_examples=1000)
@given(st.binary(max_size=150))
def test_arbitrary_contents_under_a_true_header_are_an_error(body):
    with pytest.raises(ConfigError):
        decode_update(HEADER + body, TINY, plan=PLAN)


def check(message: bytes) -> None:
    """Whatever decodes is a vector of the model's shape, under the model's own header."""
    with suppress(ConfigError):
        decoded = decode_update(message, TINY, plan=PLAN)
        assert (decoded.shape, decoded.dtype) == ((3,), torch.float32)
        assert message[:60] == HEADER[:60]


@pytest.mark.parametrize("place", range(len(RETURNED)))
def test_any_other_byte_in_any_place_is_an_error_or_a_vector(place):
    for value in set(range(256)) - {RETURNED[place]}:
        message = RETURNED[:place] + bytes([value]) + RETURNED[place + 1 :]
        check(message)
        if place < 60:  # the round is the server's to judge
            with pytest.raises(ConfigError):
                decode_update(message, TINY, plan=PLAN)


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(64, len(RETURNED) - 1), st.integers(0, 255)), min_size=2))
def test_several_changed_bytes_are_an_error_or_a_vector(changes):
    message = bytearray(RETURNED)
    for place, value in changes:
        message[place] = value
    check(bytes(message))


@pytest.mark.parametrize("cut", range(len(RETURNED)))
def test_a_cut_message_is_an_error(cut):
    with pytest.raises(ConfigError):
        decode_update(RETURNED[:cut], TINY, plan=PLAN)


@pytest.mark.parametrize(
    "dtype", ["F64", "F16", "F8_E5M2", "F4", "F6_E2M3", "F8_E8M0", "C64", "BOOL", "?"]
)
@pytest.mark.parametrize("shape", ["[3]", "[0]", "[12]", "[6]", "[24]", "[-3]", "[[3]]", "[1e3]"])
def test_hostile_types_and_shapes(dtype, shape):
    text = f'{{"trainable":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,12]}}}}'.encode()
    with pytest.raises(ConfigError):
        decode_update(HEADER + struct.pack("<Q", len(text)) + text + bytes(12), TINY, plan=PLAN)


def test_messages_of_some_groups_hold_those_and_belong_to_no_other():
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model = PartialModel(module, seed=7, overwrite=True, groups=[["0.*"], ["2.*"]])
    whole, second = encode_model(model), encode_model(model, active=(1,))
    assert len(whole) - len(second) >= 4 * 15 - 8  # two headers may differ by a digit
    assert torch.equal(decode_model(second, model, active=(1,)), model.flat[15:])
    assert torch.equal(decode_model(encode_model(model, active=(0, 1)), model), model.flat)
    for other in (None, (0,), (0, 1)):
        with pytest.raises(ConfigError, match="trainable_hash"):
            decode_model(second, model, active=other)
    delta = torch.arange(8.0)
    update = encode_update(model, delta, active=(1,))
    assert torch.equal(decode_update(update, model, active=(1,)), delta)
    with pytest.raises(ConfigError, match="trainable_hash"):
        decode_update(update, model, active=(0,))
    for wrong in (torch.zeros(15), torch.zeros(23)):
        with pytest.raises(ConfigError, match=r"must be \(8,\)"):
            encode_update(model, wrong, active=(1,))
