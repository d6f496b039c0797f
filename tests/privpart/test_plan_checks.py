"""What `privpart train` refuses is refused wherever a plan is read, in the same words."""

import re
import tomllib

import numpy as np
import pytest
import small_study
from plans import small_plan
from typer.testing import CliRunner

from accounting import ConfigError, FixedOrder, Independent, Participation
from privpart.cli.main import app
from privpart.data import cohorts_in_turn
from privpart.messages import limit_reached
from privpart.models import build_network
from privpart.training.plan_file import validated
from privpart.training.task_data import plan_data

TEXT = small_study.changed(
    ("rounds = 2", "rounds = 4"),
    ("clip_norm = 1.0", "clip_norm = 0.3"),
    ("users = 1437\nclients_per_round = 6", "users = 40\nclients_per_round = 4"),
    ("learning_rate = 0.3\n", ""),
    text=small_study.PLAN,
)
SELECT = 'filters = { keys = "independent", m = 2 }\ndelivery = "pir"'
HUGE = 10**30
MOON = 'objective = "moon"\nmu = 1.0'


def changed(*changes):
    """The plan with lines changed in, or added to, tables."""
    tables = tomllib.loads(TEXT)
    for table, lines in changes:
        tables.setdefault(table, {}).update(tomllib.loads(lines))
    return tables


REFUSED = [
    ([("client", MOON), ("select", SELECT)], "client.objective: clients that select keep no model"),
    ([("client", 'loss = "binary_cross_entropy"')], "client.loss=binary_cross_entropy: every"),
    ([("model", 'name = "small_cn"')], "model 'small_cn': unknown. Near it: small_cnn"),
    ([("model", "sizes = { hidden = 8 }")], "model 'small_cnn': .*missing"),
    ([("model", 'train = ["conv9.*"]')], "pattern 'conv9.*' matches no parameter"),
    ([("model", 'groups = [["*"]]')], "model.groups: need a table"),
    ([("model", "seed = -1")], "seed=-1: must be at least 0"),
    ([("model", 'name = "resnet8"\nsizes = { norm = "batch" }')], "is a BatchNorm2d"),
    ([("data", 'task = "emnist"')], "data.directory: is missing; emnist .iid. needs it. Its files"),
    ([("data", 'directory = "here"')], "data.directory: is not for digits .iid.; leave"),
    ([("data", "alpha = 1.0")], "data.alpha: is not for digits .iid"),
    ([("data", 'partition = "dirichlet"\nalpha = 0.0')], "data.alpha: Input should be"),
    ([("data", 'partition = "dirichlet"')], "data.alpha: is missing; digits .dirichlet. needs it"),
    ([("data", "clients_per_round = 41")], "data.clients_per_round=41: must be at most data.users"),
    ([("schedule", "cycles = 3")], "privacy.rounds=4: the schedule has 39 rounds for 4 groups"),
    ([("privacy", "rounds = 11")], "rounds=11: from round 10 on, the limits on .* leave no client"),
    ([("privacy", "minimum_cohort = 5")], "clients_per_round=4: no .* privacy.minimum_cohort is 5"),
    ([("privacy", "max_participations = 5")], "privacy: max_participations=5: at most 4 fit"),
    ([("privacy", f"rounds = {HUGE}")], f"privacy: rounds={HUGE}: must be at most 1000000"),
    *(
        ([("client", f"{key} = {HUGE}")], f"client: {key}={HUGE}: must be at most")
        for key in ("batch_size", "epochs", "steps")
    ),
    *(
        ([("data", f"{key} = {HUGE}")], f"data.{key}: Input should be less than")
        for key in ("users", "clients_per_round", "seed")
    ),
    ([("model", f"seed = {HUGE**2}")], f"seed={HUGE**2}: must be below"),
    (
        [("model", f"sizes = {{ channels = [2, {HUGE}], hidden = 8, image_size = 8 }}")],
        f"model.sizes.channels={HUGE}: must be at most",
    ),
    (
        [("model", "sizes = { channels = [2, 4], hidden = 2000000000, image_size = 8 }")],
        "model.sizes: the network has 54,000,000,1.. parameters; must be at most",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_the_plan_alone_shows_is_said_wherever_it_is_read(changes, says):
    with pytest.raises(ConfigError, match=f"^plan is not a valid plan: .*{says}") as refused:
        validated(changed(*changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", ["epsilon", "mechanisms", "train"])
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("learning_rate = 0.1", f"learning_rate = 0.1\n{MOON}\n[select]\n{SELECT}", "client.objec"),
        ("delta = 1e-5", "delta = 1.5", "delta=1.5: must lie"),
        ("delta = 1e-5", f"delta = 1e-5\nreport_goal = {HUGE}", f"report_goal={HUGE}: must be at"),
        ('name = "tree"', 'name = "tree", bands = 2', "bands: only for the mechanism toeplitz"),
        ("seed = 7", f"seed = 1{'0' * 5000}", "is not valid TOML: Exceeds the limit"),
        ("seed = 7", f"seed = {'[' * 5000}", "is not valid TOML: "),
    ],
)
def test_commands_say_the_same(tmp_path, command, old, new, says):
    assert old in TEXT
    (tmp_path / "plan.toml").write_text(TEXT.replace(old, new))
    options = ["--plan", str(tmp_path / "plan.toml")]
    if command == "train":
        options += ["--out", str(tmp_path / "run")]
    with pytest.raises(ConfigError, match=re.escape(says)):
        CliRunner().invoke(app, [command, *options], catch_exceptions=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", range(40))
def test_short_cohorts_are_those_of_the_cohorts_themselves(seed):
    """Against every round of every client; some plans fall short, and some do not."""
    draw = np.random.default_rng(seed)
    rounds, b = int(draw.integers(1, 25)), int(draw.integers(1, 6))
    k = int(draw.integers(1, 1 + -(-rounds // b)))
    users = int(draw.integers(1, 20))
    size = int(draw.integers(1, users + 1))
    least = int(draw.integers(1, 1 + size))
    limits = f"rounds={rounds}\nmax_participations={k}\nmin_separation={b}"
    tables = changed(("privacy", limits))
    tables["privacy"]["minimum_cohort"] = least
    tables["data"] |= {"users": users, "clients_per_round": size}
    cohorts = cohorts_in_turn(range(users), size=size, rounds=rounds, data_seed=0)
    limits, past = Participation(rounds, k, b), {client: [] for client in range(users)}
    for round_, cohort in enumerate(cohorts):
        able = [client for client in cohort if limit_reached(limits, past[client], round_) is None]
        for client in able:
            past[client].append(round_)
        if len(able) < least:
            assert not able  # they come again together
            with pytest.raises(ConfigError, match=f"from round {round_} on, .* leave no client"):
                validated(tables)
            return
    validated(tables)


def test_a_folder_is_named_before_it_is_opened():
    data = validated(tomllib.loads(TEXT)).data.model_copy(update={"task": "emnist"})
    with pytest.raises(TypeError, match="names the folder"):
        plan_data(data, build_network("emnist_cnn"))


def test_a_plan_does_not_promise_an_order_that_no_server_enforces():
    with pytest.raises(ConfigError, match="a FixedOrder is for budgets"):
        small_plan(Independent(8), FixedOrder(8, 2, 3))
