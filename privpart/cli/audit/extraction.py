"""``privpart audit extraction``: whether a plan's released model gives away what users wrote.

Secrets are planted in users' text by coins; they are then looked for in the last model alone.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting.report import down
from privpart.cli.audit.membership import VIOLATION, judged, setup_of, verdict_of
from privpart.cli.options import FormatOption
from privpart.cli.output import Table, print_result, print_table, say

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    _Said = Sequence[Mapping[str, NDArray[np.float64]]]

SCHEMA = "privpart/extraction/1"
_SCORE = "likelihood"


def extraction(
    source: Annotated[
        Path,
        typer.Argument(help="Plan that predicts next tokens, or folder of a run, to train anew."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.json.")],
    form: FormatOption = "table",
) -> None:
    """Plant secrets in users' text, train the plan, and look for them in its model.

    The noise is of fresh seeds: these are simulations, and no real run is touched. Exit code 4 if a
    bound on epsilon passes the accountant's. The same command resumes an interrupted audit.

    Example: privpart audit extraction examples/own/lstm/plan.toml --out secrets
    """
    import torch

    from privpart.cli.audit.store import writing

    torch.set_num_threads(1)
    document = _audited(source, out)
    with writing(out):
        (out / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    print_result(form, document, document["secrets"], lambda: _show(document))
    say(f"written: {out / 'report.json'}")
    if document["verdict"] == "VIOLATION":
        raise typer.Exit(VIOLATION)


def _audited(source: Path, out: Path) -> dict[str, Any]:
    """Train the models of an audit, and return its report."""
    from dataclasses import replace

    import numpy as np

    from attacks.extraction import standardised
    from privpart.cli.audit import extraction_models as models
    from privpart.cli.audit.membership_models import ModelFolder, Population, said_by_each
    from privpart.cli.audit.store import resumable

    setup, users = setup_of(source)
    population = Population.of(setup, users)
    population = replace(population, digest=f"{population.digest} {SCHEMA}")
    text = models.Text.of(population)
    folder = ModelFolder(out, population, models.models_needed(len(users)), shadows=0)
    draw = folder.draw
    with resumable(out, len(draw.coins)) as step:
        said = said_by_each(
            draw,
            lambda number: models.said_of_secrets(population, text, draw, number),
            folder=folder,
            told=lambda n: step(f"{n}: models are whole"),
        )
    folder.close()
    planted = [models.Planted.of(text, len(users), draw.seed + n) for n in range(len(said))]
    chosen = [coins[p.carriers] for p, coins in zip(planted, draw.coins, strict=True)]
    members = [p.members(coins) for p, coins in zip(planted, draw.coins, strict=True)]
    scores = [standardised(one["secrets"], one["reference"]) for one in said]
    copies = [p.copies * coins for p, coins in zip(planted, chosen, strict=True)]
    return {
        "schema": SCHEMA,
        "plan": setup.plan.hash,
        "unit": "client",
        "users": len(users),
        "models": len(said),
        "seed": draw.seed,
        "tokens": text.size,
        "vocabulary": text.vocabulary,
        "reference": models.REFERENCE,
        "secrets": [_exposed(said, copies, number) for number in (0, *models.COPIES)],
        "own_text": {
            name: _continued(said, [who == trained for who in members])
            for name, trained in (("trained", True), ("held out", False))
        },
        **judged(
            {_SCORE: np.concatenate(scores)}, np.concatenate(chosen), population, headline=_SCORE
        ),
    }


def _exposed(said: "_Said", copies: "Sequence[NDArray[np.int64]]", number: int) -> dict[str, Any]:
    """Return what models say of the secrets that they saw so many times."""
    import numpy as np

    import attacks

    groups = [
        (one, mask) for one, c in zip(said, copies, strict=True) if (mask := c == number).any()
    ]
    found = attacks.exposure(
        [one["secrets"][mask] for one, mask in groups], [one["reference"] for one, _ in groups]
    )
    return {
        "copies": number,
        "secrets": len(found.bits),
        "median_exposure": float(np.median(found.bits)),
        "highest_exposure": float(found.bits.max()),
        "p_value": found.p_value,
        "reproduced": int(sum(one["reproduced"][mask].sum() for one, mask in groups)),
    }


def _continued(said: "_Said", users: "Sequence[NDArray[np.bool_]]") -> dict[str, int]:
    """Return how many examples of users could be continued, and how many were, word for word."""
    counts = sum(one["windows"][:, who].sum(1) for one, who in zip(said, users, strict=True))
    return dict(zip(("examples", "reproduced"), map(int, counts), strict=True))


def _show(document: dict[str, Any]) -> None:
    """Print the table, and what it rests on."""
    bits = math.log2(document["reference"] + 1)
    rows = [
        [
            {0: "never planted", 1: "planted once"}.get(n := row["copies"], f"planted {n} times"),
            row["secrets"],
            f"{row['median_exposure']:.2f}",
            f"{row['highest_exposure']:.2f}",
            f"{row['p_value']:.4f}",
            row["reproduced"],
        ]
        for row in document["secrets"]
    ]
    header = ["secrets", "number", "median exposure", "highest", "p if unseen", "reproduced"]
    title = (
        f"Exposure of secrets of {document['tokens']} tokens (models: {document['models']}), from "
        f"the last released parameters: 1 bit is chance, {bits:g} the most"
    )
    print_table(Table(title, header, rows))
    if document["own_text"]["trained"]["examples"]:
        shares = " and ".join(
            f"{text['reproduced']} of {text['examples']} examples of users who were {name}"
            for name, text in document["own_text"].items()
        )
        typer.echo(f"Greedy decoding continued {shares} word for word.")
    bound = down(document["measured"]["epsilon"], 4)
    typer.echo(
        f"{verdict_of(document)}\nThe secrets prove epsilon at least {bound}: 95 %, fair coins, no "
        "other assumption (Steinke et al. 2023).\nThat secrets are not found does not show that "
        "nothing else would be."
    )
