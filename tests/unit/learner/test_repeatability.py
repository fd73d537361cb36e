"""The test whether updates repeat bit for bit tells a learner that does from one that does not."""

import pytest
import torch
from learner_cases import make_learner, make_ppo_learner, toy_model

from gyre_core.learner.repeatability import repeats, state_digest


def vocabulary(model):
    return model.config.vocab_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"kl_in": "loss"}, {"kl_in": "reward", "kl_coef": 0.1}])
def test_a_learner_on_a_cpu_repeats_itself_and_is_left_as_it_was(dtype, settings):
    model = toy_model()
    learner = make_learner(model, dtype=dtype, **settings)
    before = state_digest(*learner.state())
    assert repeats(learner, vocabulary(model), 1e-3)
    assert state_digest(*learner.state()) == before


def test_the_test_moves_the_weights_of_policy_and_critic():
    learner, _ = make_ppo_learner()
    digests = []
    take_step = learner.take_step

    def noted(*arguments, **options):
        result = take_step(*arguments, **options)
        digests.append(state_digest(*learner.state()))
        return result

    learner.take_step = noted
    before = state_digest(*learner.state())
    assert repeats(learner, vocabulary(learner._model), 1e-3)
    assert len(digests) == 2
    assert digests[0] == digests[1] != before


def test_noise_in_the_forward_pass_is_noticed():
    model = toy_model()
    learner = make_learner(model)
    model.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, output: output * (1 + torch.rand(()) / 8)
    )
    assert not repeats(learner, vocabulary(model), 1e-3)


def test_a_digest_tells_every_bit_name_and_counter_apart():
    tensors = {"a": torch.zeros(3), "b": torch.ones(2)}
    known = state_digest(tensors, {"updates": 1})
    assert known == state_digest(dict(reversed(tensors.items())), {"updates": 1})
    others = [
        ({**tensors, "a": torch.tensor([0.0, -0.0, 0.0])}, {"updates": 1}),
        ({"a": tensors["b"], "b": tensors["a"]}, {"updates": 1}),
        ({**tensors, "a": torch.zeros(3, 1)}, {"updates": 1}),
        ({**tensors, "a": torch.zeros(3, dtype=torch.int32)}, {"updates": 1}),
        (tensors, {"updates": 2}),
    ]
    assert len({known, *(state_digest(*other) for other in others)}) == 6
