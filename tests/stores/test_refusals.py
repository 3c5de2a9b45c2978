"""What S3 refuses, as errors: real answers where a store gives them, else recorded ones."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import servers
import serving

import mfload
from mfload import errors, sources
from mfload.options import LoadOptions
from mfload.sources import http
from mfload.sources.access import Answered
from mfload.sources.s3 import S3Access
from mfload.sources.stores import StoreDirectory, StoreSource
from mfload.sources.tls import Tls

MODEL = {"weight": np.arange(300_000, dtype=np.float32), "bias": np.arange(7)}
FILE = "d/model.safetensors"
TOO_LATE = "Request has expired"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return samples.save(tmp_path_factory.mktemp("raw") / "m.safetensors", MODEL).read_bytes()


@pytest.fixture(scope="module")
def filled(store: servers.Store, raw: bytes) -> servers.Store:
    store.put(FILE, raw)
    return store


def load(where: servers.Store, key: str = FILE, **changed: Any) -> Any:
    bucket = changed.pop("bucket", servers.BUCKET)
    given = where.options | changed
    given = {name: value for name, value in given.items() if value is not None}
    return mfload.load(f"s3://{bucket}/{key}", "numpy", options=mfload.Options(store=given))


def told(caught: pytest.ExceptionInfo[BaseException]) -> str:
    """All that an error says, in which no secret is."""
    text = "".join(map(str, (caught.value, *getattr(caught.value, "__notes__", ()))))
    for secret in (servers.SECRET, "X-Amz-", "Signature="):
        assert secret not in text
    return text


class TestRealAnswers:
    """moto checks no signature, so that it is left out of some."""

    @pytest.mark.parametrize("key", [FILE, "d"])
    def test_unknown_key(self, filled: servers.Store, key: str) -> None:
        if filled.kind == "moto":
            pytest.skip("moto takes any key")
        with pytest.raises(
            errors.SourcePermissionError, match="does not know the access"
        ) as caught:
            load(filled, key, access_key_id="nobody")
        assert "nobody" not in told(caught)

    @pytest.mark.parametrize("key", [FILE, "d"])
    def test_wrong_secret(self, filled: servers.Store, key: str) -> None:
        if filled.kind == "moto":
            pytest.skip("moto takes any key")
        with pytest.raises(errors.SourcePermissionError, match="secret key does not") as caught:
            load(filled, key, secret_access_key="not-this-one")
        assert "not-this-one" not in told(caught)

    @pytest.mark.parametrize("key", [FILE, "d"])
    def test_no_bucket(self, filled: servers.Store, key: str) -> None:
        with pytest.raises(errors.SourceNotFoundError, match="bucket 'nothing' does not") as caught:
            load(filled, key, bucket="nothing")
        assert f"s3://nothing/{key}" in told(caught)

    @pytest.mark.parametrize("key", ["d/modell.safetensors", "d/mdoel.safetensors"])
    def test_near_objects(self, filled: servers.Store, key: str) -> None:
        with pytest.raises(errors.SourceNotFoundError, match="mean 'model") as caught:
            load(filled, key)
        assert key in told(caught)

    def test_near_directories(self, filled: servers.Store, raw: bytes) -> None:
        filled.put("models/llama-70b/model.safetensors", raw)
        with pytest.raises(errors.SourceNotFoundError, match="did you mean 'llama-70b'"):
            load(filled, "models/llama70b")

    @pytest.mark.parametrize(("key", "right"), [(FILE, "GetObject"), ("d", "ListBucket")])
    def test_denied(self, weed: servers.Store, raw: bytes, key: str, right: str) -> None:
        weed.put(FILE, raw)
        with pytest.raises(errors.SourcePermissionError, match=f"s3:{right}") as caught:
            load(weed, key, access_key_id="other-key-of-tests", secret_access_key="other-secret")
        assert "these credentials" in told(caught)

    @pytest.mark.parametrize("key", [FILE, "d"])
    def test_anonymous(self, weed: servers.Store, raw: bytes, key: str) -> None:
        weed.put(FILE, raw)
        with pytest.raises(errors.SourcePermissionError, match="without credentials"):
            load(weed, key, access_key_id=None, secret_access_key=None, skip_signature=True)

    @pytest.mark.parametrize("key", [FILE, "d"])
    def test_a_public_bucket(self, moto: servers.Store, raw: bytes, key: str) -> None:
        import boto3

        moto.put(FILE, raw)
        boto3.client(
            "s3", endpoint_url=moto.endpoint, aws_access_key_id="a", aws_secret_access_key="b"
        ).put_bucket_acl(Bucket=servers.BUCKET, ACL="public-read")
        moto_object = boto3.client(
            "s3", endpoint_url=moto.endpoint, aws_access_key_id="a", aws_secret_access_key="b"
        )
        moto_object.put_object_acl(Bucket=servers.BUCKET, Key=FILE, ACL="public-read")
        found = load(moto, key, access_key_id=None, secret_access_key=None, skip_signature=True)
        samples.assert_same(found, MODEL)


class TestReplaced:
    def test_between_header_and_data(self, filled: servers.Store, raw: bytes) -> None:
        key = "replaced/model.safetensors"
        filled.put(key, raw)
        given = mfload.Options(store=filled.options)
        with mfload.open(filled.url(key), "numpy", options=given) as opened:
            time.sleep(1.1 if filled.kind == "rclone" else 0)  # Its ETag may be of the second.
            changed = bytearray(raw)
            changed[-100:] = bytes(100)
            filled.put(key, bytes(changed))
            with pytest.raises(errors.SourceChangedError):
                opened.get_tensor("weight")

    def test_between_listing_and_header(self, filled: servers.Store, raw: bytes) -> None:
        key = "listed/model.safetensors"
        filled.put(key, raw)
        place = sources.place(filled.url("listed"), LoadOptions(store=filled.options))
        source = place.file("model.safetensors")
        assert source.size == len(raw)
        filled.put(key, raw[:-8] + bytes(8))
        with pytest.raises(errors.SourceChangedError):
            source.read(0, 8)

    def test_removed(self, filled: servers.Store, raw: bytes) -> None:
        import obstore

        key = "removed/model.safetensors"
        filled.put(key, raw)
        given = mfload.Options(store=filled.options)
        with mfload.open(filled.url(key), "numpy", options=given) as opened:
            obstore.delete(filled.client(), key)
            with pytest.raises(errors.SourceChangedError):
                opened.get_tensor("weight")


class TestSignatures:
    """URLs that end, on a store that checks them."""

    def test_signed_anew(
        self, weed: servers.Store, raw: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from datetime import timedelta

        weed.put(FILE, raw)
        monkeypatch.setattr("mfload.sources.s3._SIGNED_FOR", timedelta(seconds=1))
        source = sources.find(weed.url(FILE), LoadOptions(store=weed.options))
        source.read(0, 8)
        time.sleep(2.5)
        assert source.read(100_000, 300) == raw[100_000:100_300]

    def test_a_signature_is_used_again(self, weed: servers.Store, raw: bytes) -> None:
        weed.put(FILE, raw)
        source: Any = sources.find(weed.url(FILE), LoadOptions(store=weed.options))
        assert source.signed(source.first) == source.signed(source.first)
        first = source.signed(source.first)[0]
        source.read(0, 8)
        target, headers = source.signed(source.first)
        assert target == first
        assert headers == {"If-Match": source.identity.validator}


def xml(status: int, code: str, text: str = "", **headers: str) -> Callable[[Any], bool]:
    """A fault: the answer of S3 with a code."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>"

    def fault(handler: Any) -> bool:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body.encode())
        return True

    return fault


@pytest.fixture
def served(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[serving.Server]:
    monkeypatch.setattr(http, "_PAUSE", 0.01)
    with serving.serving({f"/{servers.BUCKET}/{FILE}": raw}) as server:
        yield server


@pytest.fixture
def recorded(served: serving.Server) -> servers.Store:
    return servers.Store("recorded", served.port)


class TestRecordedAnswers:
    @pytest.mark.parametrize(("fault", "kind", "match"), [
        (xml(403, "RequestTimeTooSkewed"), errors.SourcePermissionError, "clock of this machine"),
        (xml(400, "ExpiredToken", "k0"), errors.SourcePermissionError, "token has expired"),
        (xml(400, "InvalidToken"), errors.SourcePermissionError, "token has expired"),
        (xml(403, "InvalidObjectState"), errors.SourceError, "archived"),
        (xml(503, "SlowDown"), errors.ReadError, "503 SlowDown"),
        (xml(429, "TooManyRequests"), errors.ReadError, "429"),
        (xml(403, "AccessDenied", "User: u is not authorized to perform: s3:GetObjectVersion on x"),
         errors.SourcePermissionError, "s3:GetObjectVersion"),
        (xml(301, "PermanentRedirect", Location="http://127.0.0.1:1/"), errors.SourceError,
         "another region"),
        (xml(307, "TemporaryRedirect", Location="http://127.0.0.1:1/"), errors.SourceError,
         "another region"),
        (xml(400, "AuthorizationHeaderMalformed", "", x_amz_bucket_region="eu-west-1"),
         errors.SourceError, "region 'eu-west-1'"),
        (xml(409, "Anything"), errors.SourceError, "refuses the request"),
        (xml(403, "x" * 100_000), errors.SourcePermissionError, "refuses access"),
    ])  # fmt: skip
    def test_an_object(
        self, served: serving.Server, recorded: servers.Store, fault: Any, kind: Any, match: str
    ) -> None:
        served.always = fault
        with pytest.raises(kind, match=match) as caught:
            load(recorded)
        assert len(told(caught)) < 1000
        assert len(served.asked) <= http.TRIES + 1

    @pytest.mark.parametrize(("fault", "kind", "match"), [
        (xml(403, "RequestTimeTooSkewed"), errors.SourcePermissionError, "clock of this machine"),
        (xml(400, "ExpiredToken"), errors.SourcePermissionError, "token has expired"),
        (xml(403, "AccessDenied"), errors.SourcePermissionError, "s3:ListBucket"),
        (xml(503, "SlowDown"), errors.ReadError, "fewer requests"),
    ])  # fmt: skip
    def test_a_listing(
        self, served: serving.Server, recorded: servers.Store, fault: Any, kind: Any, match: str
    ) -> None:
        served.always = fault
        quick = {"max_retries": 1, "backoff": {"init_backoff": _ms(10), "max_backoff": _ms(20)}}
        with pytest.raises(kind, match=match) as caught:
            load(recorded, "d", retry_config=quick)
        told(caught)

    def test_once_is_mended(self, served: serving.Server, recorded: servers.Store) -> None:
        for fault in (xml(403, "RequestTimeTooSkewed"), xml(403, "AccessDenied", TOO_LATE)):
            served.faults.append(fault)
            samples.assert_same(load(recorded), MODEL)

    def test_busy_for_a_while(self, served: serving.Server, recorded: servers.Store) -> None:
        served.faults.extend([xml(503, "SlowDown"), xml(500, "InternalError"), xml(429, "x")])
        samples.assert_same(load(recorded), MODEL)

    def test_redirects_get_no_signature(self, raw: bytes, recorded: servers.Store,
                                        served: serving.Server) -> None:  # fmt: skip
        with serving.serving({f"/{servers.BUCKET}/{FILE}": raw}) as other:
            served.always = xml(307, "TemporaryRedirect", Location=other.url(f"/weights/{FILE}"))
            with pytest.raises(errors.SourceError, match="another region"):
                load(recorded)
            assert other.asked == []

    def test_nothing_listens(self) -> None:
        (port,) = servers.free_ports(1)
        quick = {"max_retries": 0}
        for key in (FILE, "d"):
            with pytest.raises(errors.ReadError, match="could not read") as caught:
                load(servers.Store("none", port), key, retry_config=quick)
            assert "refused" in told(caught).lower()

    @pytest.mark.parametrize("key", [FILE, "d"])
    def test_no_answer(self, key: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            store, begun = servers.Store("silent", silent.getsockname()[1]), time.monotonic()
            given = mfload.Options(store=store.options, timeout=1.0)
            with pytest.raises((errors.LoadTimeoutError, errors.ReadError)) as caught:
                mfload.load(store.url(key), "numpy", options=given)
            assert time.monotonic() - begun < 8
            assert servers.BUCKET in told(caught)

    @pytest.mark.parametrize("key", [FILE, "d"])
    def test_unknown_certificates(self, certificates: Path, raw: bytes, key: str) -> None:
        files = {f"/{servers.BUCKET}/{FILE}": raw}
        with serving.serving(files, serving.own(certificates, "seed")) as server:
            endpoint = server.url("")
            quick = {"max_retries": 0}
            with pytest.raises(errors.ReadError, match="ca_file") as caught:
                load(servers.Store("tls", server.port), key, endpoint=endpoint, retry_config=quick)
            assert "certificate" in told(caught).lower()

    def test_preconditions_that_are_ignored(
        self, served: serving.Server, recorded: servers.Store
    ) -> None:
        given = mfload.Options(store=recorded.options)
        with mfload.open(recorded.url(FILE), "numpy", options=given) as opened:
            served.etags[f"/{servers.BUCKET}/{FILE}"] = '"another"'
            with pytest.raises(errors.SourceChangedError):
                opened.get_tensor("weight")


def _ms(count: int) -> Any:
    from datetime import timedelta

    return timedelta(milliseconds=count)


def access(**settings: Any) -> S3Access:
    given = {"access_key_id": servers.KEY, "secret_access_key": servers.SECRET, **settings}
    return S3Access("s3://weights", tuple(given.items()), None, Tls())


class TestRegions:
    def test_a_region_that_an_answer_names(self) -> None:
        made = access()
        assert made.place("k").startswith("https://s3.us-east-1.amazonaws.com/weights/k")
        said = Answered.of(
            400, "<Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region>"
        )
        assert made.stale(said)
        made.renew(made.made, said)
        assert ".eu-west-1." in made.place("k")
        assert "%2Feu-west-1%2F" in made.request("k").url
        assert not made.stale(said)

    def test_a_region_that_is_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(S3Access, "region_now", lambda _: "ap-south-1")
        made = access(region="us-west-2")
        said = made.said(
            "Received redirect without LOCATION, this normally indicates an incorrectly"
        )
        assert said is not None
        assert made.stale(said)
        made.renew(made.made, said)
        assert ".ap-south-1." in made.place("k")

    def test_an_endpoint_has_no_other_region(self) -> None:
        made = access(endpoint="http://127.0.0.1:1")
        assert not made.stale(Answered(301, "PermanentRedirect", "", "eu-west-1"))

    def test_threads_renew_once(self) -> None:
        made = access()
        made.request("k")
        before, said = made.made, Answered(403, "ExpiredToken")
        threads = [threading.Thread(target=made.renew, args=(before, said)) for _ in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        made.request("k")
        made.renew(before, said)
        made.request("k")
        assert made.made == before + 1


class TestCredentials:
    def test_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{servers.free_ports(1)[0]}")
        store = servers.Store("none", 1)
        quick = {"max_retries": 0}
        for key in (FILE, "d"):
            with pytest.raises(errors.SourcePermissionError, match="no credentials") as caught:
                load(store, key, access_key_id=None, secret_access_key=None, retry_config=quick)
            assert "skip_signature" in told(caught)

    @pytest.mark.parametrize("way", ["setting", "environment", "default"])
    def test_profiles(
        self, weed: servers.Store, raw: bytes, way: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        name = "default" if way == "default" else "work"
        weed.put(FILE, raw)
        (tmp_path / "credentials").write_text(
            f"[{name}]\naws_access_key_id={servers.KEY}\naws_secret_access_key={servers.SECRET}\n"
        )
        head = "default" if way == "default" else "profile work"
        (tmp_path / "config").write_text(
            f"[{head}]\nregion=eu-north-1\nendpoint_url={weed.endpoint}\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        if way == "environment":
            monkeypatch.setenv("AWS_PROFILE", "work")
        given = {"profile": "work"} if way == "setting" else None
        for key in (FILE, "d"):
            found = mfload.load(weed.url(key), "numpy", options=mfload.Options(store=given))
            samples.assert_same(found, MODEL)

    def test_no_such_profile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "credentials").write_text("[production]\naws_access_key_id=a\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        given = mfload.Options(store={"profile": "prodction"})
        with pytest.raises(errors.SourcePermissionError, match="did you mean 'production'"):
            mfload.load("s3://weights/d", "numpy", options=given)

    def test_profiles_want_boto3(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        given = mfload.Options(store={"profile": "work"})
        with pytest.raises(errors.FrameworkMissingError, match="pip install boto3"):
            mfload.load("s3://weights/d", "numpy", options=given)

    def test_obstore_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("obstore", "obstore.store", "obstore.exceptions"):
            monkeypatch.setitem(__import__("sys").modules, name, None)
        with pytest.raises(errors.FrameworkMissingError, match="pip install 'obstore"):
            mfload.load("s3://weights/d", "numpy")

    def test_a_setting_that_is_none(self) -> None:
        given = mfload.Options(store={"secret_acces_key": "hidden"})
        with pytest.raises(errors.UsageError, match="secret_acces_key") as caught:
            mfload.load("s3://weights/d", "numpy", options=given)
        assert "hidden" not in told(caught)


class TestUrls:
    @pytest.mark.parametrize("url", [
        "s3:///d/m.safetensors", "s3://key:secret@weights/m.safetensors",
        "s3://weights/m.safetensors?X-Amz-Signature=secret", "s3://weights//m.safetensors",
        "s3://weights/d/../m.safetensors", "s3://weights/./m.safetensors",
        "s3://weights/a\nb", "s3://weights/m.safetensors#secret",
    ])  # fmt: skip
    def test_malformed(self, url: str) -> None:
        with pytest.raises(errors.UsageError) as caught:
            mfload.load(url, "numpy")
        assert "secret" not in told(caught)

    def test_names_beside_it(self) -> None:
        source = StoreSource(access(), "d/e/index.json")
        assert source.beside("./f/x y.bin").name == "s3://weights/d/e/f/x y.bin"
        for name in ("../x", "/x", "a/../../x", "x?y"):
            with pytest.raises(errors.UsageError):
                source.beside(name)


class TestDirectories:
    @pytest.fixture
    def tree(self, moto: servers.Store) -> tuple[servers.Store, str]:
        prefix = f"tree{time.monotonic_ns()}"
        for name in ("a", "b/c", "b/d/e", "model.bin", "b.x/y"):
            moto.put(f"{prefix}/{name}", name.encode())
        moto.put(prefix + "0/other", b"")
        return moto, prefix

    @pytest.mark.parametrize("whole", [0, 3, 1000])
    def test_what_it_says(
        self, tree: tuple[servers.Store, str], whole: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mfload.sources.stores._WHOLE", whole)
        store, prefix = tree
        place = sources.place(store.url(prefix), LoadOptions(store=store.options))
        assert isinstance(place, StoreDirectory)
        assert place.names() == ["a", "b", "b.x", "model.bin"]
        assert place.name == store.url(prefix)
        assert [place.is_directory(name) for name in ("a", "b", "b/d", "b/d/e", "no", "no/x")] == [
            False, True, True, False, False, False,
        ]  # fmt: skip
        assert [place.is_file(name) for name in ("a", "b", "b/c", "b/d/e", "b/d/e/x", "no")] == [
            True, False, True, True, False, False,
        ]  # fmt: skip
        assert place.below("b").names() == ["c", "d"]
        assert place.below("b/d").file("e").read(0, 5) == b"b/d/e"
        assert place.file("b/c").read(0, 3) == b"b/c"
        assert place.below("none").names() == []
        assert sorted(place.walk()) == [
            ("a", 1), ("b.x/y", 5), ("b/c", 3), ("b/d/e", 5), ("model.bin", 9),
        ]  # fmt: skip
        assert sorted(place.below("b").walk()) == [("c", 3), ("d/e", 5)]
        above, name = place.below("b").above or (None, "")
        assert (above and above.name, name) == (place.name, "b")
        with pytest.raises(errors.SourceNotFoundError, match="did you mean 'model"):
            place.file("modle.bin")

    def test_many_objects(self, weed: servers.Store) -> None:
        """More than a page; of more than are listed at once, each directory by itself."""
        import obstore

        bucket = weed.client()

        def put(number: int) -> None:
            obstore.put(bucket, f"many/{number % 3}/{number}.bin", b"x")

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(put, range(1005)))
        place = sources.place(weed.url("many"), LoadOptions(store=weed.options))
        assert place.names() == ["0", "1", "2"]
        assert len(place.below("1").names()) == 335
        assert len([*place.walk()]) == 1005

    @pytest.mark.parametrize(("whole", "listings"), [(1000, 1), (2, 3)])
    def test_each_is_listed_once(
        self, tree: tuple[servers.Store, str], whole: int, listings: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        asked: list[str] = []

        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(self: S3Access, path: str, *more: Any) -> Any:
                asked.append(path)
                return method(self, path, *more)

            return call

        for name in ("objects", "level"):
            monkeypatch.setattr(S3Access, name, counted(getattr(S3Access, name)))
        monkeypatch.setattr("mfload.sources.stores._WHOLE", whole)
        store, prefix = tree
        place = sources.place(store.url(prefix), LoadOptions(store=store.options))
        for _ in range(3):
            assert place.is_file("b/c")
            assert place.below("b").is_directory("d")
            above = place.below("b").above
            assert above is not None
            assert above[0].is_file("a")
        assert len(asked) == listings

    def test_too_many(
        self, tree: tuple[servers.Store, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mfload.sources.stores._WHOLE", 1)
        monkeypatch.setattr("mfload.sources.stores._MOST", 3)
        store, prefix = tree
        place = sources.place(store.url(prefix), LoadOptions(store=store.options))
        with pytest.raises(errors.SourceError, match="too many objects"):
            [*place.walk()]

    def test_a_file_without_a_known_end(self, moto: servers.Store, raw: bytes) -> None:
        moto.put("steps/checkpoint_10", raw)
        moto.put("steps/checkpoint_100", b"x")
        samples.assert_same(load(moto, "steps/checkpoint_10"), MODEL)

    def test_what_marks_a_directory(self, moto: servers.Store, raw: bytes) -> None:
        import boto3

        client = boto3.client(
            "s3", endpoint_url=moto.endpoint, aws_access_key_id="a", aws_secret_access_key="b"
        )
        for key in ("marked/", "marked/inner/"):
            client.put_object(Bucket=servers.BUCKET, Key=key, Body=b"")
        moto.put("marked/model.safetensors", raw)
        moto.put("marked/inner/x", b"x")
        samples.assert_same(load(moto, "marked"), MODEL)
        place = sources.place(moto.url("marked"), LoadOptions(store=moto.options))
        assert place.names() == ["inner", "model.safetensors"]
        assert place.is_directory("inner")
