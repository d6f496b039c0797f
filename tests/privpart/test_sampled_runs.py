"""Runs that sample: an amplified epsilon holds only if each of these conditions does."""

import json
import math
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from plans import small_plan

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    BinaryTree,
    BMinSep,
    ComposedGuarantee,
    ConfigError,
    Estimate,
    Grouped,
    Guarantee,
    Independent,
    Participation,
    PoissonSampling,
    Scheduled,
    ScheduledPoissonSampling,
    Toeplitz,
    TruncatedPoissonSampling,
    WithoutReplacementSampling,
    participation_of,
    sampled_guarantee,
)
from accounting.claims import samplers
from accounting.report import up
from privpart import PrivacyPlan, RunFolder, SampledCohorts, SecretSource, SeededSource, Server, fit
from privpart.loop import CohortTooSmallError
from privpart.noise.cohorts import ids_hash
from privpart.plan import AdaptiveClipping
from privpart.run import budget_book as book
from privpart.run import package
from privpart.run.begin import create_run, fork
from privpart.run.ledger import LEDGER, Ledger, _committed, _link
from privpart.run.policy import Policy, plan_refusals
from privpart.run.report import run_report
from privpart.run.store import decode_state, encode_state, encoded_hash
from privpart.training.export import privacy_metadata
from privpart.training.verify import check_run

PEOPLE = [f"p{i}" for i in range(12)]


def plan(sampling=None, mechanism=None, **change) -> PrivacyPlan:
    sampling = sampling or PoissonSampling(4, 12)
    mechanism = mechanism or Independent(6)
    fields = {"clip_norm": 1.0, "noise_multiplier": 4.0, "minimum_cohort": 0, "sampling": sampling}
    return small_plan(mechanism, participation_of(sampling, mechanism.rounds), **fields | change)


PLAIN = small_plan(Independent(6), (2, 2), clip_norm=1.0, noise_multiplier=4.0)


class Clients:
    """Clients that all send the same update, unless they are silent; or send it unasked."""

    def __init__(self, value=0.1, silent=(), unasked=()):
        self.value, self.silent, self.unasked = value, set(silent), unasked

    def run(self, task, start):
        for client in (*task.clients, *self.unasked):
            if client not in self.silent:
                yield task.update(client, torch.full_like(start, self.value))


@cache
def releases(sampling, update, runs, choose):
    """What an adversary sees of many runs of the real server, in units of the clip norm.

    Keys are numbered, so that a test that passed passes again.
    """
    rounds = ROUNDS[sampling]
    own = plan(
        sampling, Independent(rounds), noise_multiplier=1.0, report_goal=1, clip_norm=0.5
    )  # fmt: skip
    seen = np.empty((runs, rounds + 1))
    for number, run in enumerate(seen):
        source = SeededSource(2 * number + (update > 0))
        server = Server(own, torch.zeros(1), source=source)
        run[0] = 0.0
        for r, cohort in enumerate(choose(SampledCohorts(own, ["victim"], source))):
            task = server.task(cohort)
            sent = [task.update(client, torch.tensor([update])) for client in cohort]
            assert server.run_round(sent, asked=cohort).released
            run[r + 1] = float(server.parameters)
    return np.diff(seen) / 0.5


def never_empty(cohorts):
    """A server that substitutes whoever does not come: here, the only one there is."""
    return [cohort or ("victim",) for cohort in cohorts]


def likelihood(sampling, seen):
    """P / Q at releases, for means that are the member's rounds."""
    each = np.exp(seen - 0.5)
    if isinstance(sampling, PoissonSampling):
        return ((each + 1) / 2).prod(axis=1)
    if sampling.chosen == 2:
        return (each.sum(axis=1) ** 2 - (each**2).sum(axis=1)) / 12
    return each.mean(axis=1)


HALF, ONE_OF_FOUR = PoissonSampling(0.5, 1), BallsInBins(4, 4)
TWO_OF_FOUR = BallsInBins(4, 4, chosen=2)
ROUNDS = {HALF: 2, ONE_OF_FOUR: 4, TWO_OF_FOUR: 4}
DELTA = {
    HALF: sampled_guarantee(Independent(2), HALF, noise_multiplier=1.0).delta,
    ONE_OF_FOUR: AllocatedGuarantee(1.0, ONE_OF_FOUR).delta,
    TWO_OF_FOUR: AllocatedGuarantee(1.0, TWO_OF_FOUR).delta,
}


def excess(sampling, runs, choose, epsilon=0.5, score=None):
    """By how many standard errors delta is above the accountant's, in the set of one test."""
    score = score or (lambda seen: likelihood(sampling, seen) > math.exp(epsilon))
    present = score(releases(sampling, 10.0, runs, choose))
    absent = score(releases(sampling, 0.0, runs, list))  # who sends zeros is not seen
    found = present.mean() - math.exp(epsilon) * absent.mean()
    error = math.hypot(present.std(), math.exp(epsilon) * absent.std()) / math.sqrt(runs) + 1e-9
    return (found - DELTA[sampling](epsilon)) / error


RUNS = 200


def test_a_server_that_substitutes_those_who_do_not_come_is_caught():
    assert excess(HALF, RUNS, never_empty, score=lambda seen: seen.sum(axis=1) > 1.2) > 3


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0])
@pytest.mark.parametrize(
    ("sampling", "runs", "most"),
    [
        (HALF, RUNS, 3),
        *(
            pytest.param(s, 3000, 3.5, marks=pytest.mark.slow)
            for s in (HALF, ONE_OF_FOUR, TWO_OF_FOUR)
        ),
    ],
)
def test_what_the_server_releases_is_as_private_as_the_accountant_says(
    sampling, runs, most, epsilon
):
    assert -5 < excess(sampling, runs, list, epsilon) < most


@pytest.mark.slow
def test_a_cohort_that_is_known_is_caught():
    def always_first(_):
        return [("victim",), (), (), ()]

    assert excess(ONE_OF_FOUR, 400, always_first, score=lambda seen: seen[:, 0] > 1.0) > 4


def run_all(own, clients, people=PEOPLE, source=None):
    source = source or SecretSource()
    server = Server(own, torch.zeros(3), source=source)
    seen = []
    fit(
        server, clients, SampledCohorts(own, people, source),
        callbacks=[lambda record: seen.append((record, server.parameters.clone()))],
    )  # fmt: skip
    return seen


def test_rounds_without_anybody_are_released_with_their_noise():
    rare = plan(PoissonSampling(1e-9, 12))
    seen = run_all(rare, Clients())
    assert [record.counts.received for record, _ in seen] == [0] * 6
    models = [torch.zeros(3), *(model for _, model in seen)]
    assert all(not torch.equal(a, b) for a, b in pairwise(models))
    unsampled = Server(PLAIN, torch.zeros(3), source=SecretSource())
    with pytest.raises(CohortTooSmallError):
        fit(unsampled, Clients(), [[]] * 6)


def test_the_silent_and_the_refused_count_as_zero_and_nobody_takes_their_place():
    own, malformed = plan(), Clients()
    malformed.run = lambda task, start: ["nonsense" for _ in task.clients]
    for clients in (Clients(silent=PEOPLE[:6]), malformed):
        source = SecretSource()
        seen = run_all(own, clients, source=source)
        assert all(record.counts.released for record, _ in seen)
        asked = [len(cohort) for cohort in SampledCohorts(own, PEOPLE, source)]
        assert [record.counts.asked for record, _ in seen] == asked
        assert len(asked) == 6


def test_a_client_that_was_not_drawn_is_refused():
    own, source = plan(PoissonSampling(1e-9, 12)), SecretSource()
    ((record, _), *_) = run_all(own, Clients(unasked=["p3"]), source=source)
    assert record.counts.counted == 0
    assert record.counts.refusals == {"not asked": 1}


def test_fit_takes_no_cohorts_but_those_that_the_key_draws():
    own, source = plan(), SecretSource()
    server = Server(own, torch.zeros(3), source=source)
    mine = SampledCohorts(own, PEOPLE, source)
    of_another_key = SampledCohorts(own, PEOPLE, SecretSource())
    of_another_plan = SampledCohorts(replace(own, clip_norm=2.0), PEOPLE, source)
    for cohorts in ([["p1"]] * 6, mine[:], of_another_key, of_another_plan):
        with pytest.raises(ConfigError, match="cohorts: "):
            fit(server, Clients(), cohorts)
    with pytest.raises(ConfigError, match="has no sampling"):
        fit(Server(PLAIN, torch.zeros(3), source=SecretSource()), Clients(), mine)


@pytest.mark.parametrize(
    ("sampling", "mechanism"),
    [
        (PoissonSampling(3, 12), Independent(9)),
        (PoissonSampling(3, 12, groups=3), Toeplitz.square_root(9, 3)),
        (ScheduledPoissonSampling((0, 4), (3, 6), 12), Scheduled(9, (0, 2), (1.0, 0.5))),
        (TruncatedPoissonSampling(6, 12, 4), Independent(9)),
        (WithoutReplacementSampling(4, 12), Independent(9)),
        (BallsInBins(4, 9), Toeplitz.square_root(9)),
        (BMinSep(2, 12, 3), Toeplitz.square_root(9, 3)),
    ],
    ids=["poisson", "groups", "schedules", "truncated", "without", "bins", "b-min-sep"],
)
def test_whoever_is_drawn_is_within_the_limits_that_the_server_enforces(sampling, mechanism):
    estimate = Estimate(10_000) if isinstance(sampling, BMinSep) else None
    own, source = plan(sampling, mechanism, estimate=estimate), SecretSource()
    cohorts = SampledCohorts(own, PEOPLE, source)
    asked = [record.counts.asked for record, _ in run_all(own, Clients(), source=source)]
    assert asked == [len(cohort) for cohort in cohorts]
    assert PrivacyPlan.from_dict(json.loads(json.dumps(own.to_dict()))).hash == own.hash


def test_cohorts_come_from_the_key_and_from_no_other():
    source, other = SecretSource(bytes(32)), SecretSource(bytes(31) + b"1")
    assert source.cohort_key() == SecretSource(bytes(32)).cohort_key()
    keys = {source.cohort_key(), other.cohort_key(), SeededSource(0).cohort_key(), bytes(32)}
    assert len(keys) == 4
    assert source.cohort_key().hex() not in source.identity
    own = plan()
    assert list(SampledCohorts(own, PEOPLE, source)) != list(SampledCohorts(own, PEOPLE, other))
    with pytest.raises(ConfigError, match="two have the id"):
        SampledCohorts(own, ["a"] * 12, source)
    with pytest.raises(ConfigError, match="population=12"):
        SampledCohorts(own, PEOPLE[:11], source)


class Together(Clients):
    """An engine that would hand over sums, and compute clients together."""

    each_alone = False

    def sums(self, task, start):
        total = torch.full((3,), self.value * len(task.clients), dtype=torch.float64)
        norms = [1.0] * len(task.clients)
        yield from [task.sum_of(task.clients, total, norms)] * bool(task.clients)


def test_neither_sums_nor_clients_computed_together_are_taken(tmp_path):
    own, source = plan(PoissonSampling(1, 12)), SecretSource()
    server, cohorts = (
        Server(own, torch.zeros(3), source=source),
        SampledCohorts(own, PEOPLE, source),
    )
    with pytest.raises(ConfigError, match="deterministic=True"):
        fit(server, Together(), cohorts)
    task = server.task(PEOPLE)
    with pytest.raises(ConfigError, match="each update comes alone"):
        server.run_round((), sums=Together().sums(task, None), asked=PEOPLE)
    alone = Together()
    alone.each_alone = True
    with create_run(tmp_path / "run", own, facts=FACTS) as run:
        train(run, clients=alone)
    rows = Ledger(tmp_path / "run").rows()
    assert sum(row.counted for row in rows) == sum(map(len, members(tmp_path / "run").values()))
    # a report counts rounds that have others
    assert all(row.clipped_by.keys() <= {"server"} for row in rows)


GROUPS = Grouped(((0,), (1,)) * 3, (Independent(3), Independent(3)), (2, 1))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"minimum_cohort": 1}, "minimum_cohort=1: must be 0 with sampling"),
        ({"adaptive_clipping": AdaptiveClipping(bit_noise_multiplier=10)}, "adaptive_clipping: "),
        ({"participation": Participation(6)}, "participation: must be what the sampler"),
        ({"mechanism": GROUPS}, "grouped: no amplification"),
        ({"mechanism": BinaryTree(6)}, "only a square lower-triangular"),
        ({"mechanism": Toeplitz.square_root(6, 2)}, "reaches further back"),
        ({"estimate": Estimate(10_000)}, "draws: this sampler is accounted for in closed form"),
        ({"sampling": None, "minimum_cohort": 1, "estimate": Estimate(10_000)}, "sampl"),
        ({"sampling": "poisson"}, "sampl"),
    ],
)
def test_what_no_proof_covers_is_refused(change, sentence):
    own = plan()
    with pytest.raises(ConfigError, match=sentence):
        replace(own, **change)


def test_the_report_is_amplified_also_beside_earlier_runs():
    report = plan().report(1e-6)
    assert report.epsilon == sampled_guarantee(
        Independent(6), PoissonSampling(4, 12), noise_multiplier=4.0
    ).epsilon(1e-6)
    assert report.adjacency == "add-or-remove"
    assert report.epsilon < report.guarantee.epsilon(1e-6)
    assert "no amplification" in report.statement()
    assert "hidden-sample" in {a.code for a in report.assumptions}
    both = plan().report(1e-6, earlier=ComposedGuarantee((Guarantee(1.0),)))
    assert report.epsilon < both.epsilon < both.guarantee.epsilon(1e-6)


FACTS = {"delta": 1e-6, "population": ids_hash(PEOPLE)}


def train(run: RunFolder, until=6, clients=None, people=PEOPLE) -> SampledCohorts:
    def stop(record):
        if record.round + 1 == until < 6:
            raise KeyboardInterrupt

    server = Server(run.plan, torch.zeros(3), source=run.source())
    run.restore(server)
    cohorts = run.sample(people)
    with suppress(KeyboardInterrupt):
        fit(server, clients or Clients(), cohorts, commit=run.commit, callbacks=[stop])
    return cohorts


def members(path):
    ledger = Ledger(path)
    ledger.rows()
    return ledger.rounds_by_client()


def test_a_run_that_is_resumed_draws_the_same_cohorts_and_is_verified_at_its_end(
    tmp_path, monkeypatch
):
    with create_run(tmp_path / "run", plan(), facts=FACTS) as run:
        first = list(train(run, until=3))
    halfway = run_report(tmp_path / "run")
    assert {a.code: a.status for a in halfway.guarantee.assumptions}["poisson-sampling"] == (
        "enforced"
    )
    with RunFolder.open(tmp_path / "run") as run:
        assert list(train(run)) == first
    assert not (tmp_path / "run" / "key").exists()
    found = run_report(tmp_path / "run")
    status = {a.code: a.status for a in found.guarantee.assumptions}
    assert status["poisson-sampling"] == "verified"
    assert status["hidden-sample"] == "asserted"
    assert (found.deviations, found.guarantee.status) == ((), "conditional")
    drawn_for = {p: [r for r, cohort in enumerate(first) if p in cohort] for p in PEOPLE}
    assert members(tmp_path / "run") == {p: own for p, own in drawn_for.items() if own}
    # It is the code that ran, and not the reader, who drew them again.
    monkeypatch.setattr(package, "recorded", lambda: "0" * 64)
    words = {a.code: a.status for a in run_report(tmp_path / "run").guarantee.assumptions}
    assert words["poisson-sampling"] == "asserted"
    assert words["participation"] == status["participation"]


def test_a_report_says_nothing_of_who_or_how_many_took_part(tmp_path):
    said = []
    for name, silent in (("all", ()), ("none", PEOPLE)):
        with create_run(tmp_path / name, plan(), facts=FACTS) as run:
            train(run, clients=Clients(silent=silent))
        values = run_report(tmp_path / name).to_dict()
        assert values["realised"] is None
        lines = [check for check in check_run(tmp_path / name) if check.what != "code"]
        text = json.dumps(values) + repr(lines)
        said.append(re.sub("[0-9a-f]{12,}", "#", text))  # hashes and keys, under the blinded chain
    assert said[0] == said[1]


@pytest.mark.parametrize("own", [plan(), PLAIN], ids=["sampled", "not sampled"])
def test_the_chain_does_not_let_anybody_test_a_guess_of_who_took_part(tmp_path, own):
    """Reports print the head before and after the last round, and its model is released."""
    with create_run(tmp_path / "run", own, facts=FACTS) as run:
        if own.sampling is not None:
            train(run)
        else:
            server = Server(own, torch.zeros(3), source=run.source())
            fit(server, Clients(), [PEOPLE[2 * r :][:2] for r in range(6)], commit=run.commit)
    ledger = Ledger(tmp_path / "run")
    last = ledger.rows()[-1]
    before = "".join((tmp_path / "run" / LEDGER).read_text().splitlines()[-2].split()[:2])
    file = next((tmp_path / "run").glob("*.safetensors"))
    tensors, values = decode_state(file)
    unblinded = {name: value for name, value in values.items() if name != "blind"}

    def guess(state_values):
        state = encoded_hash(encode_state(tensors, state_values))
        return _link(before, _committed(replace(last, state=state)))

    assert guess(values) == last.chain  # all but the blind is known to the adversary
    assert guess(unblinded) != last.chain
    assert len(values["blind"]) == 64


def test_another_population_or_order_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="population is missing"):
        create_run(tmp_path / "other", plan(), facts={"delta": 1e-6})
    with (
        create_run(tmp_path / "run", plan(), facts=FACTS) as run,
        pytest.raises(ConfigError, match="ids are not those"),
    ):
        train(run, people=PEOPLE[::-1])


def test_a_commit_with_somebody_who_was_not_drawn_is_refused(tmp_path):
    with create_run(tmp_path / "run", plan(), facts=FACTS) as run:
        server = Server(run.plan, torch.zeros(3), source=run.source())

        def round_with(cohort):
            task = server.task(cohort)
            return server.run_round(Clients().run(task, server.parameters), asked=cohort)

        counts = round_with(["p0"])
        with pytest.raises(ConfigError, match="was not called"):
            run.commit(server, counts)
        cohorts = run.sample(PEOPLE)
        server = None
    with RunFolder.open(tmp_path / "run") as run:
        server = Server(run.plan, torch.zeros(3), source=run.source())
        assert list(run.sample(PEOPLE)) == list(cohorts)
        stranger = next(p for p in PEOPLE if p not in cohorts[0])
        counts = round_with([stranger])
        with pytest.raises(ConfigError, match="not drawn for it"):
            run.commit(server, counts)
        assert run.rounds == 0


@pytest.fixture
def lineage(tmp_path):
    """A run that samples, a fork of it that does not, and a fork of that one that does again."""
    folders = [tmp_path / name for name in ("run", "plain", "again")]
    people = FACTS | {"population_name": "keyboard-de"}
    with create_run(folders[0], plan(), facts=people) as run:
        train(run)
    for (old, new), one in zip(pairwise(folders), (PLAIN, plan()), strict=True):
        with fork(old, new, one, facts=FACTS) as run:
            if one is not PLAIN:
                train(run)
                continue
            server = Server(run.plan, torch.zeros(3), source=run.source())
            run.restore(server)
            fit(server, Clients(), [PEOPLE[:2], PEOPLE[2:4]], commit=run.commit)
    return folders


def test_forks_of_sampled_runs_report_one_epsilon_of_all(lineage, privpart, tmp_path):
    step = PoissonSampledDpEvent(1 / 3, GaussianDpEvent(4.0))
    sampled, gaussian = SelfComposedDpEvent(step, 6), GaussianDpEvent(1 / PLAIN.guarantee().mu)
    before = 0.0
    for folder, events in zip(lineage, (1, 2, 3), strict=True):
        report = run_report(folder).guarantee
        other = PLDAccountant()
        for event in (sampled, gaussian, sampled)[:events]:
            other.compose(event)
        assert report.epsilon == pytest.approx(other.get_epsilon(1e-6), rel=0.02)
        assert before < report.epsilon < report.guarantee.epsilon(1e-6)
        assert report.samplers == ("poisson",)
        assert report.adjacency == "add-or-remove"
        before = report.epsilon
    assert report.earlier_sampling == ("poisson",)
    assert report.earlier_epsilon == pytest.approx(run_report(lineage[1]).guarantee.epsilon)
    # The book charges each once, and a report of it is that of the last of the line.
    all_runs = run_report(lineage[2]).all_runs
    assert all_runs.epsilon == pytest.approx(report.epsilon, rel=1e-3)
    said = {c.what: c for c in check_run(lineage[1])}["guarantee"]
    assert "if it is known who was sampled, derived again" in said.says


@pytest.mark.slow
def test_every_form_of_a_fork_of_a_sampled_run_says_the_composed_epsilon(
    lineage, privpart, tmp_path
):
    folder, page = lineage[1], tmp_path / "page.html"
    report = run_report(folder).guarantee
    epsilon, mu = up(report.epsilon, 5), up(report.earlier_mu, 5)
    shown = privpart("report", str(folder), "--html", str(page)).stdout
    assert f"{epsilon}   (this run; this run and earlier ones, by composing" in shown
    assert f"while nobody learns who was sampled (poisson), else mu {mu}" in shown
    assert up(report.epsilon) in page.read_text()
    assert "hold while nobody learns who was sampled" in page.read_text()
    told = json.loads(privpart("report", str(folder), "--format", "json").stdout)["guarantee"]
    assert told["epsilon"] == report.epsilon
    assert told["earlier_sampling"] == ["poisson"]
    assert "cost" not in told
    statement = privacy_metadata(folder, "trained")["privpart.statement"]
    assert f"epsilon = {up(report.epsilon)}" in statement
    assert "each round of earlier runs are secret (poisson sampling)" in statement
    assert "a test that does not know who was sampled" in statement


def test_the_parents_conditions_are_the_forks_and_no_policy_misses_its_sampler(lineage):
    report = run_report(lineage[1]).guarantee
    # The parent is read at a delta of a half, which is no condition of the fork.
    assert "delta" not in {a.code for a in report.assumptions}
    hidden = next(a for a in report.assumptions if a.code == "hidden-sample")
    assert hidden.status == "asserted"
    assert "of the run that this one was forked from" in hidden.evidence
    strict = Policy(epsilon=100.0, delta=1e-6, population=1000, adjacency=["add-or-remove"])
    assert plan_refusals(strict, report) == ["sampling poisson is not one of none"]
    known = strict.model_copy(update={"sampling": ["poisson"]})
    assert plan_refusals(known, report) == []


def test_a_fork_that_the_book_does_not_know_brings_its_parents_amplified_cost(
    lineage, tmp_path, monkeypatch
):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))
    RunFolder.open(lineage[1], adopt=True).close()
    charges = book.account("keyboard-de").charges
    assert [charge.status for charge in charges] == ["unknown", "running"]
    assert samplers(charges[0].releases) == ("poisson",)
    total = book.account("keyboard-de").total
    assert total.epsilon(1e-6) == pytest.approx(run_report(lineage[1]).guarantee.epsilon, rel=1e-3)


def test_what_is_estimated_is_neither_forked_nor_a_fork(tmp_path):
    bins = plan(BallsInBins(3, 6), estimate=Estimate(10_000))
    with create_run(tmp_path / "run", plan(), facts=FACTS) as run:
        train(run)
    with pytest.raises(ConfigError, match="no proof composes it with another run"):
        fork(tmp_path / "run", tmp_path / "new", bins)
    with create_run(tmp_path / "estimated", bins, facts=FACTS) as run:
        train(run)
    with pytest.raises(ConfigError, match="is accounted for by Monte Carlo"):
        fork(tmp_path / "estimated", tmp_path / "new", PLAIN)
    assert not (tmp_path / "new").exists()


def test_a_seeded_run_that_samples_is_not_private(tmp_path):
    with create_run(tmp_path / "run", plan(), seed=1, facts=FACTS) as run:
        train(run)
    found = run_report(tmp_path / "run").guarantee
    assert found.status == "not-private"
    said = {a.code: a.evidence for a in found.assumptions}["poisson-sampling"]
    assert "drawn from a seed, which is no secret," in said
