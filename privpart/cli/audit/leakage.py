"""``privpart audit leakage``: what an adversary recovers from a whole update and from its parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from privpart.cli.audit.options import AnyOptions, LeakageOptions, takes

# Imported where used: the other commands must not pay for torch.
if TYPE_CHECKING:
    from attacks import LeakageReport, TextReport
    from attacks.audit import Audit

THRESHOLD_PASSED = 4
VOID = 5


@takes(LeakageOptions)
def leakage(options: LeakageOptions) -> None:
    """Attack the update of each batch, per view, and say what may be concluded.

    Images by --model and --data; sentences by --plan, or by --model and --tokens. An update that
    these do not explain is void: exit code 5. After Ctrl-C, the same command resumes.
    """
    from attacks.report import VERDICTS
    from privpart.cli.audit.store import resumable

    audit, words = audit_of(
        options,
        clip=options.clip,
        noise_multiplier=options.noise_multiplier,
        schedule=options.rounds,
    )
    total = len(audit.everyone) * len(audit.views) * len(audit.batches)
    with resumable(options.out, total) as progress:
        report: Any = replace(audit, progress=progress).report()
    _write(report, options, words)
    if report.void:
        raise typer.Exit(VOID)
    limit = options.fail_on
    if limit is not None and VERDICTS.index(report.verdict) <= VERDICTS.index(limit):
        typer.echo(f"privpart: {report.verdict}: threshold {limit} passed.", err=True)
        raise typer.Exit(THRESHOLD_PASSED)


def audit_of(
    options: AnyOptions,
    **fields: Any,  # noqa: ANN401 - of Audit, which checks them
) -> "tuple[Audit[Any, Any, Any], Sequence[str]]":
    """Return the audit that the options name, with these fields, and the text of each token.

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
    # Results belong to these tensors as well as to these options.
    fields["done"] = TrialFolder(options.out, options.identity(), digest(audit))
    return replace(audit, **fields), words


def _write(
    report: "LeakageReport | TextReport", options: LeakageOptions, words: Sequence[str]
) -> None:
    from attacks import TextReport
    from privpart.cli.audit import tables
    from privpart.cli.audit.store import writing
    from privpart.cli.pages import plots
    from privpart.cli.pages.leakage import leakage_page

    summary = tables.summary(report)
    report_file = options.out / tables.REPORT
    shown = options.out / ("leakage.html" if options.of_text else "leakage.png")
    pages = [*([shown] if options.of_text else []), *([options.html] if options.html else [])]
    # Before the pages, so that a page that cannot be written loses no result.
    with writing(options.out):
        report_file.write_text(tables.as_json(report))
        if not isinstance(report, TextReport):
            plots.draw_reconstructions([report], shown)
    if pages:
        page = leakage_page(report, summary, picture=shown, words=words)
        for path in pages:
            page.write(path)
    tables.publish(report, summary, options.form, [report_file, shown])
