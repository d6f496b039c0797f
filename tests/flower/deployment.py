"""A Flower deployment on this machine: SuperLink, SuperNodes and runs, all ended with it.

Everything listens on 127.0.0.1, on ports that were free, with TLS and with nodes that sign what
they send. Processes carry a variable of the deployment's own in their environment: those that
Flower starts itself are found, killed and ended by it.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
MARK = "PRIVPART_TEST_DEPLOYMENT"
PATIENCE = 300.0
"""Seconds to wait for anything, on a machine that is busy with other things."""


class DeploymentError(Exception):
    """Something did not happen in time; the message has the end of the logs."""


def write_certificates(folder: Path) -> None:
    """Write a certificate for 127.0.0.1 that is its own authority, and the key of the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("ca.crt", "server.pem"):
        (folder / file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(_private(key, serialization.PrivateFormat.PKCS8))


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def write_node_key(path: Path) -> Path:
    """Write the private key of a SuperNode and, with the ending .pub, its public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_suffix(".pub").write_bytes(public + b"\n")
    return path


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nobody listens at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Deployment:
    """A SuperLink and its SuperNodes, in a folder of their own.

    ``environment`` is added to that of every process. The SuperLink keeps what it must in memory,
    or in a ``database`` where it is killed and started again. Temporary files are in the folder,
    too. Use it as a context: leaving it ends every process, whatever happened.
    """

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    database: bool = False
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> "Deployment":
        self.folder.mkdir(parents=True, exist_ok=True)
        write_certificates(self.folder / "certificates")
        self.port = free_port()
        self.home = self.folder / "home"
        self.home.mkdir()
        (self.folder / "tmp").mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)
        for pid, _ in self.ours():
            _signal(pid, signal.SIGKILL)

    def variables(self) -> dict[str, str]:
        """Return the environment of a process of this deployment."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR_", "PYTEST"))}
        return inherited | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":"),
            "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(self.home),
            "TMPDIR": str(self.folder / "tmp"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            MARK: str(self.folder),
            **self.environment,
        }

    def start_superlink(self) -> None:
        """Start the SuperLink, on the database that it left if it was killed."""
        held = self.folder / "certificates"
        self._configure(f'root-certificates = "{held / "ca.crt"}"')
        self._superlink(
            *("--ssl-ca-certfile", str(held / "ca.crt")),
            *("--ssl-certfile", str(held / "server.pem")),
            *("--ssl-keyfile", str(held / "server.key")),
            "--enable-supernode-auth",
        )

    def start_simulation(self) -> None:
        """Start a SuperLink that simulates two SuperNodes, as ``flwr run`` does by itself."""
        self._configure("insecure = true")
        self._superlink("--insecure", "--simulation")

    def _configure(self, trust: str) -> None:
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{trust}\n'
        (self.home / "config.toml").write_text(f'{text}address = "127.0.0.1:{self.port}"\n')

    def _superlink(self, *arguments: str) -> None:
        self._start(
            "superlink",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *(("--database", str(self.folder / "superlink.db")) if self.database else ()),
            *("--disable-runtime-dependency-installation", *arguments),
        )
        self.wait_for(lambda: _listens(self.port), "the SuperLink listens")

    def register(self, *names: str) -> None:
        """Make a key for each of these nodes and tell the SuperLink of it."""
        for name in names:
            told = self.flwr(
                "supernode", "register", f"{self.key(name)}.pub", "here", "--name", name
            )
            if told.returncode or "registered" not in told.stdout + told.stderr:
                raise DeploymentError(f"flwr supernode register {name}: {told.stdout}{told.stderr}")

    def key(self, name: str) -> Path:
        """Return the path of a node's private key; it is made when first asked for."""
        path = self.folder / "keys" / name
        return path if path.exists() else write_node_key(path)

    def start_node(
        self, name: str, config: str = "", port: int | None = None, *, worker: bool = False
    ) -> None:
        """Start a SuperNode, with the key of this name.

        Args:
            config: its node configuration, as the command line takes it.
            port: where it finds the SuperLink, if not where the SuperLink is.
            worker: whether one process answers all messages, instead of one for each.
        """
        own = str(free_port())
        self._start(
            name,
            "flower-supernode",
            *("--root-certificates", str(self.folder / "certificates" / "ca.crt")),
            *("--superlink", f"127.0.0.1:{port or self.port}"),
            *("--auth-supernode-private-key", str(self.key(name))),
            *("--port", own, "--node-config", config),
            *(("--isolation", "process") if worker else ()),
        )
        if worker:
            module = ("-m", "privpart.flower.worker", f"127.0.0.1:{own}")
            self._start(f"{name}-worker", "python", *module)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / program), *arguments],
                cwd=self.folder,
                env=self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
                preexec_fn=_end_with_parent,  # noqa: PLW1509, threads do not start processes here
            )

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``flwr`` with these arguments."""
        return subprocess.run(
            [str(BIN / "flwr"), *arguments],
            cwd=self.folder,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def submit(self, app: Path, config: str = "") -> int:
        """Start a run of an app, and return its id."""
        chosen = ["--run-config", config] if config else []
        told = self.flwr("run", str(app), "here", *chosen, "--format", "json")
        try:
            return int(json.loads(told.stdout)["run-id"])
        except (ValueError, KeyError):
            raise DeploymentError(f"flwr run: {told.stdout}{told.stderr}") from None

    def status(self, run: int) -> str:
        """Return what Flower calls the state of a run, such as finished:completed."""
        told = self.flwr("list", "here", "--run-id", str(run), "--format", "json")
        try:
            return str(json.loads(told.stdout)["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            raise DeploymentError(f"flwr list: {told.stdout}{told.stderr}") from None

    def said(self, run: int) -> str:
        """Return what the ServerApp of a run wrote."""
        return self.flwr("log", str(run), "here", "--show").stdout

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a process that this deployment started; what that started must notice by itself."""
        process = self.processes.pop(name)
        _signal(process.pid, number)
        process.wait(timeout=PATIENCE)

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process and to all below it, such as SIGSTOP and SIGCONT."""
        os.killpg(self.processes[name].pid, number)

    def server_app(self) -> int | None:
        """Return the process id of the ServerApp that is running, if one is."""
        return next((pid for pid, line in self.ours() if "flwr-serverapp" in line), None)

    def kill_server_app(self) -> None:
        """Kill the ServerApp that is running."""
        pid = self.server_app()
        if pid is None:
            raise DeploymentError(f"no ServerApp is running\n{self.logs()}")
        _signal(pid, signal.SIGKILL)

    def wait_for(
        self, happened: Callable[[], object], what: str, seconds: float = PATIENCE
    ) -> None:
        """Wait until something has happened.

        Raises:
            DeploymentError: it has not in time, or a process of the deployment ended meanwhile.
        """
        until = time.monotonic() + seconds
        while not happened():
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > until:
                why = f"{', '.join(ended)} ended" if ended else f"not within {seconds:.0f} s"
                raise DeploymentError(f"waited until {what}: {why}\n{self.logs()}")
            time.sleep(0.2)

    def wait_in(self, run: int, happened: Callable[[], object], what: str) -> None:
        """Wait until something has happened while the ServerApp of a run works.

        Raises:
            DeploymentError: the ServerApp ended before it, or it took too long.
        """
        self.wait_for(lambda: self.server_app() or happened(), "the ServerApp works")
        self.wait_for(lambda: happened() or not self.server_app(), what, 3 * PATIENCE)
        if not happened():
            raise DeploymentError(f"waited until {what}: the ServerApp ended\n{self.said(run)}")

    def result(self, run: int) -> str:
        """Wait until the ServerApp of a run has ended, and return what Flower says of the run."""
        self.wait_for(self.server_app, "the ServerApp works")
        self.wait_for(lambda: not self.server_app(), "the ServerApp ends", 3 * PATIENCE)
        return self.status(run)

    def logs(self, lines: int = 30) -> str:
        """Return the end of every log."""
        ends = []
        for path in sorted(self.folder.glob("*.log")):
            end = path.read_text(errors="replace").splitlines()[-lines:]
            ends.append("\n".join([f"--- {path.name}", *end]))
        return "\n".join(ends)

    def ours(self) -> Iterator[tuple[int, str]]:
        """Yield the processes whose environment carries this deployment's mark."""
        mark = f"{MARK}={self.folder}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    yield int(entry.name), line.decode(errors="replace")


class Proxy:
    """A wire to a port of this machine that counts bytes."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.bytes = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        for one in [self._listening, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := one.recv(1 << 16):
                self.bytes += len(chunk)
                other.sendall(chunk)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


def _listens(port: int) -> bool:
    with socket.socket() as asked:
        asked.settimeout(1)
        return asked.connect_ex(("127.0.0.1", port)) == 0


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, even by kill -9."""
    die_with_parent = 1
    ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
