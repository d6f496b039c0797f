"""Package: which code made a run, by the hashes of the installed files of this distribution.

A run's first ledger line names the hash of the files that ran, and that of the list that came with
the installed wheel; a later line names those by which the run was continued, if they differ. A
release's hash is printed when its wheel is built, and published with it, so anybody can compare. It
shows that files were edited, by mistake or by a careless hand: a process that was changed to lie
can name any hash, which nothing in a run folder can show.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from accounting.report import installed_version

Word = Literal["release", "modified", "unknown"]
PACKAGES = "packages"
"""Fact: other code than that of the first line, by which the run was continued."""
_PACKAGES = ("accounting", "attacks", "privpart")


@cache
def running() -> str:
    """Return the hash of the files of the three packages, as they lie on the disk."""
    root = Path(__file__).parents[2]
    return tree_hash(
        (file.relative_to(root).as_posix(), _sha256(file))
        for package in _PACKAGES
        for file in (root / package).rglob("*.py")
    )


@cache
def recorded() -> str | None:
    """Return the hash by the list that came with the wheel; None of a source checkout."""
    try:
        files = metadata.files("privpart") or []
    except metadata.PackageNotFoundError:
        return None
    listed = [
        (file.as_posix(), _hex(file.hash.value))
        for file in files
        if file.parts[0] in _PACKAGES and file.suffix == ".py" and file.hash is not None
    ]
    return tree_hash(listed) if listed else None


def tree_hash(files: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256, in hex, of the sorted names and SHA-256 of some files."""
    lines = (f"{name} {digest}\n" for name, digest in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def facts() -> dict[str, str | None]:
    """Return what a ledger's first line says of the code that begins a run."""
    return {"files": running(), "wheel": recorded()}


def named(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a ledger says of all code that made a run: its version, as "privpart", and files.

    What it says of no code is {}, since a version alone tells nothing.
    """
    first = facts.get("package")
    version = facts["versions"].get("privpart")
    return [{} if first is None else {"privpart": version, **first}, *facts.get(PACKAGES, [])]


def worst(facts: Mapping[str, Any]) -> tuple[Word, str]:
    """Return ``identity`` of the code that made a run; of several, that which is worth least."""
    made_by = [identity(code or None, code.get("privpart")) for code in named(facts)]
    order: tuple[Word, ...] = ("modified", "unknown", "release")
    word, says = min(made_by, key=lambda one: order.index(one[0]))
    more = f"; the run was made by {len(made_by)} versions of the code" * (len(made_by) > 1)
    return word, f"{says}{more}"


def identity(package: Mapping[str, Any] | None, version: object) -> tuple[Word, str]:
    """Return whether the code that made a run is a release's, and a sentence.

    Args:
        package: what ``facts`` returned when the run was begun; None if its ledger lacks it.
        version: the version that the run names.
    """
    if package is None:
        return "unknown", "the ledger does not name the code that made the run"
    files, wheel = package.get("files"), package.get("wheel")
    named = f"files {str(files)[:12]} of privpart {str(version)[:20]}"
    mine = recorded() if version == installed_version() else None
    if (wheel is not None and wheel != files) or (mine is not None and mine != files):
        return "modified", f"{named} are not those of that release"
    if mine is not None:
        return "release", f"{named} are those of the release that is installed here"
    if wheel is not None:
        return "unknown", f"{named} are those of their wheel; compare {files} with the published"
    same = "the same files as here, " if files == running() else ""
    return "unknown", f"{named}: {same}a source checkout, which is no release"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _hex(encoded: str) -> str:
    """Return a hash of a wheel's list, which is URL-safe base64 without padding, in hex."""
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
