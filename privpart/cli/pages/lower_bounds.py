"""Page of lower bounds on epsilon: what an audit proves, beside what the accountant says."""

from accounting.report import down, up
from attacks.lower_bounds.bounds import percent
from privpart.cli.audit.verdict import SURE, EpsilonAudit
from privpart.cli.pages.page import Facts, Page, Picture, Points, Section, table_of
from privpart.cli.pages.plots import scores_figure


def lower_bounds_page(audit: EpsilonAudit) -> Page:
    """Return the page of an audit."""
    violated = audit.verdict == "VIOLATION"
    verdict = "VIOLATION: the accountant, the mechanism or the server is wrong"
    if not violated:
        verdict = f"Consistent: at {percent(SURE)} nothing contradicts the accountant"
    figures = [
        ("accountant: epsilon, at most", up(audit.epsilon, 5)),
        ("delta", f"{audit.delta:g}"),
        ("measured", f"{audit.measured().partition(' (')[0]}"),
    ]
    if audit.visible is not None:
        figures.append(("share of mu that canaries show", f"{audit.visible:.1%}"))
    rows = [(b.method, down(b.epsilon), percent(b.confidence), b.assumption) for b in audit.bounds]
    about = [(name.replace("_", " "), str(v)) for name, v in audit.about.items()]
    return Page(
        "Audit of epsilon: lower bounds",
        "bad" if violated else "plain",
        verdict,
        (f"Lower bounds of one kind of attack: {audit.comparison()}.",),
        (
            Section("At a glance", (Facts(tuple(figures), large=True),)),
            Section("What contradicts it", (Points(audit.reasons),) if audit.reasons else ()),
            Section(
                "Bounds",
                (
                    table_of(
                        f"Epsilon is at least, at delta {audit.delta:g}",
                        ("method", "epsilon", "confidence", "assumes"),
                        rows,
                        prose=(3,),
                    ),
                    Points((f"A violation is held to {percent(SURE)} over all bounds together.",)),
                ),
            ),
            Section("Scores of the canaries", _scores(audit)),
            Section(
                "What was audited", (Facts(tuple(pair for pair in about if pair[0] != "replica")),)
            ),
        ),
        ("By the rules of privpart audit epsilon.",),
    )


def _scores(audit: EpsilonAudit) -> tuple[Picture, ...]:
    if (scored := audit.scored) is None:
        return ()
    figure = scores_figure(scored.scores, scored.present, audit.claimed.mu)
    return (
        Picture(
            figure,
            "Scores of canaries that took part and of those that did not.",
            f"{len(scored.scores)} canaries, of which {int(scored.present.sum())} took part. "
            "Curves: what the accountant allows at most.",
        ),
    )
