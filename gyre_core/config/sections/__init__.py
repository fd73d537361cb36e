"""The sections of the configuration, one theme a file: every setting with its type, default and help text."""

from gyre_core.config.sections.base import Section
from gyre_core.config.sections.data import DataConfig
from gyre_core.config.sections.experience import ExperienceConfig
from gyre_core.config.sections.learning import CriticConfig, LearningConfig
from gyre_core.config.sections.models import LoRAConfig, ModelsConfig, TinyModelConfig, WarmStartConfig
from gyre_core.config.sections.reward import RayConfig, RewardConfig, RewardFunctionConfig, ShapingConfig
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
    "CriticConfig",
    "DataConfig",
    "ElasticConfig",
    "EvaluationConfig",
    "ExperienceConfig",
    "ExperimentConfig",
    "HealthConfig",
    "LearningConfig",
    "LoRAConfig",
    "ModelsConfig",
    "MonitorConfig",
    "RayConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "Section",
    "ShapingConfig",
    "StorageConfig",
    "TinyModelConfig",
    "WarmStartConfig",
]
