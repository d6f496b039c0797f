"""Audit runs: what the audits do alike, from the options typed to results that survive Ctrl-C."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer

from accounting import checks
from attacks import suite
from privpart.cli.audit.inputs import Inputs, load_inputs, local_steps
from privpart.cli.audit.options import BUDGETS, Mode
from privpart.cli.audit.store import TrialFolder
from privpart.cli.audit.tables import counted

INTERRUPTED = 130


def prepared(out: Path, typed: Mapping[str, Any]) -> tuple[Inputs, dict[str, Any], TrialFolder]:
    """Return what is attacked, the options that every audit passes on, and the trials so far."""
    torch.set_num_threads(1)  # so that the numbers do not depend on the machine's processors
    attacks = _attacks(typed)
    local = local_steps(typed)
    inputs = load_inputs(typed)
    inputs.model.train(typed["mode"] is Mode.TRAIN)
    options = {
        "attacks": attacks,
        "batch": typed["batch"],
        "local": local,
        "delta": checks.probability("delta", typed["delta"]),
        "dataset_mean": inputs.dataset_mean,
        "class_means": inputs.class_means,
        "decoys": inputs.decoys,
        "reveal_labels": not typed["hide_labels"],
        "seed": typed["seed"],
    }
    return inputs, options, TrialFolder(out, typed, inputs.digest())


@contextmanager
def resumable(done: TrialFolder, total: int) -> Iterator[Callable[[str], None]]:
    """Show progress up to ``total`` batches; on Ctrl-C say how to go on, and exit with 130."""
    try:
        with counted(total) as progress:
            yield progress
    except KeyboardInterrupt:
        typer.echo(
            f"privpart: interrupted; {len(done)} results are kept in {done.folder.parent}. "
            "The same command goes on from there.",
            err=True,
        )
        sys.exit(INTERRUPTED)


def _attacks(typed: Mapping[str, Any]) -> dict[str, Any]:
    budget: Any = BUDGETS[typed["effort"]]
    known = suite(**budget)
    names = typed["attack"]
    for name in names or ():
        checks.choice("attack", name, list(known))
    return {name: attack for name, attack in known.items() if not names or name in names}
