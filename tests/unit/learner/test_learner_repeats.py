"""Two processes with one thread each end with the same weights, bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from learner_cases import make_learner, make_ppo_learner, minibatch, random_groups, sampling, toy_model


def digest_of_updates():
    torch.set_num_threads(1)
    digest = xxhash.xxh3_128()
    learners = (
        make_learner(toy_model("qwen3"), tokens_per_micro_batch=128),
        make_learner(toy_model("llama"), sampled=sampling(top_p=0.9), tokens_per_micro_batch=128),
        make_learner(toy_model("qwen3"), dtype=torch.bfloat16, tokens_per_micro_batch=128),
        make_learner(toy_model("qwen3"), policy_ratio="sequence", entropy_coef=0.1, tokens_per_micro_batch=128),
        make_ppo_learner(toy_model("qwen3"), tokens_per_micro_batch=128)[0],
        make_ppo_learner(toy_model("llama"), trunk="shared", tokens_per_micro_batch=128)[0],
    )
    for learner in learners:
        groups = random_groups(seed=1, count=8)
        old = learner.begin_step(groups, on_policy=False)
        for start in range(0, 8, 2):
            learner.apply(minibatch(groups[start : start + 2]), old)
        for _, tensor in sorted(learner.state()[0].items()):
            digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_two_processes_end_with_the_same_bits():
    here = digest_of_updates()
    assert here == digest_of_updates()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = "import test_learner_repeats; print(test_learner_repeats.digest_of_updates())"
    other = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, timeout=120
    )
    assert other.stdout.strip() == here, other.stderr
