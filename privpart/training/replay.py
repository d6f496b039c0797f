"""Replay: a run again, from its recorded sums and its noise, by anybody who has the folder.

Noise is integers that are the same on every machine, and so are the sums; what follows (their sum,
the public divisor, the server's step) is arithmetic in a fixed order. So whoever has the sums and
the key computes the same models, bit for bit. Equality shows that the released models are these
sums plus this noise. It does not show whose updates are in the sums, nor who clipped them.
"""

from dataclasses import dataclass
from pathlib import Path

from accounting.checks import ConfigError
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.plan import PrivacyPlan
from privpart.run import store
from privpart.run.folder import RECORDS, START, named_secret
from privpart.run.ledger import Ledger, Row, read_key, sum_name
from privpart.server import Server
from privpart.training.plan_file import plan_in

_HEADER = 2**16
"""Bytes of a file of sums besides its integers, at most."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a replay.

    Attributes:
        rounds: that gave the released model, bit for bit.
        differs: the first round that did not; None if all did.
        says: what was compared, or what differs.
    """

    rounds: int
    differs: int | None
    says: str


def replay(folder: str | Path, *, key: str | Path | None = None) -> Replayed:
    """Run the committed rounds of a run again, from its recorded sums.

    Args:
        folder: the run folder, which is only read.
        key: file with the run's noise key, which its operator disclosed; None for a seeded run, or
            to take the one that lies in the folder of a run that has not ended.

    Raises:
        ConfigError: there is no run, its ledger was changed, it recorded no sums, or the key is
            missing or another one.
    """
    path = Path(folder)
    ledger = Ledger(path)
    rows, facts = ledger.rows(), ledger.facts
    if not facts.get(RECORDS):
        raise ConfigError(
            f"{path}: this run recorded no sums, so it cannot be replayed. Begin one with "
            "--record-sums."
        )
    with store.damage_named(path):
        plan = PrivacyPlan.from_dict(facts["plan"])
        source = _source(path, facts["seed"], facts["key"], key)
        start = store.read_state(path / START, facts["start"])[0]["parameters"]
        file = plan_in(facts)
        rates = file.learning_rates.server_share(plan.rounds)
        server = Server(plan, start, source=source, optimizer=file.server, rates=rates)
    whose = f"seed {facts['seed']}" if facts["seed"] is not None else "the key given"
    for row in rows:
        if fault := _fault(path, server, row):
            return Replayed(row.round, row.round, f"round {row.round}: {fault}")
    return Replayed(
        len(rows),
        None,
        f"{len(rows)} rounds: recorded sums and the noise of {whose} give the released models, bit "
        "for bit; whose updates are in the sums, and who clipped them, it does not show",
    )


def _source(path: Path, seed: int | None, named: str, key: str | Path | None) -> NoiseSource:
    if seed is not None:
        if key is not None:
            raise ConfigError(f"noise_key={key}: the noise of this run is from seed {seed}.")
        return SeededSource(seed)
    file = path / "key" if key is None else Path(key)
    try:
        secret = read_key(file, named, named_secret)
    except OSError as error:
        raise ConfigError(f"noise_key={file}: cannot be read: {store.one_line(error)}.") from None
    if secret is None:
        raise ConfigError(
            f"noise_key: {file} is missing. The noise of this run is secret: only an operator who "
            "kept the key, and disclosed it, lets anybody replay it."
        )
    return SecretSource(secret)


def _fault(path: Path, server: Server, row: Row) -> str:
    """Run one round again; return what differs from the ledger, or ""."""
    file = path / sum_name(row.round)
    try:
        # A sparse file costs nothing to send, and minutes to hash.
        if file.lstat().st_size > 8 * server.parameters.numel() + _HEADER:
            return f"{file.name} is longer than a sum of this model"
        if store.state_hash(file) != row.sum:
            return f"{file.name} is not the one that the ledger names"
        tensors, values = store.decode_state(file)
        with store.damage_named(file):
            server.replay(tensors["sum"], values)
    except (OSError, ConfigError) as error:
        return store.one_line(error)
    if server.last_clip_norm != row.clip_norm:
        return f"the clip norm is {server.last_clip_norm:g}, the ledger says {row.clip_norm:g}"
    if store.model_hash(server.parameters) != row.model:
        return "sum and noise give another model than the one that the ledger names"
    return ""
