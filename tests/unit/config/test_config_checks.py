"""Impossible combinations, each with its key, values and remedy; and the possible ones at their borders."""

import re

import pytest
from pydantic import ValidationError

from gyre_core.config import ConfigError, GyreConfig, load_config
from gyre_core.config.checks import ConflictError
from gyre_core.config.runnable import refuse_unbuilt

PPO = "experiment: {algorithm: ppo}"
RAY = "reward: {launcher: ray, ray: {"
S3 = "storage: {url: 's3://bucket/x',"
IMPOSSIBLE = [
    ("rollout: {samples_per_prompt: 1}", "rollout.samples_per_prompt", ["1 has nothing", "2 or more"]),
    ("rollout: {temperature: 0}", "rollout.temperature", ["temperature 0", "set it above 0"]),
    ("rollout: {temperature: 0, top_p: 0.9}", "rollout.temperature", ["top_p", "set it above 0"]),
    ("rollout: {temperature: 0, top_k: 5}", "rollout.temperature", ["top_k", "set it above 0"]),
    ("rollout: {min_worker: 5, max_worker: 4}", "rollout.min_worker", ["min_worker 5", "max_worker 4", "lower"]),
    ("rollout: {worker_count: 3, min_worker: 4}", "rollout.worker_count", ["worker_count 3", "4 to max_worker 24"]),
    ("rollout: {worker_count: 25}", "rollout.worker_count", ["worker_count 25", "max_worker 24", "widen"]),
    ("elastic: {pool_low_threshold: 0.8}", "elastic.pool_low_threshold", ["0.8 must be below", "0.8;", "raise"]),
    ("elastic: {pool_high_threshold: 0.1}", "elastic.pool_low_threshold", ["0.2 must be below", "0.1;"]),
    ("elastic: {enabled: true}\nrollout: {launcher: inline}", "rollout.launcher", ["launcher inline", "to pool"]),
    ("elastic: {enabled: true}\nrollout: {launcher: ray}", "rollout.launcher", ["launcher ray", "to pool"]),
    ("rollout: {quota: 0.9}", "rollout.quota", ["max_lag 0", "quota 0.9", "set quota to 1"]),
    ("rollout: {max_lag: 1, quota: 0.9}", "rollout.quota", ["inline", "quota 0.9", "leave it out"]),
    ("rollout: {launcher: pool, max_refills: 1, quota: 0.9}", "rollout.quota", ["quota 0.9", "set quota to 1"]),
    ("rollout: {launcher: pool}\nstorage: {url: 'memory://x'}", "storage.url", ["cannot see memory://x", "folder"]),
    ("rollout: {max_lag: 60}", "experience.time_window", ["max_lag 60", "60 s", "3600 s", "raise"]),
    ("learning: {update_steps: 129}", "learning.update_steps", ["129 updates", "batch_size 128", "128 or less"]),
    ("experience: {buffer_size: 1023}", "experience.buffer_size", ["1023", "1024", "1024 or more"]),
    ("rollout: {batch_size: 1024}", "experience.buffer_size", ["4096", "8192", "8192 or more"]),
    ("learning: {warmup_steps: 101}", "learning.warmup_steps", ["101", "100", "shorten"]),
    (f"{PPO}\nrollout: {{max_refills: 1}}", "rollout.max_refills", ["nothing is refilled", "set it to 0"]),
    (f"{PPO}\nlearning: {{policy_ratio: sequence}}", "learning.policy_ratio", ["token to token", "set it to token"]),
    (f"{PPO}\ncritic: {{warmup_steps: 100}}", "critic.warmup_steps", ["first 100 steps", "has 100", "shorten"]),
    ("rollout: {max_refills: 1}\nlearning: {skip_dead_groups: false}", "rollout.max_refills", ["skip_dead_groups"]),
    ("learning: {importance_mode: mask, importance_floor: 2}", "learning.importance_floor", ["floor 2", "cap 2"]),
    ("reward: {shaping: {overlong_buffer: 257}}", "reward.shaping.overlong_buffer", ["257 tokens", "256 or less"]),
    (
        "models: {reward: m}\nreward: {functions: [{path: a:reward_model}]}",
        "reward.functions",
        ["named reward_model", "rename"],
    ),
    ("reward: {functions: []}", "reward.functions", ["neither", "name one"]),
    ("reward: {functions: [{path: a:f}, {path: a:f}]}", "reward.functions", ["a:f is listed more than once", "once"]),
    ("reward: {ray: {num_gpus: 1}}", "reward.ray", ["for launcher ray", "set reward.launcher to ray"]),
    ("reward: {launcher: ray, processes: 2}", "reward.processes", ["2 processes", "reward.ray.tasks"]),
    ("reward: {launcher: ray}\nrollout: {launcher: pool}", "reward.ray.address", ["of its own", "ray start --head"]),
    (f"{RAY} address: 'ray://host:1'}}}}", "reward.ray.address", ["ray://host:1", "HOST:PORT"]),
    (f"{RAY} address: host}}}}", "reward.ray.address", ["host is no address", "auto"]),
    (f"{RAY} num_gpus: 1.5}}}}", "reward.ray.num_gpus", ["a share of one GPU or whole ones", "not 1.5"]),
    ("storage: {url: 's3://key:secret@bucket/x'}", "storage.url", ["user name or password", "environment"]),
    (f"{S3} endpoint: 'http://key:secret@h'}}", "storage.endpoint", ["user name or password", "storage.block"]),
    (f"{S3} endpoint: 'h:9000'}}", "storage.endpoint", ["no URL of a service", "https://"]),
    ("storage: {url: 's3:///x'}", "storage.url", ["s3://BUCKET/FOLDER"]),
    ("storage: {url: 's3://bucket/x?block=b'}", "storage.url", ["s3://BUCKET/FOLDER", "storage.endpoint and block"]),
    ("checkpoint: {warm_url: w}", "checkpoint.warm_url", ["no second store", "dual_write to true"]),
    ("checkpoint: {warm_url: w/, url: w, dual_write: true}", "checkpoint.warm_url", ["would be the first one"]),
    ("checkpoint: {exact: always}", "checkpoint.exact", ["for increments", "incremental to true"]),
    ("checkpoint: {replay_budget: 60}", "checkpoint.replay_budget", ["for increments", "leave it out"]),
    (
        "checkpoint: {keep_best: 1}\ndata: {evaluation_size: 0}",
        "checkpoint.keep_best",
        ["no prompt is held out", "evaluation_size to 1 or more"],
    ),
    ("checkpoint: {keep_best: 1}\nevaluation: {every: 0}", "checkpoint.keep_best", ["every 0", "every to 1 or more"]),
    ("checkpoint: {url: 's3:///x'}", "checkpoint.url", ["s3://BUCKET/FOLDER"]),
    ("storage: {endpoint: 'http://h'}", "storage.endpoint", ["storage.url names none", "leave it out"]),
    ("storage: {url: data, block: b}", "storage.block", ["storage.url names none", "leave it out"]),
    ("experiment: {output: 's3://bucket/runs'}", "experiment.output", ["is local", "storage.url"]),
]


@pytest.mark.parametrize(("text", "key", "fragments"), IMPOSSIBLE)
def test_an_impossible_combination_is_one_sentence(tmp_path, text, key, fragments):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    (problem,) = raised.value.problems
    assert problem.key == key
    assert re.fullmatch(re.escape(str(file)) + r":\d", problem.where)
    for fragment in fragments:
        assert fragment in problem.message
    assert problem.message.endswith(".")
    assert "secret" not in str(raised.value)


POSSIBLE = [
    "experiment: {algorithm: ppo}\nrollout: {samples_per_prompt: 1}",
    "experiment: {algorithm: ppo}\ncritic: {warmup_steps: 99}",
    "learning: {importance_floor: 2}",
    "learning: {importance_mode: mask, importance_floor: 1.9}",
    "reward: {shaping: {overlong_buffer: 256}}",
    "rollout: {temperature: 0.01, top_p: 0.9, top_k: 5}",
    "rollout: {min_worker: 4, max_worker: 4}",
    "rollout: {min_worker: 4, worker_count: 24}",
    "elastic: {pool_low_threshold: 0.79}",
    "elastic: {enabled: true}\nrollout: {launcher: pool}",
    "rollout: {launcher: pool, max_lag: 1, quota: 0.1}",
    "rollout: {max_lag: 59}",
    "rollout: {max_lag: 60}\nexperience: {clock: seconds}",
    "learning: {update_steps: 128}",
    "experience: {buffer_size: 1024}",
    "learning: {warmup_steps: 100}",
    "models: {reward: r}",
    "models: {reward: r}\nreward: {functions: [{path: a:f}]}",
    f"{RAY} num_gpus: 2, num_cpus: 0.5}}}}",
    f"{RAY} address: auto}}}}\nrollout: {{launcher: pool}}",
    f"{RAY} address: 'host:6379', num_gpus: 0.5}}}}",
    "checkpoint: {exact: auto, replay_budget: 30, keep_best: 0}\ndata: {evaluation_size: 0}",
    "checkpoint: {incremental: true, exact: replay, replay_budget: 60}",
    "checkpoint: {keep_best: 1}\ndata: {evaluation_size: 0, evaluation_path: held_out.jsonl}",
    "storage: {url: 's3://bucket/a@b'}",
    f"{S3} endpoint: 'http://127.0.0.1:9000', block: minio}}",
]


@pytest.mark.parametrize("text", POSSIBLE)
def test_a_combination_at_the_border_is_possible(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    load_config(file)


def test_the_line_is_that_of_the_setting_that_was_given(tmp_path):
    """The pool's size is a default here, and the prompts a step are what the user wrote."""
    file = tmp_path / "run.yaml"
    file.write_text("experiment:\n  seed: 1\nrollout:\n  batch_size: 1024\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    assert raised.value.problems[0].where == f"{file}:4"
    file.write_text("experiment:\n  seed: 1\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file, [("rollout.batch_size", "1024")])
    assert raised.value.problems[0].where == "command line"


def test_all_conflicts_are_found_in_one_go():
    with pytest.raises(ValidationError) as raised:
        GyreConfig.model_validate({"rollout": {"samples_per_prompt": 1, "quota": 0.5}, "reward": {"functions": []}})
    conflicts = raised.value.errors()[0]["ctx"]["error"]
    assert isinstance(conflicts, ConflictError)
    assert [conflict.key for conflict in conflicts.conflicts] == [
        "rollout.samples_per_prompt",
        "rollout.quota",
        "reward.functions",
    ]


UNBUILT = [
    ({"rollout": {"engine": "vllm"}}, "rollout.engine", "vllm", "set it to transformers"),
    ({"rollout": {"launcher": "ray"}}, "rollout.launcher", "ray", "set it to pool"),
    ({"storage": {"url": "memory://b/x"}}, "storage.url", "memory://b/x", "local folder"),
    ({"checkpoint": {"url": "gs://b/x"}}, "checkpoint.url", "gs://b/x", "local folder"),
]


@pytest.mark.parametrize(("values", "key", "value", "remedy"), UNBUILT)
def test_what_is_not_built_is_refused_by_name(values, key, value, remedy):
    with pytest.raises(ConfigError) as raised:
        refuse_unbuilt(GyreConfig.model_validate(values))
    (problem,) = raised.value.problems
    assert problem.key == key
    assert problem.message.startswith(f"`{value}` is not built yet; ")
    assert remedy in problem.message


def test_everything_unbuilt_is_named_in_one_error():
    values = {"rollout": {"engine": "vllm", "launcher": "ray"}, "checkpoint": {"incremental": True}}
    with pytest.raises(ConfigError) as raised:
        refuse_unbuilt(GyreConfig.model_validate(values))
    assert [problem.key for problem in raised.value.problems] == [
        "rollout.engine",
        "rollout.launcher",
    ]


@pytest.mark.parametrize("url", ["/data/run", "data/run", "file:///data/run", "s3://bucket/run"])
def test_the_defaults_local_folders_and_s3_are_built(url):
    refuse_unbuilt(GyreConfig())
    refuse_unbuilt(GyreConfig.model_validate({"storage": {"url": url}}))
