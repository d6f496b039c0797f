"""Trial folder: what an audit has found so far, so that an interrupted audit can resume."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from accounting.checks import ConfigError
from attacks import Reconstruction
from attacks.text.read import ReadText
from privpart.run.store import decode_state, encode_state, write_durably

Result = Reconstruction | ReadText
# Exit code: the same command resumes.
INTERRUPTED = 130


class TrialFolder(dict[str, dict[str, Any]]):
    """A ``Result`` by attack for each key, and a state file with it in OUT/trials.

    It serves one set of options. A file that cannot be read counts as missing: its attacks run
    again. A folder without results, as a mistyped option leaves it, accepts other options.

    Args:
        out: folder of the audit; audit.json in it says which audit that is.
        identity: every option that the results depend on, as JSON types.
        digest: hash of the examples, the weights and the update.

    Raises:
        ConfigError: the folder holds an audit with other options, data or weights, or one of
            another version.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], digest: str) -> None:
        self.folder = out / "trials"
        versions = {"version": version("privpart"), "torch": torch.__version__}
        text = json.dumps(
            {"options": identity, "inputs": digest, **versions}, indent=2, sort_keys=True
        )
        audit = out / "audit.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            super().__init__(filter(None, map(_result, sorted(self.folder.iterdir()))))
            # A folder without results, as a mistyped option leaves it, may be used again.
            if self and audit.exists() and audit.read_text() != text:
                raise ConfigError(
                    f"out={out}: holds another audit: {audit.name} has its options and version. "
                    "Name another folder, or remove this one."
                )
            write_durably(audit, text.encode())
        except OSError as error:
            raise ConfigError(f"out={out}: cannot be used: {error.strerror}.") from None

    def __setitem__(self, key: str, results: dict[str, Any]) -> None:
        tensors: dict[str, Tensor] = {}
        texts = {}
        for name, result in results.items():
            values = asdict(result)
            for field, value in list(values.items()):
                if isinstance(value, Tensor):
                    tensors[f"{name}/{field}"] = values.pop(field)
            # As text: a residual may be infinite, which the values of a state file may not be.
            texts[name] = json.dumps(values, default=sorted)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"
        write_durably(path, encode_state(tensors, {"key": key, "results": texts}))
        super().__setitem__(key, results)


def _result(path: Path) -> tuple[str, dict[str, Result]] | None:
    """Return the key and the results in a file; None if it cannot be read."""
    try:
        tensors, values = decode_state(path)
        results = {
            name: _restored(json.loads(text), tensors, name)
            for name, text in values["results"].items()
        }
        return str(values["key"]), results
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return None


def _restored(values: dict[str, Any], tensors: Mapping[str, Tensor], name: str) -> Result:
    # Names of attacks may begin alike; none has a slash.
    own = [key for key in tensors if key.startswith(f"{name}/")]
    values |= {key.rpartition("/")[2]: tensors[key] for key in own}
    values |= {key: float(values[key]) for key in ("match", "seconds")}
    if "bag" not in values:
        return Reconstruction(**values | {"restarts": tuple(map(float, values["restarts"]))})
    for key in ("sentences", "by_position"):
        values[key] = tuple(tuple(map(int, tokens)) for tokens in values[key])
    return ReadText(**values | {"bag": frozenset(map(int, values["bag"]))})


@contextmanager
def resumable(out: Path, total: int) -> Iterator[Callable[[str], None]]:
    """Show progress up to ``total`` batches; on Ctrl-C say how to resume, and exit with 130."""
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("audit", total=total)
            # Attacks per batch are not known before; batches of views are.
            begun: set[str] = set()

            def step(message: str) -> None:
                begun.add(message.partition(":")[0])
                progress.update(bar, completed=min(len(begun) - 1, total), description=message)

            yield step
    except KeyboardInterrupt:
        typer.echo(
            f"privpart: interrupted; results are kept in {out}. The same command resumes from "
            "there.",
            err=True,
        )
        sys.exit(INTERRUPTED)


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise a ConfigError where a result cannot be written to the folder of an audit."""
    try:
        yield
    except OSError as error:
        file = f": {error.filename}" if error.filename else ""  # not where the disk is full
        raise ConfigError(
            f"out={out}: cannot be written: {error.strerror}{file}. The same command in the mended "
            "folder, or in a copy of it, attacks nothing again."
        ) from None
