"""Text of an audit: attack sentences, and print what came back."""

import json
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from accounting import checks
from accounting.report import up
from attacks import TextDefencePoint, text_defences
from attacks.text.audit import text_leakage, text_suite
from attacks.text.report import TextReport, TextRow
from privpart.cli.audit.inputs import local_steps_of
from privpart.cli.audit.options import EXCHANGES, DefencesOptions, LeakageOptions, rounds, views
from privpart.cli.audit.store import TextFolder, resumable, writing
from privpart.cli.audit.tables import plain_table
from privpart.cli.audit.text_inputs import load_text
from privpart.cli.options import Format
from privpart.cli.output import as_csv
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
    text = json.dumps(report.to_dict(), indent=2, allow_nan=False)
    with writing(out):
        (out / "report.json").write_text(text + "\n")
    page = text_leakage_page(report, words, _tables(report), _notes(report), _warnings(report))
    for path in (out / PAGE, *(() if html is None else (html,))):
        page.write(path)
    if form is Format.JSON:
        typer.echo(text)
    elif form is Format.CSV:
        rows = [row.to_dict() for row in report.rows]
        lines = [{"sentences": len(report.truth)} | {k: row[k] for k in _CSV} for row in rows]
        typer.echo(as_csv(lines), nl=False)
    else:
        _show(report)
    for warning in _warnings(report):
        typer.echo(f"privpart: warning: {warning}", err=True)
    typer.echo(f"privpart: written: {out / 'report.json'}, {out / PAGE}", err=True)


def _show(report: TextReport) -> None:
    console = Console(width=_WIDTH, highlight=False)
    for table in _tables(report):
        console.print(table)
    for line in _notes(report):
        console.print(fill(line, 100, subsequent_indent="  "))


def _tables(report: TextReport) -> list[Table]:
    return [_rows(report)] if report.void else [_rows(report), _by_attack(report)]


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
        sent = f"{row.visible:,} ({row.share:.0%})"
        if row.share <= 0.1:
            sent = f"{row.visible:,} ({row.share:.1%})"
        match = values["match_median"]
        tried = values["rouge_median"] is not None
        table.add_row(
            *(row.view, *([row.adversary] if noisy else []), sent),
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
                ", ".join(f"{n} {verdict}" for verdict, n in found["verdicts"].items() if n),
            )
    return table


def _notes(report: TextReport) -> list[str]:
    threat = report.threat
    sent = "gradient" if threat["update"] == "gradient" else "change of the weights"
    noise = f", noise multiplier {threat['noise_multiplier']:g}" if report.bound else ""
    clip = "no clip" if threat["clip"] is None else f"clip {threat['clip']:g}"
    lengths = "" if threat["padding"] == "none" else "; lengths are inferred"
    notes = [
        f"The attacker sees the {sent} of {threat['batch']} sentence(s) of up to "
        f"{threat['longest']} tokens in eval mode, {clip}{noise}, and knows every weight; labels "
        f"are {threat['labels']}{lengths}. Loss {median(report.losses):.3g}. 'Tokens of batch' is "
        "the F1 of the batch's distinct tokens in any order. Guesses are made of "
        f"{report.public} public sentences."
    ]
    worst = report.worst_round if report.schedule else None
    if worst is not None:
        notes.append(
            "Schedule: a client that takes part in all rounds is exposed by its worst round, "
            f"{worst.view}: {worst.verdict}, {worst.exact} sentences exact."
        )
    if report.bound is not None:
        notes.append(
            f"Accountant: epsilon {up(report.bound.epsilon(report.delta), 4)} at delta "
            f"{report.delta:g} for one noised release. It is not computed from any score above."
        )
    given = {row.verdict for row in report.rows}
    return [*notes, *(line for verdict, line in _MEANING.items() if verdict in given)]


def _warnings(report: TextReport) -> list[str]:
    """Return warnings about conclusions that the scores do not allow."""
    explanation = report.explanation
    if report.void and explanation is not None:
        return [
            "the audit is void: the given sentences do not explain the update (residual "
            f"{explanation.residual:.2g}). Likely wrong: {'; '.join(explanation.causes)}."
        ]
    found = []
    if not report.guesses:
        found.append(
            "no sentences besides those attacked: nothing says what a guess without the update "
            "would find; words that all sentences share count as found."
        )
    doubtful = [row for row in report.rows if row.doubtful]
    if doubtful:
        found.append(
            f"what was read in {_named(doubtful)} does not explain the update: its tokens may be "
            f"right, but its order{_inferred(report, doubtful)} is a guess."
        )
    failed = [row for row in report.rows if row.verdict == "attack failed"]
    if failed:
        found.append(f"the attack failed on {_named(failed)}: nothing follows about privacy.")
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


def _named(rows: list[TextRow]) -> str:
    return ", ".join(dict.fromkeys(row.view for row in rows))
