"""The manifests are right by the schemas of Kubernetes, and agree with each other, images and server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path, PurePath
from typing import Any

import kubernetes_validate
import pytest
import yaml

from corpus_server.settings import Settings, default_cache_dir, default_state_dir
from tests.corpora import some_tokens, write_raw
from tests.docker.images import image_environment, image_user, worker_arguments
from tests.docker.manifests import (
    KUBERNETES,
    VARIANTS,
    Manifest,
    container_of,
    documents,
    mounted_files,
    of_kind,
    pod_of,
    render,
)
from tests.serving import RunningServer
from tests.tokens import Tokens

RENDERED = {name: render(KUBERNETES / name) for name in VARIANTS}
(JOB,) = documents(KUBERNETES / "training" / "job.yaml")
WORKLOADS = {name: of_kind(each, "Deployment", "StatefulSet") for name, each in RENDERED.items()}
PODS = {**WORKLOADS, "training": JOB}
variants = pytest.mark.parametrize("variant", VARIANTS)


def settings(variant: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Read the settings as a pod does, whose image sets the environment."""
    for name, value in image_environment("Dockerfile").items():
        monkeypatch.setenv(name, value)
    return Settings.read(KUBERNETES / variant / "corpus.toml")


def test_every_file_is_used() -> None:
    used = {*KUBERNETES.glob("*/kustomization.yaml"), KUBERNETES / "training" / "job.yaml"}
    for path in KUBERNETES.glob("*/kustomization.yaml"):
        (kustomization,) = documents(path)
        made = [*kustomization.get("configMapGenerator", ()), *kustomization.get("secretGenerator", ())]
        files = [name for each in made for name in [*each.get("files", ()), *each.get("envs", ())]]
        used |= {path.parent / name for name in [*kustomization["resources"], *files]}
    there = {path for path in KUBERNETES.rglob("*") if path.is_file() and path.parent.name != "secrets"}
    assert there == {path for path in used if path.is_file() and path.parent.name != "secrets"}


@pytest.mark.parametrize("name", [*VARIANTS, "training"])
def test_the_schemas_of_kubernetes_accept_every_object(name: str) -> None:
    manifests = RENDERED.get(name, [JOB])
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    assert len(manifests) == len({(each["kind"], each["metadata"]["name"]) for each in manifests})


def test_the_schemas_would_notice_a_wrong_field() -> None:
    wrong = json.loads(json.dumps(JOB))
    wrong["spec"]["backofLimit"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="backofLimit"):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", PODS)
def test_pods_may_do_nothing_that_they_need_not(name: str) -> None:
    pod, container = pod_of(PODS[name])["spec"], container_of(PODS[name])
    user = image_user("worker.Dockerfile" if name == "training" else "Dockerfile")
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] | {"fsGroup": 0, "fsGroupChangePolicy": ""} == {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "seccompProfile": {"type": "RuntimeDefault"},
        "fsGroup": 0,
        "fsGroupChangePolicy": "",
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert container["resources"]["limits"]["memory"]


def test_served_files_keep_their_owners() -> None:
    """fsGroup would change the ctime of served shards: they would count as changed."""
    pod = pod_of(WORKLOADS["mounted"])["spec"]
    assert "fsGroup" not in pod["securityContext"]
    (corpora,) = (each for each in pod["volumes"] if "persistentVolumeClaim" in each)
    assert corpora["persistentVolumeClaim"]["readOnly"] is True


@variants
def test_selectors_ports_and_targets_match(variant: str) -> None:
    manifests, workload = RENDERED[variant], WORKLOADS[variant]
    labels = pod_of(workload)["metadata"]["labels"].items()
    service = of_kind(manifests, "Service")
    network = of_kind(manifests, "NetworkPolicy")["spec"]
    for selector in (
        workload["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        of_kind(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        network["podSelector"]["matchLabels"],
    ):
        assert selector
        assert selector.items() <= labels
    (port,) = container_of(workload)["ports"]
    ((served,), (allowed,)) = service["spec"]["ports"], network["ingress"][0]["ports"]
    assert served["targetPort"] == allowed["port"] == port["name"]
    assert served["port"] == port["containerPort"]
    assert network["policyTypes"] == ["Ingress", "Egress"]
    assert ("egress" in network) == (variant == "staged")  # where there is no list, nothing may leave
    client, _ = network["ingress"][0]["from"]
    assert client["podSelector"]["matchLabels"].items() <= pod_of(JOB)["metadata"]["labels"].items()
    if variant == "mounted":
        scaler = of_kind(manifests, "HorizontalPodAutoscaler")["spec"]
        target = scaler["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"])
        assert scaler["metrics"][0]["resource"]["name"] in container_of(workload)["resources"]["requests"]
    else:
        assert workload["spec"]["serviceName"] == service["metadata"]["name"]
    num_replicas = scaler["minReplicas"] if variant == "mounted" else workload["spec"]["replicas"]
    assert num_replicas > of_kind(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] >= 1


@variants
def test_the_settings_are_the_servers_and_point_at_what_is_mounted(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, workload = settings(variant, monkeypatch), WORKLOADS[variant]
    container = container_of(workload)
    files = mounted_files(workload, RENDERED[variant])
    command, option, path = container["args"]
    assert (command, option, files[path]) == ("serve", "--config", "ConfigMap/corpus-settings")
    assert files[str(told.tokens)] == "Secret/corpus-tokens"
    assert told.tcp_address == ("0.0.0.0", container["ports"][0]["containerPort"])
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    assert str(told.state_dir) in writable
    if variant == "staged":
        assert str(told.cache_dir) in writable
        (claim,) = workload["spec"]["volumeClaimTemplates"]
        asked = claim["spec"]["resources"]["requests"]["storage"]
        assert told.cache_bytes < 0.9 * int(asked.removesuffix("Ti")) * 2**40
        (environment,) = container["envFrom"]
        (store,) = (each for each in RENDERED[variant] if each["metadata"]["name"] == "corpus-store")
        assert environment["secretRef"]["name"] == "corpus-store"
        documented = (KUBERNETES.parents[1] / "docs" / "stores.md").read_text()
        assert all(name in documented for name in store["data"])
    else:
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "corpora")
        assert all(PurePath(spec.path).is_relative_to(mount["mountPath"]) for spec in told.corpora)
    cpus = int(container["resources"]["requests"]["cpu"])
    assert told.workers == cpus


@variants
def test_a_pod_leaves_the_service_before_it_stops(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told, pod = settings(variant, monkeypatch), pod_of(WORKLOADS[variant])["spec"]
    probe = container_of(WORKLOADS[variant])["readinessProbe"]
    assert told.drain_seconds > probe["periodSeconds"] * probe["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] > told.grace_seconds > told.drain_seconds


def test_the_image_keeps_state_and_cache_where_it_has_volumes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in image_environment("Dockerfile").items():
        monkeypatch.setenv(name, value)
    text = (KUBERNETES.parent / "Dockerfile").read_text()
    volumes = re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)[0].split()
    assert volumes == [str(default_state_dir()), str(default_cache_dir())]


def test_a_server_with_these_settings_answers_the_probes(tmp_path: Path) -> None:
    """But for its place: address, number of workers, corpus and tokens are the test's."""
    corpus = write_raw(tmp_path / "train.bin", some_tokens(5000))
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("training", "read:*", "plans")
    config = (KUBERNETES / "mounted" / "corpus.toml").read_text()
    config = re.sub(r"^path = .*$", f'path = "{corpus}"', config, flags=re.MULTILINE)
    config = re.sub(r"^tokens = .*$", f'tokens = "{tokens.path}"', config, flags=re.MULTILINE)
    with RunningServer({}, tmp_path, config=config, arguments=["--host", "127.0.0.1"]) as server:
        container = container_of(WORKLOADS["mounted"])
        probes = [each for name, each in container.items() if name.endswith("Probe")]
        assert {each["httpGet"]["path"] for each in probes} == {"/healthz", "/readyz"}
        for probe in probes:
            assert server.get(probe["httpGet"]["path"]).status == 200
        assert server.get("/v1/corpora/train").status == 401
        assert server.get("/v1/corpora/train", headers=tokens.header("training")).status == 200


def test_the_training_job_asks_the_service_with_the_token_that_it_mounts() -> None:
    container = container_of(JOB)
    args: Any = worker_arguments(container["args"])
    manifests: list[Manifest] = RENDERED["mounted"]
    service = of_kind(manifests, "Service")
    namespace = of_kind(manifests, "Namespace")["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    assert args.urls == [f"http://{service['metadata']['name']}.{namespace}:{port['port']}"]
    assert mounted_files(JOB, manifests)[str(args.token_file)] == "Secret/corpus-training-token"
    writable = [each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")]
    assert str(args.checkpoint.parent) in writable
    assert args.corpus in (KUBERNETES / "mounted" / "corpus.toml").read_text()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@variants
def test_kustomize_itself_makes_these_objects(variant: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    secrets = tmp_path / "kubernetes" / "base" / "secrets"
    secrets.mkdir(exist_ok=True)
    for name in ("tokens.toml", "training.token", "prometheus.token"):
        (secrets / name).touch()
    made = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "kubernetes" / variant)], capture_output=True, check=True
    )

    def named(objects: list[Manifest]) -> set[tuple[str, str]]:
        # Names of what is made of files end in a hash of it.
        return {(each["kind"], re.sub(r"-[0-9a-z]{10}$", "", each["metadata"]["name"])) for each in objects}

    assert named(list(yaml.safe_load_all(made.stdout))) == named(RENDERED[variant])
