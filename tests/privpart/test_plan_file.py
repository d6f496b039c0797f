"""Plan files: what people write, what they get wrong, and what fixes the run."""

import re
import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from accounting import BinaryTree, BufferedToeplitz, ConfigError, Grouped, Independent, Toeplitz
from privpart.training import plan_file

TEXT = Path("examples/digits.toml").read_text()
SCHEDULE = "[schedule]\ncycles = 4\nrounds_per_group = 3\nwarm_up = 12\nbetween = 8\n\n[data]"
TURNS = TEXT.replace("[data]", SCHEDULE)


def changed(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


def test_spaces_and_comments_do_not_change_the_hash_and_every_value_does():
    plan = plan_file.parse(TEXT)
    assert (plan.privacy_plan().report_goal, plan.privacy_plan().context) == (19, plan.hash)
    base = plan.hash
    assert plan_file.parse(TEXT + "\n# a comment\n").hash == base
    for old, new in [
        ("noise_multiplier = 1.0", "noise_multiplier = 1.5"),
        ("epochs = 2", "epochs = 3"),
        ("seed = 7", "seed = 8"),
        ('"conv*", ', ""),
        ("momentum = 0.9", "momentum = 0.8"),
        ("clients_per_round = 19", "clients_per_round = 18"),
    ]:
        assert plan_file.parse(changed(old, new)).hash != base
    # without [server] the noised mean is added
    plain = re.sub(r"\[server\][^\[]*", "[server]\nlearning_rate = 1.0\n", TEXT)
    assert (
        plan_file.parse(re.sub(r"\[server\][^\[]*", "", TEXT)).hash == plan_file.parse(plain).hash
    )


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        ('{ name = "independent" }', Independent(72)),
        ('{ name = "tree", restart_every = 9 }', BinaryTree(72, 9)),
        ('{ name = "tree", estimator = "online" }', BinaryTree(72, estimator="online")),
        ('{ name = "toeplitz", bands = 4 }', Toeplitz.square_root(72, bands=4)),
        ('{ name = "toeplitz", coefficients = [1.0, 0.5] }', Toeplitz(72, (1.0, 0.5))),
        ('{ name = "blt", decay = [0.9], scale = [0.3] }', BufferedToeplitz(72, [0.9], [0.3])),
    ],
)
def test_mechanisms(mechanism, expected):
    plan = plan_file.parse(changed('{ name = "blt" }', mechanism))
    assert plan.privacy_plan().mechanism == expected


def test_a_target_is_met_by_the_least_noise():
    plan = plan_file.parse(changed("noise_multiplier = 1.0 ", "target_epsilon = 3.0"))
    assert 3.0 * (1 - 1e-4) < plan.privacy_plan().guarantee().epsilon(1e-5) <= 3.0


WRONG = [
    ("clip_norm = 0.3", "clip_nrom = 0.3", "privacy.clip_nrom: no such key. The nearest is clip_"),
    ('"blt" }', '"blt", bufers = 2 }', "privacy.mechanism.bufers: no such key. The n"),
    ("cycles = 4", "cycle = 4", "schedule.cycle: no such key. The nearest is cycles"),
    ('schema = "privpart/plan/1"', 'schema = "privpart/plan/2"', "schema: "),
    ("clip_norm = 0.3", "clip_norm = nan", "privacy.clip_norm: "),
    ("learning_rate = 0.1", "learning_rate = -0.1", "client: learning_rate=-0.1: must be"),
    ('task = "digits"', 'task = "mnist"', "data.task: "),
    ("noise_multiplier = 1.0 ", "", "give either noise_multiplier or target"),
    ("noise_multiplier = 1.0 ", "noise_multiplier = 1.0\ntarget_epsilon = 2.0 ", "plan has both"),
    ('name = "blt"', 'name = "blt", decay = [0.9]', "decay and scale of a BLT belong together"),
    ('name = "blt"', 'name = "blt", restart_every = 2', "only for the mechanism tree"),
    ("clip_norm = 0.3", "clip_norm = 0.0", "clip_norm=0"),
    ("rounds = 72", "rounds = 0", "rounds=0"),
    ("train = ", "groups = [['*']]\ntrain = ", "model.groups: need a table"),
    ("hidden = 512", "hidden = true", "not a truth value"),
    ("cycles = 4", "cycles = 5", "privacy.rounds=72: the schedule has 89 rounds for 3 groups"),
    ("train = ", "groups = [['conv*']]\ntrain = ", "no group has norm.weight"),
    ("train = ", "groups = [['*'], ['conv1.*']]\ntrain = ", "is in groups 1 and 2"),
]


def promised(text):
    plan = plan_file.parse(text, name="mine.toml")
    plan.model.network()
    return plan.privacy_plan()


@pytest.mark.parametrize(("old", "new", "words"), WRONG)
def test_what_is_wrong_with_a_plan_is_named(old, new, words):
    base = TURNS if "cycle" in old or "conv" in new else TEXT
    assert old in base
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        promised(base.replace(old, new, 1))
    if "no such key" in words:
        assert str(error.value).startswith("mine.toml is not a valid plan:")


def fields_of(table, path=()):
    """Every field of a plan file that is no table: where it is, and its type."""
    for name, kind in get_type_hints(table).items():
        if name.startswith(("_", "model_config")):
            continue
        here = (*path, "schema" if name == "plan_schema" else name)
        options = [kind, *get_args(kind)]
        tables = [a for a in options if is_dataclass(a) or hasattr(a, "model_fields")]
        if tables:
            yield from fields_of(tables[0], here)
        else:
            yield here, options


FIELDS = dict(fields_of(plan_file.PlanFile))
WHOLE = [path for path, options in FIELDS.items() if int in options]
REAL = [path for path, options in FIELDS.items() if float in options]
SERIES = [path for path, options in FIELDS.items() if tuple[float, ...] in options]
TRUTH = [path for path, options in FIELDS.items() if bool in options]
WRONG_KIND = [
    *((path, value) for path in WHOLE for value in (True, 1.0, "1")),
    *((path, value) for path in REAL for value in (True, "1")),
    *((path, [value]) for path in SERIES for value in (True, "1")),
    *((path, value) for path in TRUTH for value in (1, "true")),
]


def test_all_fields_are_found():
    """Against a census that silently misses what it is about."""
    assert (len(WHOLE), len(REAL), len(SERIES), len(TRUTH)) == (55, 28, 7, 6)


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_truth_values_and_strings_are_no_numbers_nor_the_other_way_round(path):
    *tables, last = path
    for value in (value for wrong, value in WRONG_KIND if wrong == path):
        values = tomllib.loads(TEXT)
        table = values
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
        named = rf" {'.'.join(path)}(\.0)?: Input should be a valid"
        with pytest.raises(ConfigError, match=named):
            plan_file.validated(values)


def test_a_byte_order_mark_is_no_part_of_a_plan(tmp_path):
    text = (Path(__file__).parents[2] / "examples" / "digits.toml").read_text()
    marked = tmp_path / "marked.toml"
    marked.write_text(text, encoding="utf-8-sig")
    assert plan_file.read(marked).hash == plan_file.parse(text).hash


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match=r"plan .*nothing.toml: there is no such file"):
        plan_file.read(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_file.read(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        plan_file.read(tmp_path / "bytes")
    (tmp_path / "comma").write_text("rate = 0,5")
    with pytest.raises(ConfigError, match="has a point"):
        plan_file.read(tmp_path / "comma")
    with pytest.raises(ConfigError, match="plan: is not valid TOML"):
        plan_file.parse("rounds = = 3")


def test_a_schedule_makes_a_stream_per_group_and_enters_the_hash():
    """The frozen layer of the example is no group: conv1; conv2 and its norm; dense2."""
    plan = plan_file.parse(TURNS)
    promised = plan.privacy_plan()
    assert isinstance(promised.mechanism, Grouped)
    assert promised.mechanism.sizes == (160, 4704, 330 + 5130 - 330)
    assert {type(own) for own in promised.mechanism.mechanisms} == {BufferedToeplitz}
    assert [len(own) for own in promised.mechanism.active_rounds()] == [48] * 3
    assert promised.active(0) == (0, 1, 2)
    assert promised.active(12) == (0,)
    base = plan_file.parse(TEXT)
    assert base.privacy_plan().active(12) is None
    hashes = {plan.hash, base.hash}
    groups = "groups = [['conv1.*'], ['conv2.*'], ['norm.*', 'dense2.*']]"
    for old, new in [
        ("between = 8", "between = 8\norder = 'reverse'"),
        ("train = ", f"{groups}\ntrain = "),
    ]:
        assert old in TURNS
        hashes.add(plan_file.parse(TURNS.replace(old, new)).hash)
    assert len(hashes) == 4


def test_groups_leave_a_fit_its_participation():
    """Rounds of one client that are 9 apart may be neighbours for a group that trains seldom."""
    limits = "max_participations = 4\nmin_separation = 9\nminimum_cohort"
    promised = plan_file.parse(TURNS.replace("minimum_cohort", limits)).privacy_plan()
    claimed = promised.mechanism.sensitivity(promised.participation)
    assert claimed.squared > 4
