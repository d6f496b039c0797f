"""Statement: a privacy report in plain English. The only place where prose is made."""

from decimal import ROUND_CEILING, Context, Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accounting.report import PrivacyReport

_VERDICTS = {
    "holds": "The guarantee holds: all that it rests on was enforced, verified or vouched for.",
    "conditional": "The guarantee is conditional: part of what it rests on was not checked.",
    "does-not-hold": "The guarantee DOES NOT HOLD; its figures are void.",
    "not-private": "This run IS NOT PRIVATE: its noise can be computed again from a seed.",
}
_NEIGHBOURS = {
    "zero-out": "with one {unit}'s updates and with zeros in their place",
    "replace-one": "with one {unit}'s updates and with another's in their place",
}


def write(report: "PrivacyReport") -> str:
    """Return paragraphs separated by blank lines; figures are rounded up."""
    parts = [_VERDICTS[report.status], _claim(report), _attacker(report), _accounting(report)]
    for status, lead in (
        ("violated", "Violated"),
        ("asserted", "Asserted, not checked"),
        ("enforced", "Enforced by the code that ran"),
        ("verified", "Verified afterwards"),
        ("vouched", "Vouched for by whoever asked for this report"),
    ):
        chosen = [a for a in report.assumptions if a.status == status]
        if chosen:
            lines = (f"- {a.text} ({a.code}); otherwise: {a.consequence}." for a in chosen)
            parts.append("\n".join((f"{lead}:", *lines)))
    parts.append("\n".join(("Covered:", *(f"- {text}." for text in report.covered))))
    parts.append("\n".join(("Not covered:", *(f"- {text}." for text in report.not_covered))))
    parts.append(_tuning(report))
    parts += [f"Warning: {text}" for text in report.warnings]
    return "\n\n".join(parts)


def up(value: float, digits: int = 4) -> str:
    """Return ``value`` with few digits, rounded up.

    >>> up(1.74298), up(1e-6), up(0.12345), up(0.0)
    ('1.743', '1e-06', '0.1235', '0')
    """
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(repr(value)))
    return f"{float(rounded):.{digits}g}"


def _claim(report: "PrivacyReport") -> str:
    neighbours = _NEIGHBOURS[report.adjacency].format(unit=report.unit)
    k, b = report.max_participations, report.min_separation
    often = "once" if k == 1 else f"at most {k} times, {b} or more rounds apart"
    return (
        f"The claim is (epsilon = {up(report.epsilon)}, delta = {up(report.delta)})-differential "
        f"privacy. Unit: one {report.unit}, taking part {often} in {report.rounds} rounds. "
        f"Adjacency: {report.adjacency}; the run is compared {neighbours}, while cohort, schedule "
        f"and divisor stay. Trust model: {report.trust_model}."
    )


def _attacker(report: "PrivacyReport") -> str:
    rates = ", ".join(
        f"{up(100 * tpr)} % at a false-positive rate of {100 * fpr:g} %"
        for fpr, tpr in report.tpr_at_fpr
    )
    return (
        f"In these terms a test of whether one {report.unit} took part has an advantage of at "
        f"most {up(report.advantage)}, and detects at most {rates}."
    )


def _accounting(report: "PrivacyReport") -> str:
    bound = "exact" if report.sensitivity_exact else "an upper bound"
    text = (
        f"Mechanism: {report.mechanism}, noise multiplier {report.noise_multiplier:g} on the sum, "
        f"squared sensitivity {up(report.sensitivity_squared)} ({bound}; "
        f"{report.sensitivity_rule}), mu = {up(report.mu)}, rho = {up(report.rho)}. "
        f"Accounting: {report.formula}, privpart {report.version}."
    )
    if report.earlier_mu:
        text += f" An earlier run on the same data, mu = {up(report.earlier_mu)}, is included."
    second = report.cross_check
    agrees = "agrees to" if second.consistent else "CONTRADICTS this by"
    return (
        f"{text} A second accountant ({second.method}) says {up(second.epsilon)} at the same "
        f"delta; it {agrees} a relative {up(second.agree_to, 2)}."
    )


def _tuning(report: "PrivacyReport") -> str:
    if report.tuning_runs is None or report.tuning_epsilon is None:
        return "Tuning: how many runs on the same data came before was not stated."
    if report.tuning_runs == 1:
        return "Tuning: this is stated to be the only run on this data."
    return (
        f"Tuning: one of {report.tuning_runs} runs on the same data. Had each had this budget, all "
        f"of them together would cost epsilon = {up(report.tuning_epsilon)} at the same delta, "
        f"unit and adjacency."
    )
