"""Page of a run: its verdict first, and a guarantee only where one holds or would hold.

A run that is private shows nothing of its rounds but their number and the worst participation:
how many took part in a round, and how good the model was after it, no epsilon covers.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from accounting.checks import is_large_delta
from accounting.report import STATUS_SENTENCES, up
from privpart.cli.output import Table
from privpart.cli.pages.decision import counts, open_ends, strength, subject, support, words_of
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
from privpart.cli.pages.page import Badge, Block, Page, Picture, Section, Tone, Verdict
from privpart.cli.pages.plots import learning_curve
from privpart.run.budget_book import AllRuns
from privpart.run.evidence import Check
from privpart.run.report import RunReport

_VERDICTS: dict[str, Badge] = {
    "holds": ("good", "Yes, all of it"),
    "conditional": ("caution", "In part"),
    "does-not-hold": ("bad", "No guarantee holds"),
    "not-private": ("caution", "A simulation: not private"),
}
_PLACE = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\",;]+/)+([^\s/:'\",;]*)")


def run_page(result: RunReport) -> Page:
    """Return the page of a run whose ledger could be read."""
    # A folder that fails a check proves nothing, whatever its plan would give.
    broken = bool(result.wrong) or result.guarantee.status == "does-not-hold"
    status = "does-not-hold" if broken else result.guarantee.status
    tone, verdict = _VERDICTS[status]
    report = result.guarantee
    lead = [STATUS_SENTENCES[status], *filter(None, [result.unfinished()])]
    lead += [] if broken else [counts(report)]
    if is_large_delta(report.delta, report.population):
        lead.append("Delta is too large for the number of units.")
    private = not broken and status != "not-private"
    name = shorten(result.about.get("model", ""), 64) or f"run {result.run_id[:12]}"
    rests = _broken(result) if broken else [support(report), open_ends(report), words_of(report)]
    return Page(
        f"Privacy report: {name}",
        [Verdict(tone, verdict, lead, "Is the claim supported?"), strength(report, holds=private)],
        [
            subject(
                *(result.about, report, result.vouchers, result.server_saw),
                together="" if broken else _together(result.all_runs),
            ),
            *rests,
        ],
        f"Written by privpart {report.version} from the run's ledger, by the rules of privpart "
        "report. Whoever has the folder can check it: privpart verify FOLDER.",
        [
            *([] if broken else _sound(result)),
            _ledger(result),
            _checks(result.checks),
            _identity(result, broken),
        ],
    )


def unreadable_page(error: str, checks: Sequence[Check], folder: Path) -> Page:
    """Return the page of a run whose ledger was changed or is damaged: it claims nothing.

    It shows the error, what was checked so far, and no part of the folder's place.
    """
    reasons = [f"{check.what}: {check.says}." for check in checks if check.status == "wrong"]
    shown = [without_places(reason, folder) for reason in reasons or [error]]
    return Page(
        "Privacy report of a run",
        [
            Verdict(
                "bad",
                "No guarantee: the run's ledger was changed or is damaged",
                ["Nothing that this folder says of itself can be relied on; no figure is shown."],
            )
        ],
        [Section("What is wrong", [Block("points", shown)]), _checks(checks, folder)],
    )


def checks_page(checks: Sequence[Check], folder: Path) -> Page:
    """Return the page of a verification: is anything wrong, and what rests on the operator's word.

    Never green while a line rests on a word alone.
    """
    wrong = [check.what for check in checks if check.status == "wrong"]
    words = [check.what for check in checks if check.status == "asserted"]
    tone: Tone
    if wrong:
        tone, answer = "bad", f"Wrong: {', '.join(wrong)}"
    elif words:
        tone, answer = "caution", f"Nothing is wrong; not checked: {', '.join(words)}"
    else:
        tone, answer = "good", "Everything in this folder is as it says"
    lead = ["What the run guarantees, and how strong that is: privpart report FOLDER --html FILE."]
    return Page(
        f"Verification of {folder.resolve().name or 'a run'}",
        [Verdict(tone, answer, lead)],
        [_checks(checks, folder)],
        "By the rules of privpart verify.",
    )


def without_places(text: str, *folders: Path) -> str:
    """Return text in which a file is named without the folders in which it lies.

    >>> without_places("cannot open /home/jane/runs/a/ledger.log: damaged", Path("runs"))
    'cannot open ledger.log: damaged'
    """
    # Pages and entries leave the machine; names of folders are often names of people.
    for folder in (*folders, Path.home()):
        # Without "." and "/": every dot or slash of the text would be replaced.
        for place in {str(folder), str(folder.resolve())} - {".", "/"}:
            text = text.replace(f"{place}/", "").replace(place, folder.resolve().name or "folder")
    return _PLACE.sub(r"\1", text)


def _together(known: AllRuns | None) -> str:
    """Return what several runs about the same people cost together; "" if there is one run."""
    if known is None or known.runs < 2 or known.status == "nothing released":
        return ""
    where = f"{known.runs} runs on this machine"
    if known.status == "holds" and known.epsilon is not None:
        return f"epsilon {up(known.epsilon)} together, in {where}; this page judges one of them"
    return f"{where}, which have no bound together; the annex says why"


def _sound(result: RunReport) -> list[Section]:
    report, blocks = result.guarantee, [statement_of(result.guarantee)]
    sampled = "The curves, as the dot, hold while nobody learns who was sampled."
    if result.select is not None:
        lines = [f"{line[0].upper()}{line[1:]}." for line in result.select]
        blocks.append(Block("prose", lines))
    glance, measured = [key_figures(report)], []
    if result.all_runs is not None:
        name = "all that this machine released about these people"
        glance.append(Block("facts", [(name, without_places(result.all_runs.says))]))
    if result.server_saw is not None:
        glance.append(Block("facts", [("the server saw", result.server_saw)]))
    if result.measured is not None:
        measured = [Block("prose", [f"An audit of this run found {result.measured}."])]
    return [
        Section("At a glance", glance),
        Section("Statement", blocks),
        guarantee_section(report, lead=sampled if report.samplers else ""),
        _learning_curve(result),
        assumptions_section(report),
        coverage_section(report),
        Section(
            "Measured from below",
            measured,
            "A lower bound of one kind of attack; it does not show that the run is private.",
        ),
    ]


def _learning_curve(result: RunReport) -> Section:
    """Return the noised metrics, which the guarantee covers and anybody may see."""
    if (noised := result.noised) is None or not noised.evaluations:
        return Section("Learning curve", [])
    error = f"{noised.standard_error:.2g}"
    picture = Picture(
        learning_curve(noised.names, noised.evaluations, noised.standard_error),
        f"Noised {', '.join(noised.names)} after each evaluated round.",
        f"Bands are two standard deviations of the noise, {error} each, to both sides.",
    )
    rows = [
        (f"{number + 1:,}", *(f"{values[name]:.3f}" for name in noised.names))
        for number, values in noised.evaluations
    ]
    table = Table("Noised means over the users who evaluated", ("rounds", *noised.names), rows)
    cost = result.guarantee.figures()["metrics"].value
    return Section("Learning curve", [Block("pictures", [picture]), table], f"Covered: {cost}.")


def _broken(result: RunReport) -> list[Section]:
    # No figure beside them: whoever skims a page reads its figures first.
    reasons = [f"{check.what}: {check.says}." for check in result.wrong]
    reasons += [f"The run left its plan: {deviation}." for deviation in result.deviations]
    if not result.guarantee.cross_check.consistent:
        reasons.append("Two accountants contradict each other.")
    violated, unbroken = (
        badged(a for a in result.guarantee.assumptions if (a.status == "violated") is broken)
        for broken in (True, False)
    )
    wrong = Block("points", list(map(without_places, reasons)))
    return [
        Section("What is wrong", [wrong, violated]),
        Section("What else it would rest on", [unbroken]),
    ]


def _ledger(result: RunReport) -> Section:
    """Return what the ledger shows of the rounds; how many came to one is secret."""
    rows = [
        ("rounds committed", f"{result.rounds:,} of {result.planned_rounds:,}"),
        ("planned", result.guarantee.schedule),
        ("most that one took part", result.worst()),
    ]
    return Section("Participation and ledger", [Block("facts", rows)])


def _checks(checks: Sequence[Check], *folders: Path) -> Section:
    lines = [
        (*BADGES[check.status], check.what, f"{without_places(check.says, *folders)}.", ())
        for check in checks
    ]
    return Section(
        "What was checked",
        [Block("badged", lines)] if lines else [],
        "Of the run's folder, on the machine that wrote this page, when it was written.",
    )


def _identity(result: RunReport, broken: bool) -> Section:
    rows = [
        ("run", result.run_id),
        ("plan", result.plan),
        ("signed by", result.public_key),
        ("head of the ledger", f"{result.head} after {result.rounds} rounds"),
    ]
    if (cost := result.cost) is not None:
        if cost.parameters is not None and cost.update_bytes is not None:
            rows.append(("parameters that train", f"{cost.parameters:,}"))
            rows.append(("one update", f"{cost.update_bytes:,} bytes, and headers"))
        rows.append(("state of the noise", f"{cost.state_vectors:,} vectors of that length"))
        rows.append(("Gaussian vectors drawn per round", up(cost.draws_per_round)))
        if cost.precision is not None:
            rows.append(("clients computed in", f"{cost.precision}, when the run began"))
    mechanism = [] if broken else [mechanism_facts(result.guarantee)]
    return Section("Mechanism, cost and identity", [*mechanism, Block("facts", rows)])
