"""Statements of nodes beside the rows of a run: what is compared, and what each lack says."""

import json
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from accounting import ConfigError, Participation
from privpart import sign_move
from privpart.run.ledger import Row
from privpart.run.members import STATEMENT, STATEMENTS, Members, Statements, compared, signed

LIMITS = Participation(9, max_participations=3, min_separation=2)
KEYS = {"7": Ed25519PrivateKey.generate(), "8": Ed25519PrivateKey.generate()}
PUBLIC = {node: key.public_key().public_bytes_raw().hex() for node, key in KEYS.items()}
FACTS = {"run_id": "r", "owners": {"7": ["1", '"1"']}, "node_keys": PUBLIC}
MOVED = {"round": 3, "node": "8", "key": PUBLIC["8"], "clients": ["1"], "signed": {}}


def rows(*cohorts):
    fixed = {"state": "", "model": "", "clip_norm": 1.0}
    return [
        Row(round=n, received=len(c), clients=c, clipped_by={"server": len(c)}, **fixed)
        for n, c in enumerate(cohorts)
    ]


ROWS = rows((1, "1"), (), (1,), (), (1,))


def state(folder, round_, rounds, node="7", key=None, plan="p"):
    values = {"schema": STATEMENT, "plan": plan, "run": "r", "round": round_, "rounds": rounds}
    Statements(folder).add(int(node), signed(key or KEYS[node], values))


def says(folder, facts=FACTS, taken=ROWS):
    return compared(folder, facts, taken, LIMITS, "p")


def test_all_of_it_is_signed_or_the_sentence_says_what_is_not(tmp_path):
    assert not says(tmp_path)[0]
    state(tmp_path, 0, {"1": [0], '"1"': [0]})
    state(tmp_path, 2, {"1": [0, 2]})
    assert "round 4: nothing signed says that 1 answered" in says(tmp_path)[1]
    state(tmp_path, 4, {"1": [0, 2, 4]}, node="8")
    assert not says(tmp_path)[0]  # not the node that the ledger names
    assert says(tmp_path, {**FACTS, "moves": [MOVED]}) == (
        True, "4 answers, each counted and signed by its node, 2 in all"
    )  # fmt: skip
    without = {**FACTS, "node_keys": {"8": PUBLIC["8"]}}
    with pytest.raises(KeyError):
        says(tmp_path, without)
    (tmp_path / STATEMENTS).unlink()
    assert "a node that keeps no ledger" in says(tmp_path, without)[1]


@pytest.mark.parametrize(
    ("rounds", "sentence"),
    [
        ([4], "does not count every earlier round; its ledger may be an older copy"),
        ([0, 1, 2, 4], "is over: separation"),
        ([0, 2, 4, 6], "is over: participation limit"),
    ],
)
def test_a_count_that_lacks_a_round_or_is_over_the_limits_is_not_enough(tmp_path, rounds, sentence):
    state(tmp_path, 0, {"1": [0], '"1"': [0]})
    state(tmp_path, 2, {"1": [0, 2]})
    state(tmp_path, 4, {"1": rounds})
    if rounds == [0, 1, 2, 4]:
        assert min(b - a for a, b in pairwise(rounds)) < LIMITS.min_separation
    assert sentence in says(tmp_path)[1]


def test_what_another_key_signed_or_of_another_plan_is_refused(tmp_path):
    for wrong in ({"key": KEYS["8"]}, {"plan": "q"}):
        state(tmp_path, 0, {"1": [0]}, **wrong)
        with pytest.raises(ValueError, match=r"signature|another plan"):
            says(tmp_path)
        (tmp_path / STATEMENTS).unlink()
    for name, rounds in (("01", [0]), (" 1", [0]), ("1", [0, 0]), ("1", ["0"]), ("1", [2, 0])):
        state(tmp_path, 0, {name: rounds})
        with pytest.raises(ValueError, match=r"no client|ascending|JSON|Expecting|Extra"):
            says(tmp_path)
        (tmp_path / STATEMENTS).unlink()


def test_a_torn_statement_is_cut_off_by_the_next(tmp_path):
    state(tmp_path, 0, {"1": [0], '"1"': [0]})
    with (tmp_path / STATEMENTS).open("ab") as file:
        file.write(b'{"node": "7", "te')
    state(tmp_path, 2, {"1": [0, 2]})
    assert says(tmp_path, taken=ROWS[:3])[0]
    lines = (tmp_path / STATEMENTS).read_text().splitlines()
    assert [json.loads(line)["node"] for line in lines] == ["7", "7"]


def test_an_owner_is_that_of_the_round_and_a_move_without_a_run_is_refused(tmp_path):
    members = Members.of({**FACTS, "moves": [MOVED]})
    assert [members.owner(1, n) for n in (0, 2, 3, 8)] == ["7", "7", "8", "8"]
    assert (members.owner("1", 8), members.owner(2, 0)) == ("7", None)
    with pytest.raises(ConfigError, match="holds no run"):
        sign_move(tmp_path, node=8, of=7, key=tmp_path / "key", out=tmp_path / "moves")
