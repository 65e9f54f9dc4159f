"""A small Hub in a thread: what huggingface_hub asks for when it publishes, over real HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_LARGE = (".safetensors", ".bin", ".pt")


@dataclass
class Repository:
    """Branches of files by name; a pull request is a branch `refs/pr/N`."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})
    commits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def files(self) -> dict[str, bytes]:
        return self.branches["main"]

    @files.setter
    def files(self, files: dict[str, bytes]) -> None:
        self.branches["main"] = files


@dataclass
class Hub:
    """`busy` holds, for a method and a pattern of paths, the statuses that are answered first."""

    url: str
    repos: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    busy: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    readme_errors: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.requests)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        self.body = self._read()
        self.hub.requests.append(f"{method} {parts.path}")
        for (wanted, pattern), statuses in self.hub.busy.items():
            if wanted == method and re.search(pattern, parts.path) and statuses:
                self._send(statuses.pop(0), {"error": "not now"})
                return
        for wanted, pattern, handle in _ROUTES:
            match = re.fullmatch(pattern, parts.path)
            if wanted == method and match:
                status, document = handle(self, *map(unquote, match.groups()))
                self._send(status, document)
                return
        self._send(404, {"error": f"no such page: {method} {parts.path}"})

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, document: Any) -> None:
        raw = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    # ---- what is asked for

    def create(self) -> tuple[int, Any]:
        asked = json.loads(self.body)
        owner = asked.get("organization")
        name = f"{owner}/{asked['name']}" if owner else asked["name"]
        self.hub.tokens.add(self.headers.get("Authorization"))
        there = name in self.hub.repos
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.repos.setdefault(name, Repository(private=private))
        return (409 if there else 200), {"url": f"{self.hub.url}/{name}", "error": "is there"}

    def info(self, name: str, revision: str = "main") -> tuple[int, Any]:
        repo = self.hub.repos.get(name)
        if repo is None or revision not in repo.branches:
            return 404, {"error": "not found"}
        return 200, {"id": name, "private": repo.private, "sha": _sha(repo), "tags": []}

    def branch(self, name: str, branch: str) -> tuple[int, Any]:
        branches = self.hub.repos[name].branches
        if branch in branches:
            return 409, {"error": "is there"}
        branches[branch] = dict(branches["main"])
        return 200, {}

    def tree(self, name: str, revision: str) -> tuple[int, Any]:
        files = self.hub.repos[name].branches.get(revision)
        if files is None:
            return 404, {"error": "no such revision"}
        return 200, [
            {"type": "file", "path": path, "size": len(data), "oid": _git_oid(data)}
            for path, data in files.items()
        ]

    def preupload(self, name: str, revision: str) -> tuple[int, Any]:
        there = self.hub.repos[name].branches.get(revision, {})
        answers = []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            is_large = path.endswith(_LARGE)
            old = there.get(path)
            oid = None if old is None else _sha256(old) if is_large else _git_oid(old)
            mode = "lfs" if is_large else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return 200, {"files": answers}

    def batch(self, name: str) -> tuple[int, Any]:
        objects = []
        for asked in json.loads(self.body)["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.objects:
                upload = {"href": f"{self.hub.url}/lfs/{asked['oid']}"}
                check = {"href": f"{self.hub.url}/check/{asked['oid']}"}
                answer["actions"] = {"upload": upload, "verify": check}
            objects.append(answer)
        return 200, {"transfer": "basic", "objects": objects}

    def put(self, oid: str) -> tuple[int, Any]:
        if _sha256(self.body) != oid:
            return 400, {"error": "another content"}
        self.hub.objects[oid] = self.body
        return 200, {}

    def check(self, oid: str) -> tuple[int, Any]:
        return (200 if oid in self.hub.objects else 404), {}

    def validate(self) -> tuple[int, Any]:
        errors = [{"message": text} for text in self.hub.readme_errors]
        return (400 if errors else 200), {"errors": errors, "warnings": []}

    def commit(self, name: str, revision: str) -> tuple[int, Any]:
        repo = self.hub.repos[name]
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(repo.branches[revision])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        branch = revision
        if "create_pr" in self.query:
            branch = f"refs/pr/{len(repo.branches)}"
        repo.branches[branch] = files
        repo.commits.append({"branch": branch, **lines[0]["value"]})
        oid = _sha(repo)
        return 200, {
            "commitUrl": f"{self.hub.url}/{name}/commit/{oid}",
            "commitOid": oid,
            "pullRequestUrl": f"{self.hub.url}/{name}/discussions/1",
        }


_NAME = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/api/repos/create", _Handler.create),
    ("GET", f"/api/models/{_NAME}", _Handler.info),
    ("GET", f"/api/models/{_NAME}/revision/([^/]+)", _Handler.info),
    ("POST", f"/api/models/{_NAME}/branch/([^/]+)", _Handler.branch),
    ("GET", f"/api/models/{_NAME}/tree/([^/]+)", _Handler.tree),
    ("POST", f"/api/models/{_NAME}/preupload/([^/]+)", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", "/lfs/([0-9a-f]+)", _Handler.put),
    ("POST", "/check/([0-9a-f]+)", _Handler.check),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", f"/api/models/{_NAME}/commit/([^/]+)", _Handler.commit),
]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha(repo: Repository) -> str:
    return hashlib.sha1(str(len(repo.commits)).encode()).hexdigest()


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub on a free port of this machine, until the block ends."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = Hub(url=f"http://127.0.0.1:{server.server_address[1]}")
    handler.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
