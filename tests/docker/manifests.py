"""The Kubernetes manifests as `kubectl kustomize` prints them, for what they use of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests.serving import ROOT

KUBERNETES = ROOT / "docker" / "kubernetes"
VARIANTS = ("mounted", "staged")

Manifest = dict[str, Any]
KNOWN = {
    *("apiVersion", "kind", "namespace", "labels", "resources", "patches"),
    *("configMapGenerator", "secretGenerator", "generatorOptions"),
}


class UniqueKeys(yaml.SafeLoader):
    """Refuses a key that comes twice, of which YAML keeps the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag[-5:] != "merge"]
        assert len(keys) == len(set(keys)), f"a key comes twice at {node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


def documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file."""
    return list(yaml.load_all(path.read_text(), UniqueKeys))


def render(folder: Path) -> list[Manifest]:
    """Return every object of a kustomization; one that is made of files lists their names as its data."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    assert set(kustomization) <= KNOWN, set(kustomization) - KNOWN
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        assert path.exists(), path
        found += render(path) if path.is_dir() else documents(path)
    for patch in kustomization.get("patches", ()):
        (target,) = (
            each for each in found if names(each) == (patch["target"]["kind"], patch["target"]["name"])
        )
        for change in yaml.safe_load(patch["patch"]):
            *way, last = change["path"].strip("/").split("/")
            place = target
            for step in way:
                place = place[step]
            assert change["op"] == ("replace" if last in place else "add"), change
            place[last] = change["value"]
    for kind in ("ConfigMap", "Secret"):
        for made in kustomization.get(f"{kind[0].lower()}{kind[1:]}Generator", ()):
            files = {Path(name).name: name for name in made.get("files", ())}
            for name in made.get("envs", ()):
                lines = (folder / name).read_text().splitlines()
                files |= dict(line.split("=", 1) for line in lines if not line.startswith("#"))
            found.append(
                {"apiVersion": "v1", "kind": kind, "metadata": {"name": made["name"]}, "data": files}
            )
    return found


def names(manifest: Manifest) -> tuple[str, str]:
    """Return kind and name of an object."""
    return manifest["kind"], manifest["metadata"]["name"]


def of_kind(manifests: list[Manifest], *kinds: str) -> Manifest:
    """Return the one object of a kind."""
    (found,) = (each for each in manifests if each["kind"] in kinds)
    return found


def pod_of(workload: Manifest) -> Manifest:
    """Return the template of a workload's pods."""
    template: Manifest = workload["spec"]["template"]
    return template


def container_of(workload: Manifest) -> Manifest:
    """Return the only container of a workload's pods."""
    (container,) = pod_of(workload)["spec"]["containers"]
    return container


def mounted_files(workload: Manifest, manifests: list[Manifest]) -> dict[str, str]:
    """Return kind and name of the object behind each file that a ConfigMap or Secret puts into the pods."""
    data = {names(each): each["data"] for each in manifests if "data" in each}
    mounts = {each["name"]: each["mountPath"] for each in container_of(workload)["volumeMounts"]}
    files = {}
    for volume in pod_of(workload)["spec"]["volumes"]:
        if "configMap" in volume:
            source = ("ConfigMap", volume["configMap"]["name"])
        elif "secret" in volume:
            source = ("Secret", volume["secret"]["secretName"])
        else:
            continue
        for key in data[source]:
            files[f"{mounts[volume['name']]}/{key}"] = "/".join(source)
    return files
