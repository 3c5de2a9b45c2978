"""What readers reported of stores: settings, listings, answers that made trouble."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import proxy as proxies
import pytest
import servers
import serving

import mfload
from mfload import errors
from mfload.sources import access
from mfload.sources.access import reason

ARRAYS = {f"w{n}": np.full((64, 32), n, np.float32) for n in range(4)}


def check(loaded: Any) -> None:
    assert {*loaded} == {*ARRAYS}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], array)


def options(store: servers.Store, **settings: Any) -> mfload.Options:
    return mfload.Options(store={**store.options, **settings}, timeout=30)


@pytest.fixture(scope="module")
def url(moto: servers.Store) -> str:
    place = moto.url("reported/m")
    mfload.save(ARRAYS, place, max_shard_size="16kB", options=options(moto))
    return place


@pytest.mark.parametrize("end", ["", "/model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"endpoint": "127.0.0.1:9000"}, "no URL"),
        ({"endpoint": "localhost:9000"}, "no URL"),
        ({"endpoint": "http://"}, "no URL"),
        ({"endpoint": "http://user:s3cret@127.0.0.1:1"}, "has credentials in its URL"),
        ({"access_key_id": "key\n"}, "line break"),
        ({"session_token": "token\n"}, "line break"),
        ({"region": "us\neast"}, "line break"),
        ({"client_options": {"proxy_url": "http://127.0.0.1:1"}}, "HTTPS_PROXY"),
        ({"client_options": {"allow_invalid_certificates": True}}, "ca_file"),
        ({"sse_customer_key_base64": "AAAA"}, "keys of the customer"),
    ],
)
def test_settings_that_are_refused(
    moto: servers.Store, url: str, end: str, settings: dict[str, Any], said: str
) -> None:
    how = options(moto, **settings)
    for call in (
        lambda: mfload.load(url + end, "numpy", options=how),
        lambda: mfload.save(ARRAYS, f"{url}/x", options=how),
    ):
        with pytest.raises(errors.UsageError, match=said) as caught:
            call()
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_addresses_and_tokens_of_clouds(scheme: str) -> None:
    name, token = ("base_url", "bearer_token") if scheme == "gs" else ("endpoint", "token")
    given: dict[str, Any] = {"account_name": "a"} if scheme == "az" else {}
    for end in ("", "/m.safetensors"):
        how = mfload.Options(store={**given, name: "localhost:1"})
        with pytest.raises(errors.UsageError, match="no URL"):
            mfload.load(f"{scheme}://bucket/m{end}", "numpy", options=how)
    how = mfload.Options(store={**given, token: "s3cr3t-töken", name: "http://127.0.0.1:9"})
    with pytest.raises(errors.UsageError, match="no header can hold") as caught:
        mfload.load(f"{scheme}://bucket/m.safetensors", "numpy", options=how)
    assert "s3cr3t" not in str(caught.value)


def test_a_variable_that_obstore_panics_at(
    moto: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key\n")
    with pytest.raises(errors.MfloadError):
        mfload.load(url, "numpy")
    with pytest.raises(errors.MfloadError):
        mfload.save(ARRAYS, f"{url}/x")


def test_keys_that_are_given_need_no_token_of_the_environment(
    weed: servers.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    place = weed.url("reported/keys")
    mfload.save(ARRAYS, place, options=options(weed), overwrite=True)
    check(mfload.load(place, "numpy", options=options(weed)))
    check(mfload.load(f"{place}/model.safetensors", "numpy", options=options(weed)))


def test_half_of_the_keys_beside_a_token_of_the_environment(
    weed: servers.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    given = {name: value for name, value in weed.options.items() if name != "secret_access_key"}
    for end in ("", "/model.safetensors"):
        with pytest.raises(errors.MfloadError):
            mfload.load(weed.url(f"half{end}"), "numpy", options=mfload.Options(store=given))


def test_an_odd_key_far_below_does_not_hide_a_directory(moto: servers.Store) -> None:
    mfload.save(ARRAYS, moto.url("odd/m"), options=options(moto))
    import boto3

    client = boto3.client(
        "s3", endpoint_url=moto.endpoint, aws_access_key_id=servers.KEY,
        aws_secret_access_key=servers.SECRET, region_name="us-east-1",
    )  # fmt: skip
    client.put_object(Bucket=servers.BUCKET, Key="odd/m/logs//x.txt", Body=b"z")
    client.put_object(Bucket=servers.BUCKET, Key="odd//stray", Body=b"z")
    client.close()
    check(mfload.load(moto.url("odd/m"), "numpy", options=options(moto)))
    with pytest.raises(errors.SourceError, match=r"odd//|no such"):
        mfload.load(moto.url("odd/none"), "numpy", options=options(moto))


def test_a_key_with_an_at(moto: servers.Store) -> None:
    place = moto.url("reported/at@v1/model.safetensors")
    mfload.save(ARRAYS, place, options=options(moto))
    check(mfload.load(place, "numpy", options=options(moto)))
    for wrong in ("s3://key:sec/ret@bucket/x", "s3://a@b/x"):
        with pytest.raises(errors.UsageError, match="malformed"):
            mfload.load(wrong, "numpy")


def test_a_file_and_a_directory_of_one_name(moto: servers.Store, tmp_path: Path) -> None:
    mfload.save(ARRAYS, tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    moto.put("both/m/a.safetensors", data)
    moto.put("both/m/a.safetensors/x.safetensors", data)
    with pytest.raises(errors.MfloadError):
        mfload.load(moto.url("both/m"), "numpy", options=options(moto))
    check(mfload.load(moto.url("both/m/a.safetensors"), "numpy", options=options(moto)))


@pytest.mark.parametrize("name", [".", "./", "a/.."])
def test_an_index_that_leads_to_its_directory(moto: servers.Store, name: str) -> None:
    index = {"metadata": {}, "weight_map": {"w": name}}
    moto.put("dot/model.safetensors.index.json", json.dumps(index).encode())
    with pytest.raises(errors.MfloadError):
        mfload.load(moto.url("dot"), "numpy", options=options(moto))


@pytest.mark.parametrize("server", ["moto", "weed"])
def test_an_empty_object(server: str, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue(server)
    store.put("empty/m/model.safetensors", b"")
    with pytest.raises(errors.HeaderError, match="seems to be an empty file"):
        mfload.load(store.url("empty/m"), "numpy", options=options(store))


def test_a_listing_that_breaks_off_is_asked_for_again(moto: servers.Store, url: str) -> None:
    with proxies.proxying(moto.port) as proxy:
        proxy.plan(proxies.truncated(at=50), path="list-type=2")
        how = options(moto, endpoint=f"http://127.0.0.1:{proxy.port}")
        check(mfload.load(url, "numpy", options=how))


def test_bodies_of_what_gives_credentials_are_not_shown() -> None:
    text = (
        "Generic S3 error: Error performing GET http://10.0.0.1/creds in 1ms - Server returned "
        "non-2xx status code: 400 Bad Request: token SHORTTOK rejected"
    )
    assert reason(ValueError(text)).endswith("400 Bad Request")


def test_a_web_identity_that_is_refused_is_not_the_store_refusing(
    moto: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("token")
    refused = b"<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(403)
            self.send_header("Content-Length", str(len(refused)))
            self.end_headers()
            self.wfile.write(refused)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
            "AWS_ENDPOINT_URL_STS": f"http://127.0.0.1:{server.server_address[1]}",
            "AWS_ENDPOINT_URL": moto.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(errors.SourcePermissionError, match="no credentials for the store"):
            mfload.load(url, "numpy", options=mfload.Options(timeout=20))
        server.shutdown()


def test_without_metadata_there_are_no_credentials(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(errors.SourcePermissionError, match="no credentials for the store"):
        mfload.load(url, "numpy")


def test_the_endpoint_of_services_of_a_profile(
    moto: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        "[profile m]\nservices = mine\nregion = us-east-1\n"
        f"[services mine]\ns3 =\n  endpoint_url = {moto.endpoint}\n"
    )
    (tmp_path / "credentials").write_text(
        f"[m]\naws_access_key_id = {servers.KEY}\naws_secret_access_key = {servers.SECRET}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "m")
    check(mfload.load(url, "numpy"))


@pytest.mark.parametrize("kind", ["parts", "string"])
def test_variables_of_azure(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mfload.sources import clouds
    from mfload.sources.tls import Tls

    key = "c2VjcmV0LWtleQ=="
    if kind == "parts":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "mine")
        monkeypatch.setenv("AZURE_STORAGE_KEY", key)
    else:
        text = f"DefaultEndpointsProtocol=https;AccountName=mine;AccountKey={key}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    access = clouds.AzureAccess("az://weights", (), 5.0, Tls())
    assert access.account == "mine"
    asked = access.request("m.safetensors").url
    assert asked.startswith("https://mine.blob.core.windows.net/weights/m.safetensors?")
    assert "sig=" in asked


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("s3a://b/m", "write s3://"),
        ("gcs://b/m", "write gs://"),
        ("wasbs://b@a/m", "write az:// or abfs://"),
        ("hf://org/name/tree/main", "hf://org/name@main"),
        ("hf://org/name/blob/v1/a/m.safetensors", "hf://org/name@v1/a/m.safetensors"),
    ],
)
def test_other_spellings(given: str, meant: str) -> None:
    with pytest.raises(errors.MfloadError) as caught:
        mfload.load(given, "numpy")
    assert meant in str(caught.value)


SECRET = "s3cr3t-0123456789"


@pytest.fixture
def served() -> Iterator[Any]:
    with serving.serving({"/m.safetensors": b"x" * 1000}) as server:
        yield server


@pytest.mark.parametrize("header", ["ETag", "Content-Range", "Content-Encoding"])
def test_what_a_server_quotes_of_a_token_is_not_shown(header: str, served: Any) -> None:
    with proxies.proxying(int(served.url("").rsplit(":", 1)[1].strip("/"))) as proxy:
        proxy.plan(proxies.changed(header, f"Bearer {SECRET}"), times=100)
        how = mfload.Options(headers={"Authorization": f"Bearer {SECRET}"})
        with pytest.raises(errors.MfloadError) as caught:
            mfload.load(proxy.url("/m.safetensors"), "numpy", options=how)
        one: BaseException | None = caught.value
        while one is not None:
            assert SECRET not in f"{one}{one.args}"
            one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def test_a_refusal_that_drips_ends(
    moto: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "STALLED", 0.5)
    with proxies.proxying(moto.port) as proxy:
        proxy.plan(proxies.trickle(20), path="none.safetensors", times=100)
        how = mfload.Options(store={**moto.options, "endpoint": f"http://127.0.0.1:{proxy.port}"})
        begin = time.monotonic()
        with pytest.raises(errors.SourceError):
            mfload.load(f"{url}/none.safetensors", "numpy", options=how)
        assert time.monotonic() - begin < 15
