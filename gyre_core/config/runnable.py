"""What the schema knows and this version does not run yet: refused by name before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from gyre_core.config.checks import data_urls
from gyre_core.config.errors import ConfigError, Problem
from gyre_core.config.schema import GyreConfig


def refuse_unbuilt(config: GyreConfig) -> None:
    """Raise one ConfigError that names every setting which asks for a part that is not built yet."""
    problems = [
        Problem("", key, f"`{value}` is not built yet; {remedy}.") for key, value, remedy in _unbuilt_settings(config)
    ]
    if problems:
        raise ConfigError(problems)


def _unbuilt_settings(config: GyreConfig) -> Iterator[tuple[str, str, str]]:
    """Key, value and remedy of each setting that cannot run."""
    if config.rollout.engine == "vllm":
        yield "rollout.engine", "vllm", "set it to transformers"
    if config.rollout.launcher == "ray":
        yield "rollout.launcher", "ray", "set it to pool, which generates on Prefect work pools, or to inline"
    for key, url in data_urls(config).items():
        if "://" in url and not url.startswith(("file://", "s3://")):
            yield key, url, "give a local folder or s3://BUCKET/FOLDER, or leave it out to have the default"
