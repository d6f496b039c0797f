"""``privpart audit leakage``: what an adversary recovers from a whole update and from its parts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from privpart.cli.audit.options import LeakageOptions, takes_options

# Imported where used: the other commands must not pay for torch.
if TYPE_CHECKING:
    from attacks import DefencePoint, LeakageReport, TextReport
    from attacks.audit import Audit
    from privpart.cli.audit.tables import Summary
    from privpart.cli.pages.page import Page

    _Written = tuple[Summary, Page, list[Path]]

THRESHOLD_PASSED = 4
VOID = 5


@takes_options
def leakage(options: LeakageOptions) -> None:
    """Attack the update of each batch, per view, and say what may be concluded.

    Images by --model and --data; sentences by --plan, or by --model and --tokens. An update that
    these do not explain is void: exit code 5. Several clips or noise multipliers repeat the audit
    at each, beside the accountant's epsilon. After Ctrl-C, the same command resumes.
    """
    import attacks
    from privpart.cli.audit.leakage_gate import JUNIT, judged, read_limit, write_junit
    from privpart.cli.audit.store import resumable, writing

    limit = read_limit(options.fail_on)  # before hours of work
    audit, words = _audit_of(options)
    per_level = len(audit.everyone) * len(audit.views) * len(audit.batches)
    with resumable(options.out, per_level * options.levels) as progress:
        audit = replace(audit, progress=progress)
        if options.levels > 1:
            clips, noises = options.clips, options.noises
            points = attacks.defences(audit, clips=clips, noise_multipliers=noises)
            summary, page, files = _levels_written(points, options)
        else:
            report: Any = audit.report()
            summary, page, files = _report_written(report, options.out, words)
    results = judged(summary.rows, limit)
    with writing(options.out):
        write_junit(results, summary.kind, options.out / JUNIT)
    files.append(options.out / JUNIT)
    if options.html is not None:
        page.write(options.html)
    summary.publish(options.form, files)
    # Void says nothing of the update, so that no threshold applies.
    if summary.verdict == "void":
        raise typer.Exit(VOID)
    failures = [row for row in results if row.failure is not None]
    for row in failures:
        typer.echo(f"privpart: {row.name}: {row.failure}.", err=True)
    if failures:
        raise typer.Exit(THRESHOLD_PASSED)


def _audit_of(options: LeakageOptions) -> "tuple[Audit[Any, Any, Any], Sequence[str]]":
    """Return the audit that the options name, and the text of each token.

    Its results so far are those in ``out``.

    Raises:
        ConfigError: an option that does not fit the model or the data, or a folder with the
            results of other options.
    """
    import torch

    from privpart.cli.audit.inputs import digest
    from privpart.cli.audit.store import TrialFolder

    # The numbers must not depend on the machine's processors.
    torch.set_num_threads(1)
    audit: Audit[Any, Any, Any]
    words: Sequence[str] = ()
    if options.of_text:
        from privpart.cli.audit.text_inputs import text_audit

        audit, words = text_audit(options)
    else:
        from privpart.cli.audit.image_inputs import image_audit

        audit = image_audit(options)
    fields: dict[str, Any] = {}
    if options.levels == 1:
        (fields["clip"],), (fields["noise_multiplier"],) = options.clips, options.noises
    # Results belong to these tensors as well as to these options.
    fields["done"] = TrialFolder(options.out, options.identity(), digest(audit))
    return replace(audit, **fields), words


def _report_written(
    report: "LeakageReport | TextReport", out: Path, words: Sequence[str]
) -> "_Written":
    """Return what is said of a report, once it is in the folder: JSON, and a picture or a page."""
    from attacks import TextReport
    from privpart.cli.audit.store import writing
    from privpart.cli.audit.tables import summary
    from privpart.cli.pages import plots
    from privpart.cli.pages.leakage import leakage_page, marked_sentences, photograph

    result, document = summary(report), out / "report.json"
    # Before the pages, so that a page that cannot be written loses no result.
    with writing(out):
        document.write_text(result.as_json())
        if isinstance(report, TextReport):
            page = leakage_page(result, marked_sentences(report, words))
            page.write(out / "leakage.html")
            return result, page, [document, out / "leakage.html"]
        plots.draw_reconstructions([report], out / "leakage.png")
    caption = (
        "Truth, guesses that need no attack, and the best reconstruction of each view. The "
        "frame tells the verdict on that one picture; the table has the verdict on the view."
    )
    about = "True images beside the best reconstruction of each view."
    page = leakage_page(result, photograph(out / "leakage.png", about, caption))
    return result, page, [document, out / "leakage.png"]


def _levels_written(points: "Sequence[DefencePoint]", options: LeakageOptions) -> "_Written":
    from privpart.cli.audit.store import writing
    from privpart.cli.audit.tables import summary_of_levels
    from privpart.cli.pages import plots
    from privpart.cli.pages.leakage import leakage_page, photograph

    result = summary_of_levels(points, options.identity())
    document, picture = options.out / "defences.json", options.out / "defences.png"
    with writing(options.out):
        document.write_text(result.as_json())
        plots.draw_defences(points, picture)
    about, caption = "Scores against the noise multiplier.", "Epsilon is the accountant's."
    return result, leakage_page(result, photograph(picture, about, caption)), [document, picture]
