"""Page of a run: its verdict first, and a guarantee only where one holds or would hold.

A run that is private shows nothing of its rounds but their number and the worst participation:
how many took part in a round, and how good the model was after it, no epsilon covers.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from accounting.checks import is_large_delta
from accounting.report import STATUS_SENTENCES, Assumption, up
from privpart.cli.pages import drawing
from privpart.cli.pages.guarantee import (
    BADGES,
    assumptions_section,
    badged,
    coverage_section,
    guarantee_section,
    key_figures,
    mechanism_facts,
    statement_of,
)
from privpart.cli.pages.page import (
    Badged,
    Block,
    Facts,
    Page,
    Picture,
    Points,
    Prose,
    Section,
    Tone,
)
from privpart.run.evidence import Check
from privpart.run.report import RunReport, Simulated

_VERDICTS: dict[str, tuple[Tone, str]] = {
    "holds": ("good", "The guarantee holds"),
    "conditional": ("caution", "The guarantee is conditional"),
    "does-not-hold": ("bad", "No guarantee holds"),
    "not-private": ("caution", "A simulation: not private"),
}
_CHECKS: dict[str, tuple[Tone, str]] = {
    "wrong": ("bad", "wrong"),
    "asserted": ("caution", "not checked"),
    "verified": ("good", "verified"),
}
_PLACE = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\",;]+/)+([^\s/:'\",;]*)")


def run_page(found: RunReport) -> Page:
    """Return the page of a run whose ledger could be read."""
    broken = bool(found.wrong) or found.guarantee.status == "does-not-hold"
    status = "does-not-hold" if broken else found.guarantee.status
    tone, verdict = _VERDICTS[status]
    says = [STATUS_SENTENCES[status], *_progress(found)]
    if is_large_delta(found.guarantee.delta, found.guarantee.population):
        says.append("Delta is too large for the number of units.")
    sections = _broken(found) if broken else _sound(found)
    return Page(
        f"Privacy report of run {found.run_id[:12]}",
        tone,
        verdict,
        tuple(says),
        (*sections, _ledger(found), _checks(found.checks), _identity(found)),
        (
            f"Written by privpart {found.guarantee.version} from the run's ledger, by the rules of "
            "privpart report. Whoever has the folder can check it: privpart verify FOLDER.",
        ),
    )


def unreadable_page(error: str, checks: Sequence[Check], folder: Path) -> Page:
    """Return the page of a run whose ledger was changed or is damaged: it claims nothing.

    Args:
        error: why nothing can be derived from the ledger.
        checks: what was checked of the folder, if it could be read so far.
        folder: of the run; no part of its place is shown.
    """
    wrong = tuple(check for check in checks if check.status == "wrong")
    reasons = tuple(f"{check.what}: {check.says}." for check in wrong) or (error,)
    shown = tuple(without_places(reason, folder) for reason in reasons)
    sections = (Section("What is wrong", (Points(shown),)), _checks(checks, folder))
    return Page(
        "Privacy report of a run",
        "bad",
        "No guarantee: the run's ledger was changed or is damaged",
        ("Nothing that this folder says of itself can be relied on, so no figure is shown.",),
        sections,
    )


def without_places(text: str, *folders: Path) -> str:
    """Return text in which a file is named without the folders in which it lies.

    >>> without_places("cannot open /home/jane/runs/a/ledger.log: damaged", Path("runs"))
    'cannot open ledger.log: damaged'
    """
    for folder in (*folders, Path.home()):
        for place in {str(folder), str(folder.resolve())} - {".", "/"}:
            text = text.replace(f"{place}/", "").replace(place, folder.resolve().name or "folder")
    return _PLACE.sub(r"\1", text)


def _progress(found: RunReport) -> list[str]:
    if found.closed:
        return [f"The run was closed after {found.rounds} of {found.planned_rounds} rounds."]
    if not found.complete:
        return [
            f"The run is not finished: {found.rounds} of {found.planned_rounds} rounds are "
            "committed. The figures are for all planned rounds."
        ]
    return []


def _sound(found: RunReport) -> list[Section]:
    report = found.guarantee
    sampled = ""
    if report.sampling is not None:
        sampled = "The curves hold even if it becomes known who takes part; the dot does not."
    return [
        Section("At a glance", (key_figures(report), *_all_runs(found))),
        Section("Statement", (statement_of(report), *_select(found))),
        guarantee_section(report, lead=sampled),
        assumptions_section(report, utility=_utility(found)),
        coverage_section(report),
        _measured(found),
    ]


def _broken(found: RunReport) -> list[Section]:
    reasons = [f"{check.what}: {check.says}." for check in found.wrong]
    reasons += [f"The run left its plan: {said}." for said in found.deviations]
    if not found.guarantee.cross_check.consistent:
        reasons.append("Two accountants contradict each other.")
    violated = [a for a in found.guarantee.assumptions if a.status == "violated"]
    others = [a for a in found.guarantee.assumptions if a.status != "violated"]
    others = sorted(others, key=lambda a: list(BADGES).index(a.status))
    return [
        Section(
            "What is wrong", (Points(tuple(map(without_places, reasons))), *_listed("", violated))
        ),
        Section("What else it would rest on", tuple(_listed("", others))),
    ]


def _listed(heading: str, assumptions: Sequence[Assumption]) -> list[Block]:
    return [Badged(heading, tuple(map(badged, assumptions)))] if assumptions else []


def _utility(found: RunReport) -> str:
    if found.simulated is None or not found.simulated.metric:
        return ""
    number, value = found.simulated.metric[-1]
    return f"the last evaluation, after round {number + 1}, gave {value:.4g}."


def _all_runs(found: RunReport) -> list[Block]:
    if found.all_runs is None:
        return []
    says = without_places(found.all_runs.says)
    return [Facts((("all that this machine released about these people", says),))]


def _select(found: RunReport) -> list[Block]:
    if found.select is None:
        return []
    return [Prose(tuple(f"{line[0].upper()}{line[1:]}." for line in found.select))]


def _measured(found: RunReport) -> Section:
    if found.measured is None:
        return Section("Measured from below", ())
    return Section(
        "Measured from below",
        (Prose((f"An audit of this run found {found.measured}.",)),),
        "A lower bound of one kind of attack; it does not show that the run is private.",
    )


def _ledger(found: RunReport) -> Section:
    """Return what the ledger shows of the rounds, and of those of a simulation more."""
    rows = (
        ("rounds committed", f"{found.rounds:,} of {found.planned_rounds:,}"),
        ("planned", found.guarantee.schedule),
        ("most that one took part", found.worst()),
    )
    pictures = []
    if (told := found.simulated) is not None and told.counted:
        pictures.append(
            Picture(
                _counts(told, found.planned_rounds),
                "Number of updates in the sum of each round.",
                "Updates in the sum of each round; dashed: the least that the plan allows. Shown "
                "of simulations only: no epsilon covers the counts of a private run.",
            )
        )
    if told is not None and told.metric:
        pictures.append(
            Picture(
                _accuracy(told, found.planned_rounds),
                "Metric of the plan after the rounds that were evaluated.",
                "The metric of the plan, on its evaluation data. Shown of simulations only.",
            )
        )
    return Section("Participation and ledger", (Facts(rows), *pictures))


def _counts(told: Simulated, planned: int) -> Figure:
    figure, axes = drawing.panel(4.6, 2.6)
    axes.bar(range(1, len(told.counted) + 1), told.counted, 0.9, color=drawing.SERIES[0])
    if told.minimum_cohort > 1:
        drawing.target(axes, told.minimum_cohort, "")
    axes.set_xlim(0.4, max(planned, len(told.counted)) + 0.6)
    axes.set_ylim(0, 1.15 * max(*told.counted, told.minimum_cohort, 1))
    axes.set_xlabel("round")
    axes.set_ylabel("updates")
    return figure


def _accuracy(told: Simulated, planned: int) -> Figure:
    figure, axes = drawing.panel(4.6, 3.0)
    xs = [number + 1 for number, _ in told.metric]
    drawing.band(axes, xs, [v for _, v in told.metric], [None] * len(xs), drawing.Styles().of())
    axes.set_xlim(0, max(planned, xs[-1]) * 1.02)
    axes.set_xlabel("round")
    axes.set_ylabel("metric")
    return figure


def _checks(checks: Sequence[Check], *folders: Path) -> Section:
    lines = tuple(
        (*_CHECKS[check.status], check.what, f"{without_places(check.says, *folders)}.", ())
        for check in checks
    )
    return Section(
        "What was checked",
        (Badged("", lines),) if lines else (),
        "Of the run's folder, on the machine that wrote this page, when it was written.",
    )


def _identity(found: RunReport) -> Section:
    rows = [
        ("run", found.run_id),
        ("plan", found.plan),
        ("signed by", found.public_key),
        ("head of the ledger", f"{found.head} after {found.rounds} rounds"),
    ]
    blocks: list[Block] = [mechanism_facts(found.guarantee)]
    if found.guarantee.status == "does-not-hold" or found.wrong:
        blocks = []
    if (cost := found.cost) is not None:
        if cost.parameters is not None and cost.update_bytes is not None:
            rows.append(("parameters that train", f"{cost.parameters:,}"))
            rows.append(("one update", f"{cost.update_bytes:,} bytes, and headers"))
        rows.append(("state of the noise", f"{cost.state_vectors:,} vectors of that length"))
        rows.append(("Gaussian vectors drawn per round", up(cost.draws_per_round)))
    return Section("Mechanism, cost and identity", (*blocks, Facts(tuple(rows))))
