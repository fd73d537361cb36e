"""The policy as a run starts: loaded from its folder, or made on the spot and kept in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gyre_core.config import GyreConfig
from gyre_core.data.prompts import PromptRow
from gyre_core.policy.models import TINY, Policy, load_policy, save_policy
from gyre_core.policy.warm_start import warm_start
from gyre_core.rollout.shared import START_POLICY
from gyre_core.training.run_folder import RunFolder, replacing

logger = logging.getLogger(__name__)


def make_start_policy(config: GyreConfig, folder: RunFolder, solved: Sequence[PromptRow]) -> Policy:
    """The policy as the run starts, in float32.

    One that is made on the spot is warm-started on `solved` rows and kept in the run folder, so that a resumed run
    starts from the very same weights. Raises ValueError like `load_policy`.
    """
    target = folder.path / START_POLICY
    if config.models.policy != TINY or target.exists():
        return load_start_policy(config, folder)
    policy = load_policy(config.models, config.experiment.seed)
    if config.models.warm_start.max_steps > 0:
        result = warm_start(policy, solved, config.models.warm_start, config.experiment.seed)
        logger.info("warm start: %d steps, %.1f%% of sampled answers exact", result.steps, 100 * result.accuracy)
    with replacing(target) as unfinished:
        save_policy(unfinished, policy.model, policy.tokenizer)
    return policy


def load_start_policy(config: GyreConfig, folder: RunFolder) -> Policy:
    """The policy as the run started, in float32; raises ValueError like `load_policy`."""
    models = config.models.model_copy(update={"policy": find_start_policy(config, folder)})
    return load_policy(models, config.experiment.seed)


def find_start_policy(config: GyreConfig, folder: RunFolder) -> str:
    """Where the policy as the run started lies: in the run folder when it was made on the spot."""
    made = folder.path / START_POLICY
    return str(made) if made.exists() else config.models.policy
