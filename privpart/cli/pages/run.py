"""Page of a run: its verdict first, and a guarantee only where one holds or would hold.

A run that is private shows nothing of its rounds but their number and the worst participation:
how many took part in a round, and how good the model was after it, no epsilon covers.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from accounting.checks import is_large_delta
from accounting.report import Assumption, up
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
from privpart.run.report import RunReport

_VERDICTS: dict[str, tuple[Tone, str]] = {
    "holds": ("good", "The guarantee holds"),
    "conditional": ("caution", "The guarantee is conditional"),
    "does-not-hold": ("bad", "No guarantee holds"),
    "not-private": ("caution", "A simulation: not private"),
}
_SAYS = {
    "holds": "Everything that it rests on was enforced, verified or vouched for.",
    "conditional": "It holds if what is marked 'not checked' below is true.",
    "does-not-hold": "Something that the guarantee rests on is false. Its figures are void and are "
    "not shown.",
    "not-private": "The noise can be computed again from a seed. The figures are what a run of the "
    "same plan would cost with secret noise.",
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
    tone, verdict = _VERDICTS["does-not-hold" if broken else found.guarantee.status]
    says = [_SAYS["does-not-hold" if broken else found.guarantee.status], *_progress(found)]
    if is_large_delta(found.guarantee.delta, found.guarantee.population):
        says.append("Delta is too large for the number of units.")
    sections = _broken(found) if broken else _sound(found)
    return Page(
        f"Privacy report of run {found.run_id[:12]}",
        tone,
        verdict,
        tuple(says),
        (*sections, _ledger(found), _checks(found.checks), _identity(found)),
        _foot(found),
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
    report = found.guarantee
    rows = [("rounds committed", f"{found.rounds:,} of {found.planned_rounds:,}")]
    rows += [("planned", report.schedule), ("most that one took part", found.worst())]
    blocks: list[Block] = [Facts(tuple(rows)), Picture(_against_plan(found), *_words(found))]
    if found.simulated is not None and found.simulated.counted:
        blocks.append(
            Picture(
                _counts(found),
                "Number of updates in the sum of each round.",
                "Updates in the sum of each round; dashed: the least that the plan allows. Shown "
                "of simulations only: no epsilon covers the counts of a private run.",
            )
        )
    if found.simulated is not None and found.simulated.metric:
        blocks.append(
            Picture(
                _accuracy(found),
                "Metric of the plan after the rounds that were evaluated.",
                "The metric of the plan, on its evaluation data. Shown of simulations only.",
            )
        )
    return Section("Participation and ledger", tuple(blocks))


def _words(found: RunReport) -> tuple[str, str]:
    return (
        "Bars: what the plan allows, and what the ledger shows, of rounds and participations.",
        "What the ledger shows (filled) of what the plan allows (outlined).",
    )


def _against_plan(found: RunReport) -> Figure:
    bars = [("rounds", found.rounds, found.planned_rounds)]
    if (real := found.realised) is not None:
        allowed = found.guarantee.max_participations
        bars.append((f"rounds of one {found.guarantee.unit}", real.max_participations, allowed))
    figure, axes = drawing.panel(4.6, 0.75 + 0.45 * len(bars))
    for place, (_, done, planned) in enumerate(bars):
        colour = drawing.SERIES[0 if done <= planned else 1]
        axes.barh(place, 100 * done / planned, 0.5, color=colour)
        axes.barh(place, 100, 0.62, facecolor="none", edgecolor=drawing.FAINT, linewidth=1)
        axes.annotate(
            f"{done:,} of {planned:,}", (100, place), (5, 0), textcoords="offset points",
            va="center", fontsize=8, color=drawing.INK, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, max(100.0, *(100 * done / planned for _, done, planned in bars)) * 1.25)
    axes.set_xticks([0, 25, 50, 75, 100])
    axes.set_xlabel("% of what the plan allows")
    axes.grid(visible=False, axis="y")
    return figure


def _counts(found: RunReport) -> Figure:
    if (told := found.simulated) is None:
        raise TypeError("counts are told of a simulation only")
    figure, axes = drawing.panel(4.6, 2.6)
    axes.bar(range(1, len(told.counted) + 1), told.counted, 0.9, color=drawing.SERIES[0])
    if told.minimum_cohort > 1:
        drawing.target(axes, told.minimum_cohort, "")
    axes.set_xlim(0.4, max(found.planned_rounds, len(told.counted)) + 0.6)
    axes.set_ylim(0, 1.15 * max(*told.counted, told.minimum_cohort, 1))
    axes.set_xlabel("round")
    axes.set_ylabel("updates")
    return figure


def _accuracy(found: RunReport) -> Figure:
    if (told := found.simulated) is None:
        raise TypeError("metrics are told of a simulation only")
    figure, axes = drawing.panel(4.6, 3.0)
    xs = [number + 1 for number, _ in told.metric]
    drawing.band(axes, xs, [v for _, v in told.metric], [None] * len(xs), drawing.Styles().of())
    axes.set_xlim(0, max(found.planned_rounds, xs[-1]) * 1.02)
    axes.set_xlabel("round")
    axes.set_ylabel("metric")
    return figure


def _checks(checks: Sequence[Check], *folders: Path) -> Section:
    return Section(
        "What was checked",
        (
            Badged(
                "",
                tuple(
                    (
                        *_CHECKS[check.status],
                        check.what,
                        f"{without_places(check.says, *folders)}.",
                        (),
                    )
                    for check in checks
                ),
            ),
        )
        if checks
        else (),
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


def _foot(found: RunReport) -> tuple[str, ...]:
    return (
        f"Written by privpart {found.guarantee.version} from the run's ledger, by the rules of "
        "privpart report. Whoever has the folder can check it: privpart verify FOLDER.",
    )
