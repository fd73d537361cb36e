"""The scorer of whoever generates, where its functions run elsewhere."""

from pathlib import Path

import pytest

from gyre_core.config import GyreConfig
from gyre_core.rewards.runner import ProcessRunner
from gyre_core.rollout.build import start_scorer

RAY = GyreConfig.model_validate({"reward": {"launcher": "ray", "functions": [{"path": "exact_match"}]}})


async def test_functions_never_run_here_unasked():
    with pytest.raises(ValueError, match=r"^reward.launcher: ray is for runs on Prefect; set it to process"):
        await start_scorer(RAY)
    scorer = await start_scorer(RAY, ["answer"], ProcessRunner(RAY.reward, Path.cwd()))
    scorer.close()
