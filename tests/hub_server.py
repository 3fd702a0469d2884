"""Local Hub server for the real `huggingface_hub` client; it stores every byte that it receives over HTTP.

Large files are uploaded with Git LFS, as with `HF_HUB_DISABLE_XET`; Xet's storage protocol is not implemented.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_" + "s" * 34
LARGE = (".safetensors", ".gguf", ".onnx", ".png")  # uploaded with LFS
PREFIX = {"models": "", "datasets": "datasets/", "spaces": "spaces/"}


@dataclass
class File:
    content: bytes
    is_lfs: bool = False

    @property
    def oid(self) -> str:
        """Git's object id; for a large file, the id of its LFS pointer."""
        size, content = len(self.content), self.content
        if self.is_lfs:
            content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, File], title: str = "") -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {branch}".encode()).hexdigest()
        self.commits[sha], self.titles[sha] = files, title
        self.branches[branch] = sha
        return sha

    def sha(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {name: file.content for name, file in self.commits[self.branches.get(revision, revision)].items()}


class Hub:
    """State of the server, which tests inspect and change to simulate failures."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # key: models/user/name
        self.large: dict[str, bytes] = {}  # key: SHA-256
        self.requests: list[tuple[str, str]] = []  # method and path
        self.bodies: list[bytes] = []
        self.user = {"name": "me", "type": "user", "orgs": [{"name": "us"}], "auth": {"accessToken": {"role": "write"}}}
        self.taken: set[str] = set()  # names that other things have
        self.read_only: set[str] = set()  # namespaces without write permission
        self.secret: set[str] = set()  # files without read permission
        self.lost: Counter[str] = Counter()  # number of times that the connection is lost at a file
        self.cut_uploads = 0  # number of large uploads whose connection breaks in the middle
        self.hold = threading.Event()  # large files are accepted only while this is set
        self.hold.set()

    def __getitem__(self, name: str) -> Repository:
        return self.repositories[name if name.startswith(("models/", "datasets/", "spaces/")) else f"models/{name}"]

    def uploads(self) -> int:
        """Return the number of large files that were sent, completely or partly."""
        return sum(method == "PUT" for method, _ in self.requests)


@contextmanager
def serving() -> Iterator[tuple[Hub, str]]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class RequestError(Exception):
    """The request was answered with an error."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # send a response in one piece
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        with suppress(RequestError):
            body = self.body()
            if self.command == "POST" and path != "/api/validate-yaml":
                self.require_login()
            for pattern, answer in ROUTES[self.command]:
                if found := re.fullmatch(pattern, path):
                    answer(self, body, **found.groupdict())
                    return
            self.answer(404, {"error": f"no such address: {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def body(self) -> bytes:
        """Return the body of the request, or cut the connection."""
        length = int(self.headers.get("Content-Length", 0))
        if self.command == "PUT" and self.hub.cut_uploads:
            self.hub.cut_uploads -= 1
            self.hub.bodies.append(self.rfile.read(length // 2))
            self.close_connection = True
            self.connection.close()
            raise RequestError
        body = self.rfile.read(length)
        if self.command == "PUT":
            self.hub.hold.wait()
        self.hub.bodies.append(body)
        return body

    def answer(self, status: int, content: object = None, headers: dict | None = None, file: str = "") -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.lost[file]:
            self.hub.lost[file] -= 1
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, {"error": message}, headers)
        raise RequestError

    @property
    def base(self) -> str:
        return f"http://{self.headers['Host']}"

    def require_login(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "Invalid username or password.")

    def repository(self, kind: str, name: str) -> Repository:
        repository = self.hub.repositories.get(f"{kind}/{name}")
        if repository is None or (repository.private and "Authorization" not in self.headers):
            self.refuse(404, "Repository not found", "RepoNotFound")
        return repository

    def at(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, File]]:
        repository = self.repository(kind, name)
        if (sha := repository.sha(revision)) is None:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha, repository.commits[sha]

    def whoami(self, body: bytes) -> None:
        self.require_login()
        self.answer(200, self.hub.user)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization'] or self.hub.user['name']}/{asked['name']}"
        key = f"{asked.get('type', 'model')}s/{name}"
        if name.split("/")[0] in self.hub.read_only:
            self.refuse(403, "You don't have the rights to create a model under this namespace")
        elif name in self.hub.taken or key in self.hub.repositories:
            self.answer(409, {"error": "You already created this repo", "url": f"{self.base}/{name}"})
        else:
            repository = self.hub.repositories[key] = Repository(asked.get("visibility") == "private")
            names = (".gitattributes", *("README.md", "index.html", "style.css") * (asked.get("sdk") == "static"))
            repository.commit("main", {name: File(b"*.safetensors filter=lfs\n") for name in names})
            self.answer(200, {"url": f"{self.base}/{PREFIX[key.split('/')[0]]}{name}", "id": name})

    def info(self, body: bytes, kind: str, name: str, revision: str | None = None) -> None:
        sha, files = self.at(kind, name, revision or "main")
        siblings = [{"rfilename": path} for path in files]
        private = self.hub.repositories[f"{kind}/{name}"].private
        answer = {"id": name, "sha": sha, "private": private, "siblings": siblings, "tags": []}
        if "config.json" in files:
            answer["config"] = {"model_type": json.loads(files["config.json"].content).get("model_type")}
        self.answer(200, answer)

    def history(self, body: bytes, kind: str, name: str, revision: str) -> None:
        facts = {"message": "", "date": "2026-01-01T00:00:00.000Z", "authors": []}
        titles = self.hub.repositories[f"{kind}/{name}"].titles
        self.answer(200, [{"id": sha, "title": title} | facts for sha, title in titles.items()])

    def tree(self, body: bytes, kind: str, name: str, revision: str, folder: str | None = None) -> None:
        _, files = self.at(kind, name, revision)
        inside = f"{folder}/" if folder else ""
        below = {path.removeprefix(inside): file for path, file in files.items() if path.startswith(inside)}
        folders = set()
        if "recursive=true" not in self.path:
            folders = {path.split("/")[0] for path in below if "/" in path}
            below = {path: file for path, file in below.items() if "/" not in path}
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": inside + path} for path in folders]
        for path, file in below.items():
            entry = {"type": "file", "path": inside + path, "size": len(file.content), "oid": file.oid}
            if file.is_lfs:
                entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 134}
            entries.append(entry)
        self.answer(200, entries)

    def refs(self, body: bytes, kind: str, name: str) -> None:
        named = self.repository(kind, name).branches.items()
        branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in named]
        self.answer(200, {"branches": branches, "tags": [], "converts": []})

    def branch(self, body: bytes, kind: str, name: str, branch: str) -> None:
        repository = self.repository(kind, name)
        repository.branches[branch] = repository.sha(json.loads(body or b"{}").get("startingPoint", "main"))
        self.answer(201, {})

    def validate(self, body: bytes) -> None:
        license = yaml.safe_load(json.loads(body)["content"].split("---")[1]).get("license")
        is_valid = license in ("mit", "apache-2.0", None)
        errors = [] if is_valid else [{"message": '"license" must be one of apache-2.0, mit'}]
        self.answer(200 if is_valid else 400, {"errors": errors, "warnings": []})

    def preupload(self, body: bytes, kind: str, name: str, revision: str) -> None:
        _, published = self.at(kind, name, revision)
        files = []
        for asked in json.loads(body)["files"]:
            mode = "lfs" if asked["path"].endswith(LARGE) else "regular"
            there = published.get(asked["path"])
            oid = there and (there.sha256 if there.is_lfs else there.oid)
            files.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": files})

    def lfs(self, body: bytes, name: str) -> None:
        objects = json.loads(body)["objects"]
        for asked in objects:
            if asked["oid"] not in self.hub.large:
                asked["actions"] = {"upload": {"href": f"{self.base}/large/{asked['oid']}"}}
        self.answer(200, {"transfer": "basic", "objects": objects})

    def receive(self, body: bytes, oid: str) -> None:
        self.hub.large[oid] = body
        self.answer(200, {})

    def commit(self, body: bytes, kind: str, name: str, revision: str) -> None:
        repository = self.repository(kind, name)
        newest, title = repository.branches[revision], ""
        files = dict(repository.commits[newest])
        for item in map(json.loads, body.splitlines()):
            match item["key"], item["value"]:
                case "header", header:
                    title = header["summary"]
                    if header.get("parentCommit", newest) != newest:
                        return self.answer(412, {"error": "A commit has happened since."})
                case "file", {"path": path, "content": content}:
                    files[path] = File(base64.b64decode(content))
                case "lfsFile", {"path": path, "oid": oid}:
                    files[path] = File(self.hub.large[oid], True)
                case "deletedFile", {"path": path}:
                    del files[path]
        sha = repository.commit(revision, files, title)
        return self.answer(200, {"commitUrl": f"{self.base}/{PREFIX[kind]}{name}/commit/{sha}", "commitOid": sha})

    def resolve(self, body: bytes, name: str, revision: str, path: str, prefix: str | None = None) -> None:
        sha, files = self.at((prefix or "models/").rstrip("/"), name, revision)
        if path not in files:
            self.answer(404, None, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        if path in self.hub.secret:
            self.refuse(403, "")
        file, status, start, stop = files[path], 200, 0, None
        etag = file.sha256 if file.is_lfs else file.oid
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        headers["Access-Control-Allow-Origin"] = "*"
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            size = len(file.content)
            status, start, stop = 206, int(asked[1]), min(int(asked[2] or size), size - 1) + 1
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.answer(status, file.content[start:stop], headers, path)


KIND = r"(?P<kind>models|datasets|spaces)"
NAME = r"(?P<name>[\w.-]+/[\w.-]+)"
REVISION = r"(?P<revision>[^/]+)"
ROUTES = {
    "GET": [
        (r"/api/whoami-v2", Handler.whoami),
        (f"/api/{KIND}/{NAME}", Handler.info),
        (f"/api/{KIND}/{NAME}/revision/{REVISION}", Handler.info),
        (f"/api/{KIND}/{NAME}/tree/{REVISION}/?(?P<folder>.*)", Handler.tree),
        (f"/api/{KIND}/{NAME}/commits/{REVISION}", Handler.history),
        (f"/api/{KIND}/{NAME}/refs", Handler.refs),
        (rf"/(?P<prefix>(datasets|spaces)/)?{NAME}/resolve/{REVISION}/(?P<path>.+)", Handler.resolve),
    ],
    "POST": [
        (r"/api/repos/create", Handler.create),
        (r"/api/validate-yaml", Handler.validate),
        (f"/api/{KIND}/{NAME}/branch/(?P<branch>[^/]+)", Handler.branch),
        (f"/api/{KIND}/{NAME}/preupload/{REVISION}", Handler.preupload),
        (f"/api/{KIND}/{NAME}/commit/{REVISION}", Handler.commit),
        (rf"/(?:datasets/|spaces/)?{NAME}\.git/info/lfs/objects/batch", Handler.lfs),
    ],
    "PUT": [(r"/large/(?P<oid>\w+)", Handler.receive)],
}
ROUTES["HEAD"] = ROUTES["GET"]
