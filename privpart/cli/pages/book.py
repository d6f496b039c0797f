"""Page of the budget book: what all runs about one population cost its members together."""

from accounting.report import up
from privpart.cli.output import Table
from privpart.cli.pages.decision import glossary, strength_of
from privpart.cli.pages.guarantee import curves
from privpart.cli.pages.page import Badge, Block, Page, Section, Verdict
from privpart.cli.pages.run import without_places
from privpart.run.budget_book import Account, composed, epsilon_of

_NONE = "-"


def book_page(account: Account, delta: float | None, unseen: tuple[str, ...]) -> Page:
    """Return the page of an account at a delta, by default its own; the book misses ``unseen``."""
    chosen = account.delta if delta is None else delta
    shown = account.shown(chosen)
    guarantee, lead = [], [f"{without_places(shown.says)}."]
    verdicts = [Verdict(*_verdict(account, shown.epsilon, chosen), lead)]
    # No curve stands beside a total that bounds nothing.
    if account.total is not None and shown.epsilon is not None and account.status == "holds":
        hidden = any(charge.hides for charge in account.charges)
        assert chosen is not None  # noqa: S101  there is an epsilon at it
        pictures = curves(account.total, chosen, shown.epsilon, unit="member", hidden=hidden)
        guarantee = [Block("pictures", pictures)]
        question = "Is the guarantee of all together strong?"
        figures = shown.epsilon, chosen, account.total.advantage()
        verdicts.append(strength_of(*figures, question, unit="a member"))
    return Page(
        f"Privacy budget of {account.population}",
        verdicts,
        [
            Section("What is charged", [_charges(account, chosen)]),
            Section("What this book cannot know", [Block("points", [f"{x}." for x in unseen])]),
            glossary("differential privacy", "epsilon", "delta", "mu"),
        ],
        "Written from the log of runs of one machine, by the rules of privpart budget.",
        [
            Section(
                "Guarantee",
                guarantee,
                "Of all runs and stated releases together, for one member of the population.",
            )
        ],
    )


def _verdict(account: Account, epsilon: float | None, delta: float | None) -> Badge:
    if account.passed:
        return "bad", f"Above the limit, {account.limit}"
    if account.status == "not-private":
        return "bad", "Not private: a run has noise from a seed, or none"
    if account.status == "unknown":
        return "caution", "Unknown: an earlier log of runs is lost"
    if epsilon is None or delta is None:
        return ("caution", "No epsilon: nothing was released, or delta is too small")
    within = "" if account.limit is None else f", within the limit, {account.limit}"
    return "plain", f"epsilon {up(epsilon)} at delta {delta:g} for all together{within}"


def _charges(account: Account, delta: float | None) -> Table:
    rows = []
    for charge in account.charges:
        entry, cost = charge.entry, composed([charge])
        epsilon = None if cost is None or delta is None else epsilon_of(cost, delta)
        mu = "no bound" if cost is None else _NONE if cost.mu is None else up(cost.mu, 4)
        shown = _NONE if epsilon is None else up(epsilon, 4)
        status = f"stated by {entry.by}" if entry.by else charge.status
        rows.append((entry.run[:12], mu, shown, status, entry.at[:10]))
    header = ("run", "mu", "epsilon alone", "status", "begun")
    return Table("Each is charged alone and for its whole plan", header, rows)
