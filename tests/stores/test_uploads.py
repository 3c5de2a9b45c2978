"""Saving, converting and bundling to object stores."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import proxy as proxies
import pytest
import servers

import mfload
from mfload import errors
from mfload.options import LoadOptions
from mfload.runtime import Deadline
from mfload.saving import uploads
from mfload.sources import stores

ARRAYS = {
    f"l.{n}.w": np.random.default_rng(n).standard_normal((128, 256), np.float32) for n in range(4)
}
INDEX = "model.safetensors.index.json"


@pytest.fixture(params=["moto", "weed"])
def bucket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> servers.Store:
    store = request.getfixturevalue(request.param)
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return store


@pytest.fixture
def url(bucket: servers.Store, request: pytest.FixtureRequest) -> str:
    return bucket.url(f"saved/{abs(hash(request.node.name))}")


def listed(bucket: servers.Store, url: str) -> list[str]:
    import obstore

    prefix = url.removeprefix(bucket.url())
    pages = obstore.list(bucket.client(), prefix)
    return sorted(each["path"].removeprefix(f"{prefix}/") for page in pages for each in page)


def uploads_under_way(bucket: servers.Store) -> int:
    import boto3

    s3 = boto3.client(
        "s3", endpoint_url=bucket.endpoint, aws_access_key_id=servers.KEY,
        aws_secret_access_key=servers.SECRET, region_name="us-east-1",
    )  # fmt: skip
    try:
        return len(s3.list_multipart_uploads(Bucket=servers.BUCKET).get("Uploads", []))
    finally:
        s3.close()


def check(loaded: Any, factor: int = 1) -> None:
    assert {*loaded} == {*ARRAYS}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(loaded[name], factor * array)


def test_one_file(bucket: servers.Store, url: str, tmp_path: Path) -> None:
    place = f"{url}/m.safetensors"
    done = mfload.save(ARRAYS, place, checksums=True)
    assert done.files == (place,)
    assert f"checksums written to {url}/m.safetensors.checksums.json" in done.notes
    check(mfload.load(place, "numpy"))
    assert mfload.verify(place).ok
    with pytest.raises(errors.TargetExistsError, match="overwrite=True"):
        mfload.save(ARRAYS, place)
    done = mfload.save({name: 2 * each for name, each in ARRAYS.items()}, place, overwrite=True)
    check(mfload.load(place, "numpy"), 2)
    assert listed(bucket, url) == ["m.safetensors"]  # The old manifest is gone.
    assert os.listdir(tmp_path) == []


def test_shards_and_what_replaces_them(bucket: servers.Store, url: str) -> None:
    """The new shards have other names, so that a reader of the old ones sees none of them."""
    mfload.save(ARRAYS, url, max_shard_size="150kB")
    first = listed(bucket, url)
    assert INDEX in first
    assert len(first) == 5
    check(mfload.load(url, "numpy"))
    seen: list[list[str]] = []
    put = uploads.UploadedTarget._send  # pyright: ignore[reportPrivateUsage]

    def watched(self: Any, name: str, mode: str | None) -> None:
        put(self, name, mode)
        if name != INDEX:
            check(mfload.load(url, "numpy"))
        seen.append(listed(bucket, url))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads.UploadedTarget, "_send", watched)
        twice = {name: 2 * each for name, each in ARRAYS.items()}
        mfload.save(twice, url, max_shard_size="150kB", overwrite=True)
    check(mfload.load(url, "numpy"), 2)
    second = listed(bucket, url)
    assert len(second) == 5
    assert {*first} & {*second} == {INDEX}
    assert all({*first} <= {*each} for each in seen)
    done = mfload.save(ARRAYS, url, overwrite=True)  # One file in place of them, with an index.
    assert sorted(each.removeprefix(f"{url}/") for each in done.files) == listed(bucket, url)
    assert len(done.files) == 2
    check(mfload.load(url, "numpy"))
    mfload.save(twice, url, max_shard_size="150kB", overwrite=True)
    assert "model.safetensors" not in listed(bucket, url)
    check(mfload.load(url, "numpy"), 2)


def test_converting_brings_what_lies_beside(
    bucket: servers.Store, url: str, tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    mfload.save(ARRAYS, tmp_path / "m", max_shard_size="300kB", checksums=True)
    (tmp_path / "m" / "config.json").write_text("{}")
    done = mfload.convert(tmp_path / "m", url)
    assert all(each.startswith(url) for each in done.files)
    check(mfload.load(url, "numpy"))
    assert "config.json" in listed(bucket, url)
    mfload.convert(url, f"{url}/again/one.safetensors", dtype="float16")
    assert mfload.load(f"{url}/again/one.safetensors", "numpy")["l.0.w"].dtype == np.float16


def test_large_files_go_in_parts(
    bucket: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_PART", 5 << 20)
    large = {"w": np.random.default_rng(0).integers(0, 255, 33 << 20, np.uint8)}
    mfload.save(large, f"{url}/m.safetensors")
    np.testing.assert_array_equal(mfload.load(f"{url}/m.safetensors", "numpy")["w"], large["w"])
    assert uploads_under_way(bucket) == 0


class _Breaks(io.FileIO):
    """A file whose reads fail after some."""

    left = 4
    kind: type[BaseException] = OSError

    def read(self, size: int | None = -1, /) -> bytes:
        _Breaks.left -= 1
        if _Breaks.left < 0:
            raise self.kind("broken")
        return super().read(-1 if size is None else size)


@pytest.mark.parametrize(
    ("kind", "raised"),
    [(KeyboardInterrupt, KeyboardInterrupt), (OSError, errors.WriteError)],
)
def test_what_breaks_off_leaves_nothing(
    bucket: servers.Store,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: type[BaseException],
    raised: type[BaseException],
) -> None:
    """The second shard breaks off within its parts."""
    monkeypatch.setattr(uploads, "_PART", 5 << 20)
    monkeypatch.setattr(_Breaks, "left", 7)
    monkeypatch.setattr(_Breaks, "kind", kind)
    monkeypatch.setattr(uploads, "open", lambda path, _mode: _Breaks(path), raising=False)
    large = {n: np.zeros(20 << 20, np.uint8) for n in ("a", "b")}
    with pytest.raises(raised):
        mfload.save(large, url, max_shard_size="20MiB")
    monkeypatch.undo()
    assert listed(bucket, url) == []
    assert uploads_under_way(bucket) == 0
    assert [each for each in os.listdir(tmp_path) if each.startswith("mfload-")] == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_one_wins(bucket: servers.Store, url: str, overwrite: bool) -> None:
    """Both saw the same before; the one whose condition fails says so."""
    if overwrite:
        mfload.save(ARRAYS, url, max_shard_size="150kB")
    both, won, lost = threading.Barrier(2), list[int](), list[BaseException]()
    upload = uploads.UploadedTarget._upload  # pyright: ignore[reportPrivateUsage]

    def together(self: Any, *given: Any) -> None:
        both.wait(30)
        upload(self, *given)

    def save(factor: int) -> None:
        try:
            made = {name: factor * each for name, each in ARRAYS.items()}
            mfload.save(made, url, max_shard_size="150kB", overwrite=overwrite)
            won.append(factor)
        except errors.TargetExistsError as error:
            lost.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uploads.UploadedTarget, "_upload", together)
        threads = [threading.Thread(target=save, args=(n,)) for n in (2, 3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert len(won) + len(lost) == 2
    assert won
    assert lost or overwrite
    if len(won) == 1:
        check(mfload.load(url, "numpy"), won[0])


def test_refusals(bucket: servers.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.TargetError, match="'none' does not exist"):
        mfload.save(ARRAYS, "s3://none/m.safetensors")
    with pytest.raises(errors.UsageError, match="cannot save to a URL of that kind"):
        mfload.save(ARRAYS, "https://host/m.safetensors")
    with pytest.raises(errors.UsageError, match="the URL of the store is malformed"):
        mfload.save(ARRAYS, "s3://a@b/m.safetensors")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    if bucket.kind == "weed":
        with pytest.raises(errors.TargetError, match=r"can't list|refuses") as caught:
            mfload.save(ARRAYS, bucket.url("x/m.safetensors"))
        assert "wrong-secret" not in str(caught.value)


def test_in_the_background(bucket: servers.Store, url: str) -> None:
    pending = mfload.save(ARRAYS, f"{url}/m.safetensors", background=True)
    assert pending.result(60).files == (f"{url}/m.safetensors",)
    check(mfload.load(f"{url}/m.safetensors", "numpy"))
    del bucket


def test_settings_by_options(
    bucket: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in bucket.environment:
        monkeypatch.delenv(name)
    how = mfload.Options(store=bucket.options)
    mfload.save(ARRAYS, f"{url}/m.safetensors", options=how)
    check(mfload.load(f"{url}/m.safetensors", "numpy", options=how))


def test_an_interrupt_after_the_last_object_keeps_what_it_names(
    bucket: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = uploads.UploadedTarget._send  # pyright: ignore[reportPrivateUsage]

    def interrupted(self: Any, name: str, mode: str | None) -> None:
        send(self, name, mode)
        if name == INDEX:
            raise KeyboardInterrupt

    monkeypatch.setattr(uploads.UploadedTarget, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mfload.save(ARRAYS, url, max_shard_size="150kB")
    check(mfload.load(url, "numpy"))
    del bucket


def test_the_loser_of_two_takes_nothing_of_the_winner(
    bucket: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other saves between what the loser sees and what it sends."""
    upload = uploads.UploadedTarget._upload  # pyright: ignore[reportPrivateUsage]
    first = [True]

    def late(self: Any, *given: Any) -> None:
        if first.pop() if first else False:
            mfload.save(ARRAYS, url, max_shard_size="150kB", checksums=True)
        upload(self, *given)

    monkeypatch.setattr(uploads.UploadedTarget, "_upload", late)
    twice = {name: 2 * each for name, each in ARRAYS.items()}
    with pytest.raises(errors.TargetExistsError):
        mfload.save(twice, url, max_shard_size="150kB", checksums=True)
    check(mfload.load(url, "numpy"))
    assert mfload.verify(url).ok
    assert len(listed(bucket, url)) == 6


def test_a_fork_leaves_the_drafts_to_its_parent(
    bucket: servers.Store, url: str, tmp_path: Path
) -> None:
    del bucket
    target = uploads.UploadedTarget(url, False, None, sealed=False, options=None)
    (held,) = tmp_path.glob("mfload-*")
    child = os.fork()
    if not child:
        target._clean_up()  # pyright: ignore[reportPrivateUsage] - as at its exit
        os._exit(0)
    os.waitpid(child, 0)
    assert held.is_dir()
    del target
    assert not held.exists()


def test_a_manifest_is_written_beside(bucket: servers.Store, url: str) -> None:
    place, sums = f"{url}/m.safetensors", f"{url}/m.safetensors.checksums.json"
    mfload.save(ARRAYS, place)
    made = mfload.verify(place, mode="write")
    assert made.ok
    assert made.manifest == sums
    assert mfload.verify(place, mode="check").ok
    with pytest.raises(errors.TargetExistsError, match="overwrite=True replaces it if it is a man"):
        mfload.verify(place, mode="write")
    assert mfload.verify(place, mode="write", overwrite=True).ok
    bucket.put(sums.removeprefix(bucket.url()), b"mine")
    with pytest.raises(errors.TargetExistsError, match="overwrite=True replaces it if it is a man"):
        mfload.verify(place, mode="write", overwrite=True)
    other = f"{url}/other.json"
    assert mfload.verify(place, mode="write", manifest=other).ok
    assert mfload.verify(place, mode="check", manifest=other).ok


def test_a_manifest_of_what_was_replaced_is_not_written(
    bucket: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{url}/m.safetensors"
    mfload.save(ARRAYS, place)
    write = uploads.write_manifest

    def late(*given: Any, **more: Any) -> None:
        mfload.save({name: -each for name, each in ARRAYS.items()}, place, overwrite=True)
        write(*given, **more)

    monkeypatch.setattr(uploads, "write_manifest", late)
    with pytest.raises(errors.SourceChangedError):
        mfload.verify(place, mode="write")
    assert listed(bucket, url) == ["m.safetensors"]


def test_the_timeout_is_that_of_the_whole_upload(
    bucket: servers.Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_PART", 5 << 20)
    slow = uploads._Bucket._left  # pyright: ignore[reportPrivateUsage]

    def waits(self: Any, key: str) -> None:
        time.sleep(0.5)
        slow(self, key)

    monkeypatch.setattr(uploads._Bucket, "_left", waits)  # pyright: ignore[reportPrivateUsage]
    large = {"w": np.zeros(64 << 20, np.uint8)}
    with pytest.raises(errors.LoadTimeoutError, match="uploading"):
        mfload.save(large, f"{url}/m.safetensors", options=mfload.Options(timeout=2.0))
    assert listed(bucket, url) == []
    assert uploads_under_way(bucket) == 0


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_new_files_beside_are_there_before_the_index(
    bucket: servers.Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Those that an old checkpoint has too are replaced after it: another writer may win."""
    (tmp_path / "m").mkdir()
    mfload.save(ARRAYS, tmp_path / "m", max_shard_size="300kB")
    bucket.put(f"{url}/config.json".removeprefix(bucket.url()), b"old")
    (tmp_path / "m" / name).write_text("new")
    send = uploads.UploadedTarget._send  # pyright: ignore[reportPrivateUsage]

    def broken(self: Any, each: str, mode: str | None) -> str | None:
        if each == INDEX:
            raise errors.TargetError("the store refuses")
        return send(self, each, mode)

    monkeypatch.setattr(uploads.UploadedTarget, "_send", broken)
    with pytest.raises(errors.TargetError):
        mfload.convert(tmp_path / "m", url)
    assert listed(bucket, url) == ["config.json"]
    import obstore

    kept = obstore.get(bucket.client(), f"{url}/config.json".removeprefix(bucket.url()))
    assert bytes(kept.bytes()) == b"old"
    order: list[str] = []
    monkeypatch.setattr(
        uploads.UploadedTarget,
        "_send",
        lambda self, each, mode: (order.append(each), send(self, each, mode)),
    )
    mfload.convert(tmp_path / "m", url)
    assert (order.index(name) < order.index(INDEX)) == (name == "adapter_config.json")


def _losing(proxy: proxies.Proxy, fault: proxies.Fault, path: str, times: int = 1) -> None:
    """Has the answers of PUTs to a path lost; the store has done what they asked for."""
    proxy.plan(fault, path=path, times=times)
    planned = proxy.fault_of
    proxy.fault_of = lambda asked: planned(asked) if asked.method == "PUT" else None


@pytest.mark.parametrize("fault", [proxies.refuse("500 Internal Server Error"), proxies.silence(0)])
@pytest.mark.parametrize("before", ["nothing", "shards", "file"])
@pytest.mark.parametrize("after", ["shards", "file"])
@pytest.mark.parametrize("lost", [1, 100])
def test_a_save_whose_answer_is_lost(
    bucket: servers.Store, url: str, fault: proxies.Fault, before: str, after: str, lost: int
) -> None:
    """It came to pass; and nothing that the index names is removed, whatever is said."""
    sizes: dict[str, Any] = {"shards": "150kB", "file": None}
    if before != "nothing":
        mfload.save(ARRAYS, url, max_shard_size=sizes[before])
    decides = INDEX if "shards" in (before, after) else "model.safetensors"
    twice = {name: 2 * each for name, each in ARRAYS.items()}
    with proxies.proxying(bucket.port) as proxy:
        _losing(proxy, fault, f"/{decides}", lost)
        store = {**bucket.options, "endpoint": f"http://127.0.0.1:{proxy.port}"}
        options = mfload.Options(store=store | {"retry_config": {"max_retries": 2}})
        mfload.save(
            twice, url, max_shard_size=sizes[after], overwrite=before != "nothing", options=options
        )
    check(mfload.load(url, "numpy"), 2)
    there = listed(bucket, url)
    assert len(there) == (5 if after == "shards" else 2 if before == "shards" else 1), there


def test_a_shard_whose_answer_is_lost_is_not_left(bucket: servers.Store, url: str) -> None:
    with proxies.proxying(bucket.port) as proxy:
        _losing(proxy, proxies.silence(0), "-00002-of-00004", 100)
        store = {**bucket.options, "endpoint": f"http://127.0.0.1:{proxy.port}"}
        options = mfload.Options(store=store | {"retry_config": {"max_retries": 1}})
        with pytest.raises(errors.WriteError):
            mfload.save(ARRAYS, url, max_shard_size="150kB", options=options)
    assert listed(bucket, url) == []


def test_a_store_without_conditional_writes(bucket: servers.Store, url: str) -> None:
    with proxies.proxying(bucket.port) as proxy:
        proxy.instead = lambda asked: (
            "501 Not Implemented" if {"if-none-match", "if-match"} & {*asked.headers} else None
        )
        store = {**bucket.options, "endpoint": f"http://127.0.0.1:{proxy.port}"}
        for settings in ({}, {"conditional_put": "disabled"}):
            options = mfload.Options(store=store | settings)
            place = f"{url}/{len(settings)}/m.safetensors"
            done = mfload.save(ARRAYS, place, options=options)
            assert any("of two writers at once, the last wins" in each for each in done.notes)
            check(mfload.load(place, "numpy"))
            with pytest.raises(errors.TargetExistsError):
                mfload.save(ARRAYS, place, options=options)


@pytest.mark.parametrize("kind", ["timeout", "interrupt"])
def test_a_store_that_never_answers(bucket: servers.Store, url: str, kind: str) -> None:
    with proxies.proxying(bucket.port) as proxy:
        _losing(proxy, proxies.silence(60), "/m.safetensors", 100)
        store = {**bucket.options, "endpoint": f"http://127.0.0.1:{proxy.port}"}
        options = mfload.Options(store=store, timeout=2.0 if kind == "timeout" else None)
        begin = time.monotonic()
        if kind == "interrupt":
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt) if kind == "interrupt" else nullcontext():
            mfload.save(ARRAYS, f"{url}/m.safetensors", options=options)  # It has arrived.
        assert time.monotonic() - begin < 15


def _meanwhile(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, other: Any
) -> list[int]:
    """Has `other` run before the call of that number."""
    real, calls = getattr(owner, name), list[int]()

    def call(self: Any, *given: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == number:
            other()
        return real(self, *given)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("moment", ["_send", "_removed"])
@pytest.mark.parametrize("before", [None, "150kB"])
@pytest.mark.parametrize("one", [None, "150kB"])
@pytest.mark.parametrize("two", [None, "150kB"])
def test_another_save_at_any_moment(
    moto: servers.Store,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    before: str | None,
    one: str | None,
    two: str | None,
) -> None:
    """What is there at the end is the whole checkpoint of one of them."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    owner: Any = (
        uploads.UploadedTarget if moment == "_send" else uploads._Bucket  # pyright: ignore[reportPrivateUsage]
    )
    for number in range(8):
        url = moto.url(f"moment/{moment}/{before}/{one}/{two}/{number}")
        mfload.save(ARRAYS, url, max_shard_size=before)
        done = list[int]()

        def other(url: str = url, done: list[int] = done) -> None:
            made = {name: 3 * each for name, each in ARRAYS.items()}
            mfload.save(made, url, max_shard_size=two, overwrite=True)
            done.append(3)

        with monkeypatch.context() as patch:
            calls = _meanwhile(patch, owner, moment, number, other)
            try:
                twice = {name: 2 * each for name, each in ARRAYS.items()}
                mfload.save(twice, url, max_shard_size=one, overwrite=True)
                done.append(2)
            except errors.TargetError:
                pass
        loaded = mfload.load(url, "numpy")
        factor = round(float(loaded["l.0.w"][0, 0] / ARRAYS["l.0.w"][0, 0]))
        assert factor in done
        check(loaded, factor)
        if number >= len(calls):
            break


@pytest.mark.parametrize("size", [None, "150kB"])
def test_what_a_killed_save_left_is_no_checkpoint(
    moto: servers.Store, monkeypatch: pytest.MonkeyPatch, size: str | None
) -> None:
    """At each moment of a save over a single file, and after it was killed there, one is there."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    url = moto.url(f"killed/{size}")
    mfload.save(ARRAYS, url)
    twice = {name: 2 * each for name, each in ARRAYS.items()}
    send = uploads.UploadedTarget._send  # pyright: ignore[reportPrivateUsage]
    for number in range(1, 4):

        def killed(self: Any, name: str, mode: str | None) -> Any:
            check(mfload.load(url, "numpy"))
            if name == INDEX or "-0000" in name:
                if "-00003-" in name:
                    raise SystemExit
                self._withdraw = lambda _: None
            return send(self, name, mode)

        with monkeypatch.context() as patch:
            patch.setattr(uploads.UploadedTarget, "_send", killed)
            with pytest.raises(SystemExit):
                mfload.save(twice, url, max_shard_size="150kB", overwrite=True)
        check(mfload.load(url, "numpy"))
        assert len(listed(moto, url)) == 2 + 2 * number
    mfload.save(twice, url, max_shard_size=size, overwrite=True)
    check(mfload.load(url, "numpy"), 2)
    mfload.save(ARRAYS, url, overwrite=True)
    check(mfload.load(url, "numpy"))


def test_an_index_that_leads_to_the_file_goes_before_it(
    moto: servers.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    url = moto.url("leads")
    place = f"{url}/model.safetensors"
    mfload.save(ARRAYS, place)
    index = {"metadata": {}, "weight_map": dict.fromkeys(ARRAYS, "model.safetensors")}
    moto.put(f"leads/{INDEX}", json.dumps(index).encode())
    removed = uploads._Bucket._removed  # pyright: ignore[reportPrivateUsage]

    def watched(self: Any, *given: Any) -> bool:
        check(mfload.load(url, "numpy"))
        done = removed(self, *given)
        check(mfload.load(url, "numpy"))
        return done

    monkeypatch.setattr(uploads._Bucket, "_removed", watched)  # pyright: ignore[reportPrivateUsage]
    other = {"other": np.ones(3)}
    mfload.save(other, place, overwrite=True)
    np.testing.assert_array_equal(mfload.load(url, "numpy")["other"], other["other"])
    assert listed(moto, url) == ["model.safetensors"]


def test_names_of_other_formats_are_refused(moto: servers.Store) -> None:
    how = mfload.Options(store=moto.options)
    for name in ("x.npz", "x.msgpack", "x.json", "x.bin"):
        with pytest.raises(errors.UsageError, match="the name is one of another format"):
            mfload.save(ARRAYS, moto.url(name), options=how)


@pytest.fixture
def placed(moto: servers.Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes URLs of one server, which the environment names."""
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    return lambda name: moto.url(f"{tmp_path.name}/{name}")


def times(factor: int) -> dict[str, Any]:
    return {name: factor * each for name, each in ARRAYS.items()}


@pytest.mark.parametrize("before", [None, "150kB"])
def test_what_may_still_arrive_keeps_its_shards(
    placed: Any, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """A gateway answers 504, and the save's own request, under way, is why the next gets 409."""
    url = placed("late")
    if before:
        mfload.save(ARRAYS, url, max_shard_size=before)
    sent = list[tuple[str, bytes]]()
    way = "replace" if before else "create"

    def taken(self: Any, key: str, data: bytes, *_: Any) -> None:
        sent.append((key, data))
        raise self.taken(key)

    bucket = uploads._Bucket  # pyright: ignore[reportPrivateUsage]
    with monkeypatch.context() as patch:
        patch.setattr(bucket, way, taken)
        with pytest.raises(errors.TargetExistsError) as caught:
            mfload.save(times(2), url, max_shard_size="150kB", overwrite=True)
    assert "may still arrive" in "".join(caught.value.__notes__)
    if before:
        check(mfload.load(url, "numpy"))
    access, _ = stores.access_to(url, LoadOptions())
    for key, data in sent:
        bucket(access, Deadline(None)).write(key, data)
    check(mfload.load(url, "numpy"), 2)


def test_a_file_that_is_replaced_while_its_names_are_read(
    placed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = placed("names")
    mfload.save(ARRAYS, url)
    read = uploads.safetensors.read
    other = {"x": np.ones(3), "y": np.zeros(2)}

    def late(source: Any) -> Any:
        found = read(source)
        mfload.save(other, url, overwrite=True)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(uploads.safetensors, "read", late)
        patch.setattr(uploads, "read_index", lambda source: pytest.fail(source.name), raising=True)
        with pytest.raises(errors.TargetExistsError):
            mfload.save(times(2), url, max_shard_size="150kB", overwrite=True)
    assert {*mfload.load(url, "numpy")} == {"x", "y"}


def test_strays_beside_a_single_file_are_left_out(placed: Any, moto: servers.Store) -> None:
    url = placed("strays")
    mfload.save(ARRAYS, url)
    mfload.save(times(2), placed("others"), max_shard_size="150kB")
    import obstore

    stray = next(n for n in listed(moto, placed("others")) if "-00002-" in n)
    key = f"{placed('others')}/{stray}".removeprefix(moto.url())
    data = bytes(obstore.get(moto.client(), key).bytes())
    moto.put(f"{url}/{stray}".removeprefix(moto.url()), data)
    check(mfload.load(url, "numpy"))
    mfload.save(times(3), f"{url}/model.safetensors", overwrite=True)
    check(mfload.load(url, "numpy"), 3)


def test_shards_without_an_index_are_a_checkpoint(placed: Any, moto: servers.Store) -> None:
    url = placed("numbered")
    data: dict[str, bytes] = {}
    for number, name in enumerate(ARRAYS):
        place = f"{placed('parts')}/{number}.safetensors"
        mfload.save({name: ARRAYS[name]}, place)
        import obstore

        data[name] = bytes(obstore.get(moto.client(), place.removeprefix(moto.url())).bytes())
        key = f"{url}/model-{number + 1:05}-of-00004.safetensors"
        moto.put(key.removeprefix(moto.url()), data[name])
    check(mfload.load(url, "numpy"))
    for size in (None, "150kB"):
        with pytest.raises(errors.TargetExistsError):
            mfload.save(times(2), url, max_shard_size=size)
    mfload.save(times(2), url, overwrite=True)
    check(mfload.load(url, "numpy"), 2)
    assert not [each for each in listed(moto, url) if "-of-00004" in each]


@pytest.mark.parametrize("end", ["", "/model.safetensors"])
def test_what_another_index_leads_to_stays(placed: Any, moto: servers.Store, end: str) -> None:
    url = placed("ema")
    mfload.save(ARRAYS, url)
    index = {"metadata": {}, "weight_map": dict.fromkeys(ARRAYS, "model.safetensors")}
    moto.put(
        f"{url}/ema.safetensors.index.json".removeprefix(moto.url()), json.dumps(index).encode()
    )
    other = f"{url}/ema.safetensors.index.json"
    if end:
        with pytest.raises(errors.TargetError, match="an index leads to the file"):
            mfload.save(times(2), url + end, overwrite=True)
    else:
        mfload.save(times(2), url, max_shard_size="150kB", overwrite=True)
        check(mfload.load(f"{url}/{INDEX}", "numpy"), 2)
    check(mfload.load(other, "numpy"))


def test_a_file_of_an_index_with_others_is_not_replaced_alone(
    placed: Any, moto: servers.Store
) -> None:
    url = placed("mixed")
    mfload.save(ARRAYS, url, max_shard_size="150kB")
    mfload.save({"l.0.w": ARRAYS["l.0.w"]}, f"{placed('one')}/model.safetensors")
    import obstore

    key = f"{placed('one')}/model.safetensors".removeprefix(moto.url())
    moto.put(
        f"{url}/model.safetensors".removeprefix(moto.url()),
        bytes(obstore.get(moto.client(), key).bytes()),
    )
    index = json.loads(
        bytes(obstore.get(moto.client(), f"{url}/{INDEX}".removeprefix(moto.url())).bytes())
    )
    index["weight_map"]["l.0.w"] = "model.safetensors"
    moto.put(f"{url}/{INDEX}".removeprefix(moto.url()), json.dumps(index).encode())
    with pytest.raises(errors.TargetError, match="save to the directory"):
        mfload.save(times(2), f"{url}/model.safetensors", overwrite=True)
    check(mfload.load(url, "numpy"))


@pytest.mark.parametrize("size", [None, "150kB"])
def test_the_manifest_is_that_of_the_checkpoint(
    placed: Any, monkeypatch: pytest.MonkeyPatch, size: str | None
) -> None:
    """Another save comes between what decides and its manifest; and before that of `verify`."""
    url = placed("sums")
    mfload.save(ARRAYS, url, max_shard_size=size, checksums=True)
    send = uploads.UploadedTarget._send  # pyright: ignore[reportPrivateUsage]
    late = [True]

    def call(self: Any, name: str, mode: str | None) -> Any:
        if name.endswith("checksums.json") and late and late.pop():
            mfload.save(times(3), url, max_shard_size=size, overwrite=True, checksums=True)
        return send(self, name, mode)

    with monkeypatch.context() as patch:
        patch.setattr(uploads.UploadedTarget, "_send", call)
        done = mfload.save(times(2), url, max_shard_size=size, overwrite=True, checksums=True)
    assert any("another writer's" in note for note in done.notes)
    check(mfload.load(url, "numpy"), 3)
    assert mfload.verify(url, mode="check").ok
    bucket = uploads._Bucket  # pyright: ignore[reportPrivateUsage]
    replace = bucket.replace

    def between(self: Any, key: str, *given: Any) -> Any:
        if key.endswith("checksums.json"):
            monkeypatch.setattr(bucket, "replace", replace)
            mfload.save(times(4), url, max_shard_size=size, overwrite=True)
            return self.write(key, given[0])
        return replace(self, key, *given)

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "replace", between)
        with pytest.raises(errors.SourceChangedError):
            mfload.verify(url, mode="write", overwrite=True)
    check(mfload.load(url, "numpy"), 4)
    assert mfload.verify(url).ok
