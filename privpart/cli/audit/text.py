"""Text of an audit: attack sentences, and print what came back."""

from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from accounting import checks
from attacks import TextDefencePoint, text_defences
from attacks.text.audit import NO_ATTACK, text_leakage, text_suite
from attacks.text.report import TextReport, TextRow
from privpart.cli.audit.inputs import local_steps_of
from privpart.cli.audit.options import EXCHANGES, DefencesOptions, LeakageOptions, rounds, views
from privpart.cli.audit.store import TextFolder, resumable, writing
from privpart.cli.audit.tables import (
    REPORT,
    Told,
    accountants_note,
    as_json,
    named,
    parameters_sent,
    plain_table,
    publish,
    rows_csv,
    verdict_counts,
    void,
    what_is_seen,
)
from privpart.cli.audit.text_inputs import load_text
from privpart.cli.options import Format
from privpart.cli.pages.leakage import text_leakage_page

PAGE = "leakage.html"
_WIDTH = 136
_MEANING = {
    "recovered": "'recovered': nine tokens in ten of a sentence came back in order, and a guess "
    "without the update does not do that.",
    "partial": "'partial': tokens came back that a guess without the update does not have.",
    "no gain": "'no gain': the sentence came back, but a guess without the update is as close.",
    "ambiguous": "'ambiguous' is not 'safe': another text matches the update.",
    "attack failed": "'attack failed' says nothing about privacy.",
    "nothing sent": "'nothing sent': the update of this view is zero in this round, at these "
    "weights; a later round may send something.",
    "void": "'void': nothing was attacked, and nothing follows about privacy.",
}
_CSV = (
    *("view", "adversary", "verdict", "visible", "share", "exact", "recovered"),
    *("rouge_median", "guess_rouge_median", "f1_median", "guess_f1_median"),
    *("bag_f1_median", "guess_bag_f1_median", "match_median", "truth_match_max"),
    *("lengths_right", "labels_right", "doubtful", "attack"),
)


def audit_text(
    options: LeakageOptions, out: Path, form: Format, html: Path | None = None
) -> TextReport:
    """Attack the sentences that the options name; write and print the report."""
    torch.set_num_threads(1)  # so that the numbers do not depend on the machine's processors
    known = text_suite(exchanges=EXCHANGES[options.effort])
    for name in options.attack or ():
        checks.choice("attack", name, list(known))
    local = local_steps_of(options)
    inputs = load_text(options, views(options.view or ()), options.words)
    done = TextFolder(out, options.identity(), inputs.digest())
    adversaries = 2 if options.noise_multiplier and options.gradient is None else 1
    total = adversaries * len(inputs.views) * (len(inputs.tokens) // options.batch)
    with resumable(done, total) as progress:
        report = text_leakage(
            inputs.model,
            inputs.tokens,
            inputs.labels,
            views=inputs.views,
            attacks={k: a for k, a in known.items() if k in (options.attack or known)},
            batch=options.batch,
            pad=inputs.pad,
            update=inputs.update,
            local=local,
            clip=options.clip,
            noise_multiplier=options.noise_multiplier,
            delta=options.delta,
            schedule=rounds(options.schedule),
            public=inputs.public,
            reveal_labels=not options.hide_labels,
            seed=options.seed,
            done=done,
            progress=progress,
        )
    _write(report, out, form, inputs.words, html)
    return report


def text_points(options: DefencesOptions, out: Path) -> list[TextDefencePoint]:
    """Attack the sentences that the options name at every clip and noise multiplier."""
    torch.set_num_threads(1)
    known = text_suite(exchanges=EXCHANGES[options.effort])
    for name in options.attack or ():
        checks.choice("attack", name, list(known))
    local = local_steps_of(options)
    inputs = load_text(options, views([] if options.view is None else [options.view]))
    done = TextFolder(out, options.identity(), inputs.digest())
    clips = list(dict.fromkeys(options.clip))
    noises = list(dict.fromkeys(options.noise_multiplier))
    total = len(clips) * len(noises) * (len(inputs.tokens) // options.batch)
    with resumable(done, total) as progress:
        return text_defences(
            inputs.model,
            inputs.tokens,
            inputs.labels,
            visible=next(iter(inputs.views.values())),
            clips=clips,
            noise_multipliers=noises,
            delta=options.delta,
            attacks={k: a for k, a in known.items() if k in (options.attack or known)},
            batch=options.batch,
            pad=inputs.pad,
            local=local,
            public=inputs.public,
            reveal_labels=not options.hide_labels,
            seed=options.seed,
            done=done,
            progress=progress,
        )


def _write(
    report: TextReport, out: Path, form: Format, words: tuple[str, ...], html: Path | None
) -> None:
    tables = [_rows(report)] if report.void else [_rows(report), _by_attack(report)]
    told = Told(
        tables=tables,
        notes=_notes(report),
        warnings=_warnings(report),
        csv=rows_csv(report, "sentences", _CSV),
        width=_WIDTH,
    )
    with writing(out):
        (out / REPORT).write_text(as_json(report))
    page = text_leakage_page(report, words, told)
    for path in (out / PAGE, *(() if html is None else (html,))):
        page.write(path)
    publish(report, told, form, out, PAGE)


def _rows(report: TextReport) -> Table:
    noisy = report.bound is not None
    title = (
        f"Attack: medians over {len(report.truth)} sentences, each best over the attacks; in "
        "brackets the best guess without the update"
    )
    columns = ["view", *(["adversary"] if noisy else []), "parameters sent", "exact", "ROUGE-L"]
    table = plain_table(title, [*columns, "token F1", "tokens of batch", "residual", "verdict"])
    for row in report.rows:
        values = row.to_dict()
        match = values["match_median"]
        tried = values["rouge_median"] is not None
        table.add_row(
            *(row.view, *([row.adversary] if noisy else []), parameters_sent(row)),
            f"{row.exact}/{len(row.best)}" if tried else "",
            *(_beside(values, name) if tried else "" for name in ("rouge", "f1", "bag_f1")),
            ("none" if match is None else f"{match:.0e}") if tried else "",
            row.verdict,
        )
    return table


def _beside(values: dict[str, Any], name: str) -> str:
    return f"{values[f'{name}_median']:.2f} ({values[f'guess_{name}_median']:.2f})"


def _by_attack(report: TextReport) -> Table:
    noisy = report.bound is not None
    title = "Attack by attack, on each view itself"
    columns = ["view", *(["adversary"] if noisy else []), "attack", "exact", "ROUGE-L", "token F1"]
    table = plain_table(title, [*columns, "tokens of batch", "residual", "verdicts"])
    for row in report.rows:
        for name, found in row.to_dict()["by_attack"].items():
            match = found["match_median"]
            table.add_row(
                *(row.view, *([row.adversary] if noisy else []), name),
                f"{found['exact']}/{found['sentences']}",
                *(f"{found[f'{of}_median']:.2f}" for of in ("rouge", "f1", "bag_f1")),
                "none" if match is None else f"{match:.0e}",
                verdict_counts(found),
            )
    return table


def _notes(report: TextReport) -> list[str]:
    threat = report.threat
    lengths = "" if threat["padding"] == "none" else "; lengths are inferred"
    sentences = f"sentence(s) of up to {threat['longest']} tokens"
    notes = [
        f"{what_is_seen(report, sentences)}{lengths}. "
        f"Loss {median(report.losses):.3g}. 'Tokens of batch' is the F1 of the batch's distinct "
        f"tokens in any order. Guesses are made of {report.public} public sentences."
    ]
    worst = report.worst_round
    if worst is not None:
        notes.append(
            "Schedule: a client that takes part in all rounds is exposed by its worst round, "
            f"{worst.view}: {worst.verdict}, {worst.exact} sentences exact."
        )
    notes += accountants_note(report)
    given = {row.verdict for row in report.rows}
    return [*notes, *(line for verdict, line in _MEANING.items() if verdict in given)]


def _warnings(report: TextReport) -> list[str]:
    """Return warnings about conclusions that the scores do not allow."""
    if report.void:
        return [void(report, "sentences")]
    found = []
    if not report.guesses:
        found.append(
            "no sentences besides those attacked: nothing says what a guess without the update "
            "would find; words that all sentences share count as found."
        )
    doubtful = [row for row in report.rows if row.doubtful]
    if doubtful:
        found.append(
            f"what was read in {named(doubtful)} does not explain the update: its tokens may be "
            f"right, but its order{_inferred(report, doubtful)} is a guess."
        )
    failed = [row for row in report.rows if row.verdict == "attack failed"]
    bare = [row for row in failed if row.adversary == "server"]  # noise leaves nothing to read
    unread = [row for row in bare if not row.by_attack.keys() - {NO_ATTACK}]
    if unread:
        found.append(
            f"no attack could read {named(unread)}: none applies there, or too much moved that is "
            "no token. Nothing follows about privacy."
        )
    failed = [row for row in failed if row not in unread]
    if failed:
        found.append(f"the attack failed on {named(failed)}: nothing follows about privacy.")
    return found


def _inferred(report: TextReport, rows: list[TextRow]) -> str:
    """Return which other inferred values are guesses, and how many of them are right at worst."""
    told = ""
    for name, shares in (
        ("lengths", [row.lengths_right for row in rows]),
        ("labels", [row.labels_right for row in rows]),
    ):
        right = [share for share in shares if share is not None]
        told += f", {name} ({min(right):.0%} right at worst)" if right else ""
    return told
