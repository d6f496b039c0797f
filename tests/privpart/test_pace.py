"""Releases at fixed times: whoever came, and however long a round took within its slot."""

import json

import pytest
import runs
from small_study import PLAN, changed

from privpart import fit
from privpart.run.begin import create_run, fork
from privpart.run.folder import RunFolder
from privpart.run.report import run_report
from privpart.training.pace import paced
from privpart.training.verify import check_run

SLOT = 10.0


class Clock:
    """Time that passes when somebody waits, or when a round is computed."""

    def __init__(self):
        self.now, self.releases = 100.0, []

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


def released(run, durations):
    """Return when each round was released, after the run began."""
    clock = Clock()
    commit = paced(run, run.commit, SLOT, clock=clock, sleep=clock.pass_)
    takes = iter(durations)

    def after(server, counts):
        clock.pass_(next(takes))
        commit(server, counts)
        clock.releases.append(clock.now - 100)

    fit(runs.server(run), runs.Clients(), runs.COHORTS, commit=after)
    return clock.releases


@pytest.mark.parametrize("durations", [(1, 1, 1, 1), (9.9, 0.1, 5, 10)])
def test_the_times_of_release_do_not_depend_on_those_of_the_rounds(tmp_path, durations):
    with create_run(tmp_path / "run", runs.PLAN, facts=runs.FACTS) as run:
        assert released(run, durations) == [10, 20, 30, 40]
        assert "late_rounds" not in run.facts


def test_a_round_that_is_late_waits_for_the_end_of_a_slot_and_is_counted(tmp_path):
    own = {"round_seconds": SLOT}
    with create_run(tmp_path / "run", runs.PLAN, facts=runs.FACTS, own=own) as run:
        assert released(run, (1, 11, 25, 1)) == [10, 30, 60, 70]
    with RunFolder.open(tmp_path / "run") as run:
        assert run.facts["late_rounds"] == 2
    (line,) = (x for x in run_report(run.path).guarantee.not_covered if "side channels" in x)
    assert "slots of 10 seconds, whoever came, 2 of them later or at other" in line
    assert "time," not in line
    assert not [check for check in check_run(run.path) if check.status == "wrong"]


def test_a_commit_that_is_late_is_counted_too_also_the_last(tmp_path):
    clock = Clock()
    with create_run(tmp_path / "run", runs.PLAN, facts=runs.FACTS) as run:

        def slow(server, counts):
            run.commit(server, counts)
            clock.pass_(15)

        commit = paced(run, slow, SLOT, clock=clock, sleep=clock.pass_)
        fit(runs.server(run), runs.Clients(), runs.COHORTS, commit=commit)
    with RunFolder.open(tmp_path / "run") as run:
        assert run.facts["late_rounds"] == len(runs.COHORTS)
    assert not [check for check in check_run(run.path) if check.status == "wrong"]


def test_rounds_that_nothing_paced_are_counted_and_a_fork_speaks_of_itself(tmp_path):
    own = {"round_seconds": SLOT}
    with create_run(tmp_path / "run", runs.PLAN, facts=runs.FACTS, own=own) as run:
        runs.train(run, 3)
    with fork(
        tmp_path / "run", tmp_path / "fork", runs.PLAN, facts={"delta": 1e-6}, own=own
    ) as run:
        assert released(run, (1, 1, 1, 1)) == [10, 20, 30, 40]
    for name, late in (("run", 3), ("fork", 0)):
        (line,) = (
            line
            for line in run_report(tmp_path / name).guarantee.not_covered
            if f"whoever came, {late} of them later or at other times" in line
        )
        assert ("forked from" in line) == (name == "fork")


def test_a_plan_paces_its_run_and_another_keeps_the_line(tmp_path, privpart):
    for text, line in (
        (changed(("rounds = 2", "rounds = 2\nround_seconds = 0.001"), text=PLAN), "slots of 0.001"),
        (PLAN, "side channels, such as time, memory and traffic"),
    ):
        (tmp_path / "plan.toml").write_text(text)
        out = tmp_path / line[:8]
        done = privpart("train", "--plan", str(tmp_path / "plan.toml"), "--out", str(out))
        assert done.returncode == 0, done.stderr
        told = json.loads(privpart("report", str(out), "--format", "json").stdout)
        assert any(line in item for item in told["guarantee"]["not_covered"])


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9", '"1"'])
def test_a_slot_is_a_number_of_seconds(tmp_path, privpart, seconds):
    text = changed(("rounds = 2", f"rounds = 2\nround_seconds = {seconds}"), text=PLAN)
    (tmp_path / "plan.toml").write_text(text)
    done = privpart("epsilon", "--plan", str(tmp_path / "plan.toml"))
    assert done.returncode == 2
    assert "round_seconds" in done.stderr
