"""``privpart audit leakage``: what an adversary recovers from a whole update and from its parts."""

from typing import TYPE_CHECKING, Any

import typer

from accounting import checks
from privpart.cli.audit.options import AnyOptions, LeakageOptions, takes

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from attacks import LeakageReport, TextReport
    from privpart.cli.audit.inputs import Inputs

THRESHOLD_PASSED = 4
VOID = 5
_BUDGETS: dict[str, Any] = {
    "quick": {"restarts": 1, "max_evaluations": 300, "newton_steps": 0, "steps": 300},
    "normal": {"restarts": 2, "max_evaluations": 500, "newton_steps": 10, "steps": 1000},
    "long": {"restarts": 4, "max_evaluations": 3000, "newton_steps": 30, "steps": 6000},
}
_EXCHANGES = {"quick": 0, "normal": 4000, "long": 40_000}
"""Updates that the attack on text may compute to put tokens into sentences."""


@takes(LeakageOptions)
def leakage(options: LeakageOptions) -> None:
    """Attack the update of each batch, per view, and say what may be concluded.

    Images by --model and --data; sentences by --plan, or by --model and --tokens. An update that
    these do not explain is void: exit code 5. After Ctrl-C, the same command resumes.
    """
    import attacks
    from attacks.report import VERDICTS
    from privpart.cli.audit.store import resumable

    inputs, shared = prepare(options)
    adversaries = 2 if options.noise_multiplier and options.gradient is None else 1
    batches = len(inputs.examples) // options.batch
    kind: Any = attacks.TextAudit if options.of_text else attacks.ImageAudit
    with resumable(shared["done"], adversaries * len(inputs.views) * batches) as progress:
        audit = kind(
            views=inputs.views,
            clip=options.clip,
            noise_multiplier=options.noise_multiplier,
            schedule=options.rounds,
            progress=progress,
            **shared,
        )
        report: LeakageReport | TextReport = audit.report()
    _write(report, options, inputs)
    if report.void:
        raise typer.Exit(VOID)
    limit = options.fail_on
    if limit is not None and VERDICTS.index(report.verdict) <= VERDICTS.index(limit):
        typer.echo(f"privpart: {report.verdict}: threshold {limit} passed.", err=True)
        raise typer.Exit(THRESHOLD_PASSED)


def prepare(options: AnyOptions) -> "tuple[Inputs, dict[str, Any]]":
    """Return what is attacked, and the fields of every ``attacks.Audit`` of it.

    Among them is ``done``, the results so far in ``out``.

    Raises:
        ConfigError: an option that does not fit the model or the data, or a folder with the
            results of other options.
    """
    import torch

    from attacks import suite
    from attacks.text_audit import text_suite
    from privpart.cli.audit.inputs import local_steps_of
    from privpart.cli.audit.store import TrialFolder

    torch.set_num_threads(1)  # so that the numbers do not depend on the machine's processors
    effort = options.effort
    every: Any = (
        text_suite(exchanges=_EXCHANGES[effort]) if options.of_text else suite(**_BUDGETS[effort])
    )
    for name in options.attack or ():
        checks.choice("attack", name, list(every))
    local = local_steps_of(options)
    if options.of_text:
        from privpart.cli.audit.text_inputs import load_text as load
    else:
        from privpart.cli.audit.image_inputs import load_images as load
    inputs = load(options)
    return inputs, {
        "model": inputs.model,
        "x": inputs.examples,
        "y": inputs.labels,
        "attacks": {name: every[name] for name in every if name in (options.attack or every)},
        "batch": options.batch,
        "update": inputs.update,
        "local": local,
        "delta": options.delta,
        "reveal_labels": not options.hide_labels,
        "seed": options.seed,
        "done": TrialFolder(options.out, options.identity(), inputs.digest()),
        **inputs.public,
    }


def _write(report: "LeakageReport | TextReport", options: LeakageOptions, inputs: "Inputs") -> None:
    from attacks import TextReport
    from privpart.cli.audit import tables
    from privpart.cli.audit.store import writing
    from privpart.cli.pages import plots
    from privpart.cli.pages.leakage import leakage_page

    summary = tables.summary(report)
    report_file = options.out / tables.REPORT
    shown = options.out / ("leakage.html" if options.of_text else "leakage.png")
    pages = [*([shown] if options.of_text else []), *([options.html] if options.html else [])]
    with writing(options.out):
        report_file.write_text(tables.as_json(report))
        if not isinstance(report, TextReport):
            plots.draw_reconstructions([report], shown)
    if pages:
        page = leakage_page(report, summary, picture=shown, words=inputs.words)
        for path in pages:
            page.write(path)
    tables.publish(report, summary, options.form, [report_file, shown])
