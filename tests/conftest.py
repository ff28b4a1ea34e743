"""Fixtures that hand out checkpoints, and a report of those that were not available."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import build_overlay
import checkpoints
import hub_server
import pytest
from hub_server import Hub
from huggingface_hub import constants, file_download

from nvfp4prep import remote


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("NVFP4PREP_CHECKPOINTS")
    if folder and not Path(folder).is_dir():
        raise pytest.UsageError(f"NVFP4PREP_CHECKPOINTS names {folder}, which is not a directory")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``checkpoint(name)``: the path of a shipped checkpoint, or of an overlay built on first use. Read only."""
    built: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name in checkpoints.OVERLAYS:
            if name not in built:
                built[name] = tmp_path_factory.mktemp("overlay") / name
                build_overlay.build(name.removeprefix("tinymoe-nvfp4-"), built[name])
            return built[name]
        path = checkpoints.DATA / name
        if not path.is_dir():
            raise LookupError(f"no checkpoint {name} in {checkpoints.DATA}")
        return path

    return path_of


@pytest.fixture(scope="session")
def full_set() -> dict[str, Path]:
    """Name -> path of what the folder named by NVFP4PREP_CHECKPOINTS holds. ``checkpoints.full_set`` parametrises."""
    return checkpoints.full_set()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that huggingface_hub takes for the real one, an empty cache, and waits that take no time."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with hub_server.running() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        files = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        for module in (constants, file_download):  # the latter in versions before 1.0
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", files, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(remote, "WAITS", (0, 0, 0, 0))
        monkeypatch.chdir(tmp_path)
        yield running


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    available = checkpoints.full_set()
    missing = [name for name in checkpoints.FULL_SET if name not in available]
    folder = os.environ.get("NVFP4PREP_CHECKPOINTS") or "NVFP4PREP_CHECKPOINTS is not set"
    terminalreporter.section("full-set checkpoints")
    terminalreporter.line(f"{len(available)} of {len(checkpoints.FULL_SET)} available ({folder})")
    if missing:
        terminalreporter.line(f"not available: {', '.join(missing)}")
    if not any("engines" in str(argument) for argument in terminalreporter.config.args):
        terminalreporter.section("engines")
        terminalreporter.line(
            "tests/engines is not part of this run: scripts/test-engines runs it, beside vLLM and SGLang"
        )
