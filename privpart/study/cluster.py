"""Cluster: cells that are trained by the workers of a Dask cluster that exists.

Any executor of ``concurrent.futures`` will do, if its processes have this package, the code that
plans name and the files that they read. A cell's result comes from its seeds, so it is the same
wherever it is trained. Selections under a budget stay on one machine: how many trainings they made
is secret.
"""

from concurrent.futures import Executor

from accounting.checks import ConfigError, MissingExtraError
from privpart.run import package

_SECONDS = 15


def connect(address: str) -> Executor:
    """Return the executor of the Dask cluster whose scheduler has this address.

    Whoever runs the scheduler can run any code on this machine and on its workers: name only a
    cluster that you trust. TLS is Dask's, by its own configuration (tls://...).

    Raises:
        MissingExtraError: Dask is not installed.
        ConfigError: no scheduler answers there, it has no worker, or a worker has other code.
    """
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError(
            f"jobs=dask:{address}: needs Dask: pip install 'privpart[dask]'."
        ) from None
    try:
        client = Client(address, timeout=_SECONDS, set_as_default=False)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"jobs=dask:{address}: no Dask scheduler answers there ({error}). Pass the address "
            "that it printed, such as dask:tcp://10.0.0.5:8786."
        ) from None
    try:
        codes: dict[str, str] = client.run(package.running)
    except Exception as error:  # whatever the worker raised
        client.close()
        raise ConfigError(
            f"jobs=dask:{address}: a worker cannot import privpart ({error}). Install it there."
        ) from None
    others = sorted(worker for worker, code in codes.items() if code != package.running())
    if others or not codes:
        client.close()
        fault = f"{', '.join(others)} has other code of privpart" if others else "has no worker"
        raise ConfigError(
            f"jobs=dask:{address}: {fault}. Install the same version on every worker, and start "
            "the workers anew."
        )
    executor: Executor = client.get_executor(pure=False)
    return executor
