"""A source read and classified: headers, config, schema and quantisation config together, before any decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nvfp4prep import manifest as manifests
from nvfp4prep import quant_config as qc
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.model_config import is_tied
from nvfp4prep.schema import SCALAR_PARAMS, Format, Schema, build_schema
from nvfp4prep.source import Source, open_source, read_json
from nvfp4prep.survey import read_values


@dataclass(frozen=True)
class Checkpoint:
    """A source read and classified, before any decision."""

    source: Source
    config: Mapping[str, Any]
    schema: Schema
    quant: qc.QuantConfig | None
    exclude: qc.ExcludeReport | None
    weight_only: frozenset[str]
    manifest: Mapping[str, Any] | None
    findings: tuple[Finding, ...]

    @cached_property
    def scale_values(self) -> Mapping[str, tuple[float, ...]]:
        """Values of every NVFP4 weight_scale_2 and input_scale, read once. Raises EnvironmentFault."""
        return read_values(
            self.source,
            [
                linear.params[param]
                for linear in self.schema.of_format(Format.NVFP4)
                for param in SCALAR_PARAMS
                if param in linear.params
            ],
        )


def read_checkpoint(spec: str) -> Checkpoint:
    """Read and classify a checkpoint; what is wrong with it is in its findings.

    Raises:
        InputRefused: it can't even be read as a checkpoint.
        EnvironmentFault: I/O.
    """
    source = open_source(spec)
    config = read_json(source.root, qc.CONFIG)
    if config is None:
        raise InputRefused(
            [Finding("no-config", "error", "not there; nvfp4prep needs the model's config.json", qc.CONFIG)]
        )
    nested = read_json(source.root, qc.HF_QUANT_CONFIG)
    schema = build_schema(source.tensors, config)
    quant, findings = qc.read_quant_config(config, nested)
    previous, manifest_findings = manifests.read_manifest(source.root)
    findings = [*source.findings, *findings, *manifest_findings, *schema.findings]
    exclude, weight_only = None, frozenset[str]()
    if quant is not None:
        findings += qc.check_config(schema, quant)
        exclude = qc.rewrite_exclude(schema, quant.exclude, is_tied(config))
        findings += exclude.findings
        weight_only = qc.weight_only_modules(schema, quant)
    return Checkpoint(source, config, schema, quant, exclude, weight_only, previous, tuple(findings))
