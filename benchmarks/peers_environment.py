"""Environments of the peers: one virtual environment each, created once, outside the project's.

torch and numpy have the versions that run the benchmark.
"""

import json
import subprocess
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).parent.parent / ".peers"
FLOWER = "1.42.0"
PEERS = {"pfl": ("pfl==0.6.0",), "breaching": ("breaching==0.1.2",)}  # flower: see _flower
TOLD = {
    "pfl": ("pfl", "torch", "numpy"),
    "flower": ("flwr", "ray", "certifi", "torch"),
    "breaching": ("breaching", "hydra-core", "torchvision", "torch", "numpy"),
}
_ASK = (
    "import json, importlib.metadata as m;"
    "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
)


@dataclass(frozen=True)
class Environment:
    """Environment of a peer: its Python, the relevant versions, and remarks."""

    python: Path
    versions: dict[str, str]
    note: str = ""


class NotInstalledError(Exception):
    """Installation failed; the message is the end of pip's output."""


def environment(peer: str) -> Environment:
    """Return the environment of "pfl", "flower" or "breaching", created if it does not exist.

    Raises:
        NotInstalledError: pip failed.
    """
    folder = FOLDER / peer
    python, stamp = folder / "bin" / "python", folder / "ready.json"
    held = [f"{name}=={metadata.version(name).partition('+')[0]}" for name in ("torch", "numpy")]
    wanted = {"held": held, "peer": peer, "flower": FLOWER}
    ready = json.loads(stamp.read_text()) if stamp.exists() else {}
    if ready.get("wanted") != wanted:
        venv.create(folder, with_pip=True, clear=True)
        constraints = FOLDER / "constraints.txt"
        constraints.write_text("\n".join(held) + "\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["-c", str(constraints)]
        note = _flower(pip, python) if peer == "flower" else run([*pip, "torch", *PEERS[peer]])
        ready = {"wanted": wanted, "note": note}
        stamp.write_text(json.dumps(ready))
    return installed(python, peer, ready["note"])


def installed(python: Path, peer: str, note: str = "") -> Environment:
    """Return the environment of an interpreter that has the peer already."""
    versions = json.loads(run([str(python), "-c", _ASK]))
    return Environment(python, {name: versions[name] for name in TOLD[peer]}, note)


def _flower(pip: list[str], python: Path) -> str:
    """Install Flower; if the registry lacks its version of certifi, with the newest one there."""
    try:
        return run([*pip, "torch", f"flwr[simulation]=={FLOWER}"])
    except NotInstalledError as error:
        if "certifi" not in str(error):
            raise
    run([*pip, "--no-deps", f"flwr=={FLOWER}"])
    ask = "import json, importlib.metadata as m; print(json.dumps(m.requires('flwr')))"
    every = [Requirement(line) for line in json.loads(run([str(python), "-c", ask]))]
    needed = [r for r in every if r.marker is None or r.marker.evaluate({"extra": "simulation"})]
    for requirement in needed:
        requirement.marker = None
    run([*pip, "torch", "certifi", *(str(r) for r in needed if r.name != "certifi")])
    pins = ", ".join(str(r) for r in needed if r.name == "certifi")
    return f"flwr asks for {pins}, which the package index lacked: the newest that it had is used"


def run(command: list[str]) -> str:
    """Return the output of a command.

    Raises:
        NotInstalledError: it failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotInstalledError(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line or "Error" in line]
        raise NotInstalledError(" ".join(lines)[:400] or f"exit code {done.returncode}")
    return done.stdout
