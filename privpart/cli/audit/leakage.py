"""``privpart audit leakage``: what an adversary recovers from a whole update and from its parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from privpart.cli.audit.options import LeakageOptions, takes_options

# Imported where used: the other commands must not pay for torch.
if TYPE_CHECKING:
    from attacks import DefencePoint, LeakageReport, TextReport
    from attacks.audit import Audit
    from privpart.cli.audit.tables import Summary

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
    from attacks.report import VERDICTS
    from privpart.cli.audit.store import resumable

    audit, words = _audit_of(options)
    per_level = len(audit.everyone) * len(audit.views) * len(audit.batches)
    with resumable(options.out, per_level * options.levels) as progress:
        audit = replace(audit, progress=progress)
        if options.levels > 1:
            clips, noises = options.clips, options.noises
            points = attacks.defences(audit, clips=clips, noise_multipliers=noises)
            summary = _write_levels(points, options)
        else:
            report: Any = audit.report()
            summary = _write(report, options, words)
    # Void says nothing of the update, so that no threshold applies.
    if summary.verdict == "void":
        raise typer.Exit(VOID)
    limit = options.fail_on
    if limit is not None and VERDICTS.index(summary.verdict) <= VERDICTS.index(limit):
        typer.echo(f"privpart: {summary.verdict}: threshold {limit} passed.", err=True)
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


def _write(
    report: "LeakageReport | TextReport", options: LeakageOptions, words: Sequence[str]
) -> "Summary":
    from attacks import TextReport
    from privpart.cli.audit.store import writing
    from privpart.cli.audit.tables import summary
    from privpart.cli.pages import plots
    from privpart.cli.pages.leakage import leakage_page, marked_sentences, photograph

    result, out = summary(report), options.out
    shown = out / ("leakage.html" if options.of_text else "leakage.png")
    # Before the pages, so that a page that cannot be written loses no result.
    with writing(out):
        (out / "report.json").write_text(result.as_json())
        if not isinstance(report, TextReport):
            plots.draw_reconstructions([report], shown)
    if isinstance(report, TextReport):
        page = leakage_page(result, marked_sentences(report, words))
        page.write(shown)
    else:
        caption = (
            "Truth, guesses that need no attack, and the best reconstruction of each view. The "
            "frame tells the verdict on that one picture; the table has the verdict on the view."
        )
        about = "True images beside the best reconstruction of each view."
        page = leakage_page(result, photograph(shown, about, caption))
    if options.html is not None:
        page.write(options.html)
    result.publish(options.form, [out / "report.json", shown])
    return result


def _write_levels(points: "Sequence[DefencePoint]", options: LeakageOptions) -> "Summary":
    from privpart.cli.audit.store import writing
    from privpart.cli.audit.tables import summary_of_levels
    from privpart.cli.pages import plots
    from privpart.cli.pages.leakage import leakage_page, photograph

    result, out = summary_of_levels(points, options.identity()), options.out
    with writing(out):
        (out / "defences.json").write_text(result.as_json())
        plots.draw_defences(points, out / "defences.png")
    if options.html is not None:
        about, caption = "Scores against the noise multiplier.", "Epsilon is the accountant's."
        leakage_page(result, photograph(out / "defences.png", about, caption)).write(options.html)
    result.publish(options.form, [out / "defences.json", out / "defences.png"])
    return result
