"""What every framework's arrays and modules must do as seeds. Each framework's test subclasses it.

Modules have a layer that is tied to another, and parameters in bfloat16.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conformance.export import read
from conformance.material import Stored

import mfload
from mfload import errors
from mfload.saving.export import export

_READER = """
import sys
import mfload

mfload.save(mfload.load(sys.argv[1], "numpy"), sys.argv[2])
"""


def by(transport: str) -> mfload.Options:
    """Options for one transport."""
    return mfload.Options(timeout=60, peer=mfload.PeerOptions(transports=transport))


def stored(arrays: Mapping[str, Any]) -> dict[str, Stored]:
    """The bits of arrays, with their dtypes and shapes."""
    return {row.name: read(row) for row in export(arrays)}


class PeerConformance:
    framework: ClassVar[str]
    copied: ClassVar[tuple[str, ...]] = ()
    """Dtypes of files whose arrays can't be read in place."""
    tied: ClassVar[bool] = True
    """Whether a module names a tied tensor twice."""

    def network(self, seed: int) -> Any:
        """A module with random weights, some in bfloat16, and two that are one."""
        raise NotImplementedError

    def state(self, module: Any) -> dict[str, Any]:
        """The arrays of a module by name."""
        raise NotImplementedError

    def overwrite(self, array: Any) -> None:
        """Changes the memory of an array in place."""
        raise NotImplementedError

    @pytest.mark.parametrize("transport", ["memory", "memfd", "http"])
    def test_every_dtype(self, aligned: tuple[Path, list[Stored]], transport: str) -> None:
        path, rows = aligned
        arrays = mfload.load(path, framework=self.framework)
        copied = sum(len(row.raw) for row in rows if row.dtype in self.copied)
        with mfload.publish(arrays, model="m") as seed:
            assert seed.copied_bytes == copied
            found = mfload.load(seed.url, framework=self.framework, options=by(transport))
        assert stored(found) == stored(arrays)
        assert {name: each.raw for name, each in stored(found).items()} == {
            row.name: row.raw for row in rows
        }

    def test_parts_by_rank(self, aligned: tuple[Path, list[Stored]]) -> None:
        path, _ = aligned
        how: dict[str, Any] = {"framework": self.framework, "names": "^(BF16|F32|I8)$"}
        arrays = mfload.load(path, framework=self.framework)
        with mfload.publish(arrays, model="m") as seed:
            for rank in range(3):
                shard: Any = {"shardings": [("", 1)], "shard": (rank, 3)}
                found = mfload.load(seed.url, **how, **shard)
                assert len(found) == 3
                assert stored(found) == stored(mfload.load(path, **how, **shard))

    def test_another_process_reads_a_module(self, tmp_path: Path) -> None:
        module, path = self.network(0), tmp_path / "read.safetensors"
        with mfload.publish(module, model="m") as seed:
            assert seed.copied_bytes == 0
            done = subprocess.run(
                [sys.executable, "-c", _READER, seed.url, path], capture_output=True, timeout=120
            )
        assert done.returncode == 0, done.stderr.decode()
        state = self.state(module)
        assert {each.dtype for each in stored(state).values()} >= {"F32", "BF16"}
        assert stored(mfload.load(path, framework=self.framework)) == stored(state)

    @pytest.mark.parametrize("transport", ["memory", "http"])
    def test_a_module_is_filled(self, transport: str) -> None:
        module, other = self.network(0), self.network(1)
        assert stored(self.state(module)) != stored(self.state(other))
        with mfload.publish(module, model="m") as seed:
            names = [entry.name for entry in seed.manifest.entries]
            mfload.load_into(other, seed.url, options=by(transport))
        assert set(names) == set(self.state(module))
        assert stored(self.state(other)) == stored(self.state(module))
        memory = {row.span for row in export(self.state(other)) if row.nbytes}
        assert len(memory) == len(names) - self.tied  # What was tied still is.

    @pytest.mark.parametrize("atomic", [False, True])
    def test_a_module_is_filled_while_the_weights_change(self, atomic: bool) -> None:
        """It is left as it was, or it says what may be new."""
        other = self.network(1)
        before = stored(self.state(other))
        with mfload.publish(self.network(0), model="m") as seed:

            def update(done: int, _: int) -> None:
                if done:
                    seed.update(self.network(2))

            how: Any = {"atomic": atomic, "progress": update, "options": by("http")}
            with pytest.raises(errors.SourceChangedError):
                mfload.load_into(other, seed.url, **how)
        marked = hasattr(other, "mfload_torn")
        assert marked or stored(self.state(other)) == before
        assert not (marked and atomic)

    def test_what_is_let_go_of_stays(self) -> None:
        arrays = self.state(self.network(0))
        expected = stored(arrays)
        with mfload.publish(arrays, model="m") as seed:
            arrays.clear()
            gc.collect()
            others = [self.network(number) for number in range(1, 4)]  # Memory that was free.
            found = stored(mfload.load(seed.url, framework="numpy"))
            del others
        assert {name: each.raw for name, each in found.items()} == {
            name: each.raw for name, each in expected.items()
        }

    def test_writes_in_place_are_found_until_an_update(self) -> None:
        module = self.network(0)
        with mfload.publish(module, model="m") as seed:
            self.overwrite(max(self.state(module).values(), key=lambda each: np.prod(each.shape)))
            with pytest.raises(errors.ChecksumError):
                mfload.load(seed.url, framework=self.framework)
            seed.update(module)
            found = mfload.load(seed.url, framework=self.framework)
            assert seed.generation == 1
        assert stored(found) == stored(self.state(module))
