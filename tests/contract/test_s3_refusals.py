"""A place on S3 that cannot hold a run is refused in one sentence, before anything expensive, without secrets."""

from __future__ import annotations

import dataclasses
import re
import traceback

import pytest
from s3_proxy import faulty_proxy
from s3_servers import BUCKET, READER, free_ports

from deployments.cli import main
from gyre_core.config import GyreConfig
from gyre_core.storage import S3Options
from gyre_core.storage.s3_options import remember_block
from gyre_core.training.build import check_inputs
from gyre_core.training.resume import NEW
from gyre_core.training.run_folder import check_storage


@pytest.fixture
def no_access(monkeypatch, tmp_path):
    """An environment without any credentials of S3."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


def refusal(url: str, options: S3Options) -> str:
    """What the check before a run says of a place."""
    remember_block("refused", options)
    with pytest.raises(ValueError, match=r"^storage\.url: ") as caught:
        check_storage(GyreConfig.model_validate({"storage": {"url": url, "block": "refused"}}))
    whole = "".join(traceback.format_exception(caught.value))
    for secret in (options.secret_key, options.session_token):
        assert secret is None or secret not in whole
    return str(caught.value)


def test_a_place_that_can_hold_a_run_passes_and_nothing_is_left_there(moto, seaweedfs):
    for server in (moto, seaweedfs):
        url = server.url
        check_storage(GyreConfig.model_validate({"storage": {"url": url, "block": server.name}}))
        assert server.storage(url).folders() == server.storage(url).list() == []


@pytest.mark.parametrize("name", ["moto", "seaweedfs"])
def test_a_missing_bucket(request, name):
    server = request.getfixturevalue(name)
    text = refusal("s3://no-such-bucket/runs", server.options)
    assert f"there is no bucket no-such-bucket at {server.options.endpoint}; create it" in text


def test_no_permission_names_what_is_missing(seaweedfs):
    reader = dataclasses.replace(seaweedfs.options, access_key=READER.access_key, secret_key=READER.secret_key)
    text = refusal(seaweedfs.url, reader)
    assert f"no permission for s3://{BUCKET}/" in text
    assert "need s3:PutObject there" in text


@pytest.mark.parametrize(
    "changed", [{"access_key": "nobody"}, {"secret_key": "guessed-secret-3"}], ids=["user", "secret"]
)
def test_refused_credentials(seaweedfs, changed):
    text = refusal(seaweedfs.url, dataclasses.replace(seaweedfs.options, **changed))
    assert "refuses the credentials" in text
    assert "AWS_SECRET_ACCESS_KEY" in text


@pytest.mark.usefixtures("no_access")
def test_no_credentials(seaweedfs):
    text = refusal(seaweedfs.url, S3Options(endpoint=seaweedfs.options.endpoint))
    assert f"there are no credentials for s3://{BUCKET}/" in text
    assert "storage.block" in text


def test_a_service_that_lets_a_second_writer_in(moto):
    with faulty_proxy(moto.options.endpoint) as (proxy, address):
        proxy.add("PUT", "", "unconditional", times=10_000)
        url = moto.url
        text = refusal(url, dataclasses.replace(moto.options, endpoint=address))
    assert "lets a second writer take a name that is taken" in text
    assert moto.storage(url).folders() == []
    with faulty_proxy(moto.options.endpoint) as (proxy, address):
        proxy.add("POST", "uploadId=", "unconditional", times=10_000)
        text = refusal(moto.url, dataclasses.replace(moto.options, endpoint=address))
    assert "lets a second writer take a name that is taken" in text


async def test_an_unreachable_service_is_told_before_a_run_folder_is_made(tmp_path):
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    remember_block("nowhere", S3Options(endpoint, "us-east-1", "key", "secret-4"))
    config = GyreConfig.model_validate(
        {
            "experiment": {"output": str(tmp_path / "runs")},
            "models": {"tiny": {"hidden_size": 16, "layers": 1}},
            "storage": {"url": "s3://bucket/runs", "block": "nowhere"},
        }
    )
    with pytest.raises(ValueError, match=f"storage.url: s3://bucket/runs/.*{endpoint} did not answer within 5 s"):
        await check_inputs(config, run_id=None, origin=NEW)
    assert not (tmp_path / "runs").exists()


def test_the_command_line_tells_it_in_a_line(tmp_path, monkeypatch, capsys, moto):
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "run.yaml"
    file.write_text(f"experiment: {{output: {tmp_path}/runs}}\nmodels: {{tiny: {{hidden_size: 16, layers: 1}}}}\n")
    assert main(["train", "--config", str(file), "--storage.url", "s3://no-such-bucket/runs"]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert re.match(r"storage\.url: there is no bucket no-such-bucket at http://127", told[0])
    assert not (tmp_path / "runs").exists()
