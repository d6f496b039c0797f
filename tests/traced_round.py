"""Traced round: the files that one round of the shipped command runs through.

    python tests/traced_round.py [ROUND]

A reader who follows ``privpart train --plan examples/digits.toml`` through a round has to open
these files. Only functions that run during the round count, on any thread. Round 2 is the default:
the first ones also try methods.
"""
# ruff: noqa: T201

import os
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("accounting", "privpart", "attacks"))


def traced_files(number: int) -> dict[str, int]:
    """Return the files of a round, by path from the repository's root, with their lines."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            files.add(frame.f_code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(PRIVPART_STATE_DIR=folder, PRIVPART_CACHE_DIR=folder)
        _train(Path(folder) / "run", number, note)
    counted = {name: len(Path(name).read_text().splitlines()) for name in sorted(files)}
    return {str(Path(name).relative_to(ROOT)): lines for name, lines in counted.items()}


def _train(out: Path, number: int, note: Any) -> None:
    import privpart.loop as loop
    from privpart.cli.main import main

    run_round = loop._run_round

    def watched(server: Any, *arguments: Any, **options: Any) -> Any:
        if server.round < number:
            return run_round(server, *arguments, **options)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            run_round(server, *arguments, **options)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        raise KeyboardInterrupt

    loop._run_round = watched
    sys.argv = ["privpart", "train", "--plan", str(ROOT / "examples" / "digits.toml")]
    sys.argv += ["--out", str(out)]
    with suppress(SystemExit):
        main()


if __name__ == "__main__":
    files = traced_files(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    for path, lines in files.items():
        print(f"{lines:6}  {path}")
    print(f"{sum(files.values()):6}  lines in {len(files)} files")
