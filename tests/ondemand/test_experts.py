"""Experts on demand: NumPy against the suite that frameworks share, arguments, faults, memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import serving
from conformance.ondemand import Ondemand, least

import mfload
from mfload import errors
from mfload.io import gather
from mfload.ondemand import ExpertCache, bundle, policies


class TestNumpy(Ondemand):
    framework = "numpy"

    def raw(self, array: Any) -> bytes:
        return array.tobytes()

    def address(self, array: Any) -> int:
        return array.ctypes.data

    def capsule(self, array: Any) -> Any:
        return array.__dlpack__(max_version=(1, 0))


EACH = r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight"
LAYERS, EXPERTS, WIDTH = 3, 8, 4096


def weights(value: int = 0) -> dict[str, Any]:
    """Experts of three tensors that say which they are, and what belongs to none."""
    made: dict[str, Any] = {"embed": np.zeros(9, np.float32)}
    for layer, expert in itertools.product(range(LAYERS), range(EXPERTS)):
        for n, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            whole = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
            made[whole] = np.full(WIDTH, value + n + 10 * expert + 100 * layer, np.float32)
    return made


SLOT = 3 * WIDTH * 4 + 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "experts.safetensors", weights())


def check(arrays: Any, layer: int, expert: int) -> None:
    for n, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        assert (arrays[name] == n + 10 * expert + 100 * layer).all()


class TestArguments:
    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"pattern": "("}, "malformed regular expression in pattern="),
            ({"pattern": b"x"}, "malformed regular expression in pattern="),
            ({"pattern": 3}, "malformed regular expression in pattern="),
            ({"pattern": r"layers\.(\d+)"}, "other groups"),
            ({"pattern": r"(\d)(\d)(\d)(\d)"}, "other groups"),
            ({"pattern": r"(?P<layer>\d)(?P<expert>\d)"}, "other groups"),
            ({"pattern": r"(\w+)\.(\d+)\.mlp.*experts\.\d\.(\w+)\.weight"}, "something else"),
            ({"pattern": r"layers\.(\d+).*experts\.(\d)\..*(weight)"}, "two tensors for the same"),
            ({"budget": "much"}, "budget is not a size"),
            ({"budget": 0}, "budget must be 1 or more"),
            ({"policy": "rnd"}, "unknown policy"),
            ({"policy": lambda *_: None}, "makes no policy"),
            ({"wait": "long"}, "wait .expected: seconds"),
            ({"wait": float("nan")}, "wait .expected: seconds"),
        ],
    )
    def test_refused(self, path: Path, given: Any, says: str) -> None:
        with pytest.raises(errors.UsageError, match=says):
            ExpertCache(path, **given)

    @pytest.mark.parametrize(
        "pattern",
        [
            r"experts\.(?P<expert>\d+)\.(?P<name>\w+)\.weight",  # Completed below.
            re.compile(r"LAYERS\.(\d+)\.MLP\.EXPERTS\.(\d+)\.(.+?)\.WEIGHT", re.IGNORECASE),
        ],
    )
    def test_patterns(self, path: Path, pattern: Any) -> None:
        if isinstance(pattern, str):
            pattern = rf"(x|layers)\.(?P<layer>\d+)\.\w+\.{pattern}"
        with ExpertCache(path, pattern) as cache, cache.use(1, [2]) as experts:
            assert list(experts[2]) == ["down_proj", "gate_proj", "up_proj"]
            check(experts[2], 1, 2)

    def test_the_pattern_reaches_to_the_end(self, tmp_path: Path) -> None:
        """A scale beside a weight is not taken for it."""
        name = "layers.0.mlp.experts.0.up_proj.weight"
        made = {name: np.ones(3), f"{name}_scale": np.zeros(3)}
        path = samples.save(tmp_path / "a.safetensors", made)
        with ExpertCache(path) as cache, cache.use(0, [0]) as experts:
            assert experts[0]["up_proj"].tolist() == [1, 1, 1]
        with ExpertCache(path, r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(.+)") as cache:
            assert set(cache.use(0, [0])[0]) == {"up_proj.weight", "up_proj.weight_scale"}

    def test_names_of_checkpoints(self, tmp_path: Path) -> None:
        """Scales come along, layers that predict further tokens do not."""
        made: dict[str, Any] = {}
        for layer, expert in itertools.product(range(2), range(4, 8)):
            stem = f"layers.{layer}.mlp.experts.{expert}.up_proj"
            made[f"model.{stem}.weight"] = np.full(64, 10 * layer + expert, np.uint8)
            made[f"model.{stem}.weight_scale_inv"] = np.full(2, expert, np.float32)
            made[f"mtp.{stem}.weight"] = np.zeros(64, np.uint8)
        path = samples.save(tmp_path / "a.safetensors", made)
        with ExpertCache(path) as cache:
            assert cache.experts == {0: 4, 1: 4}
            cache.prefetch(1, [5])
            with cache.use(1, [7, 5]) as experts:  # As on a rank that has experts 4 to 7.
                for number in (5, 7):
                    arrays = experts[number]
                    assert set(arrays) == {"up_proj", "up_proj.weight_scale_inv"}
                    assert (arrays["up_proj"] == 10 + number).all()
                    assert (arrays["up_proj.weight_scale_inv"] == number).all()
            for wrong in (3, 8, -1):
                with pytest.raises(errors.UsageError, match="numbers from 4 to 7"):
                    cache.use(1, [wrong])
        with ExpertCache(path, r"mtp\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight") as cache:
            assert not cache.use(1, [4])[4]["up_proj"].any()

    def test_every_second_expert(self, tmp_path: Path) -> None:
        stem = "layers.0.mlp.experts"
        made = {f"{stem}.{n}.up_proj.weight": np.full(64, n, np.uint8) for n in range(1, 9, 2)}
        with ExpertCache(samples.save(tmp_path / "a.safetensors", made)) as cache:
            assert (cache.use(0, [3])[3]["up_proj"] == 3).all()
            with pytest.raises(errors.UsageError, match="from 1 to 7, 4 of them"):
                cache.use(0, [2])

    def test_experts_one_below_the_other_are_refused(self, tmp_path: Path) -> None:
        """As in DBRX: 16 experts of 12 rows each."""
        stem = "transformer.blocks.0.ffn.experts.mlp"
        made = {f"{stem}.{name}": np.zeros((16 * 12, 6), np.float16) for name in ("w1", "v1", "w2")}
        path = samples.save(tmp_path / "a.safetensors", made)
        with pytest.raises(errors.UnsupportedShapeError, match="no dim of experts") as caught:
            ExpertCache(path, r"blocks\.(\d+)\.ffn\.experts\.mlp\.(\w+)")
        assert (caught.value.tensor, caught.value.found) == (f"{stem}.v1", [192, 6])

    def test_no_match(self, path: Path) -> None:
        with pytest.raises(errors.TensorNotFoundError, match="no name is one of an expert"):
            ExpertCache(path, r"blocks\.(\d)\.(\d)\.(\w)")

    @pytest.mark.parametrize(
        ("gone", "says"),
        [
            ("model.layers.1.mlp.experts.3.up_proj.weight", "expert 3 of layer 1 lacks"),
            ("model.layers.1.mlp.experts.3.", "expert 3 of layer 1 lacks"),
        ],
    )
    def test_an_expert_lacks_tensors(self, tmp_path: Path, gone: str, says: str) -> None:
        made = {name: x for name, x in weights().items() if not name.startswith(gone)}
        made["model.layers.2.mlp.experts.99999999999.up_proj.weight"] = np.zeros(1)
        path = samples.save(tmp_path / "a.safetensors", made)
        with pytest.raises(errors.TensorNotFoundError, match=says):
            ExpertCache(path, EACH)

    def test_no_such_expert(self, path: Path) -> None:
        with ExpertCache(path) as cache:
            for call in (cache.use, cache.prefetch):
                for layer in (3, "2", [2], None):
                    with pytest.raises(errors.UsageError, match="no such layer"):
                        call(layer, [0])
                with pytest.raises(errors.UsageError, match="layer 2 has no such expert") as caught:
                    call(2, [0, 8])
                assert (caught.value.expected, caught.value.found) == ("numbers from 0 to 7", 8)
                with pytest.raises(errors.UsageError, match="not numbers of experts"):
                    call(2, ["up"])
            with cache.use(0, [1, 1]) as experts:
                assert len(experts) == 1
                with pytest.raises(errors.TensorNotFoundError, match="was not asked for"):
                    experts[0]
                assert (1 in experts, 0 in experts, "up" in experts) == (True, False, False)
                assert experts.get(0) is None
            with pytest.raises(errors.TensorNotFoundError, match="its block is over"):
                experts[1]
            with cache.use(0, []) as experts:
                assert not experts
        with pytest.raises(errors.UsageError, match="closed"):
            cache.use(0, [1])
        with pytest.raises(errors.UsageError, match="closed"):
            cache.prefetch(0, [1])

    def test_the_budget_that_is_said_suffices(self, tmp_path: Path) -> None:
        """For one expert, and for several at once; experts of two sizes."""
        made = weights() | {
            f"layers.9.mlp.experts.{n}.up_proj.weight": np.zeros(50) for n in (0, 1)
        }
        path = samples.save(tmp_path / "a.safetensors", made)
        budget = least(lambda budget: ExpertCache(path, budget=budget))
        for layer, count in ((0, 2), (0, 5), (9, 2), (2, 8)):
            with ExpertCache(path, budget=budget) as cache:
                cache.use(layer, [1]).close()
                with pytest.raises(errors.MemoryLimitError, match=f"for {count} experts") as caught:
                    cache.use(layer, range(count))
            more = int(str(caught.value.expected).split()[2])
            with ExpertCache(path, budget=more) as cache:
                assert len(cache.use(layer, range(count))) == count
                assert cache.report().peak_bytes <= more

    def test_a_policy_of_ones_own(self, path: Path) -> None:
        made: list[tuple[int, int]] = []

        def policy(keys: int, capacity: int) -> policies.Lru:
            made.append((keys, capacity))
            return policies.PinLru(keys, capacity, [0, 9])

        with ExpertCache(path, budget=4 * SLOT, policy=policy) as cache:
            assert made == [(LAYERS * EXPERTS, 4)]
            for layer, expert in [(0, 0), (1, 1), *itertools.product(range(LAYERS), range(2, 8))]:
                cache.use(layer, [expert]).close()
            before = cache.report().misses
            cache.use(0, [0]).close()
            cache.use(1, [1]).close()
            assert cache.report().misses == before


class TestFaults:
    @pytest.mark.parametrize("fault", ["truncated", "replaced", "gone"])
    @pytest.mark.parametrize("engine", ["direct", "pread"])
    def test_the_file_changes_while_it_serves(self, path: Path, fault: str, engine: Any) -> None:
        options = mfload.Options(engine=engine)
        with ExpertCache(path, budget=8 * 65536, options=options) as cache:
            with cache.use(0, [1]) as experts:
                if fault == "truncated":
                    os.truncate(path, path.stat().st_size // 2)
                elif fault == "replaced":
                    other = samples.save(path.with_name("other"), weights(5))
                    os.replace(other, path)
                else:
                    path.unlink()
                cache.prefetch(2, [7])
                for _ in range(2):
                    with pytest.raises(errors.SourceChangedError) as caught:
                        cache.use(2, [7])
                    assert caught.value.file == str(path)
                check(experts[1], 0, 1)
            cache.use(0, [1]).close()

    @pytest.mark.parametrize("name", ["io_uring", "threads"])
    def test_one_read_fails(self, path: Path, name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """What was asked for with it is not there; the next try reads it."""
        options = mfload.Options(engine="direct")
        with ExpertCache(path, budget=8 * 65536, options=options, gather=name) as cache:
            failing = [True]
            drive, preadv = gather._drive, os.preadv

            def broken_drive(*given: Any) -> Any:
                results = drive(*given)
                if failing:
                    results[failing.pop() - 1] = -errno.EIO
                return results

            def broken_preadv(*given: Any) -> Any:
                if failing:
                    failing.pop()
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return preadv(*given)

            monkeypatch.setattr(gather, "_drive", broken_drive)
            monkeypatch.setattr(os, "preadv", broken_preadv)
            with pytest.raises(errors.ReadError, match="Input/output error") as caught:
                cache.use(1, [2, 3])
            assert caught.value.file == str(path)
            with cache.use(1, [2, 3]) as experts:
                check(experts[2], 1, 2)
                check(experts[3], 1, 3)

    def test_a_server(self, path: Path) -> None:
        """Experts come from a server, too, a request for each run of bytes."""
        with (
            serving.serving({"/model.safetensors": path.read_bytes()}) as server,
            ExpertCache(server.url(), budget=4 * SLOT) as cache,
        ):
            for layer, expert in itertools.product(range(LAYERS), (0, 5)):
                with cache.use(layer, [expert]) as experts:
                    check(experts[expert], layer, expert)
            assert cache.report().engine == "threads"
            assert len(server.asked) < 20

    def test_threads(self, path: Path) -> None:
        """Several sequences at once, in fewer slots than their experts."""
        failed: list[BaseException] = []
        with ExpertCache(path, budget=7 * SLOT) as cache:

            def sequence(seed: int) -> None:
                rng = np.random.default_rng(seed)
                try:
                    for layer in [*range(LAYERS)] * 20:
                        cache.prefetch((layer + 1) % LAYERS, rng.choice(EXPERTS, 2, replace=False))
                        asked = rng.choice(EXPERTS, 2, replace=False)
                        with cache.use(layer, asked) as experts:
                            for expert, arrays in experts.items():
                                check(arrays, layer, expert)
                        del experts, arrays
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=sequence, args=[n]) for n in range(3)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
            assert not failed
            assert cache.report().requests == 3 * 20 * LAYERS

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_fork(self, path: Path) -> None:
        """The child has the arrays that there are, and no cache."""
        with ExpertCache(path, budget=4 * SLOT) as cache:
            with cache.use(0, [1]) as experts:
                cache.prefetch(1, [2])
                if not (child := os.fork()):
                    code = 1
                    with contextlib.suppress(BaseException):
                        check(experts[1], 0, 1)
                        try:
                            cache.use(0, [1])
                        except errors.UsageError as error:
                            code = 0 if "made before a fork" in str(error) else 2
                        cache.close()
                    os._exit(code)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            with cache.use(1, [2]) as experts:
                check(experts[2], 1, 2)

    def test_a_cache_that_is_dropped(self, path: Path) -> None:
        """Its thread ends, and its files are closed; arrays live on."""
        gc.collect()  # What errors of other tests refer to.
        descriptors = len(os.listdir("/proc/self/fd"))
        cache = ExpertCache(path, budget=4 * SLOT)
        cache.prefetch(0, [0, 1, 2])
        array = cache.use(0, [1])[1]["up_proj"]
        del cache
        gc.collect()
        end = time.monotonic() + 10
        while any(each.name == "mfload read ahead" for each in threading.enumerate()):
            assert time.monotonic() < end
            time.sleep(0.001)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert (array == 11).all()

    def test_a_kept_error_keeps_no_memory(self, path: Path) -> None:
        with ExpertCache(path, budget=4 * SLOT, wait=0.01) as cache:
            os.truncate(path, 4096)
            with pytest.raises(errors.SourceChangedError) as caught:
                cache.use(0, [1])
        del cache
        gc.collect()
        assert mfload.live_bytes() == 0
        del caught


def run(code: str, *arguments: Any, **more: Any) -> str:
    """What a program prints that ends well and without a word of complaint."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True, text=True, timeout=100, check=False, **more,
    )  # fmt: skip
    assert (found.stderr, found.returncode) == ("", 0)
    return found.stdout


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64's system calls")
def test_io_uring_is_forbidden(path: Path) -> None:
    code = """
        import sys
        from seccomp import IO_URING, forbid
        forbid(IO_URING)
        import mfload
        cache = mfload.ondemand.ExpertCache(sys.argv[1], options=mfload.Options(engine="direct"))
        with cache.use(2, [7]) as experts:
            assert (experts[7]["up_proj"] == 271).all()
        print(cache.report().engine, cache.report().why)
    """
    said = run(code, path, cwd=Path(__file__).parents[1])
    assert said.startswith("threads ")
    assert "no io_uring: Operation not permitted" in said


@pytest.mark.parametrize("engine", ["direct", "pread"])
def test_the_end_of_the_program(path: Path, engine: str) -> None:
    """With reads under way, and arrays and a block that were never let go of."""
    code = """
        import sys, threading, time
        import mfload
        options = mfload.Options(engine=sys.argv[2])
        cache = mfload.ondemand.ExpertCache(sys.argv[1], budget="1MiB", options=options)
        def work():
            while True:
                for layer in range(3):
                    cache.use(layer, [1, 5, 7])
        threading.Thread(target=work, daemon=True).start()
        experts = cache.use(0, [3])
        kept = experts[3]["up_proj"][5:]
        end = time.monotonic() + float(sys.argv[3])
        turn = 0
        while time.monotonic() < end:
            cache.prefetch(turn % 3, range(8))
            turn += 1
        cache.prefetch(turn % 3, range(8))
    """
    for wait in (0, 0.01, 0.05):
        run(code, path, engine, wait)


INTERRUPTS = """
    import faulthandler, random, signal, sys, threading, time
    import mfload

    faulthandler.dump_traceback_later(30, exit=True)
    options = mfload.Options(engine="direct")
    how = {"budget": "500KB", "options": options, "gather": sys.argv[2]}
    cache = mfload.ondemand.ExpertCache(sys.argv[1], **how)
    rng, interrupts, ends, wrong = random.Random(0), 0, False, []

    def check(layer, asked):
        with cache.use(layer, asked) as experts:
            for expert in asked:
                assert (experts[expert]["up_proj"] == 1 + 10 * expert + 100 * layer).all()

    def other():
        while not ends:
            try:
                check(rng.randrange(3), rng.sample(range(8), 2))
            except mfload.errors.ReadError:
                pass
            except AssertionError:
                wrong.append(1)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    end = time.monotonic() + 2
    while time.monotonic() < end:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 8e-4))
            cache.prefetch(rng.randrange(3), rng.sample(range(8), 2))
            check(rng.randrange(3), rng.sample(range(8), 2))
        except (KeyboardInterrupt, RuntimeError):  # Of a condition whose wait was interrupted.
            interrupts += 1
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
            except KeyboardInterrupt:
                pass
    ends = True
    thread.join()
    print(interrupts > 50, wrong)
    for layer in range(3):
        for expert in range(8):
            check(layer, [expert])
    cache.close()
"""


def test_requests_import_nothing(path: Path) -> None:
    """An interrupt of an import may leave the lock of all imports held."""
    code = """
        import sys
        import mfload
        cache = mfload.ondemand.ExpertCache(sys.argv[1], budget="500KB", gather=sys.argv[2])
        before = {*sys.modules}
        cache.prefetch(0, [3])
        with cache.use(1, [3, 5]) as experts:
            experts[5]["up_proj"]
        print({*sys.modules} - before)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(path), "threads"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "set()\n"


@pytest.mark.parametrize("engine", ["io_uring", "threads"])
def test_interrupts(path: Path, engine: str) -> None:
    """Hundreds at any place: no lock is kept, and no expert is another's."""
    code = "import signal\nsignal.signal(signal.SIGALRM, signal.default_int_handler)\n"
    found = subprocess.run(
        [sys.executable, "-c", code + textwrap.dedent(INTERRUPTS), str(path), engine],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    # What an interrupt meets in a finaliser is printed.
    assert (found.returncode, found.stdout) == (0, "True []\n"), found.stderr[-2000:]


MEMORY = """
    import resource, sys, threading
    import numpy as np
    import mfload

    threading.stack_size(256 << 10)  # The limit counts whole stacks: 8 MiB a thread otherwise.
    path, budget, margin = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = mfload.Options(engine="direct")

    def status(name):
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    def experts(budget, turns):
        pattern = r"layers\\.(\\d+)\\.experts\\.(\\d+)\\.(\\w+)"
        with mfload.ondemand.ExpertCache(path, pattern, budget, options=options) as cache:
            rng = np.random.default_rng(0)
            for turn in range(turns):
                for layer in cache.experts:
                    cache.prefetch(layer, [0])
                    asked = rng.choice(16, 2, replace=False).tolist()
                    with cache.use(layer, asked) as experts:
                        for expert in asked:
                            assert (experts[expert]["w"] == 100 * layer + expert).all()
            return cache.report(), mfload.live_bytes()

    def layers(budget, turns):
        with mfload.ondemand.LayerStream(path, budget=budget, options=options) as stream:
            for turn in range(turns):
                for layer, tensors in stream:
                    for expert in range(16):
                        name = f"layers.{layer}.experts.{expert}.w"
                        assert (tensors[name] == 100 * layer + expert).all()
            return stream.report(), mfload.live_bytes()

    def neurons(budget, turns):
        path = sys.argv[1].replace("large.", "bundled.")
        with mfload.ondemand.NeuronCache(path, budget, 2, options=options) as cache:
            rng = np.random.default_rng(0)
            for turn in range(turns):
                for layer in cache.neurons:
                    asked = rng.choice(2048, 300, replace=False)
                    cache.prefetch(layer, asked[:50])
                    with cache.use(layer, asked) as part:
                        assert (part.up == part.rows[:, None]).all()
                        assert (part.down == part.rows[:, None] + layer).all()
            part = None
            return cache.report(), mfload.live_bytes()

    walk = globals()[sys.argv[4]]
    experts("3MiB", 1)  # Whatever has to be imported and started.
    data = status("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (data + budget + margin,) * 2)
    try:
        mfload.load(path, "numpy")
    except mfload.errors.MemoryLimitError:
        pass
    else:
        sys.exit("the limit holds nothing")
    resident = status("VmHWM")
    report, held = walk(budget, 12)
    assert report.evictions > 20, report
    assert held == report.peak_bytes <= budget, (held, report)
    grown = status("VmHWM") - resident
    assert report.peak_bytes - (2 << 20) <= grown <= report.peak_bytes + margin, (grown, report)
    print("done")
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MiB: 64 experts of 1 MiB; and as much beside it, 8192 neurons of 8 KiB."""
    made = {
        f"layers.{layer}.experts.{expert}.w": np.full(1 << 18, 100 * layer + expert, np.float32)
        for layer in range(4)
        for expert in range(16)
    }
    folder = tmp_path_factory.mktemp("large")
    rows = np.arange(2048, dtype=np.float32)[:, None].repeat(1024, 1)
    dense = {f"{n}.up": rows for n in range(4)} | {f"{n}.down": rows.T + n for n in range(4)}
    samples.save(folder / "dense.safetensors", dense)
    rules = {name: rf"(\d)\.{name}" for name in ("up", "down")}
    bundle(folder / "dense.safetensors", folder / "bundled.safetensors", **rules)
    return samples.save(folder / "large.safetensors", made)


@pytest.mark.parametrize(
    ("walk", "budget"), [("experts", 24 << 20), ("layers", 40 << 20), ("neurons", 24 << 20)]
)
class TestMemory:
    """The budget is a part of the model; the report says what the kernel says."""

    def test_under_a_limit(self, large: Path, walk: str, budget: int) -> None:
        assert run(MEMORY, large, budget, 8 << 20, walk) == "done\n"

    def test_in_a_control_group(self, large: Path, walk: str, budget: int) -> None:
        with memory_group(budget + (64 << 20)) as group:
            code = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
            code += textwrap.dedent(MEMORY)
            assert run(code, large, budget, 8 << 20, walk) == "done\n"


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """A control group with a limit of memory, in that of this process."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    made: Path | None = None
    for root, name, pick in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", ":memory:"),
        ("/sys/fs/cgroup", "memory.max", "0::"),
    ):
        own = [line.rpartition(":")[2] for line in lines if pick in line]
        if not own or not (Path(root) / "cgroup.procs").exists():
            continue
        made = Path(root + own[0]) / f"mfload-test-{os.getpid()}"
        try:
            made.mkdir()
            (made / name).write_text(str(limit))
            break
        except OSError as error:
            with contextlib.suppress(OSError):
                made.rmdir()
            pytest.skip(f"no control group can be made here: {error}")
    else:
        pytest.skip("this system has no control groups for memory")
    try:
        yield made
    finally:
        made.rmdir()
