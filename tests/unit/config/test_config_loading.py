"""Loading: precedence, types, positions, suggestions, paths, and the round trip."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gyre_core.config import ConfigError, GyreConfig, dump_config, load_config
from gyre_core.config.checks import ConflictError
from gyre_core.config.fields import list_fields
from gyre_core.config.suggestions import FOREIGN_NAMES, suggest_key
from gyre_core.config.template import TEMPLATE

ROOT = Path(__file__).parents[3]


@pytest.fixture
def load(tmp_path):
    """Load a text as a configuration file."""

    def load_text(text, *overrides):
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config(file, overrides)

    return load_text


@pytest.fixture
def problems(load):
    """The mistakes of a text, each as `LINE: key: message` (or `command line: …`)."""

    def problems_of(text, *overrides):
        with pytest.raises(ConfigError) as raised:
            load(text, *overrides)
        return [re.sub(r"^.*run\.yaml:?", "", str(problem)) for problem in raised.value.problems]

    return problems_of


def test_the_package_imports_no_torch():
    code = "import gyre_core.config, deployments.cli, sys; print([n for n in ('torch', 'prefect') if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_specified_configuration_loads_as_it_stands():
    config = load_config(ROOT / "examples" / "spec.yaml")
    assert config.experiment.model_dump(include={"name", "algorithm", "seed"}) == {
        "name": "qwen_grpo_demo",
        "algorithm": "grpo",
        "seed": 42,
    }
    folder = ROOT / "examples"
    assert config.models.policy == config.models.ref == str(folder / "qwen-base-7b")
    assert config.models.reward == str(folder / "reward-model-path")
    rollout = config.rollout
    assert (rollout.engine, rollout.batch_size, rollout.max_tokens) == ("vllm", 128, 1024)
    assert (rollout.temperature, rollout.top_p) == (0.8, 0.95)
    assert (rollout.worker_count, rollout.min_worker, rollout.max_worker) == (8, 4, 24)
    learning = config.learning
    assert learning.lr == 5e-7
    assert isinstance(learning.lr, float)
    assert (learning.kl_coef, learning.update_steps, learning.max_grad_norm) == (0.05, 8, 0.5)
    assert learning.optimizer == "adamw"
    experience = config.experience
    assert (experience.buffer_size, experience.time_window, experience.priority_alpha) == (4096, 3600.0, 0.6)
    elastic = config.elastic
    assert (elastic.enabled, elastic.scale_interval, elastic.scale_cooling) == (True, 180.0, 300.0)
    assert (elastic.pool_low_threshold, elastic.pool_high_threshold) == (0.2, 0.8)
    checkpoint = config.checkpoint
    assert (checkpoint.interval, checkpoint.incremental, checkpoint.dual_write) == (600.0, True, True)
    # What it does not name follows from what it does.
    assert rollout.samples_per_prompt == 8
    assert (rollout.launcher, rollout.max_lag, rollout.quota) == ("pool", 1, 0.9)
    assert (experience.clock, config.reward.functions) == ("seconds", ())


def test_every_example_loads_and_names_files_that_exist():
    files = [file for file in (ROOT / "examples").glob("*.yaml") if file.name != "spec.yaml"]
    assert len(files) >= 2
    for file in files:
        config = load_config(file)
        assert config.data.path == "arithmetic" or Path(config.data.path).is_file()
        for function in config.reward.functions:
            assert ".py:" not in function.path or Path(function.path.rpartition(":")[0]).is_file()


def test_the_template_loads_and_explains_every_setting(load):
    config = load(TEMPLATE)
    assert config.rollout.launcher == "inline"
    assert (config.learning.lr, config.learning.update_steps) == (1e-3, 8)


def test_parsed_yaml_of_version_1_1_is_accepted_too():
    """PyYAML reads `5e-7` as text; a Prefect parameter may come that way."""
    assert GyreConfig.model_validate(yaml.safe_load("learning: {lr: 5e-7}")).learning.lr == 5e-7


# -- dependent defaults ------------------------------------------------------------------------------------------------

DEPENDENT = [
    ({}, ("inline", 0, 1.0, "steps")),
    ({"elastic": {"enabled": True}}, ("pool", 1, 0.9, "seconds")),
    ({"rollout": {"launcher": "ray"}}, ("ray", 1, 0.9, "seconds")),
    ({"rollout": {"launcher": "pool", "max_lag": 0}}, ("pool", 0, 1.0, "seconds")),
    ({"rollout": {"max_lag": 2}}, ("inline", 2, 1.0, "steps")),
    ({"rollout": {"max_lag": 2}, "experience": {"clock": "seconds"}}, ("inline", 2, 1.0, "seconds")),
    ({"rollout": {"launcher": "pool", "max_lag": 2, "quota": 0.5}}, ("pool", 2, 0.5, "seconds")),
    ({"rollout": {"launcher": "pool", "max_refills": 1}}, ("pool", 1, 1.0, "seconds")),
]


@pytest.mark.parametrize(("values", "expected"), DEPENDENT)
def test_defaults_follow_from_other_settings(values, expected):
    config = GyreConfig.model_validate(values)
    rollout = config.rollout
    assert (rollout.launcher, rollout.max_lag, rollout.quota, config.experience.clock) == expected


@pytest.mark.parametrize(("in_flight", "samples", "groups"), [(256, 8, 32), (256, 3, 86), (4, 8, 1)])
def test_a_request_fills_the_engine(in_flight, samples, groups):
    config = GyreConfig.model_validate({"rollout": {"sequences_in_flight": in_flight, "samples_per_prompt": samples}})
    assert config.rollout.groups_per_request == groups


def test_sections_given_as_models_have_the_same_defaults():
    from gyre_core.config.sections import ElasticConfig, RolloutConfig

    config = GyreConfig(elastic=ElasticConfig(enabled=True), rollout=RolloutConfig(min_worker=4))
    assert (config.rollout.launcher, config.rollout.worker_count) == ("pool", 4)


def test_validation_leaves_the_given_values_alone():
    values = {"elastic": {"enabled": True}, "rollout": {}, "models": {"reward": "/r"}}
    GyreConfig.model_validate(values)
    assert values == {"elastic": {"enabled": True}, "rollout": {}, "models": {"reward": "/r"}}


# -- odd scalars -------------------------------------------------------------------------------------------------------

ODD = [
    # field, spelling, value or the end of the error
    ("learning.lr", "1e-5", 1e-05),
    ("experience.time_window", "1.0e6", 1000000.0),
    ("learning.lr", "1", 1.0),
    ("learning.lr", "'1e-5'", 1e-05),
    ("monitor.tensorboard", "on", "expected true | false, got the text 'on'; write true."),
    ("monitor.tensorboard", "off", "expected true | false, got the text 'off'; write false."),
    ("monitor.tensorboard", "1", "expected true | false, got the number 1; choose a value within these bounds."),
    ("experiment.seed", "012", "expected whole number ≥ 0, got the text '012'; write a plain number, such as 12."),
    ("experiment.seed", "true", "expected whole number ≥ 0, got the truth value true; write a whole number."),
    ("experiment.seed", "1.5", "expected whole number ≥ 0, got the number 1.5; write a whole number."),
    ("experiment.steps", "1e3", "expected whole number ≥ 1, got the number 1000.0; write 1000."),
    (
        "experiment.steps",
        "1_000",
        "expected whole number ≥ 1, got the text '1_000'; write a plain number, such as 1000.",
    ),
    ("rollout.timeout", "1:30", "expected number > 0, got the text '1:30'; write a plain number, such as 1800."),
    ("rollout.timeout", ".inf", "expected number > 0, got the text '.inf'; write a plain number, such as 1800."),
    ("rollout.timeout", "1e999", "expected number > 0, got the number inf; choose a value within these bounds."),
    ("rollout.timeout", "true", "expected number > 0, got the truth value true; write a number."),
    ("rollout.timeout", "-1", "expected number > 0, got the number -1; choose a value within these bounds."),
    ("rollout.timeout", "null", "expected number > 0, got nothing (null); leave the key out to have the default."),
    ("experiment.name", "2025_01", "2025_01"),
    ("experiment.name", "012", "012"),
    ("experiment.name", "on", "on"),
    ("experiment.name", "2025-01-01", "2025-01-01"),
    ("experiment.name", "'2025'", "2025"),
    ("experiment.name", "2025", "expected text, got the number 2025; put it in quotes."),
    ("experiment.name", "true", "expected text, got the truth value true; put it in quotes."),
    ("experiment.output", "''", "expected text, got the text ''; write some text."),
    ("experiment.tags", "a", "expected list of text, got the text 'a'; write it as [first, second]."),
    ("learning.kl_estimator", "K3", "expected k1 | k2 | k3, got the text 'K3'; write k3."),
    ("learning.kl_estimator", "none", "expected k1 | k2 | k3, got the text 'none'; choose one of k1, k2, k3."),
    ("learning.betas", "[0.9, 0.99, 0.999]", "got 3 elements; leave out the rest."),
]


@pytest.mark.parametrize(("name", "spelling", "expected"), ODD)
def test_odd_scalars_are_the_value_meant_or_an_error(load, name, spelling, expected):
    section, key = name.split(".")
    text = f"{section}:\n  {key}: {spelling}\n"
    if isinstance(expected, str) and expected.endswith("."):
        with pytest.raises(ConfigError) as raised:
            load(text)
        (problem,) = raised.value.problems
        assert problem.where.endswith("run.yaml:2")
        assert problem.key == name
        assert problem.message.endswith(expected)
    else:
        value = getattr(getattr(load(text), section), key)
        assert value == expected
        assert type(value) is type(expected)


# -- duplicate, unknown, misplaced -------------------------------------------------------------------------------------


def test_a_duplicate_names_both_lines(problems):
    (problem,) = problems("rollout:\n  max_tokens: 1\n  top_k: 0\n  max_tokens: 2\n")
    assert problem.startswith("4: `max_tokens` is given twice, on lines 2 and 4;")


def test_merge_keys_may_be_overridden(load):
    config = load("models:\n  warm_start: &w {lr: 1e-2, batch_size: 4}\nlearning:\n  <<: {lr: 2e-2}\n  lr: 3e-2\n")
    assert (config.models.warm_start.lr, config.learning.lr) == (1e-2, 3e-2)


UNKNOWN = [
    ("learning: {learnig_rate: 1}", "learning.learnig_rate", "did you mean learning.lr?"),
    ("lr: 1e-5", "lr", "did you mean learning.lr or critic.lr or models.warm_start.lr?"),
    ("rollout: {lr: 1e-5}", "rollout.lr", "did you mean learning.lr or critic.lr or models.warm_start.lr?"),
    ("learning: {kl_coeff: 1}", "learning.kl_coeff", "did you mean learning.kl_coef?"),
    ("learning: {max-grad-norm: 1}", "learning.max-grad-norm", "did you mean learning.max_grad_norm?"),
    ("learning: {max_tokens: 1}", "learning.max_tokens", "did you mean rollout.max_tokens?"),
    ("rollouts: {max_tokens: 1}", "rollouts", "did you mean rollout?"),
    ("rollout: {num_generations: 4}", "rollout.num_generations", "did you mean rollout.samples_per_prompt?"),
    ("learning: {beta: 1}", "learning.beta", "did you mean learning.kl_coef or learning.betas?"),
    ("learning.lr: 1", "learning.lr", "write `lr` below `learning:`."),
    ("models: {tiny: {layer: 1}}", "models.tiny.layer", "did you mean models.tiny.layers?"),
    ("storage: {zzz: 1}", "storage.zzz", "known here: url, endpoint, block, min_free, pause_timeout."),
    ("reward: {functions: [{path: a, weigth: 1}]}", "reward.functions[0].weigth", "mean reward.functions[0].weight?"),
]


@pytest.mark.parametrize(("text", "key", "remedy"), UNKNOWN)
def test_an_unknown_key_is_refused_with_what_was_meant(problems, text, key, remedy):
    (problem,) = problems(text)
    assert problem.startswith(f"1: {key}: there is no such setting; ")
    assert problem.endswith(remedy)


def test_foreign_names_lead_to_settings():
    assert set(FOREIGN_NAMES.values()) <= {field.name for field in list_fields()}


@pytest.mark.parametrize("name", [field.name for field in list_fields() if len(field.name.rpartition(".")[2]) >= 5])
def test_a_letter_dropped_from_a_key_is_answered_with_that_key(name):
    section, _, key = name.rpartition(".")
    slips = {f"{section}.{key[:at]}{key[at + 1 :]}" for at in range(1, len(key))} - {f.name for f in list_fields()}
    for slip in slips:
        assert name in suggest_key(slip)


def test_all_mistakes_are_told_at_once(problems):
    found = problems("lr: 1\nrollout: 5\nlearning:\n  lr: on\n  lr: 2\nreward:\n  functions: [{weight: 1}]\n")
    assert [problem.split(":")[0] for problem in found] == ["5", "2", "7", "4", "1"]
    assert "2: rollout: expected a section of keys, got the number 5; write its keys below it, indented." in found
    assert "7: reward.functions[0]: `path` is missing in the keys weight; give it." in found


def test_empty_sections_mean_their_defaults(load):
    assert load("learning:\nmodels:\n  tiny:\n  # layers: 3\n") == GyreConfig()
    assert load("") == GyreConfig()


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda file: None, "there is no such file"),
        (lambda file: file.mkdir(), "this is a folder"),
        (lambda file: file.write_bytes(b"a: \xff"), "byte 3 is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, make, fragment):
    file = tmp_path / "run.yaml"
    make(file)
    with pytest.raises(ConfigError, match=fragment) as raised:
        load_config(file)
    assert str(raised.value).startswith(str(file))


# -- command line ------------------------------------------------------------------------------------------------------


def test_defaults_give_way_to_the_file_and_the_file_to_the_command_line(load):
    config = load("rollout:\n  batch_size: 64\n  max_tokens: 7\n", ("rollout.max_tokens", "9"))
    assert (config.rollout.batch_size, config.rollout.max_tokens, config.rollout.samples_per_prompt) == (64, 9, 8)


OVERRIDES = [
    ("learning.lr", "1e-5", 1e-05),
    ("experiment.name", "012", "012"),
    ("experiment.name", "2025", "2025"),
    ("models.tiny.layers", "3", 3),
    ("monitor.tensorboard", "false", False),
    ("rollout.stop", '["a: b", "on"]', ("a: b", "on")),
    ("learning.betas", "[0, 0.5]", (0.0, 0.5)),
    ("storage.url", "null", None),
]


@pytest.mark.parametrize(("name", "text", "value"), OVERRIDES)
def test_overrides_are_read_by_the_type_of_their_setting(load, name, text, value):
    config = load("", (name, text))
    for part in name.split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


def test_mistakes_on_the_command_line_say_so(problems):
    found = problems("learning:\n  lr: 2\n", ("learning.lr", "on"), ("lrr.x", "1"), ("rollout.stop", "["))
    assert [problem.split(": ")[:2] for problem in found] == [
        ["command line", "lrr.x"],
        ["command line", "rollout.stop"],
        ["command line", "learning.lr"],
    ]


def test_an_option_given_twice_is_refused(problems):
    (problem,) = problems("", ("learning.lr", "1"), ("learning.lr", "2"))
    assert problem == "command line: learning.lr: this is given twice; keep one of them."


# -- paths -------------------------------------------------------------------------------------------------------------


def test_relative_paths_start_at_the_file_or_at_the_working_directory(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (folder / "run.yaml").write_text(
        "data: {path: p.jsonl, evaluation_path: /abs/e.jsonl}\n"
        "models: {policy: ../m, reward: r}\n"
        "reward: {functions: [{path: 'r.py:f'}, {path: 'package.module:f'}, {path: exact_match}]}\n"
    )
    config = load_config(Path("..", "configs", "run.yaml"), [("models.ref", "ref")])
    assert (config.data.path, config.data.evaluation_path) == (str(folder / "p.jsonl"), "/abs/e.jsonl")
    assert (config.models.policy, config.models.reward) == (str(tmp_path / "m"), str(folder / "r"))
    assert config.models.ref == str(elsewhere / "ref")
    assert [function.path for function in config.reward.functions] == [
        f"{folder / 'r.py'}:f",
        "package.module:f",
        "exact_match",
    ]
    assert config.experiment.output == "runs"


def test_built_in_names_and_urls_are_no_paths(load):
    config = load("data: {path: arithmetic}\nmodels: {policy: tiny-qwen3, ref: 's3://bucket/ref'}\n")
    assert (config.data.path, config.models.policy, config.models.ref) == (
        "arithmetic",
        "tiny-qwen3",
        "s3://bucket/ref",
    )
    config = load("data: {path: 'reasoning_gym:chain_sum', evaluation_path: 'reasoning_gym:gcd'}\n")
    assert (config.data.path, config.data.evaluation_path) == ("reasoning_gym:chain_sum", "reasoning_gym:gcd")


# -- round trip --------------------------------------------------------------------------------------------------------

PATHS = ("data.path", "data.evaluation_path", "models.policy", "models.reward", "models.critic", "models.ref")
FUNCTIONS = st.lists(
    st.fixed_dictionaries(
        {"path": st.from_regex(r"\A[a-z_]{1,9}(:[a-z_]{1,9})?\Z")},
        optional={"weight": st.floats(-1e6, 1e6)},
    ),
    max_size=3,
)


def values_of(field):
    """All values that the words of a field's kind allow."""
    if field.name in PATHS:
        return st.from_regex(r"\A/[a-z0-9 é#:'-]{1,9}\Z")
    if field.name == "experiment.name":
        return st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,9}\Z")
    if field.name == "reward.functions":
        return FUNCTIONS
    if field.kind.startswith("{name"):
        return st.dictionaries(st.text(min_size=1), st.one_of(st.integers(), st.booleans(), st.text()), max_size=3)
    if field.kind == "true | false":
        return st.booleans()
    if re.fullmatch(r"[a-z0-9_]+( \| [a-z0-9_]+)*", field.kind) and field.kind not in ("text", "number"):
        return st.sampled_from(field.kind.split(" | "))
    if field.kind.startswith("list of text"):
        return st.lists(st.text(min_size=1), max_size=3)
    if field.kind.startswith("list of 2"):
        return st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2).map(list)
    if field.kind == "text":
        return st.text(min_size=1)
    bounds = {sign: float(number) for sign, number in re.findall(r"([≥>≤<]) ([0-9.e-]+)", field.kind)}
    low, high = bounds.get("≥", bounds.get(">")), bounds.get("≤", bounds.get("<", 1e9))
    if field.kind.startswith("whole number"):
        step = 8 if "multiple of 8" in field.kind else 1
        return st.integers(int(low) // step, int(high) // step).map(lambda number: number * step)
    low = -1e9 if low is None else low
    return st.floats(low, high, exclude_min=">" in bounds, exclude_max="<" in bounds)


@st.composite
def configurations(draw):
    """A valid configuration with up to a dozen settings drawn from all that there are."""
    fields = draw(st.lists(st.sampled_from(list_fields()), max_size=12, unique=True))
    values = {}
    for field in fields:
        *sections, key = field.name.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = draw(values_of(field))
    try:
        return GyreConfig.model_validate(values)
    except ValidationError as error:
        # Each value is valid by itself; only combinations may be impossible.
        if any(not isinstance(details.get("ctx", {}).get("error"), ConflictError) for details in error.errors()):
            raise
        assume(False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(config=configurations())
def test_any_configuration_reads_back_equal(tmp_path, config):
    file = tmp_path / f"{os.getpid()}.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file) == config


def test_a_dump_is_read_alike_by_other_readers():
    """Also by those that take a plain `off` for false."""
    assert yaml.safe_load(dump_config(GyreConfig())) == GyreConfig().model_dump(mode="json")
    words = ("off", "no", "Yes", "1e5", "0x1f", "2026-11-30", "null", "~", "12", "1:30", "plain")
    config = GyreConfig.model_validate({"experiment": {"tags": words}})
    assert yaml.safe_load(dump_config(config))["experiment"]["tags"] == list(words)


def test_a_dump_holds_every_setting():
    written = yaml.safe_load(dump_config(GyreConfig()))
    for field in list_fields():
        inner = written
        for part in field.name.split("."):
            inner = inner[part]
