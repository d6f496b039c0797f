"""Starter: a plan, the code that it names, and files about it, which run as they are.

The folder beside this file holds them as texts, because nobody imports them here.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Literal

from accounting.checks import ConfigError
from privpart.run.store import one_line
from privpart.training.plan_file import read

_TEXTS = Path(__file__).parent / "starter"

Kind = Literal["training", "flower", "study", "sweep", "tune", "audit"]


def write_starter(folder: Path, kind: Kind = "training") -> list[Path]:
    """Write the files of a kind into a folder, new or not, and return their paths.

    All kinds but a training take the ``plan.toml`` of the folder; where there is none, the
    starter's is written.

    Raises:
        ConfigError: a file is there already.
    """
    if kind == "flower":
        return write_flower_app(folder)
    plan = folder / "plan.toml"
    is_own = kind != "training" and plan.exists()
    texts = {} if is_own else _training(folder)
    if kind == "audit":
        planned = plan.read_text(encoding="utf-8") if is_own else texts[plan]
        texts[folder / "audit.toml"] = _text("audit.txt") + planned + "\n[canaries]\ncount = 200\n"
    elif kind != "training":
        texts[folder / f"{kind}.toml"] = _text(f"{kind}.toml")
    return _write(texts)


def _text(name: str) -> str:
    return (_TEXTS / name).read_text(encoding="utf-8")


def _training(folder: Path) -> dict[Path, str]:
    return {folder / "plan.toml": _text("plan.toml"), folder / "task.py": _text("task.txt")}


def write_flower_app(folder: Path) -> list[Path]:
    """Write a Flower app into a folder, and return the paths of what was written.

    The app trains the ``plan.toml`` of the folder; where there is none, the starter's is written.
    """
    folder = folder.absolute()
    name = folder.name
    if not re.fullmatch("[A-Za-z][A-Za-z0-9-]{0,31}", name):
        raise ConfigError(
            f"{folder}: Flower takes the name of this folder for the app's and refuses it; choose "
            "one of at most 32 letters, digits and hyphens that begins with a letter."
        )
    run = str(folder.parent / f"{name}-run")
    out = json.dumps(run, ensure_ascii=False)
    texts = {
        folder / "pyproject.toml": _text("app.txt").format(name=name, out=out),
        folder / "server_app.py": _text("server_app.txt"),
        folder / "client_app.py": _text("client_app.txt"),
        folder / "README.md": _text("readme.txt").format(name=name, shell=shlex.quote(run)),
    }
    if (folder / "plan.toml").exists():
        from privpart.training.training import refuse_over_network  # imports torch

        refuse_over_network(read(folder / "plan.toml"))
    else:
        texts |= _training(folder)
    return _write(texts)


def _write(texts: dict[Path, str]) -> list[Path]:
    folder = next(iter(texts)).parent
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder.")
    for path in texts:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path}: exists already; name another folder, or move it away.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to: {one_line(error)}.") from None
    return list(texts)
