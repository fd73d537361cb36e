import numpy as np
import pytest

from gyre_core.algorithms.whitening import whiten


def test_only_counted_tokens_enter():
    """Values 1 2 3 and three pads: +-1.225 and 0, whatever the pads hold."""
    for pads in ([0.0, 0.0, 0.0], [100.0, -7.0, np.nan]):
        result = whiten(np.array([1.0, 2.0, 3.0, *pads]), np.array([True] * 3 + [False] * 3))
        assert result.tolist() == pytest.approx([-1.2247449, 0.0, 1.2247449, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("values", [[], [3.0], [0.3, 0.1 + 0.2, 0.3], [0.0, 0.0]])
def test_nothing_to_tell_apart_is_exactly_zero(values):
    assert whiten(np.array(values), np.ones(len(values), dtype=bool)).tolist() == [0.0] * len(values)
