"""The sections of the configuration, one theme a file: every setting with its type, default and help text."""

from gyre_core.config.sections.base import Section
from gyre_core.config.sections.data import DataConfig
from gyre_core.config.sections.experience import ExperienceConfig
from gyre_core.config.sections.learning import LearningConfig
from gyre_core.config.sections.models import ModelsConfig, TinyModelConfig, WarmStartConfig
from gyre_core.config.sections.reward import RewardConfig, RewardFunctionConfig
from gyre_core.config.sections.rollout import ElasticConfig, RolloutConfig
from gyre_core.config.sections.running import (
    CheckpointConfig,
    EvaluationConfig,
    ExperimentConfig,
    HealthConfig,
    MonitorConfig,
    StorageConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "ElasticConfig",
    "EvaluationConfig",
    "ExperienceConfig",
    "ExperimentConfig",
    "HealthConfig",
    "LearningConfig",
    "ModelsConfig",
    "MonitorConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "Section",
    "StorageConfig",
    "TinyModelConfig",
    "WarmStartConfig",
]
