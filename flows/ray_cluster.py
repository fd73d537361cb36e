"""This process's connection to a Ray cluster, and the cluster itself where it is one of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
import ray.exceptions

from gyre_core.config.sections import RayConfig
from gyre_core.rewards.values import RewardError

OBJECT_STORE_BYTES = 256 * 2**20
"""Memory of a local cluster for what its processes exchange; more goes to the disk."""
STOP_SECONDS = 30.0
"""Seconds that a local cluster has to end."""


class RayCluster:
    """A cluster by its address, or one of this process alone, which listens on loopback and ends with the process.

    A thread of its own holds the connection: it can be left behind when a cluster does not answer, and the kernel
    ends the processes of a local cluster with the thread that started them.
    """

    def __init__(self, config: RayConfig) -> None:
        self._config = config
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    async def connect(self) -> None:
        """Connect, unless this process is connected; raises ValueError when there is no cluster within the timeout."""
        connected: Future[None] = Future()
        self._thread = threading.Thread(target=self._hold, args=(connected,), name="ray", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(self._config.timeout):
                await asyncio.wrap_future(connected)
        except TimeoutError:
            raise self._unusable(f"no answer within {self._config.timeout:g} s (reward.ray.timeout)") from None
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise self._unusable(" ".join(str(error).split())) from error
        finally:
            if not connected.done() or connected.exception() is not None:
                self._closing.set()

    def check_open(self) -> None:
        """Raise RewardError once `close` was called."""
        if self._closing.is_set():
            raise RewardError("the connection to the Ray cluster is closed")

    def shortage(self) -> str:
        """Why no node of the cluster could ever run a task, however long it waited; empty when one could."""
        nodes: list[Mapping[str, Any]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        config = self._config
        for node in nodes:
            if node.get("CPU", 0.0) >= config.num_cpus and node.get("GPU", 0.0) >= config.num_gpus:
                return ""
        return f"a task needs {_amounts(config.num_cpus, config.num_gpus)}, and the cluster has {_describe(nodes)}"

    def close(self) -> None:
        """Disconnect, and end the cluster if this process started it; after `connect`."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def _unusable(self, reason: str) -> ValueError:
        address = self._config.address
        if address is None:
            return ValueError(f"reward.launcher: a Ray cluster cannot be started on this machine: {reason}")
        hint = "" if "RAY_AUTH_MODE" in os.environ else "; one that asks for a token needs RAY_AUTH_MODE=token here"
        return ValueError(f"reward.ray.address: the Ray cluster at {address} cannot be reached: {reason}{hint}")

    def _hold(self, connected: Future[None]) -> None:
        """Connect, and stay connected until `close`."""
        connected.set_running_or_notify_cancel()
        others = ray.is_initialized()
        try:
            if not others:
                self._connect()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited.
            connected.set_exception(error)
            return
        connected.set_result(None)
        self._closing.wait()
        if not others:
            ray.shutdown()

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "gyre"}
        if self._config.address is not None:
            ray.init(self._config.address, **quiet)
            return
        ray.init(
            "local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            **quiet,
        )


def _amounts(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU and {gpus:g} GPU"


def _describe(nodes: Sequence[Mapping[str, Any]]) -> str:
    """The sizes of nodes in words, each size once."""
    sizes = sorted({(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes})
    return "nodes of " + ", ".join(_amounts(*size) for size in sizes) if sizes else "no node"
