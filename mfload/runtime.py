"""What a call shares with the interpreter and the machine: time, the garbage collector, cores."""

from __future__ import annotations

import collections
import functools
import gc
import os
import sys
import time
from _thread import TIMEOUT_MAX
from collections.abc import Callable, Generator
from contextlib import contextmanager
from numbers import Real
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

from mfload import errors

if sys.platform != "linux":
    raise ImportError(f"mfload runs on Linux alone, not on {sys.platform}")

T = TypeVar("T")

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    _like = collections.namedtuple("_like", "a b c d e f g h")
    _GETTERS = [vars(_like)[name] for name in _like._fields]

    @functools.cache
    def _constructor(count: int) -> Any:
        """The constructor of tuples of so many fields, which it calls by other names."""
        names = "".join(f"field{number}, " for number in range(count))
        return eval(f"lambda cls, {names}: make(cls, ({names}))", {"make": tuple.__new__})

    class _NamedTupleType(type):
        def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> type:
            fields = tuple(space.get("__annotations__", ()))
            if bases:
                new = _constructor(len(fields))
                code = new.__code__.replace(
                    co_varnames=("cls", *fields), co_qualname=f"{name}.__new__"
                )
                defaults = tuple(space[field] for field in fields if field in space)
                space["__new__"] = type(new)(code, new.__globals__, "__new__", defaults)
                space |= zip(fields, _GETTERS[: len(fields)], strict=True)
            space |= {"__slots__": (), "_fields": fields, "__match_args__": fields}
            return super().__new__(cls, name, bases, space)

    class NamedTuple(tuple, metaclass=_NamedTupleType):
        """`typing.NamedTuple` in a tenth of its time, for what a plain load imports.

        That makes two classes, and compiles a constructor and, twice, the type of each field.
        """

        def _asdict(self) -> dict[str, Any]:
            return dict(zip(self._fields, self, strict=True))

        def _replace(self, **changes: Any) -> Any:
            return type(self)(**{**dict(zip(self._fields, self, strict=True)), **changes})

        def __getnewargs__(self) -> tuple[Any, ...]:
            return tuple(self)

        def __repr__(self) -> str:
            pairs = (f"{field}={value!r}" for field, value in self._asdict().items())
            return f"{type(self).__name__}({', '.join(pairs)})"


class Deadline:
    """The moment when a timeout of `seconds` has run out; never, for None and infinity."""

    def __init__(self, seconds: float | None) -> None:
        if seconds is not None:  # Asked first: an abstract class takes longer than all the rest.
            fits = isinstance(seconds, Real) and not isinstance(seconds, bool)  # pyright: ignore
            if not (fits and seconds > 0):
                raise errors.UsageError(
                    "timeout must be positive", expected="seconds above 0", found=repr(seconds)
                )
        # No clock of the system counts further than this: some 290 years.
        self.seconds = None if seconds is None or seconds > TIMEOUT_MAX else seconds
        self._end = None if self.seconds is None else time.monotonic() + self.seconds

    def left(self) -> float:
        """Seconds left, infinity without a bound."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def error(self, what: str, file: str | None = None) -> errors.LoadTimeoutError:
        """The error to raise when it has passed."""
        return errors.LoadTimeoutError(
            f"timed out while {what}", file=file, expected=f"an end within {self.seconds} s"
        )

    def bound(
        self, call: Callable[[], T], what: str, file: str | None = None, *, apart: bool = False
    ) -> T:
        """Runs a call, with a timeout in a thread of its own, which is left behind if it hangs.

        With `apart`, it has a thread without a timeout too, so that an interrupt ends the waiting.
        """
        if self._end is None and not apart:
            return call()
        import threading

        outcome: list[tuple[Any, BaseException | None]] = []
        work = [call]  # It is in no frame of an error, which would keep what it refers to.
        del call

        def run() -> None:
            try:
                outcome.append((work.pop()(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                outcome.append((None, error))

        thread = threading.Thread(target=run, name="mfload-bounded", daemon=True)
        thread.start()
        thread.join(None if self._end is None else max(0.0, self.left()))
        if not outcome:
            raise self.error(what, file)
        value, error = outcome.pop()
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # The error refers to this frame: without this, they form a cycle.


def explained(function: Any, label: str) -> Any:
    """A public function or class that explains calls which do not fit its signature.

    Those in an old spelling are made in the new one, with a warning (see `mfload.deprecated`).

    A TypeError that is raised inside of it stays as it is. `label`: its public name, such as
    "mfload.load", by which the function is pickled.
    """
    if isinstance(function, type):
        made: Any = function
        if "__init__" in vars(made) and not issubclass(made, Exception):
            made.__init__ = explained(made.__init__, label)
        return made
    if not isinstance(function, FunctionType):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # It comes from a line of the function.
            from mfload import deprecated, misuse

            new = deprecated.renewed(label, kwargs)
            wrong = misuse.error(function, label, args, kwargs) if new is None else None
            if new is None and wrong is None:
                raise
        if wrong is not None:
            raise wrong
        return call(*args, **(new or {}))

    if call.__name__ != "__init__":
        call.__module__, _, call.__qualname__ = label.rpartition(".")
    return call


_threshold: tuple[int, int, int] | None = None  # What the last pause replaced.


@contextmanager
def gc_paused() -> Generator[None]:
    """Keeps the collector from running by itself.

    While a hundred thousand small objects are made, it would walk all that the process holds
    several times over: with a large framework imported, that doubles the cost of reading a header.
    The threshold is set, and not `gc.disable()` called, so that a program that switches the
    collector off or on meanwhile is heeded. Of several threads inside, the first to enter ends the
    pause.
    """
    global _threshold
    before = gc.get_threshold()
    try:
        if before[0]:
            _threshold = before
            gc.set_threshold(0)
        yield
    finally:
        if before[0] and gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)
            _threshold = None


def _after_fork() -> None:
    """Ends a pause of a thread that is not in the child."""
    if _threshold is not None and gc.get_threshold()[0] == 0:
        gc.set_threshold(*_threshold)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


_beside = 1


def set_local_processes(count: int) -> None:
    """Says how many processes of the same program run here, where no launcher does."""
    global _beside
    _beside = count


def local_processes() -> int:
    """Processes of the same program on this machine, with this one.

    It is what launchers such as torchrun say in LOCAL_WORLD_SIZE, or else `set_local_processes`.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(said) if said.isdecimal() else _beside)


def share_of_cores() -> int:
    """Cores for this process, at least one, if others of the same program run beside it."""
    return max(1, cores() // local_processes())


Usage = tuple[float, float, int]
"""User and system seconds of CPU time, and page faults."""


def usage(*, thread: bool = False) -> Usage:
    """What this process used so far.

    `thread`: of this thread alone.
    """
    import resource

    used = resource.getrusage(resource.RUSAGE_THREAD if thread else resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime, used.ru_minflt + used.ru_majflt
