"""Page of lower bounds on epsilon: what an audit proves, beside what the accountant says."""

from accounting.report import down, up
from attacks.lower_bounds.bounds import percent
from privpart.cli.audit.verdict import SURE, EpsilonAudit
from privpart.cli.pages.page import Facts, Page, Picture, Points, Section, table_of
from privpart.cli.pages.plots import scores_figure

_LEFT_OUT = ("replica",)


def lower_bounds_page(found: EpsilonAudit) -> Page:
    """Return the page of an audit."""
    violated = found.verdict == "VIOLATION"
    verdict = "VIOLATION: the accountant, the mechanism or the server is wrong"
    if not violated:
        verdict = f"Consistent: at {percent(SURE)} nothing contradicts the accountant"
    figures = [
        ("accountant: epsilon, at most", up(found.epsilon, 5)),
        ("delta", f"{found.delta:g}"),
        ("measured", f"{found.measured().partition(' (')[0]}"),
    ]
    if found.visible is not None:
        figures.append(("share of mu that canaries show", f"{found.visible:.1%}"))
    rows = [(b.method, down(b.epsilon), percent(b.confidence), b.assumption) for b in found.bounds]
    about = tuple((name.replace("_", " "), str(v)) for name, v in found.about.items()
                  if name not in _LEFT_OUT)  # fmt: skip
    return Page(
        "Audit of epsilon: lower bounds",
        "bad" if violated else "plain",
        verdict,
        (f"Lower bounds of one kind of attack: {found.comparison()}.",),
        (
            Section("At a glance", (Facts(tuple(figures), large=True),)),
            Section("What contradicts it", (Points(found.reasons),) if found.reasons else ()),
            Section(
                "Bounds",
                (
                    table_of(
                        f"Epsilon is at least, at delta {found.delta:g}",
                        ("method", "epsilon", "confidence", "assumes"),
                        rows,
                        prose=(3,),
                    ),
                    Points((f"A violation is held to {percent(SURE)} over all bounds together.",)),
                ),
            ),
            Section("Scores of the canaries", _scores(found)),
            Section("What was audited", (Facts(about),)),
        ),
        ("By the rules of privpart audit epsilon.",),
    )


def _scores(found: EpsilonAudit) -> tuple[Picture, ...]:
    if (scored := found.scored) is None:
        return ()
    figure = scores_figure(scored.scores, scored.present, found.claimed.mu)
    return (
        Picture(
            figure,
            "Scores of canaries that took part and of those that did not.",
            f"{len(scored.scores)} canaries, of which {int(scored.present.sum())} took part. "
            "Curves: what the accountant allows at most.",
        ),
    )
