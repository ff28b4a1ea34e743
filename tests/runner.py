"""Runs the command line in this process, for tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
from click.testing import CliRunner

from nvfp4prep.cli import main


@dataclass(frozen=True)
class Run:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one object on stdout; fails when there is anything else, or a NaN that is no JSON."""
        return strict_json(self.stdout)

    @property
    def findings(self) -> list[Mapping[str, Any]]:
        return self.json["error"]["findings"]


def strict_json(text: str) -> Any:
    """A JSON object. Python's own parser would also take NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def run(*arguments: object) -> Run:
    """Run `nvfp4prep ARGUMENTS`. An exception that the command line does not turn into an exit code is raised here."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], color=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Run(result.exit_code, result.stdout, result.stderr)


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below a folder with its content's digest; of folders, only that they are there."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
        if not path.is_fifo()
    }


def refused(source: Path, *options: object) -> Run:
    """A conversion that must end with exit code 3, write nothing and leave the source alone."""
    before = snapshot(source.parent)
    result = run("convert", source, source.parent / "out", "--json", *options)
    assert result.code == 3, result.stderr
    assert snapshot(source.parent) == before
    return result


def manifest_of(folder: Path) -> dict[str, Any]:
    """An output's manifest."""
    return json.loads((folder / "nvfp4prep.json").read_text())


def converted(source: Path, out: Path, *options: object) -> oracle.View:
    """What a conversion that succeeds has written."""
    result = run("convert", source, out, *options)
    assert result.code == 0, result.stderr
    return oracle.read(out)
