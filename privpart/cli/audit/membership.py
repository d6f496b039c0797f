"""``privpart audit membership``: whether a plan's released model tells which users trained it.

Shadow models of other coins show what a user does to a model that it trained. Attacks score the
users of every target by its last model alone.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from accounting.report import down, up
from privpart.cli.audit.epsilon import CONFIDENCE
from privpart.cli.options import FormatOption
from privpart.cli.output import Table, print_result, print_table, say

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from attacks.membership_inference import MembershipScore
    from privpart.cli.audit.membership_models import Population
    from privpart.training.training import Training

    Array = NDArray[np.float64]
    Coins = NDArray[np.bool_]

SCHEMA = "privpart/membership/1"
_SURE = 0.9999  # of a VIOLATION, over all bounds together
_MODELS = {".bin", ".ckpt", ".h5", ".keras", ".npz", ".onnx", ".pt", ".pth", ".safetensors"}
_HEADLINE = "LiRA"  # fixed beforehand: the best of several attacks proves less
VIOLATION = 4


def membership(
    source: Annotated[
        Path, typer.Argument(help="Plan, or folder of a run, whose plan is trained and attacked.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.json and membership.png.")],
    runs: Annotated[
        int, typer.Option(help="Target models; 16 shadow models are trained besides.")
    ] = 4,
    form: FormatOption = "table",
) -> None:
    """Train a plan on random halves of its users, and guess from the models who took part.

    The noise is of fresh seeds: these are simulations, and no real run is touched. Exit code 4 if a
    bound on epsilon passes the accountant's. The same command resumes an interrupted audit.

    Example: privpart audit membership examples/digits.toml --out members
    """
    import torch

    from privpart.cli.audit.store import writing
    from privpart.cli.pages import drawing

    checks.count("runs", runs)
    torch.set_num_threads(1)
    audit = _audited(source, runs, out)
    with writing(out):
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
        typer.echo(
            f"{verdict_of(document)}\nChance is an AUC of 0.5 and as many true positives as false "
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


def _audited(source: Path, targets: int, out: Path) -> _Audit:
    """Train the target and shadow models of a plan, and attack them."""
    from attacks.membership_inference import RATES
    from privpart.cli.audit import membership_models
    from privpart.cli.audit.store import resumable

    setup, users = setup_of(source)
    population = membership_models.Population.of(setup, users)
    folder = membership_models.ModelFolder(out, population, targets)
    draw = folder.draw
    with resumable(out, len(draw.coins)) as step:
        said = membership_models.said_by_models(
            population, draw, folder=folder, told=lambda n: step(f"{n}: models are whole")
        )
    folder.close()
    scores, present = said.scores(draw), draw.present
    document = {
        "schema": SCHEMA,
        "plan": setup.plan.hash,
        "unit": "client",
        "users": len(users),
        "targets": targets,
        "shadows": draw.shadows,
        "seed": draw.seed,
        "rates": list(RATES),
        **judged(scores, present, population, headline=_HEADLINE),
    }
    return _Audit(document, scores, present)


def judged(
    scores: "Mapping[str, Array]", present: "Coins", population: "Population", *, headline: str
) -> dict[str, Any]:
    """Return the fields of a report that say what scores prove, beside what the plan claims."""
    import attacks

    promised, delta = population.promised, population.setup.plan.privacy.delta
    epsilon = promised.guarantee().epsilon(delta) if promised.noise_multiplier > 0 else None
    results = attacks.membership(scores, present, delta=delta, confidence=CONFIDENCE)
    tests = sum(len(result.bounds) for result in results)
    sure = attacks.membership(scores, present, delta=delta, confidence=1 - (1 - _SURE) / tests)
    return {
        "delta": delta,
        "confidence": CONFIDENCE,
        "accountant": {"epsilon": epsilon},
        "verdict": "VIOLATION" if _above(sure, epsilon) else "consistent",
        "verdict_confidence": _SURE,
        "measured": {"attack": headline, "epsilon": _measured(results, headline)},
        "attacks": [asdict(result) for result in results],
    }


def verdict_of(document: dict[str, Any]) -> str:
    """Return the verdict of a report, and the epsilon that it is about, in one line."""
    claimed = document["accountant"]["epsilon"]
    accountant = "infinite" if claimed is None else up(claimed, 4)
    at = f"accountant: epsilon {accountant} at delta {document['delta']:g}"
    return f"verdict: {document['verdict']}; {at}."


def _above(results: "Sequence[MembershipScore]", epsilon: float | None) -> bool:
    """Whether a bound of any attack passes the accountant's epsilon; None is infinite."""
    return epsilon is not None and any(
        bound.epsilon > epsilon for result in results for bound in result.bounds
    )


def _measured(results: "Sequence[MembershipScore]", headline: str) -> float:
    """Return what the attack and the method that were fixed beforehand prove."""
    return next(result.bounds[0].epsilon for result in results if result.attack == headline)


def setup_of(source: Path) -> "tuple[Training, Sequence[Any]]":
    """Return the training of a plan or of a run, and the users that it asks in any round.

    Raises:
        ConfigError: it is a model, the plan samples, selects or sums secretly, or asks too few
            users; the run's clients are on nodes, or its code has changed.
    """
    from privpart.cli.trainings import tell_of_code
    from privpart.engines.embedded import EmbeddedEngine
    from privpart.run.ledger import Ledger
    from privpart.training.plan_file import read
    from privpart.training.train import kept_plan, released_setup
    from privpart.training.training import training

    is_run = source.is_dir() and not (source / "config.json").exists()
    if source.is_dir() != is_run or source.suffix.lower() in _MODELS:
        raise ConfigError(
            f"source={source}: is a model, and nothing in it says whom it trained; a bound needs "
            "users whose part in it a fair coin decided. Give the plan or the run that made it, "
            "which is trained anew by such coins; or judge scores of your own models with "
            "attacks.membership, from Python."
        )
    plan = kept_plan(Ledger(source).facts, source, None) if is_run else read(source)
    checks.refuse_first(
        {
            "privacy.sampling: who is drawn is secret, and a coin per user would be another "
            "sampler; audit the plan without the table.": plan.privacy.sampling,
            "select, canaries, privacy.metrics, privacy.secure: only whole models of simulated "
            "clients are attacked; leave the tables out.": (
                plan.select or plan.canaries or plan.privacy.metrics or plan.privacy.secure
            ),
            "client.objective, model.local: a client's own models are not released, and are not "
            "attacked; leave them out.": plan.client.objective == "moon" or plan.model.local,
        }
    )
    if is_run:
        setup = released_setup(source, tell=tell_of_code)
        say(f"{source}: nobody drew coins for its own model, so its plan is trained anew.")
    else:
        tell_of_code(plan)
        setup = training(plan, report=lambda _: None)
    if not isinstance(setup.trainer, EmbeddedEngine):
        raise ConfigError(
            f"{source}: its clients are on Flower nodes, which an audit cannot train; pass a plan "
            "with simulated clients."
        )
    users = list(dict.fromkeys(client for cohort in setup.cohorts for client in cohort))
    if len(users) < 20:
        raise ConfigError(
            f"plan {source}: only {len(users)} users take part; a bound needs at least 20."
        )
    return setup, users
