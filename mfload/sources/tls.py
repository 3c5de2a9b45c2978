"""Certificates of connections, and what to say of a server that speaks TLS, or none."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from mfload import errors

_PROBE = 1.0  # Seconds for finding out what a server speaks.
_BROKEN = (http.client.BadStatusLine, ssl.SSLError, ConnectionError)
_TALK = b"OPTIONS * HTTP/1.0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates by file: one's own, its key, and those of the authority that others need."""

    cert_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    ca_file: str | os.PathLike[str] | None = None

    @staticmethod
    def of(*files: str | os.PathLike[str] | None) -> Tls | None:
        """That with these files, in their order; None if none is given."""
        return Tls(*files) if any(each is not None for each in files) else None

    def context(self, server: bool) -> ssl.SSLContext:
        """The context of a server, which asks for certificates if `ca_file` is set; or a client's.

        Raises UsageError for files that hold no certificate, and keys with a passphrase.
        """
        if server and self.cert_file is None:
            raise errors.UsageError("TLS needs a certificate", expected="cert_file=")
        purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
        with _read(self.ca_file):
            context = ssl.create_default_context(purpose, cafile=self.ca_file)
        if self.cert_file is not None:
            with _read(self.cert_file, self.key_file):
                context.load_cert_chain(self.cert_file, self.key_file, _refuse_passphrase)
        if server and self.ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def mutual(self) -> bool:
        """Whether a server asks clients for certificates."""
        return self.cert_file is not None and self.ca_file is not None


@contextmanager
def _read(*files: str | os.PathLike[str] | None) -> Generator[None]:
    """Raises UsageError, which names the files, if they can't be used."""
    try:
        yield
    except (OSError, ValueError) as error:  # An SSLError is an OSError.
        names = ", ".join(str(each) for each in files if each)
        found = error.message if isinstance(error, errors.UsageError) else str(error)
        what, expected = "a certificate can't be used", getattr(error, "expected", None)
        raise errors.UsageError(what, file=names, expected=expected, found=found) from error


def _refuse_passphrase() -> str:
    """Called for the passphrase of a key: OpenSSL would ask for it at the terminal."""
    raise errors.UsageError("the key has a passphrase", expected="a key without one")


def mismatch(error: Exception, host: str, port: int, *, tls: bool) -> str | None:
    """What is wrong where a connection broke off since only one side speaks TLS; None if not."""
    if not isinstance(error, _BROKEN) or not _speaks(host, port, tls=not tls):
        return None
    return "speaks plain HTTP, without TLS" if tls else "speaks TLS"


def _speaks(host: str, port: int, *, tls: bool) -> bool:
    """Whether a server answers to TLS, or else to plain HTTP alone; asked after a connection broke.

    Servers that speak TLS may answer to plain HTTP too, by telling so.
    """
    try:
        with socket.create_connection((host, port), _PROBE) as plain:
            plain.settimeout(_PROBE)
            if not tls:
                plain.sendall(_TALK)
                return plain.recv(5) == b"HTTP/" and not _speaks(host, port, tls=True)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(plain, server_hostname=host):
                return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # Only TLS refuses so.
    except (OSError, ValueError):
        return False
