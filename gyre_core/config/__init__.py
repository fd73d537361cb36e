"""Configuration: the schema of every setting, and its reading, checking and writing. Imports no torch."""

from gyre_core.config.errors import ConfigError, Problem
from gyre_core.config.loading import dump_config, load_config
from gyre_core.config.schema import GyreConfig

__all__ = ["ConfigError", "GyreConfig", "Problem", "dump_config", "load_config"]
