"""Run report: the guarantee of a run, derived again from its ledger.

The plan's epsilon is claimed only if the ledger shows that the run kept to the plan. Otherwise the
report computes figures for the participation that happened, and says that no guarantee holds: a
limit that was not kept did not bind anybody.
"""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from accounting import Participation, PrivacyReport, checks, footprint
from accounting.checks import ConfigError, is_large_delta
from accounting.claims import earlier_runs
from accounting.metrics import Metrics
from accounting.report import Assumption, AssumptionStatus, up
from accounting.selection import selected_of
from privpart.engines.options import Precision
from privpart.engines.protocol import OPTIMIZER, OWN_ENGINES
from privpart.messages import ClientId
from privpart.plan import PrivacyPlan
from privpart.run import log, selection
from privpart.run.budget_book import AllRuns, all_runs
from privpart.run.canaries import measured_from_below
from privpart.run.evaluations import Evaluation
from privpart.run.evidence import Check, Evidence, gather
from privpart.run.folder import CHECKED, RECORDS, ROWS_DIFFER
from privpart.run.ledger import LEDGER, Row
from privpart.run.members import MOVES
from privpart.run.noised_metrics import NoisedMetrics
from privpart.run.store import damage_named
from privpart.select.delivery import SeenByParty, select_claims
from privpart.server import ANOTHER_SERVER, CLIENTS, SERVER
from privpart.settings.about import about_of

SCHEMA = "privpart/run/1"
_MOST_WORK = 5 * 10**7
"""Rounds times participations of one client: what a stranger's plan may cost, some seconds."""
_MOST_EARLIER = 20
"""Unlike releases of runs before a stranger's, each of which may take seconds."""
_VERDICTS = {
    "holds": "HOLDS: every assumption was enforced, verified or vouched for",
    "conditional": "CONDITIONAL: it holds if the assumptions listed as not checked are true",
    "does-not-hold": "DOES NOT HOLD",
    "not-private": "NOT PRIVATE: the noise can be recomputed from a seed",
}
_FIGURES = (
    "epsilon", "not hidden", "delta", "unit", "mechanism", "noise multiplier", "mu",
    "best of K", "metrics", "earlier runs", "cross-check",
)  # fmt: skip
"""What the table of a run shows of a guarantee's figures."""
AUTHENTICATED, UNAUTHENTICATED = "authenticated nodes", "asserted"
"""Values of the fact "identity" of a run whose clients are on nodes."""
FIRST_ANSWERS = "first_answers"
"""Fact of a run whose rounds end with the first answers, of more clients that were asked."""
DEADLINE = "deadline_percentile"
"""Fact of a run whose rounds end by how long answers of past rounds took."""
ROWS = {
    "unseen": "the loader dealt nothing that could be compared: parts of a batch, as with "
    "BatchMemoryManager, or objects without a tensor of a row per example",
    "outside": "layers of the network were called outside of a call of the network",
    "inputs": "the network was called with something else than the rows that were dealt, such as "
    "rows that the loop had augmented, embedded, chosen or put into another order",
    "alike": "what the network was called with does not tell the rows of the batch apart",
    "backward": "the gradients did not come unchanged from one backward pass through the call, or "
    "what the network was called with was changed before it",
    "hooks": "a layer or an output of the network has a hook that was added after make_private, "
    "which may change what its gradients come from",
}
"""Why nothing shows that the network got the rows of the examples that were dealt, each once."""
_MOST_DIMENSIONS, _MOST_VALUES = 64, 2**48
"""Of a tensor."""
_Words = tuple[AssumptionStatus, str]


@dataclass(frozen=True, slots=True)
class RunCost:
    """What the run costs besides privacy, as its ledger implies; nothing here was timed."""

    parameters: int | None  # number of parameters that train; None if the ledger does not name them
    # of one client's update of all of them, without headers; None likewise
    update_bytes: int | None
    state_vectors: int  # vectors as long as the trained part that the noise keeps
    draws_per_round: float  # Gaussian vectors drawn per round, on average
    precision: str | None  # in which clients were computed when the run began; None: not known here


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The privacy cost of a run, and the evidence for it."""

    run_id: str  # random name of the run
    plan: str  # hash of the run's plan
    planned_rounds: int  # number of rounds that the guarantee is for, however many were run
    rounds: int  # number of committed rounds
    complete: bool  # whether all planned rounds, and evaluations of metrics, are committed
    # worst participation in the ledger; None before the first round, and of a run that samples,
    # where who took part is secret
    realised: Participation | None
    deviations: tuple[str, ...]  # ways in which the run left its plan; empty if it kept to it
    # the privacy report; its assumptions say what was enforced or verified
    guarantee: PrivacyReport
    # what all runs on this machine told about the same people; None if nobody named them
    all_runs: AllRuns | None = None
    closed: bool  # whether the run was ended early, after ``rounds`` of the planned ones
    public_key: str  # key that signed the ledger, in hex
    head: str  # chain value of the last row, which the key signed
    # what was checked of the folder, on this machine, when the report was written
    checks: tuple[Check, ...]
    cost: RunCost | None = None  # what the run costs besides privacy
    # if clients select what they download, one line on the guarantee against recipients of the
    # model and one on what is seen in the clear; else None
    select: tuple[str, str] | None = None
    # what an audit of the run found from below, as it was written beside the run
    measured: str | None = None
    # the noised metrics that were released; None if the plan has none
    noised: NoisedMetrics | None = None
    # what whoever began the run states of it, by the names of ``About``
    about: Mapping[str, str] = field(default_factory=dict)
    # what the plan lets the server see, and on whose word, if not every update
    server_saw: str | None = None
    # code of each assumption that was vouched for -> "by" whom, and "at" what time
    vouchers: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    @property
    def wrong(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "wrong")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values under a schema name, ready for JSON."""
        values = {"schema": SCHEMA, **asdict(self), "guarantee": self.guarantee.to_dict()}
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
        del values["select"], values["noised"]
        if self.select is not None:
            values |= dict(zip(("against_recipients", "seen_in_clear"), self.select, strict=True))
        values["measured"] = values.pop("measured")
        if self.noised is not None:
            values["noised_metrics"] = self.noised.rows()
        unsaid = {name for name in ("measured", "server_saw") if values[name] is None}
        return {name: value for name, value in values.items() if name not in unsaid}

    def statement(self) -> str:
        """Return the report in plain English, with every condition."""
        lines = list(self.select or ())
        if self.all_runs is not None:
            lines.append(f"all that this machine released about these people: {self.all_runs.says}")
        if self.server_saw is not None:
            lines.append(f"the server saw {self.server_saw}")
        if self.measured is not None:
            lines.append(f"measured: {self.measured}")
        sentences = (f"{line[0].upper()}{line[1:]}." for line in lines)
        return "\n\n".join([self.promise(), *sentences])

    def summary(self) -> list[tuple[str, str]]:
        """Return what a table of the report shows, as pairs of a name and a text."""
        g = self.guarantee
        verdict = _VERDICTS[g.status]
        if checks.is_large_delta(g.delta, g.population):
            verdict += "; delta is too large"
        figures = {name: figure.text for name, figure in g.figures().items()}
        figures["epsilon"] = (
            f"{up(g.epsilon, 5)}   (this {'selection' if g.selection else 'run'}"
            f"{f'; {g.formula}' if g.samplers or g.selection else ''})"
        )
        after = {
            "mechanism": [("ledger", self.progress())],
            "mu": [] if self.all_runs is None else [("all runs", self.all_runs.says)],
            "metrics": [] if self.noised is None else [("evaluated", self.noised.text())],
        }
        lines = [("verdict", verdict)]
        for name in filter(figures.get, _FIGURES):
            lines += [(name, figures[name]), *after.get(name, ())]
        if self.server_saw is not None:
            lines.append(("server saw", self.server_saw))
        lines += [
            ("run, plan", f"{self.run_id}, {self.plan[:12]}"),
            ("signed by", self.public_key),
            ("head", f"{self.head} after {self.rounds} rounds"),
        ]
        return lines if self.measured is None else [*lines, ("measured", self.measured)]

    def promise(self) -> str:
        """Return the guarantee in plain English, and of how many rounds if fewer were run."""
        return "\n\n".join(filter(None, (self.guarantee.statement(), self.unfinished())))

    def unfinished(self) -> str:
        """Return how far a run is that has not run all planned rounds; "" if it has."""
        if self.rounds >= self.planned_rounds:
            return ""
        done = f"was closed after {self.rounds}" if self.closed else f"has committed {self.rounds}"
        return (
            f"The run {done} of {self.planned_rounds} planned rounds. The figures are for all "
            f"{self.planned_rounds}, and fewer cost no more."
        )

    def progress(self) -> str:
        """Return how far the run is, and the most that one took part."""
        state = "complete" if self.complete else f"{self.planned_rounds - self.rounds} to go"
        if self.rounds == self.planned_rounds and not self.complete:
            state = "the metrics of the last one to go"
        if self.closed:
            state = f"closed after {self.rounds} of {self.planned_rounds} rounds"
        return f"{self.rounds} rounds ({state}), {self.worst()}"

    def worst(self) -> str:
        """Return the most that one unit took part, as far as that may be told."""
        if self.guarantee.sampling is not None:
            return "who took part is secret"
        if (worst := self.realised) is None:
            return f"no {self.guarantee.unit} took part yet"
        apart = f", {worst.min_separation} or more apart" * (worst.max_participations > 1)
        return f"{self.guarantee.a_unit} in at most {worst.max_participations}{apart}"


def run_report(
    path: str | Path, *, delta: float | None = None, public_key: str | None = None
) -> RunReport:
    """Derive the guarantee of the run in a folder, which is only read and may still be running.

    ``delta`` None takes the delta that the run was planned with; ``public_key`` is the key that the
    run is known by, in hex, from anywhere but the folder.

    Raises:
        ConfigError: there is no run, its ledger is changed, damaged or signed by another key, delta
            is missing, or the plan adds no noise.
    """
    return report_of(gather(path, public_key), Path(path), delta=delta)


def report_of(evidence: Evidence, path: Path, *, delta: float | None = None) -> RunReport:
    """Derive the guarantee from evidence that was gathered; errors are those of ``run_report``."""
    if reason := not_derivable(evidence, path):
        raise ConfigError(f"{path / LEDGER}: {reason}.")
    with damage_named(path / LEDGER):
        return _derived(evidence, path, delta)


def not_derivable(evidence: Evidence, path: Path) -> str:
    """Return why no guarantee is derived from a ledger, or ""."""
    for what in ("chain", "signature"):
        if evidence.status(what) == "wrong":
            return evidence.line(what).says
    with damage_named(path / LEDGER):
        limits = PrivacyPlan.from_dict(evidence.facts["plan"]).participation
    if evidence.origin == "here":
        return ""
    times, earlier = limits.max_participations, evidence.facts.get("earlier", ())
    elsewhere = "a guarantee that long is derived only on the machine that made the run"
    if isinstance(earlier, list) and len(earlier) > _MOST_EARLIER:
        number = f"names {len(earlier)} unlike releases of earlier runs"
        return f"it {number}, which may take minutes to account for; {elsewhere}"
    if limits.rounds * times > _MOST_WORK:
        planned = f"{limits.rounds:,} rounds with {times:,} participations"
        return f"it is planned for {planned}, which takes minutes to account for; {elsewhere}"
    return ""


def _population(
    delta: float, stated: int | None, histories: Sized, plan: PrivacyPlan
) -> int | None:
    """Return how many clients delta is judged by: those in the ledger, if fewer are stated.

    More clients than came may exist, but a delta that is large for some is larger for more. Their
    number is shown only then; who samples keeps it secret.
    """
    came = len(histories) if plan.sampling is None else 0
    return max(came, stated or 0) if came and is_large_delta(delta, came) else stated


def _derived(evidence: Evidence, path: Path, delta: float | None) -> RunReport:
    rows, facts = evidence.rows, evidence.facts
    plan = PrivacyPlan.from_dict(facts["plan"])
    chosen = facts.get("delta") if delta is None else delta
    if chosen is None:
        raise ConfigError("delta is missing: this run was planned without one. Pass it (--delta).")
    # A ledger may hold more rounds than planned, which is a deviation.
    length = max(plan.rounds, len(rows))
    histories = evidence.ledger.rounds_by_client()
    realised = Participation.from_log(length, histories) if histories else None
    unit = facts.get("unit", "client")
    evaluations = evidence.ledger.evaluations
    deviations = _deviations(plan, rows, realised, unit)
    deviations += _deviations_of_metrics(plan, evaluations, histories)
    report = _claimed(plan, realised if deviations else None, evaluations).report(
        chosen,
        noise_source="os" if facts["seed"] is None else "seeded",
        earlier=earlier_runs(facts["earlier"]) if "earlier" in facts else None,
        unit=unit,
        population=_population(chosen, facts.get("population_size"), histories, plan),
    )
    if (part_of := facts.get("selection")) is not None:
        report = _selected(report, part_of)
    report = _with_evidence(report, plan, evidence, deviations)
    return RunReport(
        run_id=facts["run_id"],
        plan=plan.hash,
        planned_rounds=plan.rounds,
        rounds=len(rows),
        complete=evidence.ledger.is_complete,
        realised=realised if plan.sampling is None else None,
        deviations=deviations,
        guarantee=report,
        closed="closed" in facts,
        public_key=facts["public_key"],
        head=evidence.head,
        checks=evidence.checks,
        select=select_lines(report, chosen, facts.get("seen_in_clear")),
        all_runs=all_runs(facts, chosen),
        measured=measured_from_below(path, facts["run_id"]),
        noised=NoisedMetrics.of(plan, evaluations),
        server_saw=_server_saw(plan),
        cost=_cost(plan, facts),
        about=about_of(facts).stated(),
    )


def _server_saw(plan: PrivacyPlan) -> str | None:
    """Say what parties promise of a server under secure sums: no folder can show it."""
    if (rules := plan.secure) is None:
        return None
    return (
        f"sums of at least {rules.smallest_cohort} parties, asserted by the parties: the code of "
        f"each helps to unmask no other sum, if at most {rules.colluding} of a cohort work with "
        "the server and every key in their roster is another party's. The server's code took no "
        "other sum; who simulates the parties in one process sees all of them"
    )


def _selected(report: PrivacyReport, part_of: Mapping[str, Any]) -> PrivacyReport:
    """Return the report of the best of several runs, by what its ledger says of the selection."""
    cost = selected_of(part_of["cost"])
    if not report.mu <= part_of["cost"]["mu"]:
        raise ConfigError(
            f"selection: one run costs mu {up(report.mu)}, and the selection was accounted for "
            f"runs of at most {up(part_of['cost']['mu'])}."
        )
    return report.selected(cost, int(part_of["candidates"]))


def parameter_sizes(facts: Mapping[str, Any]) -> list[int] | None:
    """Return how many values each trained tensor has, if the facts name their shapes.

    Raises:
        ValueError: a name or shape is not a valid one. Facts of a stranger may be anything, also
            lengths whose product would take hours.
    """
    if (named := facts.get("parameters")) is None:
        return None
    sizes = []
    for name, shape in named:
        least = 1
        if not isinstance(name, str) or len(shape) > _MOST_DIMENSIONS:
            raise ValueError("parameters: a name or shape is not a valid one")
        for length in shape:
            if type(length) is not int or length < 0:
                raise ValueError("parameters: a length is not a valid number")
            least *= max(length, 1)
            if least > _MOST_VALUES:
                raise ValueError("parameters: no tensor is that large")
        sizes.append(0 if 0 in shape else least)
    return sizes


def _cost(plan: PrivacyPlan, facts: Mapping[str, Any]) -> RunCost:
    noise, sizes = footprint(plan.mechanism), parameter_sizes(facts)
    count = None if sizes is None else sum(sizes)
    size = None if count is None else 4 * count  # float32
    precision = next((name for name in get_args(Precision) if name == facts.get("precision")), None)
    return RunCost(count, size, noise.state_vectors, noise.draws_per_round, precision)


def select_lines(
    report: PrivacyReport | None, delta: float, disclosed: SeenByParty | None
) -> tuple[str, str] | None:
    """Return the two lines about a run whose clients select, or None if ``disclosed`` is None.

    The first states the guarantee against recipients of the model, as far as the report's status
    allows (None is a run without noise); the second what each party sees in the clear, which no
    epsilon covers.
    """
    if disclosed is None:
        return None
    holds = report is not None and report.status in ("holds", "conditional")
    return select_claims(report.cost if report and holds else None, delta, disclosed)


def _deviations(
    plan: PrivacyPlan, rows: list[Row], realised: Participation | None, unit: str
) -> tuple[str, ...]:
    deviations = []
    if len(rows) > plan.rounds:
        deviations.append(f"{len(rows)} rounds, {plan.rounds} planned")
    if realised is not None:
        limits = plan.participation
        k, b = realised.max_participations, realised.min_separation
        if k > limits.max_participations:
            deviations.append(
                f"{'an' if unit == 'example' else 'a'} {unit} took part {k} times, "
                f"{limits.max_participations} allowed"
            )
        if k > 1 and b < limits.min_separation:
            deviations.append(
                f"rounds of one {unit} lie {b} apart, {limits.min_separation} is the least"
            )
    if plan.adaptive_clipping is None:
        deviations += [
            f"round {row.round} was clipped to {row.clip_norm:g}, planned "
            f"{plan.clip_norm_at(row.round):g}"
            for row in rows
            if row.clip_norm != plan.clip_norm_at(row.round)
        ]
    seen = [row.round for row in rows if row.clipped_by.keys() - {CLIENTS}]
    if plan.secure is not None and seen:
        deviations.append(f"round {seen[0]} shows updates to the server, the plan has secure sums")
    if any(row.counted < plan.minimum_cohort for row in rows):
        deviations.append(
            f"a round had fewer than {plan.minimum_cohort} updates, the plan's minimum"
        )
    return tuple(deviations)


def _deviations_of_metrics(
    plan: PrivacyPlan, evaluations: Sequence[Evaluation], histories: Mapping[ClientId, Sized]
) -> tuple[str, ...]:
    """Return how evaluations left the plan; that nobody evaluates twice, the ledger refuses."""
    metrics, deviations = plan.metrics, []
    planned = () if metrics is None else metrics.rounds
    if extra := [evaluation.round for evaluation in evaluations if evaluation.round not in planned]:
        deviations.append(f"metrics were released after round {extra[0]}, which is not planned")
    both = [c for evaluation in evaluations for c in evaluation.clients if c in histories]
    if both and metrics is not None and not metrics.also_train:
        deviations.append("a user who evaluates took part in a round")
    return tuple(deviations)


def _claimed(
    plan: PrivacyPlan, realised: Participation | None, evaluations: Sequence[Evaluation]
) -> PrivacyPlan:
    """Return the plan, widened to allow the realised participation if that is given."""
    if plan.metrics is not None and realised is not None:
        # Who both trained and evaluated pays for both.
        rounds = {evaluation.round for evaluation in evaluations if evaluation.round < plan.rounds}
        rounds = {*plan.metrics.rounds, *rounds}
        wide = replace(plan.metrics, also_train=True, rounds=tuple(sorted(rounds)))
        plan = replace(plan, metrics=wide)
    if realised is None or realised.rounds != plan.rounds or plan.sampling is not None:
        return plan
    limits = plan.participation
    k = max(realised.max_participations, limits.max_participations)
    # A client that came once has no separation of its own.
    b = realised.min_separation if realised.max_participations > 1 else limits.min_separation
    widest = min(b, limits.min_separation)
    return replace(plan, participation=Participation(plan.rounds, k, widest))


def _with_evidence(
    report: PrivacyReport, plan: PrivacyPlan, evidence: Evidence, deviations: Sequence[str]
) -> PrivacyReport:
    """Return the report with what the run's own code enforced and what its ledger shows.

    Only this function says "enforced" or "verified" of a run. A word is never stronger than what
    was checked now: what the code enforced is known only of a run whose rounds this machine's log
    of runs saw; of any other run, its ledger asserts it.
    """
    facts, words = evidence.facts, _of_code_and_ledger(report, plan, evidence)
    # One place weakens all words, so that none can be forgotten.
    words = {code: _as_strong_as(evidence, code, *word) for code, word in words.items()}
    # After the weakening: what was not checked of the parent is not checked of its fork.
    for old in facts.get("inherited", ()):
        texts = {a.code: a.text for a in report.assumptions}
        if old["code"] not in texts:
            report = replace(report, assumptions=(*report.assumptions, Assumption(**old)))
        # Such as the probability by which that run's members were sampled.
        other = f": {old['text']}" * (texts.get(old["code"], old["text"]) != old["text"])
        why = f"asserted of the run that this one was forked from{other}. {old['evidence']}".strip()
        if words.get(old["code"], ("asserted",))[0] != "violated":
            words[old["code"]] = ("asserted", why)
    if deviations:
        words["participation"] = ("violated", "; ".join(deviations))
    for code in words.keys() & {a.code for a in report.assumptions}:
        report = report.with_status(code, *words[code])
    return _with_times(report, facts)


def _of_code_and_ledger(
    report: PrivacyReport, plan: PrivacyPlan, evidence: Evidence
) -> dict[str, _Words]:
    """Map assumptions to what the ledger says, if whoever wrote it is believed."""
    facts = evidence.facts
    of_examples = facts.get("unit") == "example"
    words = _of_examples(plan, evidence) if of_examples else _of_clients(evidence)
    # Of a seeded run, nothing can be said about secrecy.
    if facts["seed"] is None:
        words["noise"] = _noise(evidence)
    if plan.sampling is not None:
        words |= _of_sampling(plan, report, evidence)
    if plan.metrics is not None:
        words["metrics"] = _metrics(plan, plan.metrics, evidence)
    if facts.get("closed", {}).get("by_training"):
        words["choices"] = (
            "asserted",
            f"the training itself ended the run after {len(evidence.rows)} rounds: nothing shows "
            "that it looked at public data, noised metrics or released models alone",
        )
    if "selection" in facts:
        words |= selection.words(facts, evidence.head)
    if foreign := sum(_is_foreign(row, facts) for row in evidence.rows):
        why = (
            f"in {foreign} of {len(evidence.rows)} rounds a server or optimizer that is not this "
            "package's, or was changed, clipped, summed and added the noise"
        )
        checked = {code for code, (status, _) in words.items() if status != "violated"}
        words |= dict.fromkeys(checked - _follows_from_the_ledger(facts), ("asserted", why))
    return words


def _with_times(report: PrivacyReport, facts: Mapping[str, Any]) -> PrivacyReport:
    """Return the report with what it says of the times of releases, of a run that fixed them."""
    if (seconds := facts.get("round_seconds")) is None:
        return report
    late = int(facts.get("late_rounds", 0))
    paced = (
        "side channels, such as memory and traffic; by the ledger, rounds were released at the "
        f"ends of slots of {float(seconds):g} seconds, whoever came, {late} of them later or at "
        "other times"
    )
    if "fork_of" in facts:
        paced += "; it does not say when those of the run were that this one was forked from"
    lines = (*(line for line in report.not_covered if "side channels" not in line), paced)
    return replace(report, not_covered=lines)


def _as_strong_as(evidence: Evidence, code: str, status: AssumptionStatus, why: str) -> _Words:
    """Return a status no stronger than whose words the ledger holds, and whose code wrote them."""
    if status not in ("enforced", "verified"):
        return status, why
    of_ledger = code in _follows_from_the_ledger(evidence.facts)
    if evidence.package == "modified" and not of_ledger:
        return "asserted", f"says code that is not the release that it names: {why}"
    if evidence.origin == "here":
        return status, why
    if evidence.origin == "signed":
        if of_ledger:
            return status, f"{why}, signed by the key that you gave"
        return "asserted", f"says the holder of the key that you gave: {why}"
    return "asserted", f"says the folder, which this machine did not see being made: {why}"


def _is_foreign(row: Row, facts: Mapping[str, Any]) -> bool:
    """Return whether neither this package's server nor, on examples, its optimizer made a row."""
    if facts.get("unit") == "example":
        return bool(row.clipped_by.keys() - {OPTIMIZER})
    return bool(row.clipped_by.keys() & {ANOTHER_SERVER, OPTIMIZER})


def _follows_from_the_ledger(facts: Mapping[str, Any]) -> set[str]:
    """Return the assumptions that a reader derives; whose gradients came, the code compared."""
    return set() if facts.get("unit") == "example" else {"participation"}


def _of_clients(evidence: Evidence) -> dict[str, _Words]:
    """Map assumptions to what a server enforced, and what its ledger shows."""
    rows = evidence.rows
    divisor: _Words = ("enforced", "the server divides by the plan's report_goal")
    words = {"participation": _participation(evidence), "divisor": divisor}
    if by_clients := [row for row in rows if CLIENTS in row.clipped_by]:
        why = (
            f"since round {by_clients[0].round} clients clip and round their own updates, of which "
            "the server sees sums"
        )
        return words | {
            "clipping": ("asserted", f"{why} only: one that does not can move them at will"),
            "floating-point": ("asserted", f"{why} of integers, modulo a power of 2"),
        }
    if summed := [row for row in rows if row.clipped_by.keys() - {SERVER}]:
        return words | {
            "clipping": _clipping_of_sums(summed, len(rows)),
            "floating-point": (
                "asserted",
                f"in {len(summed)} of {len(rows)} rounds an engine summed updates in floating "
                "point before the server rounded them",
            ),
        }
    return words | {
        "clipping": ("enforced", "the server clips every update again"),
        "floating-point": (
            "enforced",
            "the server rounds each update to a public grid within the clip norm, sums integers, "
            "and adds exactly rounded Gaussian noise; what floating point adds to a mechanism's "
            "filter is taken from the clip norm",
        ),
    }


def _clipping_of_sums(summed: Sequence[Row], rounds: int) -> _Words:
    what = "sums, which the server cannot clip again; it clips every other update again"
    if foreign := sum(bool(row.clipped_by.keys() - {SERVER, *OWN_ENGINES}) for row in summed):
        return "asserted", (
            f"in {foreign} of {rounds} rounds an engine that is not this package's, or was "
            f"changed, says that it clipped each update, and handed over {what}"
        )
    engines = ", ".join(sorted({name for row in summed for name in row.clipped_by} - {SERVER}))
    return "enforced", (
        f"in {len(summed)} of {rounds} rounds this package's {engines} clipped each update and "
        f"handed over {what}"
    )


def _participation(evidence: Evidence) -> _Words:
    """Return what shows how often clients took part: of clients on nodes, the ledger names owners.

    A name is worth what stands behind it: without authentication, a node that is started again, or
    that lies, is somebody else. "enforced" is said where every node signed its own counts of every
    answer, and all of them were compared with the rows just now.
    """
    rows, facts = evidence.rows, evidence.facts
    chain = f"ledger of {len(rows)} rounds in one chain, by the ids that its engine gave"
    identity = facts.get("identity")
    if facts.get(FIRST_ANSWERS) or facts.get(DEADLINE):
        until = "" if facts.get(FIRST_ANSWERS) else " until a deadline that earlier ones set"
        return "asserted", (
            f"{chain}; the first answers{until} counted, and nothing checks that no client's "
            "values decide who was among them"
        )
    if identity is None:
        return "verified", chain
    if identity == AUTHENTICATED:
        owners = f"each of one node, fixed when the run was made; {AUTHENTICATED}, as declared"
        if MOVES in facts:
            owners = f"each of one node at a time; {AUTHENTICATED}, as declared"
        for check in evidence.checks:
            if check.what == "node statements" and check.status == "verified":
                by = f"enforced by the nodes (signed counts): {check.says}"
                return "enforced", f"{chain}, {owners}; {by}"
            if check.what == "node statements":
                owners += f"; the nodes' own counts were not compared: {check.says}"
        return "verified", f"{chain}, {owners}"
    return "asserted", f"{chain}, as nodes named their clients; the nodes were not authenticated"


def _of_examples(plan: PrivacyPlan, evidence: Evidence) -> dict[str, _Words]:
    """Map assumptions to what the optimizer of a loop on examples enforced."""
    dealt = "passes of one order" if plan.sampling is None else "what the sampler drew"
    return {
        "participation": _rows_compared(
            f"ledger of {len(evidence.rows)} steps in one chain, by number of the example; the "
            f"loader dealt {dealt}",
            evidence.facts,
            # in which step, could tell what a secret sample held
            names_step=plan.sampling is None,
        ),
        "divisor": ("enforced", "the optimizer divides by the batch size, or 1 for a summed loss"),
        "clipping": ("enforced", "the optimizer clips the gradient of every example by its norm"),
        "floating-point": (
            "enforced",
            "the optimizer takes what float32 adds to a sum of 64 gradients from the clip norm, "
            "rounds the sum to a public grid, and adds exactly rounded Gaussian noise",
        ),
    }


def _rows_compared(ledger: str, facts: Mapping[str, Any], *, names_step: bool) -> _Words:
    """Say whose gradients came: the ledger names those that were dealt."""
    if facts.get("compares_rows") is not True:
        return "asserted", f"{ledger}; nothing compared whose gradients came"
    if ROWS_DIFFER not in facts:
        return (
            "verified",
            f"{ledger}, and in every step the network was called with the rows that were dealt, "
            "each once, by a checksum of each row",
        )
    step, why = facts[ROWS_DIFFER]
    since = f"step {int(step)}" if names_step else "some step"
    return (
        "asserted",
        f"{ledger}; whose gradients came is not known since {since}, in which "
        f"{ROWS.get(why, 'they were not compared')}. It can be compared if transforms are in the "
        "data set or its collate function, and the network is called with what the loader deals",
    )


def _noise(evidence: Evidence) -> _Words:
    if evidence.facts.get(RECORDS):
        return "violated", "the sums lie beside the run: with them, anybody can remove the noise"
    for what in ("log of runs", "state", "key"):
        if evidence.status(what) != "verified":
            return "asserted", f"{what}: {evidence.line(what).says}"
    return (
        "enforced",
        "key from the operating system, with the hash that the ledger names, or erased; each round "
        "committed before its release; no older copy of the run was continued on this machine",
    )


def _metrics(plan: PrivacyPlan, metrics: Metrics, evidence: Evidence) -> _Words:
    """Return what shows who evaluated, and whose code added the noise."""
    evaluations = evidence.ledger.evaluations
    histories = evidence.ledger.rounds_by_client()
    if deviations := _deviations_of_metrics(plan, evaluations, histories):
        return "violated", "; ".join(deviations)
    of = f"in {len(evaluations)} of {len(metrics.rounds)} evaluations"
    if foreign := sum(evaluation.noised_by != SERVER for evaluation in evaluations):
        return "asserted", (
            f"in {foreign} of {len(evaluations)} evaluations code that is not this package's, or "
            "was changed, clipped, summed and added the noise"
        )
    apart = "" if metrics.also_train else ", nobody in a round as well"
    return "verified", (
        f"by the ids in the ledger, each user once at most {of}{apart}; this package's code chose "
        "the users by a public hash of their ids, clipped their numbers, rounded them to a public "
        "grid, and added exactly rounded Gaussian noise of its own"
    )


_SAMPLERS = ("poisson-sampling", "balls-in-bins", "sampling")
"""Codes of the assumption that members are drawn as the accountant assumes."""


def _of_sampling(plan: PrivacyPlan, report: PrivacyReport, evidence: Evidence) -> dict[str, _Words]:
    """Map assumptions to what shows how members were drawn, without a word on who, or how many."""
    rows, facts = evidence.rows, evidence.facts
    key = "the run's secret key" if facts["seed"] is None else "a seed, which is no secret,"
    drawn = f"drawn from {key} by the sampler that the accountant read"
    sampler: _Words = ("enforced", f"{drawn}; each commit checked it")
    if len(rows) >= plan.rounds:
        sampler = ("asserted", "nothing shows that everybody who counted was drawn")
    if facts.get(CHECKED) == len(rows) > 0:
        sampler = (
            "verified",
            f"{drawn}, and drawn again before the key was erased: everybody who counted in "
            f"{len(rows)} rounds was among them",
        )
    words = dict.fromkeys(_SAMPLERS, sampler)
    words["public-constants"] = (
        "enforced",
        "sampler and report_goal are in the plan, and the population's ids are in the ledger by "
        "their hash, since before the first round",
    )
    of_examples = facts.get("unit") == "example"
    loop = "; the training loop sees who was drawn, and tells nobody" * of_examples
    words["hidden-sample"] = (
        "asserted",
        "every round is released, whoever came, and nothing here prints who did; ledger and "
        f"key stay secret, and nobody outside sees the run's time or traffic{loop}",
    )
    if of_examples:
        words["floating-point"] = (
            "asserted",
            "sums of float64 on a public grid with exactly rounded noise; but an example that is "
            "not drawn makes the batch smaller, and a matrix product may then round the gradients "
            "of the others in another way, which nothing here bounds",
        )
    elif plan.mechanism.noise_program().filter_error() and report.noise_source != "seeded":
        words["floating-point"] = (
            "asserted",
            "integers on a public grid with exactly rounded noise; what floating point adds to the "
            "mechanism's filter is bounded without sampling only",
        )
    return words


def vouched(report: RunReport, code: str, by: str | None = None) -> RunReport:
    """Return the report with one asserted assumption marked as vouched for, by whom and when.

    ``by`` None says the reader of the report. Nothing checks the name.

    Raises:
        ConfigError: there is no such assumption, or it is not merely asserted: nobody can vouch for
            one that was violated, nor for a folder of which a check failed.
    """
    for check in report.wrong:
        raise ConfigError(
            f"vouch={code!r}: nobody can vouch for a folder that evidence contradicts: "
            f"{check.what}: {check.says}."
        )
    asserted = [a.code for a in report.guarantee.assumptions if a.status == "asserted"]
    if code not in asserted:
        raise ConfigError(f"vouch={code!r}: must be one of {', '.join(asserted) or 'none'}.")
    at = log.now()
    evidence = f"not checked; by {by or 'the reader of this report'}, {at}"
    guarantee = report.guarantee.with_status(code, "vouched", evidence)
    vouchers = {**report.vouchers, code: {"by": by, "at": at}}
    return replace(report, guarantee=guarantee, vouchers=vouchers)
