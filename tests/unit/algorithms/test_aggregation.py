import pytest
import torch

from gyre_core.algorithms.aggregation import aggregation_weights


def aggregate(losses, sequences, count, mode, max_tokens=8):
    weights = aggregation_weights(torch.tensor(sequences), count, mode, max_tokens)
    return float((weights * torch.tensor(losses)).sum())


class TestAggregation:
    @pytest.mark.parametrize(("mode", "expected"), [("token", 1.4), ("sequence", 2.0), ("constant", 0.4375)])
    def test_modes_differ_as_worked_out(self, mode, expected):
        assert aggregate([1.0, 1, 1, 1, 3], [0, 0, 0, 0, 1], 2, mode) == pytest.approx(expected)
        assert aggregate([3.0, 1, 1, 1, 1], [0, 1, 1, 1, 1], 2, mode) == pytest.approx(expected)

    def test_token_mean_counts_the_whole_minibatch(self):
        losses, sequences = [1.0] * 10 + [4.0] * 2, [0] * 10 + [1] * 2
        assert aggregate(losses, sequences, 2, "token") == pytest.approx(1.5)
        assert aggregate(losses[:10], sequences[:10], 2, "token") == pytest.approx(1.0)

    @pytest.mark.parametrize("mode", ["token", "sequence"])
    def test_a_sequence_without_trained_tokens_does_not_count(self, mode):
        assert aggregate([1.0] * 10, [0] * 10, 2, mode) == pytest.approx(1.0)

    @pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
    def test_nothing_to_train_on_is_finite(self, mode):
        assert aggregation_weights(torch.tensor([], dtype=torch.long), 2, mode, 8).sum() == 0.0
