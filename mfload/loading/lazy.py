"""A checkpoint opened to take tensors and slices from, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mfload import errors, frameworks
from mfload.formats import checkpoint
from mfload.frameworks.base import Adapter
from mfload.index import Index, TensorInfo
from mfload.loading.session import Loader
from mfload.options import Options, started
from mfload.planning.request import Request, select
from mfload.sources.local import LocalFile


class LazyCheckpoint:
    """The headers of a checkpoint, and the way to its data. Made by `mfload.open`.

    It holds no file open and no thread, so it may be shared between threads, inherited by a
    fork and pickled (with a device given by name). Each request checks that the files are
    still those whose headers were read.
    """

    def __init__(
        self,
        index: Index,
        sources: Sequence[LocalFile],
        adapter: Adapter,
        *,
        device: object,
        options: Options,
    ) -> None:
        self._index, self._sources, self._adapter = index, sources, adapter
        self._arguments = (device, options)
        self._closed = False

    def keys(self) -> list[str]:
        """Names of the tensors, sorted."""
        return sorted(self._opened().tensors)

    def offset_keys(self) -> list[str]:
        """Names of the tensors in the order in which the files hold them."""
        return list(self._opened().tensors)

    def metadata(self) -> dict[str, str] | None:
        """The free-form strings of the headers; None if there are none."""
        strings = self._opened().metadata
        return None if strings is None else dict(strings)

    def info(self, name: str) -> TensorInfo:
        """Name, dtype, shape and whereabouts of a tensor.

        Raises:
            TensorNotFoundError: There is none of that name.
        """
        return self._opened()[name]

    def file_of(self, info: TensorInfo) -> str:
        """The file that holds a tensor."""
        return self._opened().files[info.pieces[0].source]

    def get_tensor(self, name: str) -> Any:
        """One tensor.

        Raises:
            TensorNotFoundError: There is none of that name.
        """
        row = self.info(name)
        return self._load([Request(row, row.dtype)])[0]

    def get_tensors(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Several tensors, read together. Default: all.

        Raises:
            TensorNotFoundError: A name is missing.
        """
        wanted = list(dict.fromkeys(self.offset_keys() if names is None else names))
        rows = map(self.info, wanted)
        arrays = self._load([Request(row, row.dtype) for row in rows])
        return dict(zip(wanted, arrays, strict=True))

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed: only the bytes that the index needs are read.

        Raises:
            TensorNotFoundError: There is none of that name.
        """
        return TensorSlice(self, self.info(name))

    def _load(self, requests: list[Request]) -> list[Any]:
        options = started(self._arguments[1])
        return Loader(self._opened(), self._sources, self._adapter, options).load(requests)

    def _opened(self) -> Index:
        if self._closed:
            raise errors.UsageError("the checkpoint was closed", file=self._index.files[0])
        return self._index

    def __len__(self) -> int:
        return len(self._opened())

    def __contains__(self, name: object) -> bool:
        return name in self._opened().tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def close(self) -> None:
        """Ends it; arrays taken from it live on."""
        self._closed = True

    def __enter__(self) -> LazyCheckpoint:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        files = self._index.files
        where = files[0] if len(files) == 1 else f"{len(files)} files"
        count, framework = len(self._index), self._adapter.name
        return f"<mfload checkpoint: {count} tensors in {where}, for {framework}>"

    def __reduce__(self) -> tuple[Any, ...]:
        identities = tuple(source.identity for source in self._sources)
        name = self._adapter.name
        return _reopen, (self._index.files, name, self._arguments, identities, self._closed)


def _reopen(
    files: tuple[str, ...],
    framework: str,
    arguments: tuple[Any, Options],
    identities: tuple[Any, ...],
    closed: bool,
) -> LazyCheckpoint:
    device, options = arguments
    index, sources = started(options).deadline.bound(
        lambda: checkpoint.read(list(files)), "reading headers"
    )
    for source, identity in zip(sources, identities, strict=True):
        source.compare(identity)
    adapter = frameworks.get(framework, device)
    opened = LazyCheckpoint(index, sources, adapter, device=device, options=options)
    if closed:
        opened.close()
    return opened


class TensorSlice:
    """A tensor that has not been read. Made by `LazyCheckpoint.get_slice`."""

    def __init__(self, opened: LazyCheckpoint, info: TensorInfo) -> None:
        self._opened = opened
        self._info = info

    def get_shape(self) -> list[int]:
        """Its shape, in elements."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Its dtype by the format's name, such as "BF16"."""
        return self._info.dtype.name

    def __getitem__(self, index: Any) -> Any:
        """Reads a part.

        Args:
            index: Integers, slices (steps and negatives too), Ellipsis, one list of integers, or a
                tuple of these.

        Returns:
            The part as an array.

        Raises:
            SliceError: The index does not fit the tensor.
        """
        opened = self._opened
        with errors.about(file=opened.file_of(self._info)):
            selection = select(self._info, index)
        request = Request(self._info, self._info.dtype, selection)
        return opened._load([request])[0]  # pyright: ignore[reportPrivateUsage]

    def __repr__(self) -> str:
        return f"<{self._info.name}: {self._info.dtype} {list(self._info.shape)}, not read>"
