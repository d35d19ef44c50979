"""Cures and diagnoses on the HuggingFace hub: a small server stands in for it, the client is the real one."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import uncollapse as uc
from uncollapse.errors import UsageError
from uncollapse.io import hub

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answer what the client asks for: repositories in memory, files of regular size, one commit."""

    repositories: dict[str, dict[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.repositories.setdefault(name, {})
            self.answer({"url": f"https://huggingface.co/{name}"})
        elif self.path.startswith("/api/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer({"files": [file | {"shouldIgnore": False} for file in files]})
        else:  # a commit
            name = "/".join(self.path.split("/")[3:5])
            for change in map(json.loads, body.splitlines()):
                if change["key"] == "file":
                    self.repositories[name][change["value"]["path"]] = base64.b64decode(change["value"]["content"])
            self.answer(
                {"success": True, "commitOid": COMMIT, "commitUrl": f"https://huggingface.co/{name}/commit/{COMMIT}"}
            )

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        files = self.repositories.get(name)
        if files is None:
            return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        if parts[0] == "api":
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            tree = [{"type": "file", "path": path, "size": len(content), "oid": "1"} for path, content in files.items()]
            info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            return self.answer(tree if "tree" in parts else info)
        content = files.get("/".join(parts[4:]))
        if content is None:
            return self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        return self.answer(content, 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def answer(self, what: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def repositories(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, dict[str, bytes]]]:
    found: dict[str, dict[str, bytes]] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Hub,), {"repositories": found}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", here)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    yield found
    server.shutdown()
    server.server_close()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()


def test_a_cure_goes_to_the_hub_and_comes_back(repositories: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    model, x = encoder(), torch.randn(2, 5, 16)
    before = uc.diagnose(model, [x])
    uc.attach(model, "contra_norm", scale=0.3, learnable=True)
    after = uc.diagnose(model, [x])
    uc.save_cure(model, tmp_path / "cure", repo_id="org/cure", diagnoses={"Before": before, "After": after})
    assert set(repositories["org/cure"]) == {"uncollapse.json", "uncollapse.safetensors", "README.md"}
    card = repositories["org/cure"]["README.md"].decode()
    assert 'uc.load_cure(model, "org/cure")' in card
    assert before.verdict.sentence in card
    assert card.index("## Before") < card.index("## After")
    fresh = encoder()
    uc.load_cure(fresh, "org/cure")
    assert torch.equal(fresh(x), model(x))


def test_a_card_that_is_there_is_never_replaced(repositories: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    repositories["org/model"] = {"README.md": b"theirs"}
    model = encoder()
    found = uc.diagnose(model, [torch.randn(2, 5, 16)])
    assert found.push("org/model").endswith(COMMIT)
    assert repositories["org/model"]["README.md"] == b"theirs"
    assert found.verdict.sentence in repositories["org/model"]["uncollapse.md"].decode()
    assert uc.Diagnosis.from_json(repositories["org/model"]["diagnosis.json"].decode()) == found


def test_what_is_not_there_is_said_and_the_model_stays(repositories: dict[str, dict[str, bytes]]) -> None:
    model = encoder()
    with pytest.raises(UsageError, match="org/nothing"):
        uc.load_cure(model, "org/nothing")
    repositories["org/empty"] = {"README.md": b""}
    with pytest.raises(FileNotFoundError, match="saved cure"):
        uc.load_cure(model, "org/empty")
    assert list(uc.attachments(model)) == []


def test_without_a_network_a_sentence_says_so_and_the_files_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model = encoder()
    uc.attach(model, "contra_norm", scale=0.3)
    with pytest.raises(UsageError, match="reached"):
        uc.save_cure(model, tmp_path / "cure", repo_id="org/cure")
    assert uc.load_cure(encoder(), tmp_path / "cure")
    with pytest.raises(UsageError, match="reached"):
        uc.load_cure(encoder(), "org/other")


@pytest.mark.parametrize("name", ["cure", "a/b/c", "", "../up"])
def test_a_wrong_name_is_refused_before_anything_is_sent(name: str) -> None:
    with pytest.raises(UsageError, match="owner/name"):
        hub.push(name, {}, "", private=False, message="")
