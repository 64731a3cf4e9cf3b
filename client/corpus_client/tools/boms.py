"""A bill in the forms of others: CycloneDX 1.6 and SPDX 3.0, the run as a model trained on data sets.

What these forms have no field for, such as epochs and the root over all steps, is a property named
`corpus-server:NAME`. Nothing that is not in the bill is claimed: no profile of SPDX beyond its core.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from corpus_client import __version__

Bom = dict[str, Any]

_NAMESPACE: Final = "urn:corpus-server"
_ID: Final = r"[A-Za-z0-9.-]+\+?"
_LICENSE: Final = re.compile(rf"{_ID}( (AND|OR|WITH) {_ID})*")
_ITEM_BYTES: Final = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4}


def cyclonedx(bill: Mapping[str, Any]) -> Bom:
    """Return a CycloneDX 1.6 ML-BOM: a model, and a component of type data for each corpus."""
    components = []
    for name, source in bill["sources"].items():
        component = {
            "type": "data",
            "bom-ref": f"corpus:{name}",
            "name": name,
            "version": source["fingerprint"],
            "data": [{"type": "dataset", "name": name}],
            "properties": [{"name": key, "value": value} for key, value in _properties(source)],
        }
        if license_ := source.get("license"):
            component["licenses"] = [{"license": {"name": license_}}]
        if address := source.get("address"):
            component["externalReferences"] = [{"type": "distribution", "url": address}]
        components.append(component)
    model = {
        "type": "machine-learning-model",
        "bom-ref": "run",
        "name": _run_name(bill),
        "version": bill["plan_id"],
        "modelCard": {"modelParameters": {"datasets": [{"ref": each["bom-ref"]} for each in components]}},
        "properties": [{"name": key, "value": value} for key, value in _properties(_run_facts(bill))],
    }
    tool = {"type": "application", "name": "corpus-client", "version": __version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": model},
        "components": components,
        "dependencies": [{"ref": "run", "dependsOn": [each["bom-ref"] for each in components]}],
    }


def spdx(bill: Mapping[str, Any]) -> Bom:
    """Return an SPDX 3.0 document: an AI package, and a data set for each corpus that it was trained on.

    It says when it was made: now, or at the second that `SOURCE_DATE_EPOCH` names.
    """
    made = _Elements(bill)
    run = made.element("ai_AIPackage", "run", title=_run_name(bill), software_packageVersion=bill["plan_id"])
    run["extension"] = _extension(_run_facts(bill))
    sets = []
    for name, source in bill["sources"].items():
        data = made.element(
            "dataset_DatasetPackage",
            f"corpus/{name}",
            title=name,
            software_packageVersion=source["fingerprint"],
            dataset_datasetType=["text"],
        )
        if item_bytes := _ITEM_BYTES.get(source.get("dtype", "")):
            data["dataset_datasetSize"] = source["num_tokens"] * item_bytes
        if "://" in source.get("address", ""):
            data["software_downloadLocation"] = source["address"]
        data["extension"] = _extension(source)
        sets.append(data)
        license_ = source.get("license", "")
        if _LICENSE.fullmatch(license_):
            said = made.element("simplelicensing_LicenseExpression", f"license/{name}")
            said["simplelicensing_licenseExpression"] = license_
            made.relationship("hasDeclaredLicense", data, [said])
    made.relationship("trainedOn", run, sets)
    return made.document(run)


class _Elements:
    """Elements of one SPDX document, in the order in which they were made."""

    def __init__(self, bill: Mapping[str, Any]) -> None:
        start, stop = bill["steps"]
        self._base = f"{_NAMESPACE}:{bill['plan_id']}:{start}-{stop}:"
        self._graph: list[Bom] = []
        seconds = os.environ.get("SOURCE_DATE_EPOCH", "")
        now = datetime.fromtimestamp(int(seconds), UTC) if seconds.isdigit() else datetime.now(UTC)
        maker = self.element("SoftwareAgent", "maker", title=bill["made_by"])
        self._info = {
            "type": "CreationInfo",
            "@id": "_:made",
            "specVersion": "3.0.1",
            "created": f"{now:%Y-%m-%dT%H:%M:%SZ}",
            "createdBy": [maker["spdxId"]],
        }

    def element(self, kind: str, name: str, *, title: str | None = None, **fields: Any) -> Bom:
        made = {"type": kind, "spdxId": self._base + name, "creationInfo": "_:made", **fields}
        if title is not None:
            made["name"] = title
        self._graph.append(made)
        return made

    def relationship(self, kind: str, of: Bom, to: list[Bom]) -> None:
        ids = [each["spdxId"] for each in to]
        name = f"relationship/{len(self._graph)}"
        self.element("Relationship", name, relationshipType=kind, to=ids, **{"from": of["spdxId"]})

    def document(self, root: Bom) -> Bom:
        profiles, elements = ["core"], [each["spdxId"] for each in self._graph]
        document = self.element("SpdxDocument", "document", profileConformance=profiles, element=elements)
        document["rootElement"] = [root["spdxId"]]
        context = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
        return {"@context": context, "@graph": [self._info, *self._graph]}


def _extension(facts: Mapping[str, Any]) -> list[Bom]:
    entries = [
        {
            "type": "extension_CdxPropertyEntry",
            "extension_cdxPropName": name,
            "extension_cdxPropValue": value,
        }
        for name, value in _properties(facts)
    ]
    return [{"type": "extension_CdxPropertiesExtension", "extension_cdxProperty": entries}]


def _run_name(bill: Mapping[str, Any]) -> str:
    return f"run of plan {bill['plan_id'][:12]}"


def _run_facts(bill: Mapping[str, Any]) -> dict[str, Any]:
    start, stop = bill["steps"]
    return {"plan_id": bill["plan_id"], "first_step": start, "stop_step": stop, "root": bill["tree"]["root"]}


def _properties(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of single facts, those of what was used among them."""
    for name, value in {**facts, **facts.get("used", {})}.items():
        if not isinstance(value, dict):
            yield f"corpus-server:{name}", str(value)
