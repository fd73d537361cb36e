"""What a report of a problem needs to say about the machine and the installation, without secrets."""

from __future__ import annotations

import os
import platform
from importlib import metadata

import psutil

from gyre_core.config.checks import USER_INFORMATION

PACKAGES = ("gyre", "torch", "transformers", "prefect", "pyarrow", "pydantic", "vllm", "ray")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM")


def describe_environment() -> str:
    """Versions, usable cores, memory, thread settings and the Prefect API, one a line as `name  value`."""
    lines = [("python", platform.python_version()), ("platform", platform.platform())]
    lines += [(package, package_version(package)) for package in PACKAGES]
    memory = psutil.virtual_memory()
    lines += [
        ("cores usable", f"{len(psutil.Process().cpu_affinity())} of {os.cpu_count()}"),
        ("memory", f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f} GiB"),
    ]
    lines += [(variable, os.environ.get(variable, "not set")) for variable in THREAD_VARIABLES]
    lines += _prefect_settings()
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def mask_url(url: str) -> str:
    """A URL with user name and password, if any, replaced by stars."""
    return USER_INFORMATION.sub("***@", url)


def package_version(package: str) -> str:
    """The installed version of a package, or `not installed`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _prefect_settings() -> list[tuple[str, str]]:
    """The Prefect API in use, from its profile or environment; of the key, only whether there is one."""
    from prefect.settings import get_current_settings

    api = get_current_settings().api
    return [
        ("PREFECT_API_URL", mask_url(api.url) if api.url else "not set"),
        ("PREFECT_API_KEY", "set" if api.key else "not set"),
    ]
