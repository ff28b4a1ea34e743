"""A Hub on this machine: serves folders as repos over HTTP, counts what it serves, and fails on demand.

It has the endpoints that huggingface_hub calls to list, read and, without Xet, upload a model. Shards are behind a
redirect to another host name, as the Hub's are, where the ETag is another and no token may arrive.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_PIECE = 1 << 16
_LARGE = (".safetensors", ".bin")
"""Files that are kept elsewhere, as the Hub keeps all of more than 10 MB."""
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")

_UPLOAD = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>preupload|commit|branch)/(?P<revision>[^/]+)")
_BATCH = re.compile(r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")

LISTING = "the listing"
WHOAMI, CREATE, PREUPLOAD, BATCH, UPLOAD, COMMIT, CARD = (
    "who",
    "create",
    "preupload",
    "batch",
    "upload",
    "commit",
    "card",
)
"""In place of a file's name, in `Hub.faults`."""


@dataclass
class Repo:
    """A repo: the folder of each commit, and the commit of each branch."""

    commits: dict[str, Path] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    refusal: tuple[int, str, str] | None = None
    """Status, X-Error-Code and X-Error-Message for its files; the listing stays open, as that of a gated repo does."""

    def push(self, folder: Path, branch: str = "main") -> str:
        """Make a folder the branch's newest commit."""
        commit = hashlib.sha1(f"{folder} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = folder
        self.branches[branch] = commit
        return commit


@dataclass
class Hub:
    """What the server has, what it is to do wrong, and what it did."""

    repos: dict[str, Repo] = field(default_factory=lambda: defaultdict(Repo))
    faults: dict[str, deque[str]] = field(default_factory=lambda: defaultdict(deque))
    """Of the next requests for a file, one each: see `_Handler.fault` and `_Handler.send_range`."""
    url: str = ""
    elsewhere: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    """By method and path."""
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Start and length of each part of a shard that was asked for and sent in full."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes of each file, up to the piece with which the client hung up."""
    tokens: set[tuple[str, str | None]] = field(default_factory=set)
    """Host and token of every request."""
    user: dict[str, object] = field(default_factory=lambda: {"type": "user", "name": "org", "orgs": []})
    """What whoami tells."""
    created: dict[str, dict[str, object]] = field(default_factory=dict)
    """What was asked for when a repo was made, by its name."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files uploaded, by digest."""
    messages: list[str] = field(default_factory=list)
    """Of the commits made."""
    folder: str = ""
    """For those commits."""


@contextmanager
def running() -> Iterator[Hub]:
    """A Hub without repos, at `Hub.url`."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.folder = tempfile.mkdtemp()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    hub.elsewhere = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        shutil.rmtree(hub.folder)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry(path: Path) -> dict[str, object]:
    digest = hashlib.sha1(path.read_bytes()).hexdigest()
    entry: dict[str, object] = {"size": path.stat().st_size, "oid": digest, "blobId": digest}
    if path.suffix in _LARGE:
        entry["lfs"] = {"size": path.stat().st_size, "sha256": sha256(path), "oid": sha256(path), "pointerSize": 134}
    return entry


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.body()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests[f"{self.command} {path}"] += 1
        self.hub.tokens.add((self.headers["Host"].partition(":")[0], self.headers["Authorization"]))
        if path.startswith("/elsewhere/"):
            self.send_range(Path(path.removeprefix("/elsewhere")), parse_qs(urlsplit(self.path).query))
        elif path == "/api/whoami-v2":
            if self.fault(WHOAMI) != "sent":
                self.send_json(self.hub.user)
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            if self.fault(CARD) != "sent":
                self.send_json({"warnings": [], "errors": []})
        elif path.startswith("/upload/"):
            self.upload(path.removeprefix("/upload/"), body)
        elif match := _BATCH.fullmatch(path):
            self.batch(json.loads(body))
        elif match := _UPLOAD.fullmatch(urlsplit(self.path).path):
            getattr(self, match["what"])(match["repo"], unquote(match["revision"]), body)
        elif match := _API.fullmatch(urlsplit(self.path).path):
            self.answer_api(match["repo"], match["what"], unquote(match["revision"] or "main"))
        elif match := _FILE.fullmatch(urlsplit(self.path).path):
            self.answer_file(match["repo"], unquote(match["revision"]), unquote(match["file"]))
        else:
            self.refuse(404, "", "no such page")

    def refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        self.send(status, {"X-Error-Code": code, "X-Error-Message": message, **headers}, b"{}")

    def send(
        self, status: int, headers: dict[str, str], body: bytes, length: int | None = None, file: str | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(body), _PIECE):
                if file is not None:
                    self.hub.sent[file] += len(body[start : start + _PIECE])
                self.wfile.write(body[start : start + _PIECE])

    def commit_of(self, repo: str, revision: str) -> str | None:
        """The commit that is meant, or None after a refusal."""
        if repo not in self.hub.repos:
            self.refuse(401, "RepoNotFound", "Repository not found")
            return None
        found = self.hub.repos[repo]
        commit = found.branches.get(revision, revision)
        if commit not in found.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return commit

    def fault(self, name: str) -> str | None:
        """The fault that is due; None when it is none, or was sent already."""
        fault = self.hub.faults[name].popleft() if self.hub.faults[name] else None
        if fault is not None and fault.isdigit():
            self.refuse(int(fault), "", "trouble here")
            return "sent"
        if fault is not None and fault.startswith("429 after "):
            self.refuse(429, "", "too many requests", **{"Retry-After": fault.removeprefix("429 after ")})
            return "sent"
        if fault == "429 window":
            self.refuse(429, "", "too many requests", RateLimit='"resolvers";r=0;t=7')
            return "sent"
        return fault

    def answer_api(self, repo: str, what: str | None, revision: str) -> None:
        fault = self.fault(LISTING)
        if fault == "sent":
            return
        if fault == "no json":
            self.send(200, {"Content-Type": "text/html"}, b"<html>please sign in to this network</html>")
            return
        commit = self.commit_of(repo, revision)
        if commit is None:
            return
        folder = self.hub.repos[repo].commits[commit]
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        listed: object
        if what == "tree":
            listed = [{"type": "file", "path": name, **_entry(path)} for name, path in files.items()]
        else:
            siblings = [{"rfilename": name, **_entry(path)} for name, path in files.items()]
            listed = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(listed).encode())

    def answer_file(self, repo: str, revision: str, name: str) -> None:
        commit = self.commit_of(repo, revision)
        if commit is None:
            return
        fault = self.fault(name)
        if fault == "sent":
            return
        refusal = self.hub.repos[repo].refusal
        if refusal is not None:
            self.refuse(*refusal)
            return
        path = self.hub.repos[repo].commits[commit] / name
        if not path.is_file():
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        entry = _entry(path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"'}
        if "lfs" not in entry:
            self.send(200, headers, path.read_bytes(), file=name)
            return
        etag = "0" * 64 if fault == "etag" else sha256(path)
        headers |= {"X-Linked-Size": str(path.stat().st_size), "X-Linked-Etag": f'"{etag}"'}
        location = f"{self.hub.elsewhere}/elsewhere{quote(str(path))}?fault={fault or ''}&commit={commit}"
        self.send(302, headers | {"Location": location}, b"")

    def send_range(self, path: Path, query: dict[str, list[str]]) -> None:
        fault = query.get("fault", [""])[0]
        data = path.read_bytes()
        asked = _RANGE.fullmatch(self.headers["Range"] or "")
        start, end = (int(asked[1]), int(asked[2])) if asked else (0, len(data) - 1)
        headers = {"ETag": f'"elsewhere-{time.monotonic_ns()}"', "Accept-Ranges": "bytes"}
        if asked is None or fault == "whole":
            self.send(200, headers, data, file=path.name)
            return
        body = data[start : end + 1]
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        if fault == "other range":
            headers["Content-Range"] = f"bytes {start + 1}-{end + 1}/{len(data)}"
        elif fault == "no range":
            del headers["Content-Range"]
        elif fault == "other size":
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data) + 1}"
        elif fault == "slow":
            time.sleep(1)
        if fault in ("drop", "truncate"):
            half = body[: len(body) // 2]
            self.send(206, headers, half, len(body) if fault == "drop" else None, path.name)
            self.close_connection = True
            return
        if fault == "more":
            body += b"more"
        if fault != "slow":
            self.hub.ranges[path.name].append((start, len(body)))
        self.send(206, headers, body, file=path.name)

    # --- uploads ---

    def body(self) -> bytes:
        """What the client sends, with its length told first or in chunks."""
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"] or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def send_json(self, value: object, status: int = 200) -> None:
        self.send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def create(self, asked: dict[str, object]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if self.fault(CREATE) == "sent":
            return
        there = self.hub.repos.get(name)
        if there is None:
            self.hub.created[name] = asked
            self.hub.repos[name].push(Path(tempfile.mkdtemp(dir=self.hub.folder)))
        self.send_json({"url": f"{self.hub.url}/{name}"}, 200 if there is None else 409)

    def branch(self, repo: str, branch: str, _: bytes) -> None:
        branches = self.hub.repos[repo].branches
        if branch in branches:
            self.refuse(409, "", "there is one")
            return
        branches[branch] = branches["main"]
        self.send_json({})

    def preupload(self, repo: str, revision: str, body: bytes) -> None:
        commit = self.commit_of(repo, revision)
        if self.fault(PREUPLOAD) == "sent" or commit is None:
            return
        folder = self.hub.repos[repo].commits[commit]
        files = []
        for file in json.loads(body)["files"]:
            path = folder / file["path"]
            mode = "lfs" if path.suffix in _LARGE else "regular"
            oid = None
            if path.is_file():
                data = path.read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                oid = sha256(path) if mode == "lfs" else blob
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.send_json({"files": files})

    def batch(self, asked: dict[str, list[dict[str, object]]]) -> None:
        if self.fault(BATCH) == "sent":
            return
        objects: list[dict[str, object]] = []
        for one in asked["objects"]:
            to_do = {} if one["oid"] in self.hub.objects else {"actions": self.actions(str(one["oid"]))}
            objects.append({"oid": one["oid"], "size": one["size"], **to_do})
        self.send_json({"transfer": "basic", "objects": objects})

    def actions(self, oid: str) -> dict[str, object]:
        return {"upload": {"href": f"{self.hub.url}/upload/{oid}", "header": {}}}

    def upload(self, oid: str, body: bytes) -> None:
        if self.fault(UPLOAD) == "sent":
            return
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.send(200, {}, b"")

    def commit(self, repo: str, revision: str, body: bytes) -> None:
        before = self.commit_of(repo, revision)
        if self.fault(COMMIT) == "sent" or before is None:
            return
        folder = Path(tempfile.mkdtemp(dir=self.hub.folder))
        shutil.copytree(self.hub.repos[repo].commits[before], folder, dirs_exist_ok=True)
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub.messages.append(value["summary"])
                continue
            path = folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry["key"] == "lfsFile":
                path.write_bytes(self.hub.objects[value["oid"]])
            else:
                assert entry["key"] == "file"
                path.write_bytes(base64.b64decode(value["content"]))
        commit = self.hub.repos[repo].push(folder, revision)
        self.send_json({"commitUrl": f"{self.hub.url}/{repo}/commit/{commit}", "commitOid": commit})
