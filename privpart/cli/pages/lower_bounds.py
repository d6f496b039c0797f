"""Page of lower bounds on epsilon: what an audit proves, beside what the accountant says."""

from accounting.report import up
from attacks.lower_bounds.bounds import percent
from privpart.cli.audit.verdict import SURE, EpsilonAudit
from privpart.cli.output import Table
from privpart.cli.pages.decision import glossary
from privpart.cli.pages.page import Block, Page, Picture, Section, Verdict
from privpart.cli.pages.plots import scores_figure


def lower_bounds_page(audit: EpsilonAudit) -> Page:
    """Return the page of an audit."""
    violated = audit.verdict == "VIOLATION"
    verdict = f"Consistent: at {percent(SURE)} nothing contradicts the accountant"
    if violated:
        verdict = "VIOLATION: the accountant, the mechanism or the server is wrong"
    figures = [
        ("accountant: epsilon, at most", up(audit.epsilon, 5)),
        ("delta", f"{audit.delta:g}"),
        ("measured", audit.measured().partition(" (")[0]),
    ]
    scores = []
    if (scored := audit.scored) is not None and audit.mu is not None:
        picture = Picture(
            scores_figure(scored.scores, scored.present, audit.mu),
            "Scores of canaries that took part and of those that did not.",
            "Curves: what the accountant allows at most.",
        )
        scores.append(Block("pictures", [picture]))
    header = ["what", "compared", "level", "smallest fault seen", "result"]
    rows = [
        [c.name, f"{c.compared:,}", f"{c.level:.1g}" if c.level else "exact", c.sees, c.result]
        for c in audit.checks
    ]
    compared = [Table("", header, rows)] if rows else []
    return Page(
        "Audit of epsilon: lower bounds",
        [
            Verdict(
                "bad" if violated else "plain",
                verdict,
                [f"Lower bounds of one kind of attack: {audit.comparison()}."],
            )
        ],
        [
            Section("At a glance", [Block("figures", figures)]),
            Section("What contradicts it", [Block("points", audit.reasons)] if violated else []),
            Section("Compared with the plan", compared),
            Section("Scores of the canaries", scores),
            Section("What was audited and found", [Block("facts", audit.lines())]),
            glossary("epsilon", "delta", "lower bound", "canary"),
        ],
        "By the rules of privpart audit epsilon.",
    )
