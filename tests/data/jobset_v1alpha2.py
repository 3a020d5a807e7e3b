"""Makes `jobset_v1alpha2.json.gz` from the CRD of a JobSet release: its OpenAPI schema, without descriptions."""

from __future__ import annotations

import gzip
import json
import pathlib
import sys
from typing import Any

import yaml


def without_descriptions(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_descriptions(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    is_text = isinstance(schema.get("description"), str)
    return {key: without_descriptions(value) for key, value in schema.items() if not (key == "description" and is_text)}


if __name__ == "__main__":  # python jobset_v1alpha2.py jobset.x-k8s.io_jobsets.yaml
    crd = yaml.safe_load(pathlib.Path(sys.argv[1]).read_text())
    (version,) = crd["spec"]["versions"]
    text = json.dumps(without_descriptions(version["schema"]["openAPIV3Schema"]), separators=(",", ":"))
    pathlib.Path(__file__).with_suffix(".json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
