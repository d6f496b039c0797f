"""Record what privpart computes, before a change that must not alter it, and compare afterwards.

    python benchmarks/golden.py record before.json
    ... change the code ...
    python benchmarks/golden.py compare before.json    # lists what differs; exit code 1 if any

The record has sensitivities and fingerprints of mechanisms, hashes of seeded noise, and, for each
command line below, its exit code and its standard output (after "!", which marks secret draws, the
exit code only). Trainings are seeded, so the hashes of
their models are equal bit for bit on one machine; another processor rounds differently.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

_PLANS = {"digits": "digits", "fedpart": "fedpart_digits", "select": "federated_select"}
ROOT = Path(__file__).resolve().parent.parent
_TREE = "--rounds 64 --max-participations 3 --min-separation 16 --delta 1e-6"
_POISSON = (
    "--sampling poisson:expected_batch=10 --population 1000 --noise-multiplier 1 --delta 1e-6"
)
_AUDIT = "--model lenet --data digits --trials 1 --effort quick"
COMMANDS = f"""
epsilon --mechanism tree --rounds 1600 --max-participations 1 --noise-multiplier 1.13 --delta 1e-6
epsilon --mechanism tree {_TREE} --noise-multiplier 4 --format json
epsilon --mechanism toeplitz:bands=8 {_TREE} --noise-multiplier 4 --format json
epsilon --mechanism blt {_TREE} --noise-multiplier 4 --format json
epsilon --mechanism banded-inverse:bands=4 {_TREE} --noise-multiplier 4 --format json
epsilon --mechanism independent {_TREE} --noise-multiplier 4 --format statement
epsilon --mechanism tree {_TREE} --noise-multiplier 4 --max-epsilon 0.5
epsilon --mechanism tree --rounds 9 --max-participations 3 --min-separation 7 --delta 1e-6
epsilon --mechanism tree {_TREE} --noise-multiplier nan
epsilon --mechanism tree:bands=3 {_TREE} --noise-multiplier 4
epsilon --mechanism independent --rounds 100 {_POISSON} --format json
calibrate --mechanism blt {_TREE} --target-epsilon 2 --format json
calibrate --mechanism tree {_TREE} --target-epsilon 2 --format json
mechanisms {_TREE} --format json
epsilon --plan examples/digits.toml --format json
epsilon --plan examples/fedpart_digits.toml --format json
epsilon --plan examples/federated_select.toml --format json
epsilon --plan missing.toml
costs --plan examples/fedpart_digits.toml --format json
train --plan digits.toml --seed 1 --out @/digits --format json
train --plan fedpart.toml --seed 1 --out @/fedpart --format json
train --plan select.toml --seed 1 --out @/select --format json
train --plan digits.toml --seed 1 --out @/digits
report @/digits --format json
report @/fedpart --format statement
verify @/digits --format json
export @/digits --out @/digits.safetensors
export @/fedpart --out @/fedpart.safetensors
export @/select --out @/select.safetensors
budget --format json
audit leakage {_AUDIT} --view full --view conv1.* --view dense2.* --out @/audit --format json
audit leakage {_AUDIT} --view conv2.* --clip 1 --noise-multiplier 0,1 --out @/levels --format json
! audit epsilon --plan digits.toml --replay --out @/replay
train --plan digits.toml --seed 1
nonsense
"""
_VOLATILE = re.compile(
    r"run-[0-9a-f]{8,}|[0-9a-f]{32,}|\b[0-9a-f]{12,16}\b|\d{4}-\d\d-\d\d[T ][\d:.+Z]*"
    r"|\"?[a-z_ ]*(?:seconds|created|written|elapsed|hours)\"?:? *[\d.e+-]+"
    r"|\b[\d.]+ (?:s|ms|seconds)\b"
)


def record() -> dict[str, object]:
    """Everything that is compared, by name."""
    return {**_mechanisms(), **_noise(), **_commands()}


def _made() -> Iterator[tuple[str, object, object]]:
    import accounting as acc

    for name, participation in (
        ("once", acc.Participation(64)),
        ("thrice", acc.Participation(64, 3, 16)),
        ("any", acc.Participation(24, 2, 1)),
    ):
        n = participation.rounds
        yield f"tree {name}", acc.BinaryTree(n), participation
        yield f"independent {name}", acc.Independent(n), participation
        yield f"blt {name}", acc.BufferedToeplitz.from_options(participation), participation
        yield f"toeplitz {name}", acc.Toeplitz.square_root(n, 8), participation


def _mechanisms() -> dict[str, object]:
    import accounting as acc

    values: dict[str, object] = {}
    for name, mechanism, participation in _made():
        cost = acc.guarantee(mechanism, participation, noise_multiplier=2.0)  # type: ignore[arg-type]
        squared = mechanism.sensitivity(participation).squared  # type: ignore[attr-defined]
        values[f"mechanism {name}"] = [
            acc.fingerprint(mechanism),  # type: ignore[arg-type]
            squared.hex() if isinstance(squared, float) else str(squared),
            cost.mu.hex(),
            cost.epsilon(1e-6).hex(),
        ]
    return values


def _noise() -> dict[str, object]:
    from privpart import NoiseStream, SeededSource

    values: dict[str, object] = {}
    for name, mechanism, _ in _made():
        stream = NoiseStream(mechanism, dim=1000, stddev=2.0**20, source=SeededSource(3))  # type: ignore[arg-type]
        digest = hashlib.sha256()
        for _ in range(20):
            digest.update(stream.next().numpy().tobytes())
        values[f"noise {name}"] = digest.hexdigest()
    return values


def _commands() -> dict[str, object]:
    values: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        state = {f"PRIVPART_{name}_DIR": f"{folder}/{name}" for name in ("STATE", "CACHE")}
        environment = {**os.environ, **state, "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
        Path(folder, "examples").symlink_to(ROOT / "examples")
        _short_plans(Path(folder))
        for line in COMMANDS.strip().splitlines():
            argv = [word.replace("@", folder) for word in shlex.split(line.removeprefix("! "))]
            print(line, file=sys.stderr)
            command = [sys.executable, "-m", "privpart.cli.main", *argv]
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, cwd=folder, check=False
            )
            output = done.stdout.replace(folder, "@").replace(str(ROOT), "ROOT")
            values[line] = {
                "exit": done.returncode,
                "output": _VOLATILE.sub("#", output).splitlines(),
            }
            if line.startswith("!"):
                values[line] = {"exit": done.returncode}
            elif done.returncode not in (0, 3, 4, 6):
                values[line]["error"] = done.stderr.replace(folder, "@").splitlines()[-3:]  # type: ignore[index]
        for path in sorted(Path(folder).glob("*.safetensors")):
            values[f"model {path.name}"] = _model_hash(path)
        for name in _PLANS:
            with contextlib.suppress(OSError):
                lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines()
                rows = [json.loads(line) for line in lines]
                cells = [[str(row["round"]), *map(str, row["metrics"].values())] for row in rows]
                values[f"metrics {name}"] = ["round,metric", *map(",".join, cells)]
    return values


def _short_plans(folder: Path) -> None:
    """The examples' plans, with fewer rounds where the schedule does not fix them."""
    for name, source in _PLANS.items():
        text = (ROOT / "examples" / f"{source}.toml").read_text()
        if name != "fedpart":
            text = re.sub(r"^rounds = \d+", "rounds = 8", text, flags=re.MULTILINE)
        tomllib.loads(text)
        (folder / f"{name}.toml").write_text(text)


def _model_hash(path: Path) -> str:
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    for name, array in sorted(load_file(path).items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def _differences(before: object, now: object, place: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(
                before.get(key), now.get(key), f"{place} / {key}".removeprefix(" / ")
            )
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for i, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _differences(old, new, f"{place} [{i}]")
    elif before != now:
        yield f"{place}\n  before {json.dumps(before)}\n  now    {json.dumps(now)}"


if __name__ == "__main__":
    action, file = sys.argv[1], Path(sys.argv[2])
    if action == "record":
        file.write_text(json.dumps(record(), indent=1))
    else:
        lines = list(
            _differences(json.loads(file.read_text()), json.loads(json.dumps(record())), "")
        )
        print(*lines, f"{len(lines)} differences", sep="\n")
        sys.exit(bool(lines))
