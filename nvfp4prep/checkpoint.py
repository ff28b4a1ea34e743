"""A source read and classified: headers, config, schema and quantisation config together, before any decision."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nvfp4prep import manifest as manifests
from nvfp4prep import quant_config as qc
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.model_config import is_tied
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear, Schema, build_schema
from nvfp4prep.source import HubRepo, Source, locate, open_directory, open_source, read_json
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
    def _sorted_names(self) -> list[str]:
        return sorted(self.source.tensors)

    @cached_property
    def _sorted_modules(self) -> list[str]:
        return sorted(self.schema.linears)

    def tensors_under(self, path: str) -> list[TensorInfo]:
        """The tensors of a module and all within it, by name."""
        return [self.source.tensors[name] for name in _under(self._sorted_names, path)]

    def linears_under(self, path: str) -> list[Linear]:
        """The linears within a module, by name."""
        return [self.schema.linears[module] for module in _under(self._sorted_modules, path)]

    @cached_property
    def scale_values(self) -> Mapping[str, tuple[float, ...]]:
        """Values of every NVFP4 and int4 weight_scale_2 and input_scale, read once. Raises EnvironmentFault."""
        return read_values(
            self.source,
            [
                linear.params[param]
                for linear in self.schema.linears.values()
                if linear.format in (Format.NVFP4, Format.INT4)
                for param in SCALAR_PARAMS
                if param in linear.params
            ],
        )


def _under(names: list[str], path: str) -> list[str]:
    """Those of sorted names that begin with the path and a dot."""
    return names[bisect_left(names, f"{path}.") : bisect_left(names, f"{path}/")]  # "/" comes next after "."


def read_checkpoint(spec: str) -> Checkpoint:
    """Read and classify a checkpoint; what is wrong with it is in its findings. A Hub repo is downloaded in full.

    Raises:
        InputRefused: it can't even be read as a checkpoint.
        EnvironmentFault: I/O.
    """
    return _classify(open_source(spec))


def peek_checkpoint(spec: str, workspace: Path | None = None) -> Checkpoint:
    """As `read_checkpoint`, but of a Hub repo no shard is downloaded: what is read of its tensors is fetched then.

    With a `workspace` it can be converted: shards then lie on the disk of that folder while they are read.
    """
    found = locate(spec)
    if not isinstance(found, HubRepo):
        return _classify(open_directory(found))
    from nvfp4prep.remote import open_remote  # huggingface_hub takes a while to import

    return _classify(open_remote(found, workspace))


def _classify(source: Source) -> Checkpoint:
    config = read_json(source.root, qc.CONFIG)
    if config is None:
        raise InputRefused(
            [Finding("no-config", "error", "not there; nvfp4prep needs the model's config.json", qc.CONFIG)]
        )
    nested = read_json(source.root, qc.HF_QUANT_CONFIG)
    schema = build_schema(source.tensors, config)
    quant, findings = qc.read_quant_config(config, nested)
    previous, manifest_findings = manifests.read_manifest(source.root)
    method = (qc.quantization_section(config) or {}).get("quant_method")
    if previous is not None and method == "compressed-tensors":
        message = f"written by nvfp4prep in the form of {method}; convert what it was made from"
        raise InputRefused([Finding("already-packed", "error", message, qc.CONFIG)])
    findings = [*source.findings, *findings, *manifest_findings, *schema.findings]
    exclude, weight_only = None, frozenset[str]()
    if quant is not None:
        findings += qc.check_config(schema, quant)
        exclude = qc.rewrite_exclude(schema, quant.exclude, is_tied(config))
        findings += exclude.findings
        weight_only = qc.weight_only_modules(schema, quant)
    return Checkpoint(source, config, schema, quant, exclude, weight_only, previous, tuple(findings))
