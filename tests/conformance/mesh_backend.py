"""What every mesh backend must do, whatever the framework. Each backend's test subclasses it.

A subclass makes meshes, says how a tensor is cut over their axes, and looks into sharded arrays
without mfload's help. What processes agree through is checked by
`check_store`, by a backend's own test with several processes, or with one that was joined alone.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mfload import errors
from mfload.formats import checkpoint
from mfload.index import Box
from mfload.loading.session import Loader
from mfload.mesh import base
from mfload.mesh.base import KeyValueStore, MeshArguments, MeshBackend, TensorShares, Whole
from mfload.options import LoadOptions
from mfload.planning.request import Request
from mfload.runtime import Deadline

ROWS, COLUMNS = "rows", "columns"  # Axes of the meshes.
CUTS: list[tuple[str | None, ...]] = [
    (),
    (ROWS,),
    (COLUMNS,),
    (None, ROWS),
    (ROWS, COLUMNS),
    (COLUMNS, ROWS),
    (None, None),
]
"""For each dim the axis that cuts it; those of dims that are left out are whole."""
SHAPE = (8, 24)


class Conformance:
    """The suite.

    Attributes:
        grid: Sizes of a mesh over all devices of the process: eight, or the one that it has.
    """

    grid = (2, 4)

    def make(self) -> MeshBackend:
        """A new backend."""
        raise NotImplementedError

    def mesh(self, grid: tuple[int, int]) -> Any:
        """A mesh of the axes `ROWS` and `COLUMNS` over all devices of this process."""
        raise NotImplementedError

    def spec(self, cuts: tuple[str | None, ...]) -> Any:
        """What a user gives as the sharding of a tensor."""
        raise NotImplementedError

    def shards(self, array: Any) -> list[tuple[Box, Any]]:
        """The box and the NumPy array of each device of a sharded array."""
        raise NotImplementedError

    @pytest.fixture
    def requests(self, tmp_path: Path) -> tuple[Loader, list[Request], dict[str, Any]]:
        """Two tensors on disk: a loader without an adapter yet, and what is stored."""
        stored = {
            "w": np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE),
            "b": np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE),
        }
        safetensors.numpy.save_file(stored, tmp_path / "m.safetensors")
        index, sources = checkpoint.read(tmp_path)
        loader: Any = index, sources
        rows = [Request(info, info.dtype) for info in index.tensors.values()]
        return loader, rows, stored

    def _resolved(self, backend: MeshBackend, rows: Any, cuts: Any) -> list[Any]:
        shardings = [(".", self.spec(cuts))]
        return backend.resolve(rows, MeshArguments(self.mesh(self.grid), shardings))

    def test_the_processes_are_known_and_arguments_never_raise(self) -> None:
        backend = self.make()
        asked = MeshArguments(self.mesh(self.grid), self.spec((ROWS,)))
        assert backend.processes(asked) == (backend.rank,)
        for mesh, shardings in itertools.product((None, 7, "mesh"), (None, 7, [()], lambda: 1)):
            assert backend.rank in backend.processes(MeshArguments(mesh, shardings))

    @pytest.mark.parametrize("cuts", CUTS)
    def test_shares_cover_the_tensor(self, cuts: Any, requests: Any) -> None:
        sizes = dict(zip((ROWS, COLUMNS), self.grid, strict=True))
        backend = self.make()
        (sharding, _) = self._resolved(backend, requests[1], cuts)
        shares, count = backend.shares(sharding, SHAPE), math.prod(self.grid)
        assert [share.process for share in shares] == [backend.rank] * count
        assert sorted(share.device for share in shares) == list(range(count))
        seen = np.zeros(SHAPE, int)
        for share in shares:
            seen[tuple(slice(*pair) for pair in share.box)] += 1
        parts = np.prod([sizes[axis] for axis in cuts if axis is not None])
        assert (seen == count // parts).all()
        again = self.make()
        (sharding, _) = self._resolved(again, requests[1], cuts)
        assert again.shares(sharding, SHAPE) == shares

    @pytest.mark.parametrize("allocator", ["mfload", "framework"])
    @pytest.mark.parametrize("cuts", CUTS)
    def test_arrays_hold_what_is_stored(self, cuts: Any, allocator: Any, requests: Any) -> None:
        (index, sources), rows, stored = requests
        backend, options = self.make(), LoadOptions(allocator=allocator)
        shardings = self._resolved(backend, rows, cuts)
        shares = [
            TensorShares(
                row.info,
                row.dtype,
                False,
                backend.shares(sharding, SHAPE),
                backend.separate(sharding, row.dtype, options),
            )
            for row, sharding in zip(rows, shardings, strict=True)
        ]
        mine = base.requests(shares)[backend.rank]
        landed = Loader(index, sources, backend.adapter(), options).load(mine)
        assert [len(arrays) for arrays in landed] == [len(each.devices) for each in mine]
        held: dict[str, dict[int, Any]] = {name: {} for name in stored}
        for request, arrays in reversed(list(zip(mine, landed, strict=True))):  # In any order.
            held[request.info.name].update(zip(request.devices, arrays, strict=True))
        wholes = [
            Whole(SHAPE, row.dtype, sharding, held[row.info.name])
            for row, sharding in zip(rows, shardings, strict=True)
        ]
        for row, array, each in zip(rows, backend.assemble(wholes), shares, strict=True):
            found = self.shards(array)
            assert sorted(box for box, _ in found) == sorted(share.box for share in each.shares)
            for box, part in found:
                whole = stored[row.info.name][tuple(slice(*pair) for pair in box)]
                assert part.dtype == whole.dtype
                assert part.tobytes() == np.ascontiguousarray(whole).tobytes()

    def test_a_sharding_that_does_not_fit_names_the_tensor(self, requests: Any) -> None:
        backend, rows = self.make(), requests[1]
        with pytest.raises(errors.ShardingError) as caught:
            backend.resolve(
                rows,
                MeshArguments(
                    self.mesh((math.prod(self.grid), 1)), [("w", self.spec((None, None, ROWS)))]
                ),
            )
        assert caught.value.tensor == "w"
        asked = MeshArguments(self.mesh(self.grid), [("w", self.spec((ROWS,)))], "error")
        with pytest.raises(errors.ShardingError, match="no sharding"):
            backend.resolve(rows, asked)

    def test_what_arrays_will_be(self, requests: Any) -> None:
        backend, rows = self.make(), requests[1]
        if not hasattr(backend, "abstract"):
            return  # Only JAX has arrays without data.
        shardings = self._resolved(backend, rows, (ROWS, COLUMNS))
        for given in (shardings, [None, None]):
            made = backend.abstract(rows, given)
            assert {name: tuple(each.shape) for name, each in made.items()} == {
                "w": SHAPE,
                "b": SHAPE,
            }

    def test_rows_of_bytes_travel(self) -> None:
        backend = self.make()
        assert isinstance(backend.platform(), str)
        link = backend.link([backend.rank], 4096, Deadline(None))
        assert not link.broken
        for value in (7, 200):
            rows = link.buffer()
            assert (rows.shape, rows.dtype) == ((1, 4096), np.uint8)
            rows[:] = value
            link.start(rows)
            came, interrupted = link.finish(lambda: None)
            assert interrupted is None
            assert np.asarray(came).shape == (1, 4096)
            assert (np.asarray(came) == value).all()
        link.close()

    def test_without_other_processes_there_is_no_store_or_it_works(self) -> None:
        store = self.make().store()
        if store is not None:
            check_store(store)


def check_store(store: KeyValueStore) -> None:
    """What the store of a backend must do; leaves nothing behind."""
    prefix = "mfload/conformance/"
    try:
        names = ["a", "b/c", "d"]
        assert store.texts(prefix, []) == store.texts(prefix, names) == {}
        store.put(f"{prefix}a", "one")
        store.put(f"{prefix}a", "two")
        assert store.first(f"{prefix}b/c", "three") == "three"
        assert store.first(f"{prefix}b/c", "four") == "three"
        assert store.first(f"{prefix}a", "five") == "two"
        assert store.texts(prefix, ["a", "b/c"]) == {"a": "two", "b/c": "three"}
        store.put(f"{prefix}e/{'x' * 40}", "")
        assert store.texts(prefix, names) == {"a": "two", "b/c": "three"}
        assert store.texts(f"{prefix}e/", ["x" * 40, "x"]) == {"x" * 40: ""}
        store.drop([f"{prefix}b/c", f"{prefix}none"])
        assert store.texts(prefix, names) == {"a": "two"}
        store.counts["conformance"] = 1
        assert store.counts.pop("conformance") == 1
        assert isinstance(store.wrote, dict)
    finally:
        store.drop([f"{prefix}a", f"{prefix}b/c", f"{prefix}e/{'x' * 40}"])
