"""The whole configuration of a run: its sections, the defaults that depend on each other, and conflicts.

With `sections` this is the single source of defaults and help. Neither imports torch, so that a command line can show
help at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from gyre_core.config.checks import ConflictError, find_conflicts
from gyre_core.config.sections import (
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    ElasticConfig,
    EvaluationConfig,
    ExperienceConfig,
    ExperimentConfig,
    HealthConfig,
    LearningConfig,
    ModelsConfig,
    MonitorConfig,
    RewardConfig,
    RolloutConfig,
    Section,
    StorageConfig,
)


def _as_mapping(section: object) -> Any:
    """A section as a dictionary of its own, holding what was set on it; anything else as it is."""
    if isinstance(section, Section):
        return section.model_dump(exclude_unset=True)
    return dict(section) if isinstance(section, Mapping) else section


class GyreConfig(Section):
    """The whole configuration of a run."""

    experiment: ExperimentConfig = ExperimentConfig()
    models: ModelsConfig = ModelsConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    learning: LearningConfig = LearningConfig()
    critic: CriticConfig = CriticConfig()
    experience: ExperienceConfig = ExperienceConfig()
    elastic: ElasticConfig = ElasticConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    health: HealthConfig = HealthConfig()
    monitor: MonitorConfig = MonitorConfig()
    storage: StorageConfig = StorageConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, data: object) -> object:
        """Give the defaults that depend on another section: `launcher`, `clock` and `reward.functions`.

        Sections that arrive as models are taken apart into what was set on them, so that their defaults follow too.
        """
        if not isinstance(data, Mapping):
            return data
        values = {str(name): _as_mapping(value) for name, value in data.items()}
        rollout, models = values.setdefault("rollout", {}), values.get("models", {})
        experience, elastic = values.setdefault("experience", {}), values.get("elastic", {})
        # Sections of a wrong type are left as they are, for pydantic to refuse by name.
        if isinstance(rollout, dict):
            enabled = isinstance(elastic, dict) and elastic.get("enabled") is True
            rollout.setdefault("launcher", "pool" if enabled else "inline")
            if isinstance(experience, dict):
                experience.setdefault("clock", "steps" if rollout["launcher"] == "inline" else "seconds")
        if isinstance(models, dict) and models.get("reward") is not None:
            reward = values.setdefault("reward", {})
            if isinstance(reward, dict):
                reward.setdefault("functions", ())
        return values

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> GyreConfig:
        """Refuse values that are right each by itself and impossible together."""
        conflicts = find_conflicts(self)
        if conflicts:
            raise ConflictError(conflicts)
        return self
