"""Page of lower bounds on epsilon: what an audit proves, beside what the accountant says."""

from accounting.report import down, up
from attacks.lower_bounds.bounds import percent
from privpart.cli.audit.verdict import SURE, EpsilonAudit
from privpart.cli.pages.page import Block, Page, Picture, Section, Table
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
        ("measured", audit.measured().partition(" (")[0]),
    ]
    rows = [(b.method, down(b.epsilon), percent(b.confidence), b.assumption) for b in audit.bounds]
    header = ("method", "epsilon", "confidence", "assumes")
    bounds = Table(f"Epsilon is at least, at delta {audit.delta:g}", header, rows, prose=(3,))
    note = f"A violation is held to {percent(SURE)} over all bounds together."
    scores = []
    if (scored := audit.scored) is not None:
        figures.append(("share of mu that canaries show", f"{audit.visible:.1%}"))
        picture = Picture(
            scores_figure(scored.scores, scored.present, audit.claimed.mu),
            "Scores of canaries that took part and of those that did not.",
            f"{len(scored.scores)} canaries, of which {int(scored.present.sum())} took part. "
            "Curves: what the accountant allows at most.",
        )
        scores.append(Block("pictures", [picture]))
    about = [(name.replace("_", " "), str(value)) for name, value in audit.about.items()]
    return Page(
        "Audit of epsilon: lower bounds",
        "bad" if violated else "plain",
        verdict,
        [f"Lower bounds of one kind of attack: {audit.comparison()}."],
        [
            Section("At a glance", [Block("figures", figures)]),
            Section("What contradicts it", [Block("points", audit.reasons)] if violated else []),
            Section("Bounds", [bounds, Block("points", [note])]),
            Section("Scores of the canaries", scores),
            Section("What was audited", [Block("facts", about)]),
        ],
        "By the rules of privpart audit epsilon.",
    )
