"""A node's own ledger: what it declines, whatever a server asks, and what becomes of its folder."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from accounting import Participation
from accounting.checks import ConfigError
from privpart.flower.agreement import DeclinedError
from privpart.flower.people import Asked, People, moves_in
from privpart.run.members import (
    MOVE,
    NODE_KEYS,
    STATEMENT,
    STATEMENTS,
    Statements,
    compared,
    histories,
    signed,
    unsealed,
)

LIMITS = Participation(12, max_participations=3, min_separation=3)
ASKED = Asked("people", "p" * 64, "run", 0, "model 0")


def at(round_, **changes):
    return replace(ASKED, **{"round": round_, "model": f"model {round_}", **changes})


def why(people, asked, client=1):
    """Return why a client declines, or its signed rounds."""
    entry, declined = people.answer(asked, [client], LIMITS)
    values = unsealed(entry, people.public_key, STATEMENT)
    return declined.get(str(client)) or histories(values, plan=asked.plan, run=asked.run)[client]


@pytest.fixture
def people(tmp_path):
    return People(tmp_path / "node")


def test_a_client_answers_as_often_and_as_far_apart_as_the_plan_says(people, tmp_path):
    assert why(people, at(3)) == [3]
    for near in (1, 2, 4, 5):
        assert "too near" in why(people, at(near))
    assert why(people, at(0)) == [0, 3]
    assert why(People(tmp_path / "node"), at(6)) == [0, 3, 6]  # another process of the node
    assert "3 times" in why(people, at(9))
    assert why(people, at(9), client="1") == [9]  # another client


def test_a_round_is_answered_again_in_its_run_and_for_its_model_alone(people):
    assert why(people, at(0)) == why(people, at(0)) == [0]
    for other in ({"model": "another"}, {"run": "another"}):
        assert "another run or for another model" in why(people, at(0, **other))


def test_other_runs_and_plans_about_the_population_count(people, tmp_path):
    assert why(people, at(0)) == [0]
    assert "too near" in why(people, at(1, run="second server"))
    assert why(people, at(3, run="second server")) == [0, 3]
    other = at(0, plan="q" * 64)
    assert why(people, other) == [0]
    assert "3 times about this population" in why(people, replace(other, round=3))
    more = People(tmp_path / "node", most=4)
    assert why(more, replace(other, round=3)) == [0, 3]
    assert why(people, at(0, population="other people")) == [0]


def test_what_was_signed_is_on_the_disk_after_a_kill(tmp_path):
    """The process dies as soon as it has decided; each tells what it would have sent."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from accounting import Participation\n"
        "from privpart.flower.people import Asked, People\n"
        "people = People(Path(sys.argv[1]))\n"
        "for n in range(0, 12, 3):\n"
        "    asked = Asked('people', 'p' * 64, 'run', n, f'model {n}')\n"
        "    people.answer(asked, [1], Participation(12, 3, 3))\n"
        "    if n == 3:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "node")], env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert why(People(tmp_path / "node"), at(9)) == [0, 3, 9]


def test_an_operator_alone_moves_a_history(people, tmp_path):
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    values = {"schema": MOVE, "plan": ASKED.plan, "run": "run", "rounds": {"1": [0, 6]}}
    entry = signed(key, {**values, "node": "7"})
    with pytest.raises(DeclinedError, match="named no operator"):
        people.take_over(at(9), [entry])
    keeper = People(tmp_path / "node", operator=key.public_key().public_bytes_raw().hex())
    for wrong in (signed(other, values), {**entry, "text": entry["text"] + " "}, {}):
        with pytest.raises(DeclinedError, match="were moved here, but"):
            keeper.take_over(at(9), [wrong])
    for _ in range(2):
        keeper.take_over(at(9), [entry])
    assert "too near" in why(keeper, at(8))
    assert why(keeper, at(9)) == [0, 6, 9]
    # a server passes the same moves on with every task: they are entered once
    (tmp_path / "node" / "answers.db").rename(tmp_path / "elsewhere")
    keeper.take_over(at(9), [entry])
    for text in (None, "{", "{}", "[1]", "[" * 10**5, "[" + " " * 2**24 + "]"):
        with pytest.raises(DeclinedError, match="not a list"):
            moves_in(text)


def test_a_folder_that_lost_a_part_is_refused(people, tmp_path):
    why(people, at(0))
    folder = tmp_path / "node"
    shutil.copytree(folder, tmp_path / "copy")
    (folder / "answers.db").unlink()
    with pytest.raises(ConfigError, match="with it who has answered"):
        People(folder)
    (tmp_path / "copy" / "key").unlink()
    with pytest.raises(ConfigError, match="is missing"):
        People(tmp_path / "copy")
    shutil.copy(folder / "key", tmp_path / "copy" / "key")
    (tmp_path / "copy" / "answers.db").write_bytes(b"")
    with pytest.raises(ConfigError, match="missing or empty beside its key"):
        People(tmp_path / "copy")
    (tmp_path / "copy" / "answers.db").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        People(tmp_path / "copy")
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by other users"):
        People(folder)


def test_clients_of_one_sum_answer_together_or_not_at_all(people):
    assert why(people, at(3)) == [3]
    _, declined = people.answer(at(4), [1, 2], LIMITS, together=True)
    assert declined.keys() == {"1"}
    assert why(people, at(5), client=2) == [5]  # round 4 did not count


def test_a_ledger_that_was_put_back_is_named_by_answers_that_no_row_counts(people, tmp_path):
    """Round 0 was answered too late to be counted; an older copy no longer knows of it."""
    older, run = tmp_path / "older", tmp_path / "run"
    shutil.copytree(tmp_path / "node", older)
    run.mkdir(mode=0o700)
    keys = {"7": people.public_key}
    facts = {"owners": {"7": ["1"]}, NODE_KEYS: keys, "run_id": ASKED.run}
    rows, said = [SimpleNamespace(round=6, clients=(1,))], Statements(run)
    said.add(7, people.answer(at(0), [1], LIMITS)[0])
    honest = people.answer(at(6), [1], LIMITS)[0]
    said.add(7, honest)
    assert compared(run, facts, rows, LIMITS, ASKED.plan)[0]
    (run / STATEMENTS).write_text((run / STATEMENTS).read_text().partition("\n")[0] + "\n")
    Statements(run).add(7, People(older).answer(at(6), [1], LIMITS)[0])
    whole, sentence = compared(run, facts, rows, LIMITS, ASKED.plan)
    assert not whole
    assert "no longer counts round 0 of 1" in sentence
