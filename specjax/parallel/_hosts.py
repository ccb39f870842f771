"""Several processes as one machine: each runs the same program on its own devices."""

import os
import re
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_asked: dict[str, Any] = {}  # what this process was started with


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins the processes of a run, before anything else is asked of JAX.

    What is not given is read from `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`, and what is not there either from the cluster, where JAX knows it
    (Slurm, Open MPI, Cloud TPU, Kubernetes). Without any of them there is one process
    and nothing to join. A second call with the same settings does nothing.

    Afterwards `jax.devices()` are those of all processes: `make_mesh` lays them out,
    and `distill.train` runs on them. All processes must run the same program and see
    the same workdir.

    Args:
        coordinator_address: "host:port" of process 0, a port that is free there.
        num_processes: how many there are.
        process_id: which one this is, from 0.

    Raises:
        ValueError: settings that are wrong, incomplete or not those of an earlier call;
            or JAX was used already.

    Example:
        >>> initialize("10.0.0.1:8476", 2, 0)  # doctest: +SKIP
    """
    asked = _settings(coordinator_address, num_processes, process_id)
    given = [value for value in asked.values() if value is not None]
    if jax.distributed.is_initialized():
        if given and asked != _asked:
            raise ValueError(
                f"this process has joined a run already, with {_asked}; a second "
                f"initialize must say the same, got {asked}"
            )
        return
    try:
        jax.distributed.initialize(**asked)
    except ValueError as error:
        if not given:
            return  # no cluster either: one process
        raise ValueError(
            f"several processes need {', '.join(asked)} (or {', '.join(_VARIABLES)}), "
            f"got {asked}: {error}"
        ) from None
    except RuntimeError as error:
        if "before any JAX calls" not in str(error):
            raise
        raise ValueError(
            "parallel.initialize must come before anything that makes JAX look for "
            "devices (an array, jax.devices()): it was called too late"
        ) from None
    _asked.update(asked)


def is_first() -> bool:
    """Whether this is process 0, which writes files and talks to people."""
    return jax.process_index() == 0


def agree(wanted: bool) -> bool:
    """Whether any process wants it. All must ask at the same point of the program."""
    if jax.process_count() == 1:
        return wanted
    return bool(multihost_utils.process_allgather(np.asarray(wanted)).any())


def wait(name: str) -> None:
    """Goes on when every process has come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def gather(tree: Any) -> Any:
    """Whole NumPy arrays on every process, from wherever their parts lie.

    Parameters trained on several hosts are exported from what this gives.
    """
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _settings(address, number, process) -> dict[str, Any]:
    """The three, from arguments or the environment, checked."""
    if address is None:
        address = os.environ.get(_VARIABLES[0])
    if address is not None and not re.fullmatch(r".+:\d+", str(address)):
        raise ValueError(f"coordinator_address must be 'host:port', got {address!r}")
    number = _whole("num_processes", number, _VARIABLES[1])
    process = _whole("process_id", process, _VARIABLES[2])
    if number is not None and number < 1:
        raise ValueError(f"num_processes must be at least 1, got {number}")
    if process is not None and (process < 0 or process >= (number or np.inf)):
        raise ValueError(
            "process_id must be at least 0 and below num_processes, got "
            f"{process} of {number}"
        )
    return {
        "coordinator_address": address,
        "num_processes": number,
        "process_id": process,
    }


def _whole(name: str, value: Any, variable: str) -> int | None:
    if value is None:
        value = os.environ.get(variable)
        name = variable
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
