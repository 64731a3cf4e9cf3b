"""The compose file, and the secrets that it and the Kubernetes manifests need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from corpus_server.admission.access import read_tokens
from corpus_server.settings import all_settings
from tests.docker.images import DOCKER, image_environment, image_user, worker_arguments
from tests.docker.manifests import KUBERNETES, documents
from tests.serving import ROOT

(COMPOSE,) = documents(DOCKER / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
REPLICAS = ("server-1", "server-2")
GRACE = next(float(each.default) for each in all_settings() if each.name == "grace_seconds")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docker") / "secrets"
    make_secrets(folder)
    return folder


def make_secrets(folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run([DOCKER / "make_secrets", folder], env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
    for source, _ in (each.split(":")[:2] for each in service.get("volumes", ())):
        if source.startswith("./"):
            assert (DOCKER / source).exists(), source
        elif not source.startswith("$"):
            assert source in COMPOSE["volumes"]


def test_folders_in_memory_belong_to_who_writes_them() -> None:
    """The proxy did not come back from a restart: by then the engine had forgotten that anybody may write."""
    for service in SERVICES.values():
        for path, _, options in (each.partition(":") for each in service["tmpfs"]):
            if path != "/tmp":  # which every image has, with the right mode
                user, _, group = service["user"].partition(":")
                assert {f"uid={user}", f"gid={group}"} <= set(options.split(",")), path


def test_volumes_and_services_are_all_used() -> None:
    named = {each.split(":")[0] for service in SERVICES.values() for each in service.get("volumes", ())}
    assert set(COMPOSE["volumes"]) <= named
    waited = {name for service in SERVICES.values() for name in service.get("depends_on", ())}
    assert waited <= set(SERVICES)


@pytest.mark.parametrize("name", REPLICAS)
def test_the_replicas_run_with_settings_that_exist(name: str) -> None:
    service = SERVICES[name]
    command, _, *options = service["command"]
    assert command == "serve"
    known = {"--" + each.name.replace("_", "-") for each in all_settings()}
    assert {each for each in options if each.startswith("--")} <= known
    assert options[options.index("--tokens") + 1] == "/run/secrets/" + service["secrets"][0]
    folders = {each.split(":")[1] for each in service["volumes"]}
    assert folders == {f"{base}/corpus-server" for base in image_environment("Dockerfile").values()}
    assert float(service["stop_grace_period"].rstrip("s")) > GRACE
    assert name in (DOCKER / "nginx.conf").read_text()


def test_the_image_is_healthy_when_it_is_ready() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    (check,) = re.findall(r"HEALTHCHECK .*\\\n\s*CMD (.*)", text)
    assert "127.0.0.1:8000/readyz" in check
    assert re.findall(r"^EXPOSE (\d+)$", text, re.MULTILINE) == ["8000"]
    assert image_user("Dockerfile") == image_user("worker.Dockerfile") > 0
    for name in REPLICAS:
        assert "healthcheck" not in SERVICES[name]  # the image's own
        assert SERVICES["proxy"]["depends_on"][name]["condition"] == "service_healthy"


def test_the_worker_asks_the_proxy_with_its_token() -> None:
    service = SERVICES["worker"]
    words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", each) for each in service["command"]]
    args = worker_arguments(words)
    assert args.urls == ["http://proxy:8080"]
    assert "listen 8080;" in (DOCKER / "nginx.conf").read_text()
    assert str(args.token_file) == "/run/secrets/" + service["secrets"][0]


def test_prometheus_asks_each_replica_with_its_token() -> None:
    (configuration,) = documents(DOCKER / "prometheus" / "prometheus.yml")
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{name}:8000" for name in REPLICAS]}]
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"


def test_all_secrets_that_are_asked_for_are_made(secrets: Path) -> None:
    made = {path.name for path in secrets.iterdir()}
    assert {Path(each["file"]).name for each in COMPOSE["secrets"].values()} <= made
    used = {name for service in SERVICES.values() for name in service.get("secrets", ())}
    assert used == set(COMPOSE["secrets"])
    environments = {name for service in SERVICES.values() for name in service.get("env_file", ())}
    assert {Path(name).name for name in environments} <= made
    (base,) = documents(KUBERNETES / "base" / "kustomization.yaml")
    assert {Path(name).name for each in base["secretGenerator"] for name in each["files"]} <= made


def test_the_secrets_fit_together(secrets: Path) -> None:
    scopes = {caller.name: caller.scopes for caller in read_tokens(secrets / "tokens.toml")[0].values()}
    assert scopes == {"training": {"read:*", "plans"}, "prometheus": {"metrics"}}
    for name in scopes:
        token = (secrets / f"{name}.token").read_text().strip()
        assert token not in (secrets / "tokens.toml").read_text()
    store = dict(line.split("=", 1) for line in (secrets / "store.env").read_text().split())
    assert store["AWS_SECRET_ACCESS_KEY"] == store["ROOT_SECRET_ACCESS_KEY"]
    assert secrets.stat().st_mode & 0o777 == 0o700
    with pytest.raises(subprocess.CalledProcessError):
        make_secrets(secrets)


def test_secrets_are_made_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """Without the command, or if it fails: no folder that the next call would refuse."""
    shutil.copy(DOCKER / "make_secrets", tmp_path)  # beside no virtual environment
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("bash", "dirname", "mkdir", "mktemp", "rm", "openssl"):
        (commands / name).symlink_to(str(shutil.which(name)))
    script = [str(shutil.which("bash")), tmp_path / "make_secrets", tmp_path / "docker" / "secrets"]
    for content, said in ((None, "the command corpus-server is not there"), ("#!/bin/bash\nexit 3\n", "")):
        if content is not None:
            (commands / "corpus-server").write_text(content)
            (commands / "corpus-server").chmod(0o755)
        ended = subprocess.run(
            script, env={"PATH": str(commands)}, capture_output=True, text=True, check=False
        )
        assert ended.returncode != 0
        assert said in ended.stderr
        assert not list(tmp_path.glob("docker/*"))


def test_secrets_are_not_committed() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"docker/secrets/", "docker/kubernetes/base/secrets/"} <= set(ignored)
