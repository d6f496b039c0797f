"""Costs: the tables of FedPT and FedPart; FLOPs and memory as a person counts them by hand."""

import pytest
import torch
from torch import nn

from privpart import LocalTraining, PartialModel
from privpart.data.index import batch_rows
from privpart.models import MODELS, build_network
from privpart.patterns import trained_groups
from privpart.plan import Schedule
from privpart.training.costs import client_costs, parameters_sent

SGD = LocalTraining(0.1)


def dense(train, hidden=6):
    network = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 4))
    return PartialModel(network, train=train, seed=0, overwrite=True)


def batch(n=8):
    return torch.rand(n, 5), torch.arange(n) % 4


def measure(train=("*",), local=SGD, examples=8, n=8):
    return client_costs(dense(train), batch(n), local=local, examples=examples)


def test_flops_by_hand():
    upper, lower = 2 * 6 * 4, 2 * 5 * 6  # two per multiply-add, of one example
    assert measure().forward_flops == 8 * (upper + lower)
    assert measure().backward_flops == 8 * (2 * upper + lower)  # no gradient of the input
    assert measure(["2.*"]).backward_flops == 8 * upper
    assert measure(["0.*"]).backward_flops == 8 * (upper + lower)  # through the frozen layer
    assert measure(["2.*"]).forward_flops == measure().forward_flops


def test_attention_counts():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            mixed = nn.functional.scaled_dot_product_attention(x, x, x)
            return self.out(mixed.mean(dim=(1, 2)))

    model = PartialModel(Attention, seed=0)
    costs = client_costs(
        model, (torch.rand(2, 1, 7, 4), torch.tensor([0, 1])), local=SGD, examples=2
    )
    assert costs.forward_flops == 2 * (2 * 2 * 7 * 7 * 4 + 2 * 4 * 3)


@pytest.mark.parametrize(
    ("local", "examples", "seen"),
    [
        (LocalTraining(0.1, batch_size=8), 20, 20),
        (LocalTraining(0.1, epochs=3, batch_size=8), 20, 60),
        (LocalTraining(0.1, batch_size=8, steps=2), 20, 16),
        (LocalTraining(0.1, batch_size=8, steps=7), 20, 48),
        (LocalTraining(0.1, batch_size=8, steps=2), 3, 6),
    ],
)
def test_a_round_is_every_example_that_passes_through(local, examples, seen):
    passed = sum(len(rows) for rows in batch_rows(local, examples, torch.Generator()))
    assert passed == seen
    assert measure(local=local, examples=examples).forward_flops == seen * 2 * (5 * 6 + 6 * 4)


def test_memory_by_hand():
    full, last = measure().memory, measure(["2.*"]).memory
    numbers = 5 * 6 + 6 + 6 * 4 + 4
    assert full.parameters == last.parameters == 4 * numbers
    assert (full.gradients, full.before, full.optimizer) == (4 * numbers, 4 * numbers, 0)
    assert last.gradients == last.before == 4 * (6 * 4 + 4)
    # log-softmax, labels, its count of labels, the hidden layer, once although ReLU and the dense
    # layer above both keep it; training the first layer keeps the input too
    above = 4 * 8 * 4 + 8 * 8 + 4 + 4 * 8 * 6
    assert last.activations == above
    assert full.activations == above + 4 * 8 * 5
    assert full.total == full.parameters + 2 * full.gradients + full.activations


def test_optimizer_state():
    trained = 4 * (6 * 4 + 4)
    assert measure(["2.*"], LocalTraining(0.1, momentum=0.9)).memory.optimizer == trained
    model = dense(["2.*"])
    before = model.flat.clone()
    local = LocalTraining(0.1, optimizer="adam")
    adam = client_costs(model, batch(), local=local, examples=8).memory.optimizer
    assert adam == 2 * trained + 4  # and a count of steps
    assert torch.equal(model.flat, before)
    assert not model.gradient.any()


# Tables 1 to 3, Comm. in GB by number of cycles. Left out: two misprints of full training,
# CIFAR-100 at 2 cycles (9.65 for 9.83) and AG News at 5 (106 for 111).
R8, R18, TEXT = "resnet8", "resnet18", "text_transformer"
COMM = [
    # network, its sizes, cycles, full, FedPart
    (R8, {"classes": 10}, (1, 2, 3, 4), (4.83, 9.65, 14.5, 19.3), (1.35, 2.70, 4.05, 5.40)),
    (R8, {"classes": 100}, (1, 3, 4, 5), (4.92, 14.8, 19.7, 24.6), (1.38, 4.13, 5.51, 6.88)),
    (R8, {"classes": 200}, (1, 3, 5), (5.02, 15.1, 25.1), (1.40, 4.21, 7.02)),
    (R18, {"classes": 10}, (1, 2, 3), (82.1, 164, 246), (12.2, 24.5, 36.7)),
    (R18, {"classes": 200}, (1, 2, 3), (82.8, 166, 248), (12.3, 24.7, 37.0)),
    (TEXT, {"vocabulary": 30_333}, (1, 3, 5), (22.3, 66.9, None), (7.43, 22.3, 37.2)),
    (TEXT, {"vocabulary": 75_242}, (1, 3, 5), (51.8, 155, 259), (17.3, 51.8, 86.3)),
]


def group_sizes(name, **sizes):
    with torch.device("meta"):
        module = build_network(name, **sizes)
    everything = dict(module.named_parameters())
    groups = trained_groups(module, MODELS[name].groups, list(everything))
    return [sum(everything[n].numel() for n in names) for names in groups]


def printed(numbers):
    """FedPart's unit: 4 bytes a number, all 40 clients, in 1,024,000,000 bytes."""
    return numbers * 4 * 40 / 1e6 / 1024


@pytest.mark.parametrize(("name", "sizes", "cycles", "full", "partial"), COMM)
def test_communication_of_the_paper_s_tables(name, sizes, cycles, full, partial):
    groups = group_sizes(name, **sizes)
    for count, fnu, fedpart in zip(cycles, full, partial, strict=True):
        rounds = Schedule(cycles=count).rounds(len(groups))
        for said, numbers in (
            (fnu, len(rounds) * sum(groups)),
            (fedpart, parameters_sent(rounds, groups)),
        ):
            if said is not None:
                digit = 10.0 ** (len(str(int(said))) - 3)  # three digits are printed
                # two cells (14.8 and 15.1) multiply the printed figure of the first cycle
                first = round(printed(numbers) / count, 2)
                found = (printed(numbers), count * first)
                assert min(abs(x - said) for x in found) <= 0.5 * digit + 1e-9


def partial_model(**sizes):
    return PartialModel(
        lambda: build_network("resnet8", **sizes), seed=0, groups=MODELS["resnet8"].groups
    )


def test_a_real_client_of_resnet8_does_half_not_two_thirds_in_a_partial_round():
    one = partial_model()
    x, y = torch.rand(1, 3, 32, 32), torch.zeros(1, dtype=torch.long)
    flops = [
        cost.forward_flops + cost.backward_flops
        for rounds in (None, *(((g,),) for g in range(10)))
        for cost in [client_costs(one, (x, y), local=SGD, examples=1, rounds=rounds)]
    ]
    assert sum(flops[1:]) / 10 / flops[0] == pytest.approx(0.498, abs=0.002)
    assert max(flops[1:]) < flops[0]


def test_bytes_are_those_of_the_messages():
    one = partial_model(width=4)
    rounds = Schedule(cycles=2, warm_up=2, between=1, rounds_per_group=1).rounds(10)
    x, y = torch.rand(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    before = one.flat.clone()
    local = LocalTraining(0.1, batch_size=2)
    found = client_costs(one, (x, y), local=local, examples=2, rounds=rounds)
    numbers = parameters_sent(rounds, one.group_sizes)
    assert 64 < found.bytes_up - 4 * numbers / len(rounds) < 170
    assert 64 < found.bytes_down - 4 * one.dim < 170
    full = client_costs(one, (x, y), local=local, examples=2)
    assert found.memory == full.memory  # some rounds are full
    assert found.trained == round(numbers / len(rounds)) < full.trained
    assert torch.equal(one.flat, before)
    assert all(p.requires_grad for p in one.module.parameters())
