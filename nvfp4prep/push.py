"""An output to the Hub, through huggingface_hub: as it lies on disk, but for the model card."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id  # type: ignore[attr-defined]

from nvfp4prep import remote
from nvfp4prep.card import README, card, read_manifests
from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.manifest import MANIFEST, NO_OUTPUTS, listed_outputs
from nvfp4prep.source import HubRepo, hub_advice, hub_repo

T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"
_NO_WRITING = ("read", "no_access")


@dataclass(frozen=True, slots=True)
class Pushed:
    """Where an output is on the Hub."""

    repo: str
    branch: str
    commit: str
    url: str


def destination(spec: str) -> HubRepo:
    """The repo and branch that `org/name[@branch]` names. Raises UsageFault."""
    repo = hub_repo(spec)
    if repo is None:
        raise UsageFault(f"{spec}: not a Hub repo; write org/name or org/name@branch")
    try:
        validate_repo_id(repo.name)
    except HFValidationError as error:
        raise UsageFault(f"{spec}: {error}") from None
    if repo.revision is not None and _COMMIT.fullmatch(repo.revision):
        raise UsageFault(f"{spec}: a commit can't be pushed to; give a branch")
    return repo


def check_may_push(repo: HubRepo) -> None:
    """Ask the Hub once who the token is. What it does not tell, the upload will.

    Raises:
        EnvironmentFault: there is no token, or it can't write to the repo's owner; or the Hub can't be asked.
    """
    owner = repo.name.partition("/")[0]
    with _faults(f"{repo}: the Hub was asked whether the token may write there"):
        found: Mapping[str, Any] = huggingface_hub.HfApi().whoami()
        name = found.get("name")
        role = ((found.get("auth") or {}).get("accessToken") or {}).get("role")
        listed = found.get("orgs")
        orgs = {org["name"]: org.get("roleInOrg") for org in listed or ()}
    if role == "read":
        raise EnvironmentFault(f"{repo}: the token of {name} may only read; make one that may write (hf auth login)")
    if owner == name or listed is None:
        return
    if owner not in orgs:
        raise EnvironmentFault(f"{repo}: the token is {name}'s, who is no member of {owner}")
    if orgs[owner] in _NO_WRITING:
        raise EnvironmentFault(f"{repo}: the token is {name}'s, who may only read in {owner}")


def push(out: Path, repo: HubRepo, *, private: bool = False, quiet: bool = False) -> Pushed:
    """Upload an output of convert, and last its card; a README.md in it stays as it is.

    A repo or branch that is not there is made. Files that it has already are not sent again.

    Args:
        out: an output of convert.
        repo: where to, and which branch of it.
        private: a repo that is made now is nobody else's to see.
        quiet: no progress bars.

    Raises:
        UsageFault: it is no output of convert, or not all of one; or the repo holds shards that are not part of it.
        EnvironmentFault: the upload failed; repeating it goes on with what is missing.
    """
    manifests, text = read_manifests(out), card(out)
    _check_complete(out, manifests)
    branch = repo.revision or _MAIN
    if quiet:
        disable_progress_bars()
    api = huggingface_hub.HfApi()
    what, again = f"{repo}: {out} was not uploaded", f"; repeat it with: nvfp4prep push {out} {repo}"

    def prepare() -> list[str]:
        api.create_repo(repo.name, private=private or None, exist_ok=True)
        if branch != _MAIN:
            api.create_branch(repo.name, branch=branch, exist_ok=True)
        return list(api.list_repo_files(repo.name, revision=branch))

    def upload() -> None:
        message = f"nvfp4prep: {', '.join(str(manifest['target']) for manifest in manifests.values())}"
        api.upload_folder(
            repo_id=repo.name, folder_path=out, revision=branch, commit_message=message, ignore_patterns=[README]
        )

    def upload_card() -> str:
        return api.upload_file(
            path_or_fileobj=text.encode(),
            path_in_repo=README,
            repo_id=repo.name,
            revision=branch,
            commit_message="nvfp4prep: model card",
        ).oid

    with _faults(what, again):
        there = [name for name in _tried(prepare) if name.endswith(".safetensors")]
    strangers = sorted(name for name in there if not (out / name).is_file())
    if strangers:
        raise UsageFault(
            f"{repo}: has {strangers[0]}{f' and {len(strangers) - 1} more' if len(strangers) > 1 else ''}, which {out} "
            "does not: an engine would read both; delete it there, or choose another repo or branch"
        )
    with _faults(what, again):
        _tried(upload)
        return Pushed(repo.name, branch, _tried(upload_card), f"{api.endpoint}/{repo.name}/tree/{branch}")


def _check_complete(out: Path, manifests: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse an output that lacks files of its manifests, or has them at other sizes. Raises UsageFault."""
    for folder, manifest in manifests.items():
        outputs = listed_outputs(manifest)
        if not outputs:
            raise UsageFault(f"{out / folder / MANIFEST}: {NO_OUTPUTS}; convert again")
        for file, (wanted, _) in outputs.items():
            path = out / folder / file
            found = path.stat().st_size if path.is_file() else None
            if found != wanted:
                what = "is missing" if found is None else f"has {found:,} bytes"
                raise UsageFault(
                    f"{path}: {what}, {MANIFEST} says {wanted} bytes; it can't be pushed: convert again, or look with "
                    "nvfp4prep validate --level full"
                )


def _tried(work: Callable[[], T]) -> T:
    """What `work` gives; again after a while where the Hub says that it has trouble, or too much to do.

    What was uploaded by then is not sent again, and what was committed gives no second commit.
    """
    for wait in remote.WAITS:
        try:
            return work()
        except Exception as error:
            if not any(_may_pass(one) for one in (error, error.__cause__)):
                raise
        time.sleep(wait)
    return work()


def _may_pass(error: BaseException | None) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status in (408, 429) or status >= 500


@contextmanager
def _faults(what: str, again: str = "") -> Iterator[None]:
    """Whatever huggingface_hub, its HTTP library or hf_xet raise, as EnvironmentFault with their own words."""
    try:
        yield
    except Exception as error:
        told = hub_advice(error)
        if error.__cause__ is not None and str(error.__cause__) not in str(error):
            told = f"{told} {hub_advice(error.__cause__)}"  # type: ignore[arg-type]
        raise EnvironmentFault(f"{what}: {told}{again}") from error
