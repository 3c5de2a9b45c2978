"""Routes: an engine a file, and the reason said."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import watch

import mfload
from mfload.io import probes, route
from mfload.sources.local import LocalFile

LARGE = samples.numbers((9 << 20,), np.uint8)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 9 MiB, which is not small."""
    return samples.save(tmp_path_factory.mktemp("route") / "large.safetensors", {"a": LARGE})


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "small.safetensors", {"a": LARGE[:100]})


def _leg(path: Path, engine: str = "auto", page_cache: str = "auto") -> route.Leg:
    source = LocalFile(path)
    (leg,) = route.choose([(source, source.size)], engine, page_cache)
    return leg


def _real_disk(path: Path) -> None:
    """Skips where the kernel can't say or forget what it caches of the file."""
    path.read_bytes()
    with path.open("rb") as file:
        warm = probes.cached_share(file.fileno(), path.stat().st_size)
        watch.drop_cache(path)
        cold = probes.cached_share(file.fileno(), path.stat().st_size)
        if (warm, cold) != (1.0, 0.0) or probes.direct_alignment(file.fileno()) is None:
            pytest.skip(f"cached {warm} when read, {cold} when dropped")


def test_what_the_cache_holds_is_read_through_it(large: Path) -> None:
    _real_disk(large)
    large.read_bytes()
    leg = _leg(large)
    assert (leg.engine, leg.why, leg.cached) == ("pread", "100% in the page cache", 1.0)


def _share(path: Path) -> float:
    with path.open("rb") as file:
        return probes.cached_share(file.fileno(), path.stat().st_size) or 0.0


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_next_load_finds_what_fits(large: Path, framework: Any) -> None:
    _real_disk(large)
    routes: list[tuple[str, str]] = []
    for _ in range(2):
        report = mfload.Report()
        mfload.load(large, framework=framework, report=report)
        routes += [leg[1:] for leg in report.route]
        assert _share(large) == 1.0
    assert routes[0][0] == "pread"
    assert routes[0][1].startswith("0% in the page cache, kept there: at most a quarter of the ")
    assert routes[1] == ("pread", "100% in the page cache")


def test_bypass_leaves_headers_and_ends_in_the_page_cache(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_SAMPLES", sys.maxsize)  # All pages are looked at.
    arrays = dict.fromkeys("abc", LARGE[: (3 << 20) + 28])
    several = samples.save(tmp_path / "several.safetensors", arrays)
    for path, engine in ((large, "auto"), (large, "direct"), (several, "auto")):
        _real_disk(path)
        options = mfload.Options(page_cache="bypass", engine=engine)
        for share in (0.0, 1.0):
            report = mfload.Report()
            mfload.load(path, framework="numpy", report=report, options=options)
            why = {"auto": "page_cache='bypass'", "direct": "asked for"}[engine]
            assert report.route == ((os.fspath(path), "direct", why),)
            if share:  # What it held before stays.
                assert _share(path) == share
            else:
                pages = 2 * report.tensors + 4  # The kernel fetches 16 KiB with the header.
                assert 0 < _share(path) * path.stat().st_size <= pages * mmap.PAGESIZE
            path.read_bytes()


def test_keep_fills_the_page_cache(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _real_disk(large)
    monkeypatch.setattr(probes, "memory_room", lambda **_: (1, "test machine"))
    report = mfload.Report()
    how = mfload.Options(page_cache="keep")
    loaded = mfload.load(large, framework="numpy", report=report, options=how)
    assert samples.same(loaded["a"], LARGE)
    why = "0% in the page cache, page_cache='keep'"
    assert report.route == ((os.fspath(large), "pread", why),)
    assert _share(large) == 1.0


def test_a_source_of_the_user_is_not_kept_open(large: Path) -> None:
    source, how = LocalFile(large), mfload.Options(page_cache="keep")
    mfload.load(source, "numpy", options=how)
    assert (source.keeps, source.kept) == (False, None)
    with mfload.open(source, options=how) as opened:
        opened.get_tensors()
        assert source.keeps
    assert not source.keeps


def _with(
    monkeypatch: pytest.MonkeyPatch,
    cached: float | None,
    direct: Any = (512, 512),
    room: int | None = 1,
) -> None:
    monkeypatch.setattr(probes, "cached_share", lambda *_: cached)
    monkeypatch.setattr(probes, "direct_alignment", lambda _: direct)
    found = None if room is None else (room, "test machine")
    # What is swapped out is no room for a page cache.
    monkeypatch.setattr(probes, "memory_room", lambda *, swap: None if swap else found)


MORE, LESS = "not kept there: more than", "kept there: at most"


@pytest.mark.parametrize(
    ("page_cache", "room", "files", "engine", "why"),
    [
        ("auto", 4 * (9 << 20), 1, "pread", f", {LESS} a quarter of the available 36 MiB (9 MiB)"),
        ("auto", 4 * (9 << 20) - 1, 1, "direct", f", {MORE} a quarter of the available"),
        # What counts is the load, not the file.
        ("auto", 4 * (9 << 20), 2, "direct", f", {MORE} a quarter of the available 36 MiB"),
        ("auto", None, 1, "direct", ", not kept there: the available memory is unknown"),
        ("keep", 1, 2, "pread", ", page_cache='keep'"),
        ("keep", None, 1, "pread", ", page_cache='keep'"),
    ],
)
def test_what_the_page_cache_is_to_keep(
    large: Path,
    monkeypatch: pytest.MonkeyPatch,
    page_cache: str,
    room: int | None,
    files: int,
    engine: str,
    why: str,
) -> None:
    _with(monkeypatch, 0.2, room=room)
    for asked in ("auto", "pinned"):
        legs = route.choose([(LocalFile(large), 9 << 20)] * files, asked, page_cache)
        assert len(legs) == files
        for leg in legs:
            assert leg.engine == engine
            assert f"20% in the page cache{why}" in leg.why
            assert (leg.direct, leg.cold) == (engine == "direct", engine == "pread")


def test_what_is_warm_is_left_alone(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, 0.9, room=1)
    for page_cache in ("auto", "keep"):
        assert _leg(large, page_cache=page_cache)[1:] == (
            *("pread", "90% in the page cache", 0.9),
            *(False, False, False, False),
        )


@pytest.mark.parametrize("cached", [0.0, 1.0, None])
def test_bypass_goes_past_whatever_is_cached(
    small: Path, large: Path, monkeypatch: pytest.MonkeyPatch, cached: float | None
) -> None:
    _with(monkeypatch, cached, room=1 << 40)
    for path in (small, large):
        leg = _leg(path, page_cache="bypass")
        assert leg[1:3] == ("direct", "page_cache='bypass'")


def test_bypass_where_there_is_no_way_past_says_so(
    small: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _with(monkeypatch, 0.0, None)
    caplog.set_level(logging.INFO, "mfload")
    leg = _leg(small, page_cache="bypass")
    assert leg[1:3] == ("pread", "page_cache='bypass'; the file takes no O_DIRECT")
    assert [r.levelname for r in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("engine", "page_cache"),
    [("direct", "keep"), ("gds", "keep"), ("pread", "bypass"), ("mmap", "bypass")],
)
def test_an_engine_and_a_page_cache_that_contradict_each_other(
    engine: Any, page_cache: Any
) -> None:
    with pytest.raises(mfload.errors.UsageError, match="the page cache") as caught:
        mfload.Options(engine=engine, page_cache=page_cache)
    assert engine in str(caught.value)
    assert page_cache in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "page_cache", "said", "engines"),
    [
        ("auto", "auto", "no gds: no", ("gds", "pinned, buffered")),
        ("auto", "keep", None, ("pinned, buffered", "pinned, buffered")),
        ("auto", "bypass", "no gds: no", ("gds", "pinned, O_DIRECT")),
        ("pinned", "auto", None, ("pinned, buffered", "pinned, buffered")),
        ("pinned", "bypass", None, ("pinned, O_DIRECT", "pinned, O_DIRECT")),
        ("gds", "bypass", "gds asked for, but no", ("gds", "pinned, O_DIRECT")),
        ("direct", "auto", None, ("pinned, O_DIRECT", "pinned, O_DIRECT")),
        ("pread", "keep", None, ("pinned, buffered", "pinned, buffered")),
    ],
)
def test_the_way_onto_a_device(
    large: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    page_cache: str,
    said: str | None,
    engines: tuple[str, str],
) -> None:
    """`engines`: where cuFile is real, and where it is not."""
    _with(monkeypatch, 0.0, room=1 << 40)
    for real, expected in zip((True, False), engines, strict=True):
        past = lambda *_, real=real: (real, "as told" if real else "no")  # noqa: E731
        wanted = [(LocalFile(large), 9 << 20)]
        (leg,) = route.choose(wanted, engine, page_cache, past)
        name, _, how = expected.partition(", ")
        assert leg.engine == name
        assert leg.why.startswith(how)
        assert leg.direct == (how != "buffered")
        assert (said is not None and said in leg.why) == (said is not None and not real)


@pytest.mark.parametrize(
    ("cached", "direct", "engine", "why"),
    [
        (
            *(0.49, (512, 512), "direct"),
            f"49% in the page cache, {MORE} a quarter of the available 1 B (9 MiB)",
        ),
        (0.5, (512, 512), "pread", "50% in the page cache"),
        (0.1, None, "pread", "10% in the page cache, but the file takes no O_DIRECT"),
        (None, (512, 512), "pread", "the kernel does not say what it caches"),
    ],
)
def test_auto_says_why(
    large: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached: float | None,
    direct: Any,
    engine: str,
    why: str,
) -> None:
    _with(monkeypatch, cached, direct)
    assert _leg(large)[1:3] == (engine, why)


def test_small_files_are_read_through_the_cache(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with(monkeypatch, 0.0)
    assert _leg(small)[1:3] == ("pread", "small read")


@pytest.mark.parametrize("engine", ["pread", "direct", "mmap"])
def test_what_is_asked_for_is_done(
    small: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    _with(monkeypatch, 0.0)
    assert _leg(small, engine)[1:3] == (engine, "asked for")


def test_direct_where_there_is_none_says_so(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, 0.0, None)
    assert _leg(small, "direct")[1:3] == (
        "pread",
        "direct asked for; the file takes no O_DIRECT",
    )


def test_auto_never_maps(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (0.0, 0.5, 1.0, None):
        for direct in ((512, 512), None):
            _with(monkeypatch, cached, direct)
            assert _leg(large).engine != "mmap"


def test_choices_are_logged_and_orders_are_not(
    large: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mfload")
    _with(monkeypatch, 0.2)
    _leg(large)
    assert [(r.levelname, r.message) for r in caplog.records] == [
        (
            "INFO",
            f"{large}: direct (20% in the page cache, {MORE} a quarter of the available 1 B "
            "(9 MiB))",
        )
    ]
    caplog.clear()
    _leg(large, "pread")
    assert caplog.records == []
    _with(monkeypatch, 0.2, None)
    _leg(large, "direct")
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_log_without_logging() -> None:
    """Information is for those who have imported logging; a warning is always shown."""
    code = """
        import sys
        from mfload.io import route
        def log(asked):
            route._log(route.Leg("f", "pread", "why"), asked, "auto")
        log("auto")
        assert "logging" not in sys.modules
        log("direct")
        import logging
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
        log("auto")
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert found.stderr == "f: pread (why)\nINFO mfload f: pread (why)\n"
