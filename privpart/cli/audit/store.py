"""Trial folder: what an audit has found so far, so that an interrupted audit can resume."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from accounting.checks import ConfigError, parsed_json
from attacks import Reconstruction
from attacks.text.audit import ReadByAttack
from attacks.text.read import ReadText

Found = dict[str, Reconstruction]
INTERRUPTED = 130  # exit code: the same command resumes


Kept = TypeVar("Kept")


class _Folder(MutableMapping[str, Kept]):
    """A file per key in OUT/trials, for one set of options only.

    Each file is written under another name and then renamed, so that no file is ever incomplete.
    A file that cannot be read counts as missing: its attacks run again. A folder without results,
    as a mistyped option leaves it, accepts other options.

    Args:
        out: folder of the audit; audit.json in it says which audit that is.
        identity: every option that the results depend on, as JSON types.
        digest: hash of the examples, the weights and the update.

    Raises:
        ConfigError: the folder holds an audit with other options, data or weights, or one of
            another version.
    """

    _suffix: str

    def __init__(self, out: Path, identity: Mapping[str, Any], digest: str) -> None:
        self.folder = out / "trials"
        text = json.dumps(
            {"options": identity, "inputs": digest}
            | {"version": version("privpart"), "torch": torch.__version__},
            indent=2,
            sort_keys=True,
        )
        plan = out / "audit.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if len(self) and plan.exists() and plan.read_text() != text:
                raise ConfigError(
                    f"out={out}: holds another audit: {plan.name} has its options and version. "
                    "Name another folder, or remove this one."
                )
            _write(plan, text.encode())
        except OSError as error:
            raise ConfigError(f"out={out}: cannot be used: {error.strerror}.") from None

    def __delitem__(self, key: str) -> None:
        self._path(key).unlink()

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in sorted(self.folder.glob(f"*{self._suffix}")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}{self._suffix}"


class TrialFolder(_Folder[Found]):
    """Images that were reconstructed, by safetensors."""

    _suffix = ".safetensors"

    def __getitem__(self, key: str) -> Found:
        try:
            with safe_open(self._path(key), "pt") as file:
                header = parsed_json(file.metadata()["found"])
                return {
                    name: Reconstruction(
                        x=file.get_tensor(f"{name}/x"),
                        labels=file.get_tensor(f"{name}/labels"),
                        match=float(values["match"]),
                        status=values["status"],
                        evaluations=values["evaluations"],
                        seconds=values["seconds"],
                        restarts=tuple(float(value) for value in values["restarts"]),
                    )
                    for name, values in header.items()
                }
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            raise KeyError(key) from None

    def __setitem__(self, key: str, found: Found) -> None:
        tensors = {f"{name}/x": one.x.contiguous() for name, one in found.items()}
        tensors |= {f"{name}/labels": one.labels.contiguous() for name, one in found.items()}
        header = {
            name: {
                "match": repr(one.match),
                "status": one.status,
                "evaluations": one.evaluations,
                "seconds": one.seconds,
                "restarts": [repr(value) for value in one.restarts],
            }
            for name, one in found.items()
        }
        _write(self._path(key), save(tensors, {"found": json.dumps(header), "key": key}))


class TextFolder(_Folder[ReadByAttack]):
    """Sentences that were read, by JSON."""

    _suffix = ".json"

    def __getitem__(self, key: str) -> ReadByAttack:
        try:
            kept = parsed_json(self._path(key).read_bytes())["found"]
            return {name: None if one is None else _read_text(one) for name, one in kept.items()}
        except (OSError, AttributeError, KeyError, TypeError, ValueError):
            raise KeyError(key) from None

    def __setitem__(self, key: str, found: ReadByAttack) -> None:
        kept = {name: None if one is None else _told(one) for name, one in found.items()}
        _write(self._path(key), json.dumps({"key": key, "found": kept}).encode())


def _told(read: ReadText) -> dict[str, Any]:
    return {
        "sentences": read.sentences,
        "bag": sorted(read.bag),
        "match": repr(read.match),
        "seconds": read.seconds,
        "by_position": read.by_position,
        "labels": None if read.labels is None else read.labels.tolist(),
    }


def _read_text(kept: Mapping[str, Any]) -> ReadText:
    return ReadText(
        sentences=tuple(tuple(map(int, one)) for one in kept["sentences"]),
        bag=frozenset(map(int, kept["bag"])),
        match=float(kept["match"]),
        seconds=float(kept["seconds"]),
        by_position=tuple(tuple(map(int, one)) for one in kept["by_position"]),
        labels=None if kept["labels"] is None else torch.tensor(kept["labels"], dtype=torch.long),
    )


@contextmanager
def resumable(done: TrialFolder | TextFolder, total: int) -> Iterator[Callable[[str], None]]:
    """Show progress up to ``total`` batches; on Ctrl-C say how to resume, and exit with 130."""
    try:
        with _counted(total) as progress:
            yield progress
    except KeyboardInterrupt:
        typer.echo(
            f"privpart: interrupted; {len(done)} results are kept in {done.folder.parent}. "
            "The same command resumes from there.",
            err=True,
        )
        sys.exit(INTERRUPTED)


@contextmanager
def _counted(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error that moves with each new batch of each view."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("audit", total=total)
        seen: set[str] = set()

        def step(message: str) -> None:
            seen.add(message.partition(":")[0])
            progress.update(bar, completed=min(len(seen) - 1, total), description=message)

        yield step


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise a ConfigError where a result cannot be written to the folder of an audit."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"out={out}: cannot be written: {error.strerror}: {error.filename}. The same command "
            "in the mended folder, or in a copy of it, attacks nothing again."
        ) from None


def _write(path: Path, content: bytes) -> None:
    beside = path.with_suffix(".part")
    beside.write_bytes(content)
    os.replace(beside, path)  # noqa: PTH105 - atomic, as POSIX requires
