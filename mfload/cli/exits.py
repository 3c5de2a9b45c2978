"""Exit codes: what a script can tell from them.

0    fine
1    a comparison or a verification found a difference, or the doctor trouble
2    wrong usage, a tensor that is not there among it
3    the source or the target can't be had: missing, no permission, I/O error, exists already
4    a malformed file or checkpoint
5    can't be done here: framework, dtype, device, memory
70   a fault in mfload itself
124  `--timeout` ran out
130  interrupted
141  whoever read the output closed it
"""

from __future__ import annotations

from mfload import errors

FINE = 0
DIFFERENT = 1
USAGE = 2
SOURCE = 3
FORMAT = 4
UNABLE = 5
FAULT = 70
TIMEOUT = 124
INTERRUPTED = 130
CLOSED = 141

# The first that fits counts. Names, because errors grow with the library.
_CODES = (
    ("LoadTimeoutError", TIMEOUT),
    ("ChecksumError", DIFFERENT),
    ("UsageError", USAGE),
    ("TensorNotFoundError", USAGE),
    ("SliceError", USAGE),
    ("SourceError", SOURCE),
    ("TargetError", SOURCE),
    ("FormatError", FORMAT),
    ("MfloadError", UNABLE),
    ("MemoryError", UNABLE),
    ("OSError", SOURCE),
)


def code_of(error: BaseException) -> int:
    """The exit code of an error."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return next((code for name, code in _CODES if name in kinds), FAULT)


def expected(error: BaseException) -> bool:
    """Whether an error says all a user needs, so that no trace helps further."""
    return isinstance(error, errors.MfloadError | OSError | MemoryError)
