"""URLs as sources, against a server on loopback that misbehaves."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import serving
from hypothesis import HealthCheck, given, settings, strategies as st
from serving import Server, after, answer, cut, refuse, reset, stall

import mfload
from mfload import errors, sources
from mfload.sources import http
from mfload.sources.client import Timeouts

SECRET = "s3cr3t"
MODEL = {"w": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "b": np.arange(5)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short pauses, and no `.netrc` of the user's."""
    monkeypatch.setattr(http, "_PAUSE", 0.001)
    monkeypatch.setattr(http, "_LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(http, "STALLED", 0.3)
    monkeypatch.setenv("NETRC", os.fspath(tmp_path / "no netrc"))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return samples.save(tmp_path_factory.mktemp("m") / "m", MODEL).read_bytes()


@pytest.fixture
def server(raw: bytes) -> Iterator[Server]:
    with serving.serving({"/model.safetensors": raw}) as served:
        yield served


def load(server: Server, path: str = "/model.safetensors", **options: Any) -> dict[str, Any]:
    return mfload.load(server.url(path), "numpy", options=mfload.Options(**options))


class TestEveryCall:
    def test_load(self, server: Server) -> None:
        report = mfload.Report()
        found = mfload.load(server.url(), "numpy", report=report)
        samples.assert_same(found, MODEL)
        assert report.route == ((server.url(), "http", "not a local file"),)
        assert report.threads == 1  # It is one block.
        assert all(each.range for each in server.asked)

    def test_open(self, server: Server) -> None:
        with mfload.open(server.url()) as opened:
            assert opened.keys() == ["b", "w"]
            assert np.array_equal(opened.get_slice("w")[10:20, 3:7], MODEL["w"][10:20, 3:7])
            assert np.array_equal(opened.get_tensor("b"), MODEL["b"])
            copied = pickle.loads(pickle.dumps(opened))
        assert np.array_equal(copied.get_tensor("w"), MODEL["w"])
        assert server.url() in repr(copied)

    def test_a_pickle_remembers_the_version(self, server: Server) -> None:
        with mfload.open(server.url()) as opened:
            frozen = pickle.dumps(opened)
        server.etags["/model.safetensors"] = '"other"'
        with pytest.raises(errors.SourceChangedError):
            pickle.loads(frozen)

    def test_plan(self, server: Server) -> None:
        found = mfload.plan(server.url())
        assert found.route[0].engine == "http"
        assert found.tensors == 2
        assert len(server.asked) == 1

    def test_verify(self, server: Server, raw: bytes, tmp_path: Path) -> None:
        found = mfload.verify(server.url())
        assert found.ok
        assert "there is no manifest at http://127.0.0.1" in found.notes[-1]
        path = tmp_path / "model.safetensors"
        path.write_bytes(raw)
        mfload.verify(path, mode="write")
        server.files["/model.safetensors.checksums.json"] = (
            tmp_path / "model.safetensors.checksums.json"
        ).read_bytes()
        found = mfload.verify(server.url(), against=path)
        assert found.ok
        assert set(found.checked) >= {"checksums", "against"}
        found = mfload.verify(server.url() + "?token=x", checksums="sha256")
        assert found.ok
        assert found.checked[-1] == "sha256"
        # The name that earlier versions gave counts if the manifest has this file.
        known = server.files.pop("/model.safetensors.checksums.json")
        server.files["/model.checksums.json"] = known
        found = mfload.verify(server.url())
        assert str(found.manifest).endswith("/model.checksums.json")
        server.files["/model.checksums.json"] = known.replace(b"model.safe", b"model-2.safe")
        found = mfload.verify(server.url())
        assert found.manifest is None
        assert "is for other files" in "; ".join(found.notes)
        server.files["/model.safetensors.checksums.json"] = known
        broken = bytearray(raw)
        broken[-1] ^= 1
        server.files["/model.safetensors"] = bytes(broken)
        assert not mfload.verify(server.url())
        with pytest.raises(errors.UsageError, match="no manifest can lie"):
            mfload.verify(server.url(), mode="write")

    def test_a_manifest_that_is_refused_counts_as_none(self, server: Server) -> None:
        server.always = lambda each: each.path.endswith(".json") and refuse(403)(each)
        assert mfload.verify(server.url()).ok

    def test_diff_and_align(self, server: Server, tmp_path: Path) -> None:
        target = tmp_path / "new.safetensors"
        mfload.align(server.url(), target)
        assert mfload.diff(server.url(), target).equal
        with pytest.raises(errors.MfloadError):
            mfload.align(server.url(), overwrite=True)

    def test_an_index(self, server: Server) -> None:
        index = _index(server, {"w": "a%s.safetensors", "b": "b/b%s.safetensors"})
        found = mfload.load(server.url(index), "numpy")
        samples.assert_same(found, MODEL)
        with mfload.open(server.url(index)) as opened:
            samples.assert_same(pickle.loads(pickle.dumps(opened)).get_tensors(), MODEL)
        assert mfload.verify(server.url(index)).ok

    def test_an_index_with_a_query_hands_it_on(self, server: Server) -> None:
        index = _index(server, {"w": "a.safetensors", "b": "b.safetensors"})
        samples.assert_same(load(server, f"{index}?sig={SECRET}"), MODEL)
        assert {each.path.partition("?")[2] for each in server.asked} == {f"sig={SECRET}"}

    def test_a_shard_that_is_missing(self, server: Server) -> None:
        index = _index(server, {"w": "a.safetensors", "b": "b.safetensors"})
        del server.files["/m/b.safetensors"]
        with pytest.raises(errors.SourceNotFoundError) as info:
            load(server, index)
        assert info.value.file == server.url(index)
        assert "b.safetensors" in str(info.value)

    def test_a_list(self, server: Server, raw: bytes) -> None:
        server.files["/other"] = mfload_bytes({"c": np.arange(3)})
        found = mfload.load([server.url(), server.url("/other")], "numpy")
        assert set(found) == {"b", "w", "c"}
        with pytest.raises(errors.UsageError, match="listed twice"):
            mfload.load([server.url(), server.url()], "numpy")

    def test_many_at_once(self, server: Server) -> None:
        table = {f"w{n}": f"{n}.safetensors" for n in range(20)}
        for name, file in table.items():
            server.files[f"/m/{file}"] = mfload_bytes({name: np.full(4, int(name[1:]))})
        server.files["/m/i.json"] = json.dumps({"weight_map": table}).encode()
        found = load(server, "/m/i.json")
        assert all((found[name] == int(name[1:])).all() for name in table)

    def test_no_error_of_many_at_once_is_lost(self) -> None:
        given = [http.HttpSource(f"http://host/{n}") for n in range(4)]

        def fail(_: object) -> None:
            raise IndexError

        with pytest.raises(IndexError):
            sources.together(fail, given)

    def test_an_empty_tensor_and_an_empty_file(self, server: Server) -> None:
        server.files["/e"] = mfload_bytes({"e": np.zeros((0, 3))})
        assert load(server, "/e")["e"].shape == (0, 3)
        server.files["/none"] = b""
        with pytest.raises(errors.HeaderError, match="too short"):
            load(server, "/none")

    def test_torch(self, server: Server) -> None:
        pytest.importorskip("torch")
        found = mfload.load(server.url(), "torch")
        assert np.array_equal(found["w"].numpy(), MODEL["w"])


def mfload_bytes(arrays: dict[str, Any]) -> bytes:
    from safetensors.numpy import save

    return save(arrays)


def _index(server: Server, places: dict[str, str]) -> str:
    """Shards of the model below /m, one for each tensor; the path of their index."""
    places = {name: place.replace("%s", " é") for name, place in places.items()}
    for name, place in places.items():
        path = "/m/" + place.replace(" ", "%20").replace("é", "%C3%A9")
        server.files[path] = mfload_bytes({name: MODEL[name]})
    server.files["/m/model.safetensors.index.json"] = json.dumps({"weight_map": places}).encode()
    return "/m/model.safetensors.index.json"


class TestReads:
    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_slices_are_those_of_the_local_file(self, data: st.DataObject, server: Server) -> None:
        bounds = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n))) for n in (300, 1000)]
        steps = [data.draw(st.sampled_from([1, 1, 2, 7])) for _ in bounds]
        index = tuple(slice(*b, s) for b, s in zip(bounds, steps, strict=True))
        with mfload.open(server.url()) as opened:
            assert np.array_equal(opened.get_slice("w")[index], MODEL["w"][index])

    @pytest.mark.parametrize("settings", [
        {"chunked": True}, {"protocol": "HTTP/1.0"}, {"validator": "Last-Modified"},
    ])  # fmt: skip
    def test_servers_of_other_kinds(self, raw: bytes, settings: dict[str, Any]) -> None:
        with serving.serving({"/model.safetensors": raw}, **settings) as server:
            samples.assert_same(load(server), MODEL)

    def test_connections_are_kept(self, server: Server) -> None:
        with mfload.open(server.url()) as opened:
            for n in range(20):
                opened.get_slice("w")[n]
        assert len({each.connection for each in server.asked}) == 1

    def test_a_small_read_is_one_request(self, server: Server) -> None:
        with mfload.open(server.url()) as opened:
            rows = opened.get_slice("w")
            server.asked.clear()
            assert np.array_equal(rows[200], MODEL["w"][200])
            assert len(server.asked) == 1
            # A long answer may end in another version than it began with.
            assert np.array_equal(rows[100:200], MODEL["w"][100:200])
            assert len(server.asked) == 3
            server.etags["/model.safetensors"] = '"other"'
            with pytest.raises(errors.SourceChangedError):
                rows[200]

    @pytest.mark.parametrize("lines", [10, 40, 300])
    def test_what_came_with_the_header_is_asked_for_once(self, tmp_path: Path, lines: int) -> None:
        array = np.arange(lines * 1000, dtype=np.float32).reshape(lines, 1000)
        raw = samples.save(tmp_path / "a.safetensors", {"w": array}).read_bytes()
        with serving.serving({"/a.safetensors": raw}) as served:
            assert np.array_equal(load(served, "/a.safetensors")["w"], array)
            spans = [re.findall(r"\d+", each.range or "") for each in served.asked]
            came = sum(min(int(last) + 1, len(raw)) - int(first) for first, last in spans)
            assert came <= len(raw) + 1  # And a byte, to see that it is the same version.
        with (
            serving.serving({"/a.safetensors": raw}) as served,
            mfload.open(served.url("/a.safetensors")) as opened,
        ):
            rows = opened.get_slice("w")
            assert np.array_equal(rows[3], array[3])
            served.etags["/a.safetensors"] = '"other"'
            with pytest.raises(errors.SourceChangedError):
                rows[3]

    def test_a_fork_has_its_own(self, server: Server) -> None:
        with mfload.open(server.url()) as opened:
            row = opened.get_slice("w")
            assert np.array_equal(row[1], MODEL["w"][1])
            if (child := os.fork()) == 0:
                os._exit(0 if np.array_equal(row[2], MODEL["w"][2]) else 1)
            assert np.array_equal(row[3], MODEL["w"][3])
            assert os.waitpid(child, 0)[1] == 0

    def test_several_small_ones_share_threads(self, server: Server) -> None:
        server.always = after(1, lambda each: stall_briefly())
        with mfload.open(server.url(), options=mfload.Options(threads=2)) as opened:
            assert set(opened.get_tensors()) == {"b", "w"}

    def test_rows_apart_are_not_asked_for_one_by_one(self, tmp_path: Path) -> None:
        array = np.arange(400 * 256, dtype=np.float32).reshape(400, 256)
        rows = [("a", "F32", array.shape, array.tobytes())]
        raw = samples.save_raw(tmp_path / "a", rows).read_bytes()
        with serving.serving({"/a.safetensors": raw}) as server:
            with mfload.open(server.url("/a.safetensors")) as opened:
                assert np.array_equal(opened.get_slice("a")[::2], array[::2])
            assert len(server.asked) < 10

    def test_http_client_is_imported_for_urls_alone(self) -> None:
        code = "import sys, mfload, mfload.api; assert 'http.client' not in sys.modules"
        assert os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", code) == 0


def stall_briefly(seconds: float = 0.01) -> None:

    time.sleep(seconds)


class TestFaults:
    """What comes in the end is right, or an error of a type that says what is wrong."""

    @pytest.mark.parametrize("fault", [
        cut(0), cut(1), cut(700_001), cut(1_199_999), reset, refuse(503),
        refuse(429, Retry_After="1"), stall(1.0, 100_000),
    ])  # fmt: skip
    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_what_breaks_off_is_taken_up_again(self, server: Server, fault: Any, at: int) -> None:
        server.faults.extend([lambda _: None] * at)
        server.faults.append(fault)
        samples.assert_same(load(server), MODEL)

    def test_it_is_resumed_at_the_byte(self, server: Server, raw: bytes) -> None:
        server.faults.extend([lambda _: None, cut(100_000), cut(200_000)])
        samples.assert_same(load(server), MODEL)
        starts = [int(each.range[6:].partition("-")[0]) for each in server.asked if each.range]
        assert starts[1:4] == [starts[1], starts[1] + 100_000, starts[1] + 300_000]

    def test_small_steps_are_not_taken_for_ever(self, server: Server) -> None:
        server.always = after(1, cut(10))
        with pytest.raises(errors.ReadError, match="ended before the data"):
            load(server)
        assert len(server.asked) <= 1 + http.TRIES

    @pytest.mark.parametrize(("fault", "said"), [
        (reset, "reset|closed"), (stall(1.0), "no byte came for 0.3 s"), (refuse(503), "503"),
        (cut(0), "ended before the data"),
    ])  # fmt: skip
    @pytest.mark.parametrize("at", [0, 1])
    def test_a_server_that_stays_broken(
        self, server: Server, fault: Any, said: str, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http, "TRIES", 2)
        server.always = after(at, fault)
        with pytest.raises(errors.ReadError, match=said) as info:
            load(server)
        assert info.value.file == server.url()

    @pytest.mark.parametrize(
        "said",
        [b"garbage\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n", b"\0" * 70_000, b"HTTP/1.1 206 P\r\n" +
         b"A: b\r\n" * 1000 + b"\r\n", b"HTTP/1.1 206 P\r\nA: " + b"b" * 70_000, b"",
         b"HTTP/1.1 206 P\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
         b"HTTP/1.1 206 P\r\nContent-Length: -5\r\nContent-Range: bytes -5--1/-9\r\n\r\n",
         b"\x1b[31m" + b"x" * 9999 + b"\r\n\r\n"],
    )  # fmt: skip
    @pytest.mark.parametrize("at", [0, 1])
    def test_answers_that_are_no_http(self, server: Server, said: bytes, at: int) -> None:
        def fault(handler: Any) -> bool:
            handler.wfile.write(said)
            handler.close_connection = True
            return True

        server.always = after(at, fault)
        with pytest.raises(errors.ReadError) as info:
            load(server)
        assert len(str(info.value)) < 500
        assert str(info.value).isprintable()

    @pytest.mark.parametrize("kept", range(8))
    @pytest.mark.parametrize("at", [0, 1])
    def test_a_chunked_answer_without_its_end(self, server: Server, kept: int, at: int) -> None:
        """All bytes came: whether the end of the last chunk comes as well does not matter."""

        def fault(handler: Any) -> bool:
            body = handler.head(Content_Length=None, Transfer_Encoding="chunked")
            said = b"%x\r\n%s" % (len(body), body) + b"\r\n0\r\n\r\n"[:kept]
            handler.wfile.write(said)
            handler.close_connection = True
            return True

        server.always = after(at, fault)
        samples.assert_same(load(server), MODEL)
        asked = [each.range for each in server.asked if each.range]
        spans = [tuple(map(int, each[6:].split("-"))) for each in asked]
        assert all(first <= last for first, last in spans)
        assert len(set(asked)) == len(asked)

    @pytest.mark.parametrize("size", [b"-5", b"x", b""])
    def test_sizes_of_chunks_that_are_none(self, server: Server, size: bytes) -> None:
        def fault(handler: Any) -> bool:
            body = handler.head(Content_Length=None, Transfer_Encoding="chunked")
            handler.wfile.write(size + b"\r\n" + body)
            handler.close_connection = True
            return True

        for at in (0, 1):
            server.always = after(at, fault)
            with pytest.raises(errors.ReadError):
                load(server)

    @pytest.mark.parametrize("encoding", ["", "identity", "aws-chunked", "AWS-Chunked, identity",
                                          "utf-8"])  # fmt: skip
    def test_encodings_that_are_none(self, server: Server, encoding: str) -> None:
        server.always = answer(Content_Encoding=encoding)
        samples.assert_same(load(server), MODEL)
        server.always = answer(Content_Encoding=f"{encoding},gzip")
        with pytest.raises(errors.ReadError, match="encoded bytes"):
            load(server)

    @pytest.mark.parametrize("changed", [
        ("bytes ", "Bytes "), ("bytes ", "BYTES  "), ("bytes ", "bytes="), (r"/\d+", "/*"),
        ("bytes (.*)/.*", r"Bytes \1/*  "),
    ])  # fmt: skip
    @pytest.mark.parametrize("at", [0, 1])
    def test_spellings_of_a_range(
        self, server: Server, changed: tuple[str, str], at: int, raw: bytes
    ) -> None:
        def spelled(handler: Any) -> bool | None:
            if "Range" not in handler.headers:
                return answer(200, Content_Range=None)(handler)
            first, last = handler.span()
            found = re.sub(*changed, f"bytes {first}-{last}/{len(handler.served.files['/m'])}")
            return answer(Content_Range=found)(handler)

        for each in (raw, mfload_bytes({"b": MODEL["b"]})):  # One is shorter than the first read.
            server.files["/m"] = each
            server.always = after(at, spelled)
            found = load(server, "/m")
            samples.assert_same(found, {name: MODEL[name] for name in found})
            with mfload.open(server.url("/m")) as opened:
                copied = pickle.loads(pickle.dumps(opened))
            assert np.array_equal(copied.get_tensor("b"), MODEL["b"])

    def test_a_range_with_the_status_of_a_whole_file(self, server: Server) -> None:
        """Such as ModelScope answers with: what counts is Content-Range."""
        server.always = answer(200)
        samples.assert_same(load(server), MODEL)
        server.always = answer(200, Content_Range="bytes 7-65535/1200312")
        with pytest.raises(errors.ReadError, match="another range"):
            load(server)
        server.always = answer(200, Content_Range="bytes 0-1200311/1200312")
        with pytest.raises(errors.SourceError, match="requests for ranges: download"):
            load(server)

    @pytest.mark.parametrize("reply", [refuse(200), refuse(416, Content_Range="bytes */0")])
    def test_an_empty_file(self, server: Server, reply: Any) -> None:
        server.always = reply
        with pytest.raises(errors.HeaderError, match="an empty file"):
            load(server)

    def test_a_size_that_is_nowhere(self, server: Server) -> None:
        def hidden(handler: Any) -> bool:
            first, last = handler.span()
            chunked = {"Content_Length": None, "Transfer_Encoding": "chunked"}
            if "Range" not in handler.headers:
                return answer(200, Content_Range=None, **chunked)(handler)
            return answer(Content_Range=f"bytes {first}-{last}/*")(handler)

        server.always = hidden
        with pytest.raises(errors.SourceError, match="does not say how long the file is"):
            load(server)

    @pytest.mark.parametrize("date", [False, True])
    def test_a_pause_that_is_asked_for(self, server: Server, date: bool) -> None:
        """It is kept to, however long, if the timeout leaves time for it; else the load ends."""

        def asks(seconds: int) -> Any:
            later = formatdate(time.time() + seconds + 0.9, usegmt=True)
            return refuse(503, Retry_After=later if date else str(seconds))

        start = time.monotonic()
        server.faults.append(asks(2))
        samples.assert_same(load(server, timeout=30), MODEL)
        assert 1.5 < time.monotonic() - start < 10
        for seconds, timeout in ((48, 20), (400, None)):
            start = time.monotonic()
            server.faults.append(asks(seconds))
            with pytest.raises(errors.ReadError, match=r"503.*asks for a pause of [34]\d+ s"):
                load(server, timeout=timeout)
            assert time.monotonic() - start < 5

    @pytest.mark.parametrize("value", [
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Mon, 01 Jan 2030 00:00:00 +99999999999",
        "-1", "nan", "soon", "",
    ])  # fmt: skip
    def test_a_pause_that_makes_no_sense(self, server: Server, value: str) -> None:
        server.faults.append(refuse(503, Retry_After=value))
        samples.assert_same(load(server), MODEL)

    def test_an_error_holds_no_connection(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[HTTPResponse] = []
        real = http.HttpHandle._send

        def send(*args: Any) -> HTTPResponse:
            seen.append(real(*args))
            return seen[-1]

        monkeypatch.setattr(http.HttpHandle, "_send", send)
        for at in (0, 1):
            server.always = after(at, answer(Content_Range="x", Connection="close"))
            with pytest.raises(errors.ReadError):
                load(server)
            assert seen
            assert all(each.isclosed() for each in seen)

    def test_a_kept_connection_has_the_patience_of_its_reader(
        self, server: Server, raw: bytes
    ) -> None:
        first = http.HttpSource(server.url(), timeout=0.05)
        second = http.HttpSource(server.url(), timeout=5.0)
        assert first.size == second.size
        server.always = lambda each: stall_briefly(0.2)
        assert second.read(70_000, 1) == raw[70_000:70_001]
        assert len({each.connection for each in server.asked}) == 1
        second.limits = Timeouts(0.05)
        with pytest.raises(errors.ReadError, match=r"no byte came for 0\.05 s"):
            second.read(70_000, 1)

    def test_a_read_that_outlives_its_checkpoint_keeps_no_connection(self, server: Server) -> None:
        source = http.HttpSource(server.url())
        where = source.target[:3], source.target.path, {"Range": "bytes=0-9"}, source.limits
        for kept in (1, 0):
            with source.client.ask(*where) as answer:
                assert len(answer.read()) == 10
                if not kept:
                    source.keep(False)
            assert (source.client.waiting(where[0]) is not None) == bool(kept)

    def test_nothing_listens(self, server: Server) -> None:
        server.port = 1
        with pytest.raises(errors.ReadError, match="refused"):
            load(server)

    def test_no_such_host(self) -> None:
        with pytest.raises(errors.ReadError, match=r"given up after \d tries|could not read"):
            mfload.load("http://no-such-host.invalid/model.safetensors", "numpy")

    @pytest.mark.parametrize(("headers", "said"), [
        ({"Content_Range": "bytes 0-9/1"}, "another range"),
        ({"Content_Range": None}, "another range"),
        ({"Content_Range": "bytes 1-2-3"}, "another range"),
        ({"Content_Range": f"bytes 0-65535/{'9' * 30}"}, "another range"),
        ({"Content_Range": f"bytes 0-65535/{'9' * 19}"}, "another range"),
        ({"Content_Length": "7"}, "another number of bytes"),
        ({"Content_Length": "99999999999"}, "another number of bytes"),
        ({"Content_Encoding": "gzip"}, "encoded bytes"),
        ({"Transfer_Encoding": "gzip"}, "encoded bytes"),
        ({"Transfer_Encoding": "gzip, chunked"}, "encoded bytes"),
    ])  # fmt: skip
    @pytest.mark.parametrize("at", [0, 1])
    def test_lies_about_lengths(self, server: Server, headers: Any, said: str, at: int) -> None:
        server.always = after(at, answer(**headers))
        with pytest.raises(errors.ReadError, match=said):
            load(server)

    def test_a_size_that_is_a_lie(self, server: Server, raw: bytes) -> None:
        """The header says where the data ends, and the size must fit it."""
        size = 10**15
        server.always = answer(Content_Range=f"bytes 0-65535/{size}")
        with pytest.raises(errors.HeaderError):
            load(server)
        server.always = None
        raw = (10**12).to_bytes(8, "little") + bytes(100)
        server.files["/long"] = raw + bytes(http._HEAD)
        with pytest.raises(errors.HeaderError, match="over the format's limit"):
            load(server, "/long")
        assert len(server.asked) == 2

    def test_a_size_beyond_64_bits(self, server: Server) -> None:
        size = 95 * 10**17  # The header agrees with it.
        entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        text = json.dumps({"a": entry}).encode()
        body = len(text).to_bytes(8, "little") + text
        server.files["/huge.safetensors"] = body + bytes(http._HEAD)
        server.always = answer(Content_Range=f"bytes 0-{http._HEAD - 1}/{size + len(body)}")
        with pytest.raises(errors.ReadError, match="another range"):
            load(server, "/huge.safetensors")

    @pytest.mark.parametrize("end", [b"more\r\n0\r\n\r\n", b"\r\n0\r\n", b""])
    def test_what_follows_a_chunked_answer(self, raw: bytes, end: bytes) -> None:
        def chunked(handler: Any) -> bool:
            body = handler.head(Content_Length=None, Transfer_Encoding="chunked")
            length = len(body) + 4 * end.startswith(b"more")
            handler.wfile.write(b"%x\r\n%s%s" % (length, body, end))
            handler.wfile.flush()
            stopped.wait(20)  # Neither trailers nor the end of the last chunk come.
            return True

        stopped = threading.Event()
        with serving.serving({"/model.safetensors": raw}) as server:
            server.always = chunked
            start = time.monotonic()
            found = load(server)
            assert time.monotonic() - start < 10
            stopped.set()
        samples.assert_same(found, MODEL)

    def test_the_timeout(self, server: Server) -> None:
        for at in (0, 1):
            server.always = after(at, stall(5.0))
            with pytest.raises(errors.LoadTimeoutError):
                load(server, timeout=0.2)


class TestVersions:
    def test_a_change_between_two_answers(self, server: Server) -> None:
        with mfload.open(server.url()) as opened:
            server.etags["/model.safetensors"] = '"other"'
            with pytest.raises(errors.SourceChangedError) as info:
                opened.get_tensor("w")
        assert '"other"' in str(info.value)
        assert info.value.tensor == "w"

    def test_a_change_after_the_last_answer(self, server: Server) -> None:
        seen: list[int] = []

        def change(handler: Any) -> None:
            seen.append(1)
            if len(seen) == 3:  # The header, the data, the last look.
                server.etags["/model.safetensors"] = '"other"'

        server.always = change
        with pytest.raises(errors.SourceChangedError):
            load(server)
        assert len(seen) == 3

    def test_a_change_while_it_is_taken_up_again(self, server: Server) -> None:
        def change(handler: Any) -> bool:
            cut(100_000)(handler)
            server.etags["/model.safetensors"] = '"other"'
            return True

        server.faults.extend([lambda _: None, change])
        with pytest.raises(errors.SourceChangedError):
            load(server)

    def test_a_file_that_shrank(self, server: Server, raw: bytes) -> None:
        server.etags["/model.safetensors"] = '"same"'
        with mfload.open(server.url()) as opened:
            server.files["/model.safetensors"] = raw[:-4]
            with pytest.raises(errors.MfloadError):
                opened.get_tensor("w")

    def test_an_answer_without_a_version(self, server: Server) -> None:
        server.validator = None
        with pytest.raises(errors.SourceError, match="which version"):
            load(server)

    def test_a_server_without_ranges(self, server: Server) -> None:
        server.ranges = False
        with pytest.raises(errors.SourceError, match="requests for ranges: download"):
            load(server)


class TestCredentials:
    def test_a_header(self, server: Server) -> None:
        server.always = _guarded
        headers = {"authorization": f"Bearer {SECRET}"}
        samples.assert_same(load(server, headers=headers), MODEL)
        options = mfload.Options(headers=headers)
        with mfload.open(server.url(), options=options) as opened:
            copied = pickle.loads(pickle.dumps(opened))
        assert np.array_equal(copied.get_tensor("b"), MODEL["b"])
        assert hash(options) == hash(mfload.Options(headers=headers))

    def test_a_netrc(self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "netrc"
        path.write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
        monkeypatch.setenv("NETRC", os.fspath(path))
        load(server)
        assert {each.authorization for each in server.asked} == {"Basic bWU6czNjcjN0"}

    def test_without(self, server: Server) -> None:
        server.always = _guarded
        with pytest.raises(errors.SourcePermissionError, match=r"Options\(headers=…\)"):
            load(server)

    @pytest.mark.parametrize("headers", [
        {"Range": "x"}, {"a b": "x"}, {"X": f"{SECRET}\r\nHost: y"}, {"X": f"{SECRET}☃"},
        {"X": 5}, [1], SECRET, {"": SECRET},
    ])  # fmt: skip
    def test_headers_that_are_refused(self, headers: Any) -> None:
        with pytest.raises(errors.UsageError) as info:
            mfload.Options(headers=headers)
        assert SECRET not in str(info.value)

    @pytest.mark.parametrize("place", [
        "u:{}@127.0.0.1:{}/m", "{}@127.0.0.1:{}/m", "u:a/{}@127.0.0.1:{}/m", "u:{}@[::1]:{}/m",
        "u:1@{}#@127.0.0.1:{}/m",
    ])  # fmt: skip
    def test_a_password_in_a_url(self, server: Server, place: str) -> None:
        url = "http://" + place.format(SECRET, server.port)
        for call in (mfload.load, mfload.plan, mfload.open, mfload.verify):
            with pytest.raises(errors.UsageError) as info:
                call(url, *(["numpy"] if call is mfload.load else []))
            assert SECRET not in str(info.value)
        with pytest.raises(errors.MfloadError) as info:
            mfload.load(url, "numpy", options=mfload.Options(timeout=1e-9))
        assert SECRET not in str(info.value)
        assert not server.asked

    @pytest.mark.parametrize("fault", [
        refuse(401), refuse(404), refuse(418), refuse(503), reset, stall(1.0),
        answer(ETag=None), answer(Content_Range="x"), answer(Content_Encoding="br"),
        refuse(302, Location=f"ftp://x/?{SECRET}"), refuse(302, Location=f"//u:{SECRET}@x/"),
        refuse(302, Location=f"/again?{SECRET}"), refuse(302, Location=f"http://[{SECRET}"),
    ])  # fmt: skip
    @pytest.mark.parametrize("at", [0, 1])
    def test_no_error_shows_a_secret(
        self, server: Server, fault: Any, at: int, caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        monkeypatch.setattr(http, "TRIES", 2)
        caplog.set_level(logging.DEBUG)
        headers = {"Authorization": f"Bearer {SECRET}"}
        options = mfload.Options(headers=headers, timeout=20)
        assert SECRET not in repr(options)
        server.always = after(at, fault)
        url = f"{server.url()}?token={SECRET}"
        with pytest.raises(errors.MfloadError) as info:
            mfload.load(url, "numpy", options=options)
        error: BaseException | None = info.value
        assert SECRET.encode() not in pickle.dumps(error)
        while error is not None:
            assert SECRET not in f"{error}{error!r}{vars(error)}"
            error = error.__cause__ or error.__context__
        assert SECRET not in caplog.text

    def test_reports_and_reprs_show_none(self, server: Server) -> None:
        url, report = f"{server.url()}?token={SECRET}", mfload.Report()
        options = mfload.Options(headers={"X-Key": SECRET}, timeout=30)
        mfload.load(url, "numpy", report=report, options=options)
        with mfload.open(url, options=options) as opened:
            shown = [repr(opened), opened.file_of(opened.info("w")), str(report), repr(report)]
            shown += [str(report.as_dict()), str(mfload.plan(url, options=options))]
        with pytest.raises(errors.HeaderError, match="not a list of sums") as info:
            mfload.verify(url, sha256=url)
        shown.append(str(info.value))
        assert SECRET not in "".join(shown)
        assert "model.safetensors?…" in "".join(shown)


def _guarded(handler: Any) -> bool | None:
    right = handler.headers.get("Authorization") == f"Bearer {SECRET}"
    return None if right else refuse(401)(handler)


class TestRedirects:
    def test_to_another_server_without_credentials(self, server: Server, raw: bytes) -> None:
        with serving.serving({"/there": raw}) as other:
            server.always = refuse(302, Location=f"{other.url('/there')}?sig=1")
            samples.assert_same(load(server, headers={"Authorization": SECRET, "X": "y"}), MODEL)
            assert {each.authorization for each in other.asked} == {None}
            assert {each.authorization for each in server.asked} == {SECRET}
            assert len(server.asked) == 1  # What it leads to is remembered.

    @pytest.mark.parametrize(("entry", "sent"), [
        ("machine localhost login me password pw", "Basic bWU6cHc="),
        ("default login me password pw", None),  # A signed URL must not come with a password.
        ("machine 127.0.0.1 login me password pw", None),
    ])  # fmt: skip
    def test_to_another_server_with_its_own_credentials(
        self, server: Server, raw: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        entry: str, sent: str | None,
    ) -> None:  # fmt: skip
        """The entry of a host in `.netrc` is for it, however a request comes there."""
        (tmp_path / "netrc").write_text(entry)
        monkeypatch.setenv("NETRC", os.fspath(tmp_path / "netrc"))
        with serving.serving({"/there": raw}) as other:
            place = other.url("/there").replace("127.0.0.1", "localhost")
            server.always = refuse(302, Location=place)
            samples.assert_same(load(server, headers={"Authorization": SECRET}), MODEL)
            assert {each.authorization for each in other.asked} == {sent}

    def test_on_the_same_server_with_them(self, server: Server) -> None:
        server.always = lambda each: (
            each.path == "/a" and refuse(307, Location="/model.safetensors")(each)
        )
        samples.assert_same(load(server, "/a", headers={"Authorization": SECRET}), MODEL)
        assert {each.authorization for each in server.asked} == {SECRET}

    def test_an_end_that_is_over_is_asked_for_again(self, server: Server, raw: bytes) -> None:
        """Such as a signed URL that was valid for a while."""
        with serving.serving({"/1": raw, "/2": raw}) as other:
            other.etags = {"/1": '"x"', "/2": '"x"'}
            ends = iter("12")
            server.always = lambda each: refuse(302, Location=other.url(f"/{next(ends)}"))(each)
            with mfload.open(server.url()) as opened:
                other.always = lambda each: each.path == "/1" and refuse(403)(each)
                assert np.array_equal(opened.get_tensor("w"), MODEL["w"])

    @pytest.mark.parametrize("path", ["/a b/ü.safetensors", "/m?sig=%2Fa+b%3D&x=ü|", "/%C3%BC<1>",
                                      "/☃#part"])  # fmt: skip
    def test_places_as_servers_write_them(self, server: Server, raw: bytes, path: str) -> None:
        """Raw UTF-8 and spaces become what `requests` asks for; what is encoded stays."""
        requests: Any = pytest.importorskip("requests")
        moved = path.encode().decode("latin-1")
        server.always = lambda each: (
            each.path == "/model.safetensors" and refuse(302, Location=moved)(each)
        )
        expected = requests.utils.requote_uri(path.partition("#")[0])
        server.files[expected.partition("?")[0]] = raw
        requests.get(server.url(), headers={"Range": "bytes=0-0"}, timeout=20)
        theirs = server.asked[-1].path
        samples.assert_same(load(server), MODEL)
        assert theirs == server.asked[-1].path == expected

    def test_for_ever(self, server: Server) -> None:
        server.always = lambda each: refuse(302, Location=each.path + "x")(each)
        with pytest.raises(errors.SourceError, match="redirects more than 5 times"):
            load(server)

    @pytest.mark.parametrize("headers", [
        {}, {"Location": "ftp://x/y"}, {"Location": "file:///x"}, {"Location": "http://u:p@x/y"},
        {"Location": "http://"}, {"Location": "http://a..b/x"},
    ])  # fmt: skip
    def test_that_are_not_followed(self, server: Server, headers: dict[str, str]) -> None:
        server.always = refuse(302, **headers)
        with pytest.raises(errors.SourceError, match="redirects"):
            load(server)

    def test_from_https_to_http(self) -> None:
        source = http.HttpSource("https://a/m")
        with pytest.raises(errors.SourceError, match="from https to http"):
            source.follow(source.first, "http://a/m")

    @pytest.mark.parametrize(("first", "second", "same"), [
        ("http://a/", "http://a:80/x", True), ("http://a/", "https://a/", True),
        ("https://a/", "http://a/", False), ("http://a:8080/", "https://a/", False),
        ("http://a/", "https://a:444/", False), ("http://a/", "http://b/", False),
        ("http://a/", "http://a.b/", False), ("http://A/", "http://a/", True),
    ])  # fmt: skip
    def test_what_counts_as_the_same_server(self, first: str, second: str, same: bool) -> None:
        assert http.RequestTarget.of(first).same_server(http.RequestTarget.of(second)) is same


class TestWhatIsRefused:
    @pytest.mark.parametrize("name", [
        "../x", "a/../../x", "/x", "//host/x", "http://host/x", "https:x", "..\\x", "a\\b",
        "%2e%2e/x", "a/%2e%2e/x", "%2fx", "x?y", "x#y", "?", "a\nb", "a b\0", "", "..", "C:x",
        ".%2e/x",
    ])  # fmt: skip
    def test_entries_that_leave_the_base(self, server: Server, name: str) -> None:
        index = json.dumps({"weight_map": {"w": name}})
        server.files["/m/model.safetensors.index.json"] = index.encode()
        with pytest.raises(errors.CheckpointError, match="outside its directory"):
            load(server, "/m/model.safetensors.index.json")
        assert len(server.asked) == 1

    @pytest.mark.parametrize("engine", ["mmap", "direct", "gds"])
    def test_engines_of_local_files(self, server: Server, engine: Any) -> None:
        options = mfload.Options(engine=engine)
        load = partial(mfload.load, framework="numpy")
        for call in (mfload.plan, mfload.open, mfload.verify, load):
            with pytest.raises(errors.UsageError, match=f"engine='{engine}' reads local files"):
                call(server.url(), options=options)
            with pytest.raises(errors.UsageError, match="local files"):
                call(server.url("/m/x.json"), options=options)
        assert not server.asked

    @pytest.mark.parametrize("url", [
        "http://", "http:///x", "https://[::1/x", "http://a:b/x", "http://a:99999/x", "http://a/é",
        "http://a/x y", "http://a/x\r\nHost: b", "http://a", "http://a/dir/", "http://a/\x7f",
        "http://a..b/x", f"http://{'a' * 64}.b/x",
    ])  # fmt: skip
    def test_malformed_urls(self, url: str) -> None:
        with pytest.raises(errors.UsageError):
            mfload.load(url, "numpy")

    def test_other_schemes(self) -> None:
        with pytest.raises(errors.SourceNotFoundError, match="download it first") as caught:
            mfload.load("ftp://key:secret@host/model.safetensors", "numpy")
        assert "ftp://host/model.safetensors" in str(caught.value)
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("url", [
        "https://user:secret@host/m.safetensors", "s3://key:secret@bucket/m.safetensors",
        "http://host/m.safetensors?sig=secret",
    ])  # fmt: skip
    def test_urls_that_became_paths(self, url: str) -> None:
        for path in (Path(url), [Path(url)], os.fspath(Path(url))):
            with pytest.raises(errors.UsageError, match="as text") as caught:
                mfload.load(path, "numpy")
            assert "secret" not in str(caught.value)
            assert "m.safetensors" in str(caught.value)

    def test_paths_with_colons(self, raw: bytes, tmp_path: Path) -> None:
        (tmp_path / "https:").mkdir()
        (tmp_path / "https:" / "m.safetensors").write_bytes(raw)
        samples.assert_same(mfload.load(tmp_path / "https:/m.safetensors", "numpy"), MODEL)

    def test_names_beside_it(self) -> None:
        source = http.HttpSource("https://host/a/m.safetensors.index.json")
        assert source.beside("b/./ c.safetensors").name == "https://host/a/b/%20c.safetensors"
        source = http.HttpSource("http://[::1]:8080/m.json?sig=1")
        for name in ("../x", "a/../../x", "/x", "..", "a\\b", "%2e%2e/x", "x?y"):
            with pytest.raises(errors.UsageError):
                source.beside(name)
        assert source.beside("x").first == http.RequestTarget("http", "::1", 8080, "/x?sig=1")

    @pytest.mark.parametrize(("status", "kind"), [
        (404, errors.SourceNotFoundError), (410, errors.SourceNotFoundError),
        (403, errors.SourcePermissionError), (418, errors.SourceError), (204, errors.SourceError),
        (416, errors.SourceError),
    ])  # fmt: skip
    def test_statuses(self, server: Server, status: int, kind: type[Exception]) -> None:
        server.always = refuse(status)
        with pytest.raises(kind, match=str(status)):
            load(server)


_SPELLINGS = st.fixed_dictionaries(
    {},
    optional={
        "Content_Range": st.sampled_from(
            ["bytes {}-{}/{}", "Bytes  {}-{}/{}", "bytes {}-{}/*", "bytes={}-{}/{}"]
        ),
        "Content_Encoding": st.sampled_from(["", "identity", "aws-chunked", "utf-8", "x-none"]),
        "Connection": st.sampled_from(["close", "keep-alive", ""]),
        "Accept_Ranges": st.sampled_from(["none", "bytes"]),
        "Content_Type": st.sampled_from(["", "text/html; charset=utf-8"]),
        "Cache_Control": st.just("no-transform"),
        "chunked": st.just(True),
        "interim": st.sampled_from([100, 102, 103]),
        "moved": st.sampled_from(["/a b", "/ü?x=%2F", "//127.0.0.1:{port}/ä ö", "a/../b"]),
    },
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(how=_SPELLINGS)
def test_answers_are_read_as_requests_reads_them(server: Server, how: dict[str, Any]) -> None:
    """Or, of an encoding that is unknown, refused. `requests` takes no interim answers but 100."""
    requests: Any = pytest.importorskip("requests")
    how = dict(how)
    chunked, interim, moved = (how.pop(each, None) for each in ("chunked", "interim", "moved"))
    if chunked:
        how |= {"Content_Length": None, "Transfer_Encoding": "chunked"}
    raw = server.files["/model.safetensors"]

    def reply(handler: Any) -> bool:
        if moved is not None and handler.path == "/model.safetensors":
            where = moved.format(port=server.port).encode().decode("latin-1")
            return refuse(302, Location=where)(handler)
        handler.path = "/model.safetensors"
        if interim is not None:
            handler.wfile.write(f"HTTP/1.1 {interim} Soon\r\n\r\n".encode())
        first, last = handler.span()
        changed = dict(how)
        whole = "Range" not in handler.headers
        given = changed.get("Content_Range", "bytes {}-{}/{}").format(first, last, len(raw))
        body = handler.head(200 if whole else 206, **changed | {"Content_Range": given})
        if chunked:
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        with suppress(OSError):
            handler.wfile.write(body)
        handler.close_connection |= how.get("Connection") == "close"
        return True

    server.always = reply
    theirs = None
    if interim in (None, 100):
        ours = {"Range": f"bytes=0-{len(raw) - 1}", "Accept-Encoding": "identity"}
        theirs = requests.get(server.url(), headers=ours, timeout=20).content
        assert theirs == raw
    try:
        found = load(server)
    except errors.SourceError as error:
        unknown = how.get("Content_Encoding") == "x-none" and "encoded bytes" in str(error)
        unsaid = chunked and "*" in how.get("Content_Range", "") and "how long" in str(error)
        assert unknown or unsaid
    else:
        samples.assert_same(found, MODEL)
