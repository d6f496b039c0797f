"""``privpart audit membership``: whether a plan's released model tells which users trained it.

A fair coin per user decides who trains each of several target models; whoever stays out counts as
zero, which is the adjacency of the plan's guarantee. Shadow models of other coins show what a user
does to a model that it trained. Attacks score the users of every target by its last model alone.
"""

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from accounting.report import down, up
from privpart.cli.options import FormatOption
from privpart.cli.output import Table, print_result, print_table, say

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from attacks.membership_inference import MembershipScore
    from privpart.training.training import Training

    Array = NDArray[np.float64]
    Coins = NDArray[np.bool_]

SCHEMA = "privpart/membership/1"
_SHADOWS = 16  # in pairs of opposite coins, so that each user is in half of them
_CONFIDENCE = 0.95
_SURE = 0.9999  # of a VIOLATION, over all bounds together
_PUBLIC = 500  # units of test examples for RMIA, at most
_HEADLINE = "LiRA"  # fixed beforehand: the best of several attacks proves less
VIOLATION = 4


def membership(
    plan: Annotated[Path, typer.Argument(help="Plan whose training is attacked.")],
    out: Annotated[Path, typer.Option(help="Folder for report.json and membership.png.")],
    runs: Annotated[
        int, typer.Option(help="Target models; 16 shadow models are trained besides.")
    ] = 4,
    form: FormatOption = "table",
) -> None:
    """Train a plan on random halves of its users, and guess from the models who took part.

    The noise is of fresh seeds: these are simulations, and no real run is touched. Exit code 4 if a
    bound on epsilon passes the accountant's. After Ctrl-C, begin again.

    Example: privpart audit membership examples/digits.toml --out members
    """
    import torch

    from privpart.cli.audit.store import writing
    from privpart.cli.pages import drawing

    checks.count("runs", runs)
    torch.set_num_threads(1)
    audit = _audited(plan, runs)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(json.dumps(audit.document, indent=2) + "\n")
        drawing.save(audit.picture(), out / "membership.png")
    rows = [{k: v for k, v in row.items() if k != "bounds"} for row in audit.document["attacks"]]
    print_result(form, audit.document, rows, audit.show)
    say(f"written: {out / 'report.json'}, {out / 'membership.png'}")
    if audit.document["verdict"] == "VIOLATION":
        raise typer.Exit(VIOLATION)


@dataclass(frozen=True, slots=True)
class _Audit:
    document: dict[str, Any]
    scores: dict[str, "Array"]
    present: "Coins"

    def show(self) -> None:
        """Print the table, and what it rests on."""
        document = self.document
        header = ["attack", "AUC", *(f"TPR at {100 * at:g} % FPR" for at in document["rates"])]
        rows = [
            [row["attack"], f"{row['auc']:.3f}", *map(_cell, row["found"]), _bound(row)]
            for row in document["attacks"]
        ]
        title = (
            f"Membership of {document['users']} users in {document['targets']} models, from their "
            "last released parameters"
        )
        print_table(Table(title, [*header, "epsilon at least"], rows))
        claimed = document["accountant"]["epsilon"]
        accountant = "infinite" if claimed is None else up(claimed, 4)
        typer.echo(
            f"verdict: {document['verdict']}; accountant: epsilon {accountant} at delta "
            f"{document['delta']:g}.\nChance is an AUC of 0.5 and as many true positives as false "
            "ones. Bounds: 95 %, fair coins, no other assumption (Steinke et al. 2023).\nThat "
            "these attacks find little does not show that others would not."
        )

    def picture(self) -> Any:  # noqa: ANN401  matplotlib's
        """Draw the ROC curve of each attack."""
        import numpy as np

        from privpart.cli.pages import drawing

        figure, axes = drawing.panel(5.2, 4.4)
        for number, (attack, values) in enumerate(self.scores.items()):
            order = np.argsort(-values, kind="stable")
            took_part = self.present[order]
            right = np.cumsum(took_part) / took_part.sum()
            false = np.cumsum(~took_part) / (~took_part).sum()
            style = {"color": drawing.SERIES[number], "linestyle": drawing.DASHES[number]}
            axes.plot(false, right, label=attack, linewidth=1.4, **style)
        axes.plot([1e-4, 1], [1e-4, 1], color="#888888", linewidth=0.8, label="chance")
        least = 1 / (~self.present).sum()
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(least, 1)
        axes.set_ylim(least, 1.05)
        axes.set_xlabel("false positives")
        axes.set_ylabel("true positives")
        drawing.legend(axes)
        return figure


def _cell(found: dict[str, Any]) -> str:
    if found["rate"] is None:
        return "too few users"
    return f"{found['rate']:.2%} ({found['low']:.2%}-{found['high']:.2%})"


def _bound(row: dict[str, Any]) -> str:
    return down(row["bounds"][0]["epsilon"], 4)


def _audited(path: Path, targets: int) -> _Audit:
    """Train the target and shadow models of a plan, and attack them."""
    import numpy as np

    import attacks
    from attacks.membership_inference import RATES, lira, logit_of_confidence, rmia

    setup, users = _setup(path)
    seed = secrets.randbits(48)
    draws = np.random.default_rng(seed)
    half = draws.random((_SHADOWS // 2, len(users))) < 0.5
    shadow_coins = np.concatenate([half, ~half])
    # From the operating system: whoever knew the target's coins could guess them without a model.
    target_coins = np.array([[secrets.randbits(1) for _ in users] for _ in range(targets)], bool)
    coins = np.concatenate([shadow_coins, target_coins])
    losses, norms, public = _trained(setup, users, coins, seed)
    s = _SHADOWS
    scores: dict[str, list[Array]] = {}
    for t in range(s, len(coins)):
        found = {"loss": -losses[t], "gradient": -norms[t]}
        signal = logit_of_confidence(losses)
        found["LiRA"] = lira(signal[t], signal[:s], coins[:s])
        if public is not None:
            found["RMIA"] = rmia(losses[t], losses[:s], public[t], public[:s])
        for attack, values in found.items():
            scores.setdefault(attack, []).append(values)
    together = {attack: np.concatenate(values) for attack, values in scores.items()}
    present = target_coins.ravel()
    promised, delta = setup.promise(), setup.plan.privacy.delta
    private = promised.noise_multiplier > 0
    epsilon = promised.guarantee().epsilon(delta) if private else None
    at = {"delta": delta, "confidence": _CONFIDENCE}
    results = attacks.membership(together, present, **at)
    tests = sum(len(result.bounds) for result in results)
    sure = attacks.membership(together, present, delta=delta, confidence=1 - (1 - _SURE) / tests)
    document = {
        "schema": SCHEMA,
        "plan": setup.plan.hash,
        "unit": "client",
        "users": len(users),
        "targets": targets,
        "shadows": _SHADOWS,
        "seed_of_shadows": seed,
        "delta": delta,
        "confidence": _CONFIDENCE,
        "rates": list(RATES),
        "accountant": {"epsilon": epsilon},
        "verdict": "VIOLATION" if _above(sure, epsilon) else "consistent",
        "verdict_confidence": _SURE,
        "measured": {"attack": _HEADLINE, "epsilon": _measured(results)},
        "attacks": [asdict(result) for result in results],
    }
    return _Audit(document, together, present)


def _above(results: "Sequence[MembershipScore]", epsilon: float | None) -> bool:
    """Whether a bound of any attack passes the accountant's epsilon; None is infinite."""
    return epsilon is not None and any(
        bound.epsilon > epsilon for result in results for bound in result.bounds
    )


def _measured(results: "Sequence[MembershipScore]") -> float:
    """Return what the attack and the method that were fixed beforehand prove."""
    return next(result.bounds[0].epsilon for result in results if result.attack == _HEADLINE)


def _setup(path: Path) -> "tuple[Training, Sequence[Any]]":
    """Return the training of a plan, and the users that it asks in any round.

    Raises:
        ConfigError: the plan samples, selects or sums secretly, or asks too few users.
    """
    from privpart.cli.trainings import tell_of_code
    from privpart.training.plan_file import read
    from privpart.training.training import training

    plan = read(path)
    checks.refuse_first(
        {
            "privacy.sampling: who is drawn is secret, and a coin per user would be another "
            "sampler; audit the plan without the table.": plan.privacy.sampling,
            "select, canaries, privacy.metrics, privacy.secure: membership is attacked in whole "
            "models of simulated clients; leave the tables out.": (
                plan.select or plan.canaries or plan.privacy.metrics or plan.privacy.secure
            ),
            "client.objective, model.local: a client's own models are not released, and are not "
            "attacked; leave them out.": plan.client.objective == "moon" or plan.model.local,
        }
    )
    tell_of_code(plan)
    setup = training(plan, report=lambda _: None)
    users = list(dict.fromkeys(client for cohort in setup.cohorts for client in cohort))
    if len(users) < 20:
        raise ConfigError(
            f"plan {path}: asks {len(users)} users in all; coins of fewer than 20 prove nothing."
        )
    return setup, users


def _trained(
    setup: "Training", users: Sequence[Any], coins: "Coins", seed: int
) -> "tuple[Array, Array, Array | None]":
    """Train a model for each row of coins, (n, m).

    Returns:
        Each model's loss and norm of the gradient on each user, (n, m), and its loss on public
        units, (n, k); None without test examples.
    """
    import numpy as np
    from rich.console import Console
    from rich.progress import Progress

    from privpart.noise.source import SeededSource

    public = list(_public(setup, users))
    # Whoever stays out is a zero: the divisor is public, and no cohort is too small to release.
    promised = replace(setup.promise(), minimum_cohort=1)
    losses, norms, of_public = [], [], []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("models trained and attacked", total=len(coins))
        for number, row in enumerate(coins):
            members = {user for user, coin in zip(users, row, strict=True) if coin}
            cohorts = [[c for c in cohort if c in members] for cohort in setup.cohorts]
            server, _ = replace(setup, cohorts=cohorts).run(promised, SeededSource(seed + number))
            of_users = (setup.clients.examples(user) for user in users)
            told = np.array(list(_told(setup, server.parameters, of_users)))
            losses.append(told[:, 0])
            norms.append(told[:, 1])
            of_public.append([loss for loss, _ in _told(setup, server.parameters, iter(public))])
            progress.advance(bar)
    return np.array(losses), np.array(norms), np.array(of_public) if public else None


def _told(
    setup: "Training", parameters: "Tensor", units: Iterator[Any]
) -> Iterator[tuple[float, float]]:
    """Yield the loss of a released model on each unit's examples, and the norm of its gradient."""
    import torch

    from privpart.client import batch_loss, loss_gradients

    setup.model.load(setup.whole(parameters))
    setup.model.train_only(None)
    module, loss = setup.model.module, setup.engine.local_of(0).loss
    trained = [p for p in module.parameters() if p.requires_grad]
    module.eval()
    for batch in units:
        total = batch_loss(module, batch, loss)
        gradients = [g for g in loss_gradients(total, trained) if g is not None]
        norm = torch.linalg.vector_norm(torch.cat([g.detach().flatten() for g in gradients]))
        yield float(total.detach()), float(norm)


def _public(setup: "Training", users: Sequence[Any]) -> Iterator[Any]:
    """Yield test examples in units of as many as a user has, if the metric is an accuracy."""
    from privpart.data.batches import count_rows
    from privpart.training.metric import Accuracy

    if not isinstance(setup.metric, Accuracy):
        return
    size = count_rows(setup.clients.examples(users[0]))
    x, y = setup.test
    for start in range(0, min(len(x) - size + 1, _PUBLIC * size), size):
        yield x[start : start + size], y[start : start + size]
