"""How a run begins: in a folder of its own, with new keys, perhaps from another run's model."""

import json
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accounting import PrivacyReport, checks
from accounting.checks import ConfigError
from accounting.claims import plain, releases_of
from accounting.report import installed_version
from privpart.noise.source import SecretSource, SeededSource
from privpart.plan import PrivacyPlan
from privpart.run import budget_book, log, package
from privpart.run.folder import (
    KEY,
    LOCK,
    SIGNING_KEY,
    START,
    RunFolder,
    holds_a_run,
    locked,
    on_disk,
    refuse_without_folder,
)
from privpart.run.ledger import (
    KEY_BYTES,
    LATER_FACTS,
    SCHEMA,
    Ledger,
    SigningKey,
    genesis,
    signed_by,
)
from privpart.run.population import is_public
from privpart.run.report import run_report
from privpart.run.store import (
    encode_state,
    encoded_hash,
    is_scratch,
    make_private,
    read_state,
    write_durably,
)
from privpart.select.delivery import merge_seen
from privpart.settings.about import about_of

_WORDS = (
    "canaries", "code", "compares_rows", "earlier", "fork_of", "identity", "inherited", "node_keys",
    "operator", "owners", "passed", "plan_file", "plan_folder", "plan_tables", "precision",
    "records_sums", "rest", "round_seconds", "seen_in_clear", "selection", "unit",
)  # fmt: skip
"""Facts that a report, or a command that continues the run, takes for this package's own words."""


def create_run(
    path: str | Path,
    plan: PrivacyPlan,
    *,
    seed: int | None = None,
    facts: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    start: Tensor | None = None,
) -> RunFolder:
    """Begin a run in a folder that does not exist yet or is empty.

    Args:
        path: path of the folder.
        plan: plan of the run; it cannot change afterwards.
        seed: seed of the noise, >= 0, for a simulation, which is not private; None draws a secret
            key from the operating system.
        facts: further values to keep in the ledger, ready for JSON: "delta", "population_name",
            "population" (see ``ids_hash``), "parameters" and "frozen" (names with shapes, and with
            hashes), "about" (see ``About``), and whatever else has a name of your own.
        own: facts for which this package answers, and which a report takes for its own words.
        start: trainable part to begin with, shape (d,), if it is not the model's own.

    Raises:
        ConfigError: the folder is not empty, or others can write in it; or a fact has a name of
            this package, or names the public data of a built-in task.
        BudgetExceededError: the fact "population_name" names people whose limit the run would pass;
            nothing was created.
        StorageError: the folder cannot be written.
    """
    folder = Path(path)
    _refuse_used(folder)
    checks.count("seed", seed or 0, minimum=0)
    keys = {name: secrets.token_bytes(KEY_BYTES) for name in (SIGNING_KEY, KEY)}
    source = SecretSource(keys[KEY]) if seed is None else SeededSource(seed)
    about = {
        "schema": SCHEMA,
        "run_id": secrets.token_hex(16),
        "plan": plan.to_dict(),
        "seed": seed,
        "key": source.identity,
        "public_key": signed_by(keys[SIGNING_KEY]),
        "versions": versions(),
        "package": package.facts(),
    }
    given, answered = facts or {}, own or {}
    reserved = {*about, "start", *LATER_FACTS}
    if taken := sorted((given.keys() & {*_WORDS, *reserved}) | (answered.keys() & reserved)):
        raise ConfigError(f"facts: {', '.join(taken)} are words of this package. Choose others.")
    if is_public(str(given.get("population_name"))):
        raise ConfigError(
            f"facts: population_name={given['population_name']!r} is for the public data of "
            "built-in tasks. Choose another."
        )
    about_of(given)  # refuse what no report could show
    about |= given | answered
    if plan.sampling is not None and not isinstance(about.get("population"), str):
        raise ConfigError(
            "facts: population is missing: a run that samples fixes who may be drawn, and in "
            "which order, before it begins. Give ids_hash(ids)."
        )
    files = keys if seed is None else {SIGNING_KEY: keys[SIGNING_KEY]}
    if start is not None:
        files = {START: encode_state({"parameters": start}, {}), **files}
        about["start"] = encoded_hash(files[START])
    # As it will be read back.
    about = json.loads(json.dumps(about, allow_nan=False))
    with on_disk(f"{folder} cannot be begun"), _entered(folder, plan, about):
        _write(folder, about, files)
    run = RunFolder.open(folder)
    run.is_new = True
    return run


@contextmanager
def _entered(folder: Path, plan: PrivacyPlan, about: dict[str, Any]) -> Iterator[None]:
    """Enter a run in the log of runs; if its files are not written, it costs nobody anything."""
    # Nobody hears of a simulation that names no people.
    if about["seed"] is not None and "population_name" not in about:
        yield
        return
    begun = log.Entry(event="begun", run=about["run_id"], head=genesis(about))
    # Under one lock: two runs begun at once must not both fit into what is left.
    with log.writing():
        budget_book.enter(begun, plan, about, folder)
        try:
            yield
        except BaseException:
            if not holds_a_run(folder):
                log.append(replace(begun, event="closed"))
            raise


def _write(folder: Path, about: dict[str, Any], files: dict[str, bytes]) -> None:
    make_private(folder)
    folder_lock = locked(folder)
    try:
        # By a process that began a run in it in the meantime.
        _refuse_used(folder)
        # Keys before the ledger, which makes it a run: no crash leaves a run without keys.
        for name, data in files.items():
            write_durably(folder / name, data)
        Ledger.create(folder, about, SigningKey(files[SIGNING_KEY]))
    finally:
        folder_lock.release()


def versions() -> dict[str, str]:
    """Return the versions of what computes a run."""
    numeric = {"torch": str(torch.__version__), "numpy": np.__version__}
    return {"privpart": installed_version(), "python": platform.python_version(), **numeric}


def _refuse_used(folder: Path) -> None:
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{folder}: {path} is a file; name a folder of the run's own.")
    # Leftovers of a crash before a run began do not count.
    names, files = (KEY, SIGNING_KEY, LOCK, START), folder.iterdir() if folder.exists() else ()
    if not all(file.name in names or is_scratch(file.name) for file in files):
        way = "name a new or an empty folder."
        if holds_a_run(folder):
            way = "to continue that run, add --resume; for a new run, name another folder."
        raise ConfigError(f"{folder} is not empty: {way}")


def fork(
    old: str | Path,
    new: str | Path,
    plan: PrivacyPlan,
    *,
    facts: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
) -> RunFolder:
    """Begin a new run from the last committed model of an old one, with a new key.

    The old run may be an older copy, or have lost its key. Its whole plan is charged, however much
    of it was run, so rounds that were run after the copy was taken are covered too. The new run's
    report composes that cost with its own (``accounting.composed``), and repeats the old run's
    unchecked assumptions and what was seen in the clear. It is about the population of the old run
    unless ``facts`` say otherwise, and the budget book counts the old run there, too.

    Args:
        old: folder of the old run.
        new: folder of the new run; it must not exist yet or be empty.
        plan: plan of the new run.
        facts: further values to keep in the new ledger, as of ``create_run``.
        own: facts for which this package answers.

    Raises:
        ConfigError: a plan is accounted for by Monte Carlo, which composes with nothing; the old
            run was not private, left its plan, has another model, has no committed state, is
            damaged, or is open; or a fact has a reserved name.
        BudgetExceededError: the new run would pass the limit of its population.
    """
    if plan.sampling is not None:
        releases_of(plan.guarantee())
    before, was, start = _forked(Path(old))
    # It starts from that model, so what was open about it stays open; its delta is its own.
    unchecked = (a for a in before.assumptions if a.status in ("asserted", "violated"))
    open_ones = [asdict(a) for a in unchecked if a.code != "delta"]
    about: dict[str, Any] = {"earlier": plain(releases_of(before.cost)), "fork_of": was["run_id"]}
    about["inherited"] = open_ones
    others = facts or {}
    given = {**others, **(own or {})}
    if taken := sorted(given.keys() & about.keys()):
        raise ConfigError(f"facts: {', '.join(taken)} are the fork's own names. Choose others.")
    # The fact "rest" is the hash of the frozen part and of the order of slices.
    if given.get("rest") != was.get("rest"):
        raise ConfigError(
            f"{old} is of another model: its trained parameters do not fit this plan's frozen part "
            "or order of slices. Use the same table [model] and, if slices take turns, the same "
            "number of rounds and shared keys."
        )
    population = given.get("population_name", was.get("population_name"))
    # The caller's own name stays the caller's word.
    if population is not None and "population_name" not in others:
        about["population_name"] = population
    # What was seen of the old run's clients cannot be unseen.
    sightings = [seen for known in (was, given) if (seen := known.get("seen_in_clear"))]
    disclosed = merge_seen(*sightings) if sightings else None
    about = {**(own or {}), **about, "seen_in_clear": disclosed}
    others = {name: value for name, value in others.items() if name not in about}
    return create_run(new, plan, facts=others, own=about, start=start)


def _forked(old: Path) -> tuple[PrivacyReport, dict[str, Any], Tensor]:
    """Return report, facts and released parameters of the run to start from."""
    refuse_without_folder(old)
    # While its state is read, nobody may commit another round of it.
    lock = locked(old)
    try:
        # For its cost, which does not depend on delta.
        before = run_report(old, delta=0.5).guarantee
        broken = "; ".join(a.evidence for a in before.assumptions if a.status == "violated")
        unfit = {
            "is a run on examples; a fork adds costs of clients": before.unit != "client",
            "was not private: its noise is seeded, so its cost has no bound": (
                before.noise_source != "os"
            ),
            f"its guarantee does not hold ({broken}), so its cost has no bound that could be "
            "added": before.status == "does-not-hold",
            "is accounted for by Monte Carlo, by a bound that composes with no other run": (
                before.sampling is not None and before.sampling["method"] == "monte-carlo"
            ),
            "is the best of several, whose cost is not that of one run: it is never forked. Begin "
            "a new run": before.selection is not None,
        }
        for why, applies in unfit.items():
            if applies:
                raise ConfigError(f"{old}: {why}.")
        ledger = Ledger(old)
        # Called for its checks of chain and signature.
        ledger.rows()
        name, expected = ledger.newest()
        tensors, _ = read_state(old / name, expected)
    finally:
        lock.release()
    return before, ledger.facts, tensors["parameters"]
