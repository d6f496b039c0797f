"""Weights that stay beside a seed, and parts that never leave a client."""

import copy

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import Constant, LocalTraining, PartialModel, Users, client_update
from privpart.engines.frozen_prefix import split
from privpart.engines.methods import LocalComputation
from privpart.messages import RoundTask
from privpart.start_values import default_initializers
from privpart.training.costs import message_bytes


def network(seed=0):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)
        )


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def examples(n=8):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def test_kept_weights_stay_and_the_others_follow_from_the_seed():
    before = values(network())
    model = PartialModel(network(), train=["4.*"], keep=["0.*"], seed=7)
    drawn = values(PartialModel(network, train=["4.*"], seed=7).module)
    now = values(model.module)
    assert model.kept == ("0.weight", "0.bias")
    for name in before:
        assert torch.equal(now[name], (before if name in model.kept else drawn)[name])
    assert not torch.equal(before["2.weight"], drawn["2.weight"])  # power


def test_without_patterns_kept_are_none_or_all():
    assert PartialModel(network, seed=7).kept == ()
    assert PartialModel(network(), seed=None).kept == tuple(values(network()))


def test_one_fingerprint_over_kept_and_seeded_weights():
    def partial(module, seed=7, **options):
        return PartialModel(module, train=["4.*"], keep=["0.*"], seed=seed, **options)

    expected = partial(network()).fingerprint
    assert partial(network, fingerprint=expected).fingerprint == expected
    for other, seed in ((network(1), 7), (network(), 8)):
        with pytest.raises(ConfigError, match="kept weights"):
            partial(other, seed, fingerprint=expected)
    # it is of the bits, not of how one came by them
    drawn = partial(network()).module
    assert PartialModel(copy.deepcopy(drawn), train=["4.*"], seed=None).fingerprint == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": ["0.*"], "seed": None}, "Leave keep out"),
        ({"keep": ["0.*"], "seed": 7, "overwrite": True}, "nothing is overwritten"),
        ({"keep": ["*"], "seed": 7}, "pass seed=None"),
        ({"keep": "0.*", "seed": 7}, r"keep='0\.\*': must be a list"),
        ({"keep": ["9.*"], "seed": 7}, r"pattern '9\.\*' matches no parameter"),
        (
            {"keep": ["0.*"], "seed": 7, "initializers": {"0.bias": Constant(1.0)}},
            "matches only parameters that keep their weights",
        ),
        ({"local": ["4.*"], "seed": 7, "overwrite": True}, "'4.weight' is in train and in local"),
        (
            {"train": ["0.*"], "local": ["0.bias"], "seed": None},
            "'0.bias' is in train and in local",
        ),
        ({"local": "4.*", "seed": None}, r"local='4\.\*': must be a list"),
    ],
)
def test_what_has_no_effect_or_contradicts_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        PartialModel(network(), **options)


def test_an_initialiser_of_some_weights_beside_kept_ones_is_followed():
    model = PartialModel(network(), keep=["0.*"], seed=7, initializers={"*.bias": Constant(2.0)})
    now = values(model.module)
    assert now["2.bias"].unique().tolist() == [2.0]
    assert torch.equal(now["0.bias"], values(network())["0.bias"])


PERSONAL = {"train": ["!4.*"], "local": ["4.*"]}


def personal(module=None, seed=7, **options):
    return PartialModel(module or network, seed=seed, **PERSONAL, **options)


def test_local_parts_live_in_a_vector_of_their_own():
    model = personal()
    head = model.module[4]
    assert model.local == ("4.weight", "4.bias")
    assert not {*model.local} & {*model.trainable, *model.frozen}
    assert model.own.shape == model.own_gradient.shape == model.own_start.shape == (15,)
    assert model.dim == model.flat.numel() == model.parameter_count - 15
    model.own.fill_(2.0)
    assert head.weight.unique().tolist() == [2.0]
    model.module(examples()[0]).sum().backward()
    assert torch.equal(model.own_gradient[:12], head.weight.grad.flatten())
    assert model.own_gradient.abs().sum() > 0
    model.load(model.flat)
    assert torch.equal(model.own, model.own_start)
    plain = PartialModel(network, seed=7)
    assert plain.own.shape == plain.own_gradient.shape == (0,)
    assert plain.local == ()


def test_local_parts_have_no_part_in_groups_views_hashes_and_messages():
    model = personal(groups=[["0.*"], ["2.*"]])
    assert model.groups == (("0.weight", "0.bias"), ("2.weight", "2.bias"))
    assert list(model.views(model.flat)) == list(model.trainable)
    model.train_only([1])
    assert [model.module[at].weight.requires_grad for at in (0, 2, 4)] == [False, True, True]
    without = PartialModel(network, train=["!4.*"], seed=7)
    assert personal().trainable_hash == without.trainable_hash
    assert message_bytes(personal()) == message_bytes(without)


def test_the_fingerprint_covers_names_and_start_values_of_local_parts():
    expected = personal().fingerprint
    frozen = PartialModel(network, train=["!4.*"], seed=7)
    assert frozen.fingerprint != expected
    with pytest.raises(ConfigError, match="local set"):
        personal(fingerprint=expected, initializers={"4.bias": Constant(1.0)})
    model = personal(fingerprint=expected)
    model.own.fill_(2.0)  # what a client makes of it is not covered
    model.verify()


def test_the_next_client_cannot_tell_who_trained_before():
    model, (x, y) = personal(), examples()
    start = model.flat.clone()

    def update(which):
        return client_update(
            model, start, (x[which], y[which]), local=LocalTraining(0.5, epochs=3), clip_norm=9.0,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip

    alone = update(slice(4))
    update(slice(4, 8))
    assert torch.equal(model.own, model.own_start)
    assert not model.own_gradient.any()
    assert torch.equal(model.flat, start)
    assert torch.equal(update(slice(4)), alone)
    model.own_start.add_(0.1)  # power: another local part is another update
    assert not torch.equal(update(slice(4)), alone)


def test_a_device_s_copy_has_its_own_local_part():
    model = personal()
    model.own_start.fill_(1.0)
    other = model.on(torch.device("meta"))
    assert (other.own.device.type, other.own.shape) == ("meta", (15,))
    assert other.own_start.device.type == "meta"
    assert model.module[4].weight.unique().tolist() == [1.0]


def test_methods_that_share_all_but_the_trained_part_do_not_take_local_parts():
    first = PartialModel(network, train=["4.*"], local=["2.*"], seed=7)
    below, _ = split(first)
    assert [type(layer) for layer in below] == [nn.Linear, nn.Tanh]  # a local layer is not frozen
    task = RoundTask(0, (0,), 0.5, "")
    for model, shared in ((PartialModel(network, train=["4.*"], seed=7), True), (first, False)):
        users = Users(*examples(), [torch.arange(8)])
        work = LocalComputation(model, users, local=LocalTraining(0.5, steps=1), data_seed=5)
        assert work.vectorizable == work.recordable(task) == shared
        assert (work.clients_per_ghost_sum(task) > 0) == shared


def test_a_change_that_no_version_counts_is_found_by_the_fingerprint():
    model = PartialModel(network, train=["4.*"], seed=7)
    model.verify()
    with model.lent(model.flat.clone()):
        model.module[0].weight.data.mul_(1.0 + 1e-6)
    with pytest.raises(ConfigError, match="frozen part has changed"):
        model.verify()


def test_a_module_without_parameters_is_one_sentence():
    with pytest.raises(ConfigError, match="a Tanh, has no parameters"):
        PartialModel(nn.Tanh(), seed=None)
    with pytest.raises(ConfigError, match="returned a dict; must return a torch"):
        PartialModel(dict, seed=7)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(3, 16, 2, bidirectional=True, proj_size=8),
        lambda: nn.GRU(3, 16),
        lambda: nn.RNN(3, 16),
        lambda: nn.LSTMCell(3, 16),
        lambda: nn.GRUCell(3, 16),
        lambda: nn.TransformerEncoderLayer(16, 2, 32),
        lambda: nn.TransformerDecoderLayer(16, 2, 32),
        lambda: nn.MultiheadAttention(16, 2, kdim=8, vdim=8, add_bias_kv=True),
        nn.PReLU,
        lambda: nn.EmbeddingBag(50, 3),
        lambda: nn.BatchNorm1d(3).eval(),
    ],
)
def test_a_seed_suffices_for_torch_s_layers(build):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        before = values(build())
    drawn = values(PartialModel(build, seed=0).module)
    for name, value in drawn.items():
        assert value.abs().max() < 4.4
        if "weight" in name and value.dim() > 1:  # as spread out as torch's own, roughly
            assert 0.5 < value.std() / before[name].std() < 4


def test_recurrent_start_values_are_torch_s():
    found = default_initializers(nn.LSTM(3, 16))
    assert {initializer.limit for initializer in found.values()} == {0.25}
