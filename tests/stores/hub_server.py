"""A small hub on loopback, and the store that it redirects to; it speaks what `hf://` asks.

What it answers is as the real hub's: names of models, of revisions and of files that do not exist,
gated and private models, hashes, commits, signed addresses of the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import serving

TOKEN = "hf_s3cr3tOfTests"


@dataclass
class Repository:
    """A model: files by commit and path, and the commit of each revision."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    private: bool = False
    gated: bool = False

    def resolved(self, revision: str) -> str | None:
        return self.refs.get(revision, revision if revision in self.commits else None)


@dataclass
class Hub:
    """The hub and its store.

    Attributes:
        signature: What a signed address must have; another makes older ones invalid.
        plain: Files below so many bytes come from the hub itself.
        sizes: Whether listings tell sizes and hashes.
    """

    repositories: dict[str, Repository]
    web: serving.Server
    store: serving.Server
    signature: str = "first"
    plain: int = 1000
    sizes: bool = True
    renamed: dict[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        return self.web.url("")

    def push(self, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Makes a commit that a revision stands for from now on; returns it."""
        text = repr((name, revision, sorted(files.items()))).encode()
        commit = hashlib.sha1(text).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}))
        repository.commits[commit] = files
        repository.refs[revision] = commit
        return commit

    def requests(self, what: str) -> list[serving.Asked]:
        """Those to the hub with a text in their path."""
        return [each for each in self.web.asked if what in each.path]

    def answer(self, handler: Any) -> bool:
        """Answers a request to the hub."""
        path, _, _query = handler.path.partition("?")
        known = handler.headers.get("Authorization") == f"Bearer {TOKEN}"
        if handler.headers.get("Authorization") and not known:
            return _refuse(handler, 401, None, "Invalid credentials in Authorization header")
        parts = [unquote(each) for each in path.strip("/").split("/")]
        if parts[:2] == ["api", "models"] and len(parts) == 2:
            asked = parse_qs(handler.query)
            owner, wanted = (asked.get(each, [""])[0].lower() for each in ("author", "search"))
            known = [each for each in self.repositories if each.lower().startswith(owner)]
            return say(handler, [{"id": each} for each in known if wanted in each.lower()])
        if parts[0] == "api" and parts[1] != "models":
            handler.plain(404)
            return True
        rest = parts[2:] if parts[0] == "api" else parts
        verbs = {"revision", "refs", "resolve", "tree"}
        at = next((n for n, each in enumerate(rest) if each in verbs), len(rest))
        name, verb, rest = "/".join(rest[:at]), "".join(rest[at : at + 1]), rest[at + 1 :]
        if name in self.renamed:
            where = handler.path.replace(name, self.renamed[name], 1)
            handler.plain(307, Location=where + ("?" + handler.query if handler.query else ""))
            return True
        repository = self.repositories.get(name)
        if repository is None or (repository.private and not known):
            return _refuse(handler, 404 if known else 401, "RepoNotFound", "Repository not found")
        if verb == "refs":
            refs = [{"name": each, "targetCommit": sha} for each, sha in repository.refs.items()]
            return say(handler, {"branches": refs, "tags": [], "converts": []})
        commit = repository.resolved(rest[0] if rest else "main")
        if commit is None:
            return _refuse(handler, 404, "RevisionNotFound", f"Invalid rev id: {rest[0]}")
        if verb == "tree":
            rows = self._listing(name, repository, commit)["siblings"]
            return say(handler, [_entry(row) for row in rows])
        if verb in ("", "revision"):
            return say(handler, self._listing(name, repository, commit))
        if repository.gated:
            text = f"Access to model {name} is restricted. You must be authenticated."
            return _refuse(handler, 403 if known else 401, "GatedRepo", text)
        return self._resolve(handler, repository.commits[commit], commit, "/".join(rest[1:]))

    def _listing(self, name: str, repository: Repository, commit: str) -> dict[str, Any]:
        files = repository.commits[commit]
        rows: list[dict[str, Any]] = [{"rfilename": path} for path in files]
        for row in rows if self.sizes else ():
            raw = files[row["rfilename"]]
            row |= {"size": len(raw), "blobId": hashlib.sha1(raw).hexdigest()}
            if len(raw) >= self.plain:
                row["lfs"] = {"sha256": _hash(raw), "size": len(raw), "pointerSize": 134}
        return {"id": name, "sha": commit, "siblings": rows, "gated": repository.gated}

    def _resolve(self, handler: Any, files: dict[str, bytes], commit: str, path: str) -> bool:
        if path not in files:
            return _refuse(handler, 404, "EntryNotFound", "Entry not found", X_Repo_Commit=commit)
        raw = files[path]
        if len(raw) < self.plain:
            self.web.files[handler.path] = raw
            etag = f'"{hashlib.sha1(raw).hexdigest()}"'
            if handler.command == "HEAD":
                handler.head(200, ETag=etag, X_Repo_Commit=commit)
            elif raw:
                handler.wfile.write(handler.head(ETag=etag, X_Repo_Commit=commit))
            else:
                handler.plain(416, Content_Range="bytes */0", ETag=etag)
            return True
        place = f"/{_hash(raw)}"
        self.store.files[place] = raw
        headers = {"X-Linked-ETag": f'"{_hash(raw)}"', "X-Linked-Size": str(len(raw))}
        signed = self.store.url(f"{place}?Signature={self.signature}")
        handler.plain(302, Location=signed, X_Repo_Commit=commit, **headers)
        return True

    def check_signature(self, handler: Any) -> bool:
        """Refuses a request to the store whose address is no longer valid."""
        if parse_qs(urlsplit(self.store.asked[-1].path).query).get("Signature") == [self.signature]:
            return False
        handler.plain(403)
        return True


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a listing as a row of a tree."""
    made = {"type": "file", "path": row["rfilename"], "size": row["size"], "oid": row["blobId"]}
    if "lfs" in row:
        made["lfs"] = row["lfs"] | {"oid": row["lfs"]["sha256"]}
    return made


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def say(handler: Any, what: Any) -> bool:
    """Answers with JSON."""
    raw = json.dumps(what).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(raw)))
    handler.end_headers()
    handler.wfile.write(raw)
    return True


def _refuse(handler: Any, status: int, code: str | None, text: str, **more: str) -> bool:
    codes = {} if code is None else {"X_Error_Code": code}
    handler.plain(status, **codes, X_Error_Message=text, **more)
    return True


@contextlib.contextmanager
def hub(tls: dict[str, Any] | None = None) -> Iterator[Hub]:
    """An empty hub while it lasts; over TLS with what `serving.own` gives."""
    with serving.serving({}, tls) as web, serving.serving({}, tls) as store:
        made = Hub({}, web, store)

        def answer(handler: Any) -> bool:
            handler.query = urlsplit(made.web.asked[-1].path).query
            return made.answer(handler)

        web.always, store.always = answer, made.check_signature
        yield made


def cache(place: Any, name: str, commit: str, files: dict[str, bytes], ref: str = "main") -> Any:
    """Lays files in a cache as `huggingface_hub` does; returns the snapshot."""
    base = place / re.sub("^|/", "--", "models/" + name).removeprefix("--")
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    if ref:
        (base / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (base / "refs" / ref).write_text(commit)
    for path, raw in files.items():
        blob = base / "blobs" / _hash(raw)
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(raw)
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(blob)
    return snapshot
