"""`load(verify=)`: a load whose bytes are compared with a manifest while they come."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from mfload import errors
from mfload.checking.checksums import Observer
from mfload.checking.manifest import Manifest
from mfload.formats.strict_json import brief
from mfload.index import Index, TensorInfo
from mfload.report import Report


class Check:
    """What a load should find.

    Args:
        known: The manifest, or its path.
        index: The checkpoint's table.
        tensors: Rows that are to be loaded.

    Attributes:
        observer: To be shown the bytes.

    Raises:
        ChecksumError: The manifest lacks a tensor, or knows another dtype or shape of it.
        SourceError: The manifest can't be read.
        HeaderError: It is malformed.
        FrameworkMissingError: The package that hashes is not installed.
    """

    def __init__(
        self, known: str | os.PathLike[str] | Manifest, index: Index, tensors: Sequence[TensorInfo]
    ) -> None:
        self._known = known if isinstance(known, Manifest) else Manifest.read(_path(known))
        self._index = index
        self._tensors = tensors
        offenders: list[tuple[TensorInfo, object, object]] = []
        for info in tensors:
            entry = self._known.tensors.get(info.name)
            if entry is None:
                offenders.append((info, "a digest in the manifest", "none"))
                continue
            unlike = entry.unlike(info)
            if unlike is not None:
                offenders.append((info, *unlike))
        self._refuse(offenders)
        self.observer = Observer(tensors)

    def settle(self, arrays: list[Any], report: Report | None) -> None:
        """Compares, once all was loaded; what differs takes the arrays with it.

        Raises:
            ChecksumError: The bytes of tensors are not those that the manifest knows.
        """
        offenders: list[tuple[TensorInfo, object, object]] = []
        for info in self._tensors:
            expected = self._known.tensors[info.name].digest
            found = self.observer.tensor(info.name)
            if expected != found:
                offenders.append((info, expected, found))
        if offenders:
            # Whoever keeps the error keeps this frame, and the caller's.
            arrays.clear()
            if report is not None:
                report.clear()
        self._refuse(offenders)
        if report is not None:
            report.notes += (f"{len(self._tensors)} tensors verified against the manifest",)

    def _refuse(self, offenders: list[tuple[TensorInfo, object, object]]) -> None:
        if not offenders:
            return
        first, expected, found = offenders[0]
        raise errors.ChecksumError(
            f"{len(offenders)} of {len(self._tensors)} tensors are not those of the manifest",
            file=self._file(first),
            tensor=first.name,
            expected=expected,
            found=found,
            problems=tuple(
                f"{brief(info.name)} in {self._file(info)}: expected {wanted}, found {got}"
                for info, wanted, got in offenders
            ),
        )

    def _file(self, info: TensorInfo) -> str:
        return self._index.files[info.pieces[0].source]


def _path(known: Any) -> str:
    try:
        return os.fsdecode(known)
    except TypeError:
        raise errors.UsageError(
            "verify", expected="a manifest, or the path of one", found=repr(known)
        ) from None
