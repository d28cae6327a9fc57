"""An HTTP server on loopback that speaks as much of the Hub's API as its real client asks of it.

Repositories with branches and commits, large files by LFS, tokens with and without the right to
write, downloads; no xet, whose route it does not have. `fail` breaks requests on purpose, and
`requests` is what was asked."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

READER, WRITER = "hf_reader0123456789", "hf_writer0123456789"
BINARY = (".safetensors", ".bin", ".model", "tokenizer.json")


@dataclass(frozen=True)
class File:
    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def blob(self) -> str:
        """git's name of the content."""
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repository:
    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, File], message: str) -> str:
        name = hashlib.sha1(f"{branch} {len(self.commits)} {message}".encode()).hexdigest()
        self.commits[name], self.branches[branch] = files, name
        self.messages.append(message)
        return name

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: file.content for path, file in self.commits[self.branches[revision]].items()}


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    token: str | None
    body: bytes
    endpoint: str


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class CutOff(Exception):
    """The connection is closed without an answer."""


class FakeHub:
    """The state of the Hub, and what it answers."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.failures: list[tuple[str, str, Callable[[Request], Exception]]] = []
        self.lock = threading.RLock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                hub.serve(self)

            do_GET = do_HEAD = do_POST = do_PUT = _serve

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    # ------------------------------------------------------------------ for tests

    def fail(
        self, method: str, pattern: str, error: Callable[[Request], Exception], times: int = 1
    ) -> None:
        """The next `times` requests whose path matches get this."""
        self.failures += [(method, pattern, error)] * times

    def hold(
        self, name: str, folder: Path, revision: str = "main", *, private: bool = False
    ) -> None:
        """Puts a folder there, as if it had been pushed."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        repository = self.repositories.setdefault(name, Repository(private))
        repository.commit(
            revision,
            {path: File(content, path.endswith(BINARY)) for path, content in files.items()},
            "",
        )

    def asked(self, method: str, pattern: str) -> list[Request]:
        return [
            each
            for each in self.requests
            if each.method == method and re.search(pattern, each.path)
        ]

    # ------------------------------------------------------------------ requests

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        header = handler.headers.get("Authorization") or ""
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if handler.headers.get("Transfer-Encoding") == "chunked":
            body = _chunks(handler.rfile)
        request = Request(
            handler.command,
            unquote(parts.path),
            {k: v[0] for k, v in parse_qs(parts.query).items()},
            header.removeprefix("Bearer ") or None,
            body,
            self.endpoint,
        )
        try:
            with self.lock:
                self.requests.append(request)
                self._break(request)
                status, headers, content = self.answer(request)
        except CutOff:
            handler.close_connection = True
            handler.connection.close()
            return
        except Refused as refused:
            status, content = refused.status, json.dumps({"error": refused.message}).encode()
            headers = {"X-Error-Message": refused.message} | (
                {"X-Error-Code": refused.code} if refused.code else {}
            )
        handler.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def _break(self, request: Request) -> None:
        for i, (method, pattern, error) in enumerate(self.failures):
            if request.method == method and re.search(pattern, request.path):
                del self.failures[i]
                raise error(request)

    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        for method, pattern, name in ROUTES:
            if request.method in method.split() and (match := re.fullmatch(pattern, request.path)):
                if request.token not in (None, READER, WRITER):
                    raise Refused(401, "Invalid credentials in Authorization header")
                found = getattr(self, name)(request, **match.groupdict())
                return found if isinstance(found, tuple) else (200, {}, json.dumps(found).encode())
        raise Refused(404, f"no route for {request.method} {request.path}")

    def _repository(self, request: Request, repo: str) -> Repository:
        found = self.repositories.get(repo)
        if found is None or (found.private and request.token is None):
            raise Refused(404 if request.token else 401, "Repository not found", "RepoNotFound")
        return found

    def _writer(self, request: Request) -> None:
        if request.token is None:
            raise Refused(401, "Invalid username or password.")
        if request.token != WRITER:
            raise Refused(403, "You don't have the rights to do this")

    def _commit(self, request: Request, repo: str, revision: str) -> tuple[str, dict[str, File]]:
        repository = self._repository(request, repo)
        name = repository.find(revision)
        if name is None:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return name, repository.commits[name]

    # ------------------------------------------------------------------ routes

    def whoami(self, request: Request) -> Any:
        if request.token is None:
            raise Refused(401, "Invalid username or password.")
        return {
            "type": "user",
            "name": "writer" if request.token == WRITER else "reader",
            "orgs": [],
        }

    def create(self, request: Request) -> Any:
        self._writer(request)
        asked = json.loads(request.body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repositories:
            raise Refused(409, "You already created this model repo")
        private = asked.get("private", asked.get("visibility") == "private")
        made = self.repositories[name] = Repository(private)
        made.commit(
            "main", {".gitattributes": File(b"*.safetensors filter=lfs\n", False)}, "initial commit"
        )
        return {"url": f"{self.endpoint}/{name}", "name": name, "id": name}

    def info(self, request: Request, repo: str, revision: str | None = None) -> Any:
        name, files = self._commit(request, repo, revision or "main")
        return {
            "id": repo,
            "modelId": repo,
            "sha": name,
            "private": self.repositories[repo].private,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [{"rfilename": path} for path in files],
        }

    def tree(self, request: Request, repo: str, revision: str, path: str | None = None) -> Any:
        _, files = self._commit(request, repo, revision)
        inside = {
            name: file
            for name, file in files.items()
            if path is None or name.startswith(f"{path}/")
        }
        if path is not None and not inside:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        return [
            {"type": "file", "path": name, "size": len(file.content), "oid": file.blob}
            | (
                {"lfs": {"oid": file.sha256, "size": len(file.content), "pointerSize": 130}}
                if file.large
                else {}
            )
            for name, file in inside.items()
        ]

    def branch(self, request: Request, repo: str, branch: str) -> Any:
        self._writer(request)
        repository = self._repository(request, repo)
        if branch in repository.branches:
            raise Refused(409, "Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        return {}

    def validate(self, request: Request) -> Any:
        return {"errors": [], "warnings": []}

    def preupload(self, request: Request, repo: str, revision: str) -> Any:
        self._writer(request)
        _, there = self._commit(request, repo, revision)
        files = []
        for asked in json.loads(request.body)["files"]:
            large = asked["path"].endswith(BINARY)
            file = there.get(asked["path"])
            oid = None if file is None else file.sha256 if file.large else file.blob
            mode = "lfs" if large else "regular"
            files.append(
                {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}
            )
        return {"files": files}

    def batch(self, request: Request, repo: str) -> Any:
        self._repository(request, repo)
        objects = []
        for asked in json.loads(request.body)["objects"]:
            one: dict[str, Any] = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.objects:
                base = f"{self.endpoint}/lfs/{asked['oid']}"
                one["actions"] = {"upload": {"href": base}, "verify": {"href": f"{base}/verify"}}
            objects.append(one)
        return {"transfer": "basic", "objects": objects}

    def put(self, request: Request, oid: str) -> Any:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise Refused(400, "content does not have this sha256")
        self.objects[oid] = request.body
        return {}

    def verify(self, request: Request, oid: str) -> Any:
        if len(self.objects.get(oid, b"")) != json.loads(request.body)["size"]:
            raise Refused(404, "object is not there")
        return {}

    def commit(self, request: Request, repo: str, revision: str) -> Any:
        self._writer(request)
        _, before = self._commit(request, repo, revision)
        files, message = dict(before), ""
        for line in request.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    raise Refused(400, f"LFS object {value['oid']} is missing")
                files[value["path"]] = File(self.objects[value["oid"]], True)
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        repository = self.repositories[repo]
        name = repository.commit(revision, files, message)
        return {
            "success": True,
            "commitOid": name,
            "commitUrl": f"{self.endpoint}/{repo}/commit/{name}",
            "hookOutput": "",
        }

    def resolve(self, request: Request, repo: str, revision: str, path: str) -> Any:
        name, files = self._commit(request, repo, revision)
        if (file := files.get(path)) is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": name, "ETag": f'"{file.sha256 if file.large else file.blob}"'}
        if file.large:
            headers |= {
                "X-Linked-Etag": f'"{file.sha256}"',
                "X-Linked-Size": str(len(file.content)),
            }
        return 200, headers | {"Content-Type": "application/octet-stream"}, file.content


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>refs/pr/\d+|[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", rf"/api/models/{_REPO}", "info"),
    ("GET", rf"/api/models/{_REPO}/revision/{_REVISION}", "info"),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<path>.+))?", "tree"),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<branch>.+)", "branch"),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", "commit"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "put"),
    ("POST", r"/lfs/(?P<oid>\w+)/verify", "verify"),
    ("GET HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
]


def _chunks(stream: Any) -> bytes:
    """A body that came in chunks."""
    whole = b""
    while size := int(stream.readline().split(b";")[0], 16):
        whole += stream.read(size)
        stream.readline()
    stream.readline()
    return whole
