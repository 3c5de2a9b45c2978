"""`hf://`, against a hub and a store of ours on loopback."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import serving
from hypothesis import HealthCheck, given, settings, strategies as st

import mfload
from mfload import errors
from mfload.sources import http
from mfload.sources.hub_model import HubPath, HubSource, Model
from mfload.sources.tls import Tls

constants: Any = pytest.importorskip("huggingface_hub.constants")

import hub_server  # noqa: E402
from hub_server import TOKEN, Hub  # noqa: E402

ONE = {"w": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "b": np.arange(5)}
TWO = {"v": np.arange(20_000, dtype=np.int32).reshape(500, 40)}
NAME = "org/name"
INDEX = "model.safetensors.index.json"
PARTS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Short pauses, no token and no cache but the test's own; returns the cache."""
    for name, value in (("_PAUSE", 0.001), ("_LONGEST_PAUSE", 0.01), ("STALLED", 1.0)):
        monkeypatch.setattr(http, name, value)
    cache = tmp_path / "hub cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", os.fspath(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.fspath(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("NETRC", os.fspath(tmp_path / "no netrc"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    return cache


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.hub() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.endpoint)
        yield made


def _saved(path: Path, arrays: dict[str, Any]) -> bytes:
    raw = samples.save(path, arrays).read_bytes()
    path.unlink()
    return raw


@pytest.fixture
def single(tmp_path: Path) -> dict[str, bytes]:
    raw = _saved(tmp_path / "m", ONE)
    return {"config.json": b"{}", ".gitattributes": b"", "model.safetensors": raw}


@pytest.fixture
def sharded(tmp_path: Path) -> dict[str, bytes]:
    table = dict.fromkeys(ONE, PARTS[0]) | dict.fromkeys(TWO, PARTS[1])
    return {
        "config.json": b"{}",
        INDEX: json.dumps({"metadata": {}, "weight_map": table}).encode(),
        PARTS[0]: _saved(tmp_path / "a", ONE),
        PARTS[1]: _saved(tmp_path / "b", TWO),
    }


def load(url: str = f"hf://{NAME}", **options: Any) -> dict[str, Any]:
    return mfload.load(url, "numpy", options=mfload.Options(**options))


def refused(url: str, kind: type[errors.MfloadError] = errors.SourceNotFoundError) -> str:
    with pytest.raises(kind) as caught:
        load(url)
    assert TOKEN not in str(caught.value)
    return str(caught.value)


class TestHubCalls:
    @pytest.mark.parametrize(
        "url",
        ["hf://org/name", "hf://org/name@main", "hf://models/org/name/", "hf://org/name@refs/pr/1",
         "hf://org/name/model.safetensors", "hf://org/name@a%2Fb", "HF://org/name"],
    )  # fmt: skip
    def test_load(self, hub: Hub, single: dict[str, bytes], url: str) -> None:
        for revision in ("main", "refs/pr/1", "a/b"):
            hub.push(NAME, single, revision)
        report = mfload.Report()
        samples.assert_same(mfload.load(url, "numpy", report=report), ONE)
        assert report.route[0][1] == "http"
        assert len(hub.requests("/api/")) == 1
        assert len(hub.requests("/resolve/")) == 1

    def test_shards(self, hub: Hub, sharded: dict[str, bytes]) -> None:
        commit = hub.push(NAME, sharded)
        report = mfload.Report()
        found = mfload.load(f"hf://{NAME}", "numpy", report=report)
        samples.assert_same(found, ONE | TWO)
        assert any(f"{NAME} at commit {commit[:12]}" in note for note in report.notes)
        assert len(hub.requests("/api/")) == 1
        assert len(hub.requests("/resolve/")) == 3  # Once a file: else the store is asked.
        samples.assert_same(load(f"hf://{NAME}/{INDEX}"), ONE | TWO)

    def test_folders_and_names_without_an_owner(
        self, hub: Hub, single: dict[str, bytes], sharded: dict[str, bytes]
    ) -> None:
        hub.push("gpt2", single | {f"sub dir/x/{name}": raw for name, raw in sharded.items()})
        samples.assert_same(load("hf://gpt2"), ONE)
        samples.assert_same(load("hf://gpt2/model.safetensors"), ONE)
        samples.assert_same(load("hf://gpt2@main/sub dir/x"), ONE | TWO)
        samples.assert_same(load(f"hf://gpt2@main/sub%20dir/x/{PARTS[1]}"), TWO)
        assert "close names: sub dir/x/model-00001-of-00002" in refused(
            "hf://gpt2@main/subdir/x/model-00001-of-00002.safetensors"
        )
        assert "look in hf://gpt2@main/sub dir/x" in refused("hf://gpt2@main/sub dir")

    def test_what_a_directory_tells(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, single | {"step/d/0": b"12", "step/manifest": b"3"})
        top: Any = mfload.sources.place(f"hf://{NAME}", mfload.options.LoadOptions())
        assert top.names() == [".gitattributes", "config.json", "model.safetensors", "step"]
        assert [top.is_directory(each) for each in ("step", "step/d", "config.json")] == [1, 1, 0]
        assert [top.is_file(each) for each in ("step/d/0", "step", "x")] == [1, 0, 0]
        step = top.at("step")
        assert (step.name, step.names()) == (f"hf://{NAME}/step", ["d", "manifest"])
        assert [*step.walk()] == [("d/0", 2), ("manifest", 1)]
        assert (step.above[0].name, step.above[1], top.above) == (top.name, "step", None)
        assert step.below("d").at("0").read(0, 2) == step.file("d/0").read(0, 2) == b"12"
        assert len(hub.requests("/api/")) == 1

    def test_open_slices_and_pickles(self, hub: Hub, sharded: dict[str, bytes]) -> None:
        hub.push(NAME, sharded)
        with mfload.open(f"hf://{NAME}") as opened:
            assert sorted(opened.keys()) == ["b", "v", "w"]
            assert np.array_equal(opened.get_slice("w")[10:20, 3:7], ONE["w"][10:20, 3:7])
            frozen = pickle.dumps(opened)
        assert np.array_equal(pickle.loads(frozen).get_tensor("v"), TWO["v"])
        sent = sum(len(each.range or "") > 0 for each in hub.store.asked)
        assert sent < 8

    def test_a_pickle_holds_no_token_of_the_machine(
        self, hub: Hub, single: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.push(NAME, single)
        hub.repositories[NAME].private = True
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        with mfload.open(f"hf://{NAME}") as opened:
            frozen = pickle.dumps(opened)
        assert TOKEN.encode() not in frozen
        assert np.array_equal(pickle.loads(frozen).get_tensor("b"), ONE["b"])

    def test_plan_stream_verify_and_shards_of_a_tensor(
        self, hub: Hub, sharded: dict[str, bytes]
    ) -> None:
        hub.push(NAME, sharded)
        plan = mfload.plan(f"hf://{NAME}")
        assert (plan.tensors, plan.route[0].engine) == (3, "http")
        assert "by ranges from http://127.0.0.1" in str(plan)
        streamed = dict(mfload.stream(f"hf://{NAME}", framework="numpy"))
        samples.assert_same(streamed, ONE | TWO)
        assert mfload.verify(f"hf://{NAME}").ok
        part = mfload.load(f"hf://{NAME}", "numpy", names="w", shardings=[("w", 0)], shard=(1, 3))
        assert np.array_equal(part["w"], ONE["w"][100:200])

    def test_command_line(self, hub: Hub, sharded: dict[str, bytes], tmp_path: Path) -> None:
        hub.push(NAME, sharded)
        command = [sys.executable, "-m", "mfload", "ls", f"hf://{NAME}"]
        place = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": os.fspath(tmp_path / "home")}
        done = subprocess.run(
            command, env=os.environ | place, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert all(name in done.stdout for name in (*ONE, *TWO))

    def test_several_revisions_in_a_list(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, {"a.safetensors": single["model.safetensors"]})
        with pytest.raises(errors.UsageError, match="a list has files alone"):
            mfload.load([f"hf://{NAME}"], "numpy")
        found = mfload.load([f"hf://{NAME}/a.safetensors"], "numpy")
        samples.assert_same(found, ONE)

    @pytest.mark.parametrize("size", [99_000, 99_993, 99_994, 100_000, 65_528, 65_536])
    def test_headers_of_any_length(self, hub: Hub, size: int) -> None:
        text = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'.ljust(size)
        hub.push(NAME, {"model.safetensors": size.to_bytes(8, "little") + text + b"\1\2"})
        assert load()["a"].tolist() == [1, 2]

    def test_nothing_is_written(self, hub: Hub, single: dict[str, bytes], tmp_path: Path) -> None:
        hub.push(NAME, single)
        before = sorted(tmp_path.rglob("*"))
        load()
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.parametrize("end", ["", "/model.safetensors"])
    def test_converting_brings_what_lies_beside(
        self, hub: Hub, single: dict[str, bytes], tmp_path: Path, end: str
    ) -> None:
        hub.push(NAME, single)
        (tmp_path / "out").mkdir()
        mfload.convert(f"hf://{NAME}{end}", tmp_path / "out")
        assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
        samples.assert_same(mfload.load(tmp_path / "out", "numpy"), ONE)

    def test_names_that_no_file_can_have_are_left_out(
        self, hub: Hub, single: dict[str, bytes]
    ) -> None:
        odd = dict.fromkeys(("//a.safetensors", "a/../b.safetensors", "/" * 5000), b"x")
        hub.push(NAME, {**single, **odd})
        samples.assert_same(mfload.load(f"hf://{NAME}", "numpy"), ONE)


class TestHubVersions:
    def test_a_branch_that_moves_while_it_is_read(
        self, hub: Hub, sharded: dict[str, bytes]
    ) -> None:
        hub.push(NAME, sharded)
        with mfload.open(f"hf://{NAME}") as opened:
            assert np.array_equal(opened.get_tensor("b"), ONE["b"])
            hub.push(NAME, {name: raw[::-1] for name, raw in sharded.items()})
            assert np.array_equal(opened.get_tensor("w"), ONE["w"])
            assert np.array_equal(opened.get_tensor("v"), TWO["v"])

    @pytest.mark.parametrize(
        ("header", "value", "what"),
        [("X-Repo-Commit", "0" * 40, "another commit"), ("X-Linked-ETag", '"0"', "another hash")],
    )
    def test_a_hub_that_answers_for_something_else(
        self, hub: Hub, single: dict[str, bytes], header: str, value: str, what: str
    ) -> None:
        hub.push(NAME, single)
        answer = hub.web.always
        assert answer is not None

        def lies(handler: Any) -> bool | None:
            plain = handler.send_header

            def send(name: str, given: str) -> None:
                plain(name, value if name == header else given)

            handler.send_header = send
            return answer(handler)

        hub.web.always = lies
        assert what in refused(f"hf://{NAME}", errors.SourceChangedError)

    def test_a_store_that_sends_another_file(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, single)
        with mfload.open(f"hf://{NAME}") as opened:
            for place, raw in hub.store.files.items():
                hub.store.etags[place] = '"other"'
                hub.store.files[place] = raw[:-1] + b"x"
            with pytest.raises(errors.SourceChangedError, match="another ETag"):
                opened.get_tensor("w")
        hub.push(NAME, single)
        hub.store.etags.clear()
        hub.store.always = None

        def short(handler: Any) -> None:
            raw = hub.store.files[handler.path]
            hub.store.files[handler.path] = raw if len(raw) < 1_200_000 else raw[:-4]

        hub.store.always = short
        assert "another number of bytes" in refused(f"hf://{NAME}", errors.SourceChangedError)

    def test_identities_are_those_of_the_commit(self, hub: Hub, single: dict[str, bytes]) -> None:
        commit = hub.push(NAME, single)
        options = mfload.options.LoadOptions()
        source = mfload.sources.find(f"hf://{NAME}/model.safetensors", options)
        assert str(source.identity).split()[2] == commit
        hub.sizes = False
        source = mfload.sources.find(f"hf://{NAME}/model.safetensors", options)
        assert str(source.identity).endswith(commit)
        samples.assert_same(load(), ONE)


class TestHubFaults:
    def test_signed_addresses_that_expire(self, hub: Hub, sharded: dict[str, bytes]) -> None:
        hub.push(NAME, sharded)
        with mfload.open(f"hf://{NAME}") as opened:
            for signature in ("second", "third"):
                hub.signature = signature
                assert np.array_equal(opened.get_tensor("w"), ONE["w"])
                assert np.array_equal(opened.get_tensor("v"), TWO["v"])

    @pytest.mark.parametrize("where", ["web", "store"])
    @pytest.mark.parametrize(
        "fault",
        [serving.reset, serving.refuse(503), serving.refuse(500),
         serving.refuse(429, RateLimit='"api";r=0;t=0'), serving.refuse(429, Retry_After="0")],
    )  # fmt: skip
    def test_servers_that_fail_for_a_while(
        self, hub: Hub, single: dict[str, bytes], where: str, fault: Callable[[Any], bool]
    ) -> None:
        hub.push(NAME, single)
        server: serving.Server = getattr(hub, where)
        server.faults.extend([fault] * 3)
        samples.assert_same(load(), ONE)

    def test_the_quota_says_how_long_to_wait(
        self, hub: Hub, single: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.push(NAME, single)
        waited: list[float] = []
        monkeypatch.setattr(http.time, "sleep", waited.append)
        hub.web.faults.append(serving.refuse(429, RateLimit='"api";r=0;t=55'))
        load()
        assert waited == [55.0]

    @settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(at=st.lists(st.integers(0, 70_000), max_size=3))
    def test_answers_that_break_off(
        self, hub: Hub, single: dict[str, bytes], at: list[int]
    ) -> None:
        hub.push(NAME, single)
        hub.store.faults.extend(map(serving.cut, at))
        samples.assert_same(load(), ONE)
        hub.store.faults.clear()

    def test_listings_that_break_off(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, single)

        def short(handler: Any) -> bool:
            handler.send_response(200)
            handler.send_header("Content-Length", "100")
            handler.end_headers()
            handler.wfile.write(b'{"sha":')
            handler.close_connection = True
            return True

        hub.web.faults.extend([short, short])
        samples.assert_same(load(), ONE)

    @pytest.mark.parametrize(
        "said",
        [b"<html>", b"[]", b"{}", b'{"sha": 7}', b'{"sha": "%b", "siblings": [7]}' % (b"0" * 40)],
    )
    def test_servers_that_are_no_hub(self, hub: Hub, said: bytes) -> None:
        def answer(handler: Any) -> bool:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(said)))
            handler.end_headers()
            handler.wfile.write(said)
            return True

        hub.web.always = answer
        assert "check HF_ENDPOINT" in refused(f"hf://{NAME}", errors.ReadError)

    def test_a_model_that_has_another_name_now(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, single)
        hub.renamed["old/name"] = NAME
        samples.assert_same(load("hf://old/name"), ONE)

    def test_a_mirror_that_leads_to_the_hub(
        self, hub: Hub, single: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its redirect has a query, leads to another host, and says nothing of a commit."""
        hub.push(NAME, single)

        def mirror(handler: Any) -> bool:
            handler.plain(308, Location=hub.endpoint + asked.asked[-1].path)
            return True

        monkeypatch.setenv("HF_TOKEN", TOKEN)
        with serving.serving({}, always=mirror) as asked:
            monkeypatch.setattr(constants, "ENDPOINT", asked.url(""))
            samples.assert_same(load(), ONE)
            assert "blobs=true" in hub.web.asked[0].path
            assert {each.authorization for each in asked.asked} == {f"Bearer {TOKEN}"}
        assert {each.authorization for each in hub.web.asked} == {None}

    def test_a_mirror_that_answers_in_chunks(
        self, hub: Hub, single: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit = hub.push(NAME, single)
        place = f"/{NAME}/resolve/{commit}/model.safetensors"
        lacks = serving.answer(Content_Range=None)

        def answer(handler: Any) -> bool:
            return handler.path != place and hub_server.say(handler, {"sha": commit})

        files = {place: single["model.safetensors"]}
        with serving.serving(files, chunked=True, always=answer) as mirror:
            monkeypatch.setattr(constants, "ENDPOINT", mirror.url(""))
            samples.assert_same(load(f"hf://{NAME}/model.safetensors"), ONE)
            mirror.always = lambda each: answer(each) or lacks(each)
            said = refused(f"hf://{NAME}/model.safetensors", errors.ReadError)
            assert "no Content-Range" in said

    def test_private_authorities(
        self, single: dict[str, bytes], certificates: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with hub_server.hub(serving.own(certificates, "seed")) as secured:
            monkeypatch.setattr(constants, "ENDPOINT", secured.endpoint)
            secured.push(NAME, single)
            samples.assert_same(load(ca_file=certificates / "ca.pem"), ONE)
            assert "certificate" in refused(f"hf://{NAME}", errors.ReadError)

    def test_a_load_ends_in_time(self, hub: Hub) -> None:
        ended = threading.Event()
        hub.web.always = lambda _: ended.wait(10)
        with pytest.raises(errors.LoadTimeoutError):
            load(timeout=0.1)
        ended.set()

    def test_a_fork_has_connections_of_its_own(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, single)
        with mfload.open(f"hf://{NAME}") as opened:
            opened.get_tensor("b")
            child = os.fork()
            if child == 0:
                os._exit(0 if np.array_equal(opened.get_tensor("w"), ONE["w"]) else 1)
            assert np.array_equal(opened.get_tensor("w"), ONE["w"])
            assert os.waitpid(child, 0)[1] == 0

    def test_the_first_error_does_not_hang(
        self, hub: Hub, single: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.push(NAME, single)
        monkeypatch.setattr(http, "STALLED", 0.2)
        ended = threading.Event()
        hub.web.always = lambda _: ended.wait(10)
        assert "no byte came" in refused(f"hf://{NAME}", errors.ReadError)
        ended.set()


class TestHubTokens:
    @pytest.fixture(autouse=True)
    def pushed(self, hub: Hub, sharded: dict[str, bytes]) -> None:
        hub.push(NAME, sharded)
        hub.repositories[NAME].private = True

    @pytest.mark.parametrize("where", ["environment", "file", "options"])
    def test_the_token_goes_to_the_hub_alone(
        self, hub: Hub, where: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        caplog.set_level(logging.DEBUG)
        options: dict[str, Any] = {}
        if where == "environment":
            monkeypatch.setenv("HF_TOKEN", TOKEN)
        elif where == "file":
            Path(constants.HF_TOKEN_PATH).write_text(TOKEN)
        else:
            monkeypatch.setenv("HF_TOKEN", "hf_other")
            options["headers"] = {"authorization": f"Bearer {TOKEN}"}
        hub.store.faults.extend([serving.reset, serving.cut(10)])
        report = mfload.Report()
        found = mfload.load(
            f"hf://{NAME}", "numpy", options=mfload.Options(**options), report=report
        )
        samples.assert_same(found, ONE | TWO)
        assert {each.authorization for each in hub.web.asked} == {f"Bearer {TOKEN}"}
        assert {each.authorization for each in hub.store.asked} == {None}
        assert TOKEN not in f"{report}{report!r}{caplog.text}"

    def test_tokens_that_must_not_be_sent(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        assert "or it is private" in refused(f"hf://{NAME}")
        assert {each.authorization for each in hub.web.asked} == {None}

    def test_a_token_that_expires_while_it_reads(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        with mfload.open(f"hf://{NAME}") as opened:
            hub.signature = "second"
            expired = serving.refuse(
                401, X_Error_Message="Invalid credentials in …".replace("…", TOKEN)
            )
            hub.web.always = expired
            with pytest.raises(
                errors.SourcePermissionError, match="does not accept the token"
            ) as e:
                opened.get_tensor("w")
        assert TOKEN not in str(e.value)


class TestHubErrors:
    def test_gated(
        self, hub: Hub, single: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.push(NAME, single)
        hub.repositories[NAME].gated = True
        said = refused(f"hf://{NAME}", errors.SourcePermissionError)
        assert f"accept its terms at {hub.endpoint}/{NAME}, then log in" in said
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        said = refused(f"hf://{NAME}", errors.SourcePermissionError)
        assert "with the account of the token" in said

    def test_private_and_missing(
        self, hub: Hub, single: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.push(NAME, single)
        said = refused("hf://org/nane")
        assert "has no model org/nane; close names: org/name, or it is private: log in" in said
        assert "close names: org/name" in refused("hf://orgg/name")
        assert "no model xyz/abc, or" in refused("hf://xyz/abc")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert "or the token may not read it" in refused("hf://xyz/abc")
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        said = refused(f"hf://{NAME}", errors.SourcePermissionError)
        assert "does not accept the token: log in with `hf auth login`" in said
        assert "hf_wrong" not in said

    def test_a_token_without_a_model(self, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.web.always = serving.refuse(401, X_Error_Code="RepoNotFound")
        assert "has no model org/name, or the token" in refused(f"hf://{NAME}")

    def test_a_hub_that_refuses_all_is_not_asked_forever(self, hub: Hub) -> None:
        hub.web.always = serving.refuse(401)
        refused(f"hf://{NAME}")
        assert len(hub.web.asked) == 3  # The model, and twice for models with a name like it.

    def test_missing_revisions_and_files(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, single)
        hub.push(NAME, single, "v1.0")
        said = refused(f"hf://{NAME}@v1.1")
        assert "no revision v1.1" in said
        assert "expected: main, v1.0" in said
        assert "close names: model.safetensors" in refused(f"hf://{NAME}/modle.safetensors")
        assert "no such file or folder" in refused(f"hf://{NAME}/folder")
        assert f"hf://{NAME}@{'0' * 40}" in refused(f"hf://{NAME}@{'0' * 40}")

    def test_a_missing_shard(self, hub: Hub, sharded: dict[str, bytes]) -> None:
        del sharded[PARTS[1]]
        hub.push(NAME, sharded)
        said = refused(f"hf://{NAME}", errors.ShardNotFoundError)
        assert f"{PARTS[1]!r} is named by the index and does not exist" in said

    @pytest.mark.parametrize("said", [7, "x", {}, [7], {"branches": 7, "tags": [7]}])
    def test_strange_answers_to_what_an_error_asks(self, hub: Hub, said: Any) -> None:
        def answer(handler: Any) -> bool:
            codes = {f"/api/models/{NAME}/revision/main": "RevisionNotFound"}
            if code := codes.get(handler.path) or ("xyz" in handler.path and "RepoNotFound"):
                handler.plain(404, X_Error_Code=code)
                return True
            return hub_server.say(handler, said)

        hub.web.always = answer
        assert "has no revision main" in refused(f"hf://{NAME}")
        assert "has no model xyz/a" in refused("hf://xyz/a")

    def test_credentials_of_other_tools_are_not_sent(
        self, hub: Hub, single: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "netrc"
        path.write_text(f"machine 127.0.0.1 login me password {TOKEN}")
        path.chmod(0o600)
        monkeypatch.setenv("NETRC", os.fspath(path))
        hub.push(NAME, single)
        samples.assert_same(load(f"hf://{NAME}/model.safetensors"), ONE)
        assert {each.authorization for each in hub.web.asked} == {None}

    def test_forbidden(self, hub: Hub, single: dict[str, bytes]) -> None:
        hub.push(NAME, single)
        text = "Access to this resource is disabled."
        hub.web.faults.append(serving.refuse(403, X_Error_Message=text))
        said = refused(f"hf://{NAME}", errors.SourcePermissionError)
        assert text in said

    def test_no_weights(self, hub: Hub) -> None:
        hub.push(NAME, {"config.json": b"{}", "pytorch_model.bin": b"x"})
        assert "PyTorch files" in refused(f"hf://{NAME}")

    @pytest.mark.parametrize(
        "url",
        [
            "hf://",
            "hf://a/b@",
            "hf://a b/c",
            "hf://../x",
            "hf://a/b/../c",
            "hf://u:p@h/x",
            "hf:///a",
        ],
    )
    def test_malformed_urls(self, url: str) -> None:
        assert "malformed" in refused(url, errors.UsageError)

    @pytest.mark.parametrize("kind", ["datasets", "spaces", "buckets"])
    def test_what_is_no_model(self, kind: str) -> None:
        said = refused(f"hf://{kind}/org/name", errors.UsageError)
        assert f"this is a {kind[:-1].capitalize() if kind == 'spaces' else kind[:-1]}" in said

    def test_no_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            port = closed.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert "Connection refused" in refused(f"hf://{NAME}", errors.ReadError)

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        said = refused(f"hf://{NAME}", errors.FrameworkMissingError)
        assert "pip install 'huggingface_hub>=1.0'" in said

    def test_names_of_models_that_are_no_paths(self) -> None:
        with pytest.raises(errors.SourceNotFoundError, match="'hf://org/name'"):
            mfload.load("org/name", "numpy")

    @given(
        name=st.from_regex(r"[A-Za-z0-9][\w.-]{0,8}/[A-Za-z0-9][\w.-]{0,8}", fullmatch=True),
        path=st.lists(st.from_regex(r"[a-z0-9_@ %-]{1,8}", fullmatch=True), max_size=3),
        revision=st.none() | st.sampled_from(["main", "v1.0", "refs/pr/12", "a/b", "0" * 40]),
    )
    def test_urls_are_taken_apart(self, name: str, path: list[str], revision: str | None) -> None:
        from urllib.parse import quote

        if not name.isascii() or name.split("/")[0] in ("models", "datasets", "spaces"):
            return
        plain = revision and (revision if revision.startswith("refs") else quote(revision, safe=""))
        at = "" if plain is None else f"@{plain}"
        rest = "/".join(path).strip("/ ")
        found = HubPath.of(f"hf://{name}{at}" + (f"/{quote(rest)}" if rest else ""))
        assert found == (name, revision or "main", rest, f"hf://{name}{at}")


class TestHubCache:
    def test_a_whole_snapshot_is_used(
        self, hub: Hub, sharded: dict[str, bytes], alone: Path
    ) -> None:
        commit = hub.push(NAME, sharded)
        needed = {name: raw for name, raw in sharded.items() if name != "config.json"}
        snapshot = hub_server.cache(alone, NAME, commit, needed)
        report = mfload.Report()
        found = mfload.load(f"hf://{NAME}", "numpy", report=report)
        samples.assert_same(found, ONE | TWO)
        assert any(f"cache at {snapshot}" in note for note in report.notes)
        assert len(hub.web.asked) == 1  # Which commit the branch stands for.
        samples.assert_same(load(f"hf://{NAME}/{INDEX}"), ONE | TWO)
        samples.assert_same(load(f"hf://{NAME}/{PARTS[0]}"), ONE)
        assert not hub.requests("/resolve/")
        hub.web.asked.clear()
        samples.assert_same(load(f"hf://{NAME}@{commit}"), ONE | TWO)
        samples.assert_same(load(f"hf://{NAME}@{commit}/{PARTS[0]}"), ONE)
        assert not hub.web.asked

    def test_an_old_snapshot_is_not(
        self, hub: Hub, single: dict[str, bytes], sharded: dict[str, bytes], alone: Path
    ) -> None:
        hub_server.cache(alone, NAME, hub.push(NAME, single), single)
        hub.push(NAME, sharded)
        samples.assert_same(load(), ONE | TWO)

    @pytest.mark.parametrize("how", ["absent", "short", "broken link", "index"])
    def test_a_snapshot_that_lacks_something_is_not(
        self, hub: Hub, sharded: dict[str, bytes], alone: Path, how: str
    ) -> None:
        commit, held = hub.push(NAME, sharded), dict(sharded)
        if how == "absent":
            del held[PARTS[1]]
        elif how == "short":
            held[PARTS[1]] = held[PARTS[1]][:-1]
        elif how == "index":
            del held[INDEX]
        snapshot = hub_server.cache(alone, NAME, commit, held)
        if how == "broken link":
            (snapshot / PARTS[1]).resolve().unlink()
        report = mfload.Report()
        found = mfload.load(f"hf://{NAME}", "numpy", report=report)
        samples.assert_same(found, ONE | TWO)
        lacked = INDEX if how == "index" else PARTS[1]
        assert any(f"the cache lacks {lacked}" in note for note in report.notes)
        assert len(hub.requests("/resolve/")) == 3

    def test_a_folder_of_a_commit_is_compared_with_the_list(
        self, hub: Hub, sharded: dict[str, bytes], alone: Path
    ) -> None:
        """One of two files is no whole model, and only the hub tells that there are two."""
        files = {"a.safetensors": sharded[PARTS[0]], "b.safetensors": sharded[PARTS[1]]}
        commit = hub.push(NAME, files)
        hub_server.cache(alone, NAME, commit, {"a.safetensors": files["a.safetensors"]})
        samples.assert_same(load(f"hf://{NAME}@{commit}"), ONE | TWO)

    def test_offline(
        self,
        hub: Hub,
        sharded: dict[str, bytes],
        alone: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        commit = hub.push(NAME, sharded)
        assert "HF_HUB_OFFLINE=1 is set" in refused(f"hf://{NAME}")
        hub_server.cache(alone, NAME, commit, sharded, ref="")
        said = refused(f"hf://{NAME}")
        assert f"with the commits {commit}" in said  # It knows no branch.
        samples.assert_same(load(f"hf://{NAME}@{commit}"), ONE | TWO)
        hub_server.cache(alone, "org/part", commit, {INDEX: sharded[INDEX]})
        assert f"a snapshot without {PARTS[0]}, {PARTS[1]}" in refused("hf://org/part")
        hub_server.cache(alone, "org/whole", commit, sharded, ref="refs/pr/1")
        samples.assert_same(load("hf://org/whole@refs/pr/1"), ONE | TWO)
        assert not hub.web.asked

    @pytest.mark.parametrize("fault", [serving.reset, serving.refuse(503), serving.refuse(429)])
    def test_a_hub_that_does_not_answer(
        self,
        hub: Hub,
        single: dict[str, bytes],
        alone: Path,
        fault: Callable[[Any], bool],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        hub_server.cache(alone, NAME, hub.push(NAME, single), single)
        hub.web.always = fault
        report = mfload.Report()
        samples.assert_same(mfload.load(f"hf://{NAME}", "numpy", report=report), ONE)
        assert any("which may be old" in note for note in report.notes)
        assert "which may be old" in caplog.text
        assert len(hub.web.asked) == 1
        hub.web.always = serving.refuse(401, X_Error_Code="RepoNotFound")
        with pytest.raises(errors.SourceNotFoundError) as caught:
            load()
        assert "HF_HUB_OFFLINE=1 loads that one" in "".join(caught.value.__notes__)

    def test_a_hub_that_hangs_is_waited_for_once(
        self, hub: Hub, single: dict[str, bytes], alone: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub_server.cache(alone, NAME, hub.push(NAME, single), single)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.1)
        monkeypatch.setattr(http, "STALLED", 20.0)
        ended = threading.Event()
        hub.web.always = lambda _: ended.wait(20)
        start = time.monotonic()
        samples.assert_same(load(), ONE)
        assert time.monotonic() - start < 10
        ended.set()

    def test_a_folder_that_the_cache_does_not_have(
        self, hub: Hub, single: dict[str, bytes], alone: Path
    ) -> None:
        hub_server.cache(alone, NAME, hub.push(NAME, single), single)
        hub.web.always = serving.reset
        said = refused(f"hf://{NAME}/folder", errors.ReadError)
        assert "could not read from the server" in said

    def test_a_cache_that_cannot_be_listed(
        self, hub: Hub, single: dict[str, bytes], alone: Path
    ) -> None:
        commit = hub.push(NAME, single)
        snapshot = hub_server.cache(alone, NAME, commit, single)
        snapshot.joinpath("model.safetensors").unlink()
        (snapshot / "model.safetensors").mkdir()
        samples.assert_same(load(), ONE)

    def test_what_huggingface_hub_downloads(
        self, hub: Hub, sharded: dict[str, bytes], alone: Path
    ) -> None:
        """The package takes this server for a hub, and its cache is found."""
        commit = hub.push(NAME, sharded)
        code = f"import huggingface_hub; print(huggingface_hub.snapshot_download({NAME!r}))"
        place = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": os.fspath(alone)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=os.environ | place, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        hub.web.asked.clear()
        samples.assert_same(load(f"hf://{NAME}@{commit}"), ONE | TWO)
        assert not hub.web.asked
        samples.assert_same(load(), ONE | TWO)
        assert len(hub.web.asked) == 1


def test_loads_at_once_share_nothing_but_connections(hub: Hub, sharded: dict[str, bytes]) -> None:
    hub.push(NAME, sharded)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(load())) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in found:
        samples.assert_same(each, ONE | TWO)
    assert len(found) == 4


def test_the_rate_holds_for_the_hub_too() -> None:
    model = Model(HubPath.of("hf://org/name"), (), None, Tls(), 1000)
    source = pickle.loads(pickle.dumps(HubSource(model, "m.safetensors")))
    assert source.link.pace is not None
