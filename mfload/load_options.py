"""The options of one call, with its deadline.

A call without `options=` needs only these: `mfload.options`, which defines and validates what a
user may set, is imported where the user names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mfload import errors
from mfload.runtime import Deadline

if TYPE_CHECKING:
    import os

    from mfload.options import Allocator, Engine, Exchange, Options, PageCache, PeerOptions

OVERHEAD = 256 << 20
"""Default of both memory limits, in bytes beside the result."""

Unmatched = Literal["replicate", "error"]
UNMATCHED = ("replicate", "error")


class LoadOptions:
    """Options of one call: the fields of `Options`, and three more. They don't change.

    They are written twice, since `Options` is a dataclass, which takes long to import.

    Attributes:
        deadline: When `timeout` has run out.
        by_host: Whether all arrays pass through host memory.
        check: Compares what is read with a manifest, where `verify=` asks for it (see
            `loading.session.verifying`).
    """

    engine: Engine = "auto"
    allocator: Allocator = "auto"
    exchange: Exchange = "auto"
    page_cache: PageCache = "auto"
    threads: int | None = None
    timeout: float | None = None
    max_host_overhead: int | None = None
    max_device_overhead: int | None = None
    headers: tuple[tuple[str, str], ...] | None = None
    ca_file: str | os.PathLike[str] | None = None
    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    peer: PeerOptions | None = None
    deadline: Deadline = Deadline(None)
    by_host: bool = False
    check: Any = None

    def __init__(self, **given: Any) -> None:
        if unknown := [name for name in given if not hasattr(LoadOptions, name)]:
            raise TypeError(f"no such options: {', '.join(unknown)}")
        vars(self).update(given)

    def replace(self, **changes: Any) -> LoadOptions:
        """The same options with some of them changed."""
        return LoadOptions(**{**vars(self), **changes})


_DEFAULT = LoadOptions()


def started(options: Options | None, deadline: Deadline | None = None) -> LoadOptions:
    """The options of a call that begins now, or began with `deadline`."""
    if options is None:
        return LoadOptions(deadline=deadline) if deadline else _DEFAULT
    from mfload.options import Options

    if not isinstance(options, Options):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise errors.UsageError(
            "options must be an mfload.Options",
            expected="options=mfload.Options(engine=…, threads=…, …)",
            found=repr(options),
        )
    given = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    return LoadOptions(**given, deadline=deadline or Deadline(options.timeout))
