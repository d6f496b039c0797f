"""Suggestions for a plan: from public data alone, and a warning where there is nothing to gain."""

import re
from pathlib import Path

import pytest
from plans import tables

from accounting.checks import ConfigError
from privpart.training import suggest
from privpart.training.plan_file import validated
from privpart.training.suggest import suggestions


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(suggest, "_ROUNDS", 2)
    monkeypatch.setattr(suggest, "_COHORT", 10)


def plan_of(folder=None, **changes):
    changes["privacy"] = {"rounds": 6} | changes.get("privacy", {})
    return validated(tables(**changes), folder=folder)


def lines_of(*arguments, **options):
    return {what: (text, status) for what, text, status in suggestions(*arguments, **options)}


def test_what_is_suggested_for_a_built_in_task():
    found = lines_of(plan_of())
    first, rounds = ["looked at", "clip norm", "client", "signal to noise"], (3, 6, 12)
    assert list(found) == [*first, *(f"{number} rounds" for number in rounds)]
    assert found["looked at"][0] == "2 rounds of up to 10 of 300 public users"
    assert "leaves 50% of 20 updates unclipped" in found["clip norm"][0]
    # 7 cohorts of 40 out of 300: the eighth round is of clients who came before
    assert "max_participations = 1: noise_multiplier = " in found["6 rounds"][0]
    assert "max_participations = 2, min_separation = 7" in found["12 rounds"][0]
    assert "for epsilon 8," in found["12 rounds"][0]


def test_a_budget_that_buys_nothing_is_warned_of():
    found = lines_of(plan_of(privacy={"target_epsilon": 0.01}))
    assert "hopeless" in found["signal to noise"][0]
    assert found["signal to noise"][1] == "note"
    ratios = [
        float(re.search(r"at most ([\d.e+-]+) in", lines_of(plan)["signal to noise"][0])[1])
        for plan in (plan_of(), plan_of(privacy={"target_epsilon": 80.0}))
    ]
    assert ratios[0] < ratios[1]


def test_adaptive_clippings_quantile_is_the_one_that_is_suggested():
    clipping = {"quantile": 0.8, "bit_noise_multiplier": 30.0}
    mechanism = {"name": "tree", "restart_every": 2}
    privacy = {"adaptive_clipping": clipping, "mechanism": mechanism}
    assert "leaves 80% of" in lines_of(plan_of(privacy=privacy))["clip norm"][0]


OWN = """
import torch
from privpart.data import from_tensors

seen = []

class Watched:
    def __init__(self, of):
        self.of = of
        self.ids = of.ids

    def examples(self, client):
        seen.append(client)
        return self.of.examples(client)

def population(n=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4 * n, 1, 8, 8, generator=generator)
    y = torch.randint(0, 10, (4 * n,), generator=generator)
    return Watched(from_tensors((x, y), user=torch.arange(n).repeat_interleave(4)))

def proxies():
    return population(25)
"""


def own_plan(folder: Path, name: str, **data):
    """Return a plan of clients of a module of this name, which one process loads once."""
    (folder / f"{name}.py").write_text(OWN)
    table = {"task": None, "users": None, "clients": f"./{name}.py:population"}
    table |= {"clients_per_round": 8} | data
    given = {key: value for key, value in table.items() if value is not None}
    return validated(tables(privacy={"rounds": 6}) | {"data": given}, folder=folder)


def test_private_clients_are_never_looked_at(tmp_path):
    with pytest.raises(ConfigError, match="what their updates look like would be a release"):
        lines_of(own_plan(tmp_path, "of_private"))


def test_of_a_population_only_those_held_out_are_looked_at(tmp_path):
    import sys

    plan = own_plan(tmp_path, "of_held_out", held_out=10)
    found = lines_of(plan)
    assert found["looked at"][0].endswith("of 10 public users")
    from privpart.training.task_data import held_out_of

    module = sys.modules["of_held_out"]
    _, public = held_out_of(module.population(), 10)
    assert set(module.seen) == set(public)


def test_proxy_data_stand_for_the_plans_own(tmp_path):
    import sys

    plan = own_plan(tmp_path, "of_proxies")
    found = lines_of(plan, "./of_proxies.py:proxies")
    assert found["looked at"][0].endswith("of 25 public users")
    assert len(set(sys.modules["of_proxies"].seen)) <= 25


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"privacy": {"target_epsilon": None, "noise_multiplier": 0.0}}, "adds no noise"),
        (
            {
                "schedule": {"cycles": 1, "rounds_per_group": 1, "warm_up": 3},
                "model": {"groups": [["conv1.*"], ["conv2.*"], ["norm.*", "dense*"]]},
            },
            r"no suggestions for plans with \[schedule\]",
        ),
    ],
)
def test_plans_for_which_there_are_none(changes, says):
    with pytest.raises(ConfigError, match=says):
        lines_of(plan_of(**changes))
