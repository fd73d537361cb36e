"""Advantages brought to a common scale."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gyre_core.algorithms.advantages import are_equal


def whiten(advantages: NDArray[np.float64], counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Minus the mean, divided by the standard deviation (n) of the counted tokens; 0 at the others. `[tokens]`.

    Where the counted ones are all equal the result is 0 everywhere.
    """
    whitened = np.zeros_like(advantages)
    values = advantages[counted]
    if values.size and not are_equal(values):
        whitened[counted] = (values - values.mean()) / values.std()
    return whitened
