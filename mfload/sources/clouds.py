"""Buckets of Google Cloud Storage and containers of Azure.

A request is authorised by what is at hand first: nothing, if that is asked for; a token or a signed
part of the URL that was given; a key that signs here; a token of the cloud's own package, which is
renewed before it ends; and what obstore itself signs with, such as a delegation key.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from mfload import errors
from mfload.sources.access import Access, Answered, Request, in_home, obstore, reason

_SIGNED_FOR = timedelta(hours=1)
_USED_FOR = 900.0  # Seconds after which a URL is signed anew.
_EARLY = 120.0  # Seconds before a token ends, when it is renewed.
_DENIED, _MISSING = errors.SourcePermissionError, errors.SourceNotFoundError
_CODE = re.compile(r"<Code>(\w+)</Code>|\"reason\": ?\"(\w+)\"")
_SKEWED = re.compile(r"RequestTimeTooSkewed|not valid yet|not valid in the specified time")


class Names(NamedTuple):
    """What a cloud calls things.

    Attributes:
        prefixes: Of the environment's variables, which settings may have too; lower case.
        provider: Module and class of obstore's that give tokens by the cloud's own package.
        package: That package.
        bucket: What holds objects.
        read, list: Permissions.
        keys: Settings that sign here.
    """

    prefixes: tuple[str, ...]
    provider: tuple[str, str]
    package: str
    bucket: str
    read: str
    list: str
    keys: tuple[str, ...]


class CloudAccess(Access):
    """What both have in common (see `Access`)."""

    names: Names

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._provider: Callable[[], Any] | None = None
        self._token: tuple[str, float] | None = None  # And when it ends, by `time.time`.

    def setting(self, *names: str) -> str:
        """A setting (see `Access`)."""
        given = {self._plain(name): str(value) for name, value in self.settings}
        for name in names:
            if name in given:
                return given[name]
        for name in names:
            for prefix in self.names.prefixes:
                if value := os.environ.get(f"{prefix}{name}".upper()):
                    return value
        return ""

    def _plain(self, name: str) -> str:
        name = name.lower()
        prefix = next(filter(name.startswith, self.names.prefixes), "")
        return name.removeprefix(prefix)

    @property
    def anonymous(self) -> bool:
        """Whether requests go out without credentials."""
        return self.setting("skip_signature").lower() in ("true", "1", "yes", "y", "on")

    @property
    def atomic(self) -> bool:
        """Of the clouds themselves it is (see `Access`), of emulators unknown."""
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        return not (self.setting("base_url", "endpoint") or emulator)

    def _with_provider(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings with the tokens of the cloud's package, where they are what counts."""
        if not self.anonymous and not self._given and (found := self._tokens()) is not None:
            return {"credential_provider": found} | settings
        return settings

    @property
    def _given(self) -> bool:
        """Whether keys or tokens were given."""
        return bool(self.setting(*self.names.keys) or self._fixed(""))

    def _fixed(self, key: str) -> Request | None:
        """A request by a token or a part of the URL that was given."""
        raise NotImplementedError

    def _bearing(self, key: str, token: str, seconds: float) -> Request:
        token = token.strip()
        if not (token.isascii() and token.isprintable()):
            what = "the token for the store has characters that no header can hold"
            raise errors.UsageError(what, file=self.url)
        return Request(self.place(key), {"Authorization": f"Bearer {token}"}, seconds)

    def _tokens(self) -> Callable[[], Any] | None:
        """What gives tokens: one that was given, or the cloud's own package if it is installed."""
        if self._provider is None:
            self._provider = dict(self.settings).get("credential_provider")
        if self._provider is None:
            module, name = self.names.provider
            try:
                if importlib.util.find_spec(self.names.package) is None:
                    return None
                made = getattr(importlib.import_module(module), name)
            except ImportError:
                return None
            try:
                self._provider = made()
            except Exception as error:  # noqa: BLE001 - of the package's own kinds
                raise self.without_credentials(reason(error)) from None
        return self._provider

    def request(self, key: str) -> Request:
        """What reads an object now (see `Access`)."""
        if self.anonymous:
            return Request(self.place(key), {}, _USED_FOR)
        if (fixed := self._fixed(key)) is not None:
            return fixed
        if self.setting(*self.names.keys) or (tokens := self._tokens()) is None:
            return Request(self.sign(key), {}, _USED_FOR)
        now = time.time()
        token = self._token  # Another thread may forget it meanwhile.
        if token is None or token[1] - _EARLY < now:
            try:
                found = tokens()
                if "token" not in found:  # Such as a key of Azure's.
                    return Request(self.sign(key), {}, _USED_FOR)
            except errors.MfloadError:
                raise
            except Exception as error:  # noqa: BLE001
                raise self.without_credentials(reason(error)) from None
            end = found.get("expires_at") or datetime.now(UTC) + _SIGNED_FOR
            token = self._token = found["token"], end.timestamp()
        return self._bearing(key, token[0], max(1.0, token[1] - _EARLY - now))

    @in_home(str)
    def sign(self, key: str) -> str:
        """The signed URL of an object."""
        try:
            return self.bounded(
                lambda: obstore().sign(self.store, "GET", key, _SIGNED_FOR), "signing"
            )
        except errors.MfloadError:
            raise
        except (obstore().exceptions.BaseError, OSError, ValueError, RuntimeError) as error:
            raise self.without_credentials(reason(error)) from None

    def stale(self, said: Answered) -> bool:
        """Whether a token or a signature may have been right before (see `Access`)."""
        old = "expired" in said.text.lower() or _SKEWED.search(said.text) is not None
        return not self.anonymous and (said.status == 401 or (said.status in (400, 403) and old))

    def renew(self, made: int, said: Answered) -> None:
        """Forgets the token as well (see `Access`)."""
        if made == self.made:
            self._token = None
        super().renew(made, said)

    def refused(self, said: Answered, key: str | None, name: str) -> errors.SourceError:
        """The error of an answer (see `Access`)."""
        found = _CODE.search(said.text)
        code = said.code or (found and (found[1] or found[2])) or ""
        kind, what, expected = self._explained(said, code, key)
        if kind is _MISSING and key is not None and "bucket" not in what:
            what += self.near(key)
        return kind(what, file=name, expected=expected, found=f"{said.status} {code}".rstrip())

    def _explained(
        self, said: Answered, code: str, key: str | None
    ) -> tuple[type[errors.SourceError], str, str | None]:
        names = self.names
        if code in ("NoSuchBucket", "ContainerNotFound") or (said.status == 404 and key is None):
            return _MISSING, f"the {names.bucket} {self.bucket!r} does not exist", None
        if said.status == 404:
            return _MISSING, f"no such object in the {names.bucket}", None
        if _SKEWED.search(said.text):
            what = "the clock of this machine differs from the store's"
            return _DENIED, what, "a clock that is set by NTP"
        if said.status in (401, 403) or code in ("AuthenticationFailed", "ExpiredToken"):
            right = names.list if key is None else names.read
            if self.anonymous:
                return _DENIED, "the store refuses access to who asks without credentials", right
            if said.status == 401 or code in ("AuthenticationFailed", "ExpiredToken"):
                return _DENIED, "the store does not take these credentials", self.credentials
            return _DENIED, "the store refuses access to these credentials", right
        if said.status == 429 or code in ("ServerBusy", "rateLimitExceeded"):
            what = "the store asks for fewer requests"
            return errors.ReadError, what, "fewer loads at once, or Options(threads=…)"
        return errors.SourceError, "the store refuses the request", None


class GoogleAccess(CloudAccess):
    """The objects of a bucket of Google Cloud Storage, `gs://bucket`."""

    addresses = ("base_url",)
    credentials = (
        "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login` with the "
        "package google-auth, the key of a service account, or for a public bucket "
        "Options(store={'skip_signature': True})"
    )
    names = Names(
        ("google_",), ("obstore.auth.google", "GoogleCredentialProvider"), "google.auth",
        "bucket", "the permission storage.objects.get", "the permission storage.objects.list",
        ("service_account", "service_account_path", "service_account_key"),
    )  # fmt: skip

    def make(self, settings: dict[str, Any]) -> Any:
        """Makes the store of obstore."""
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        if emulator and not self.setting("base_url"):
            settings = {"base_url": self._base, "skip_signature": True} | settings
        return obstore().store.GCSStore(self.bucket, **self._with_provider(settings))

    @property
    def anonymous(self) -> bool:
        """Whether requests go out without credentials; an emulator asks for none."""
        return super().anonymous or bool(os.environ.get("STORAGE_EMULATOR_HOST"))

    @property
    def _base(self) -> str:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        return (self.setting("base_url") or emulator or "https://storage.googleapis.com").rstrip(
            "/"
        )

    def place(self, key: str) -> str:
        """The URL of an object, unsigned."""
        return f"{self._base}/{self.bucket}/{quote(key)}"

    def _fixed(self, key: str) -> Request | None:
        token = self.setting("bearer_token")
        return self._bearing(key, token, _USED_FOR) if token else None


_ALSO = {"account_key": ("key",), "endpoint": ("blobendpoint",), "sas_key": ("sas_token",)}
# What a connection string has, by the names of settings.
_CONNECTION = {
    "accountname": "account", "accountkey": "key", "blobendpoint": "blobendpoint",
    "sharedaccesssignature": "sas_token",
}  # fmt: skip


class AzureAccess(CloudAccess):
    """The objects of a container of Azure: `az://container`, `abfs://container@account…`."""

    addresses = ("endpoint",)
    credentials = (
        "AZURE_STORAGE_ACCOUNT_KEY, a SAS token, `az login` or an identity of the machine with the "
        "package azure-identity, or for a public container Options(store={'skip_signature': True})"
    )
    names = Names(
        ("azure_storage_", "azure_"), ("obstore.auth.azure", "AzureCredentialProvider"),
        "azure.identity", "container", "the role Storage Blob Data Reader",
        "the role Storage Blob Data Reader", ("account_key", "access_key", "master_key", "key"),
    )  # fmt: skip
    _VERSION = "2023-11-03"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.bucket, _, host = self.bucket.partition("@")
        self._account = host.partition(".")[0]

    def setting(self, *names: str) -> str:
        """A setting (see `Access`), also of a connection string, which comes last."""
        if found := super().setting(*names):
            return found
        pairs = (each.partition("=") for each in super().setting("connection_string").split(";"))
        told = {_CONNECTION.get(name.lower(), ""): value for name, _, value in pairs}
        return next((told[name] for name in names if told.get(name)), "")

    @property
    def account(self) -> str:
        """The storage account.

        Raises:
            UsageError: Nothing names one.
        """
        endpoint = self.setting("endpoint", "blobendpoint")
        path = urlsplit(endpoint).path.strip("/")  # Emulators have it there.
        found = self._account or self.setting("account_name", "account") or path
        if not found and not endpoint:
            what = "the storage account of Azure is not known"
            expected = (
                "AZURE_STORAGE_ACCOUNT_NAME, or abfs://container@account.dfs.core.windows.net/…"
            )
            raise errors.UsageError(what, file=self.url, expected=expected)
        return found

    def make(self, settings: dict[str, Any]) -> Any:
        """Makes the store of obstore."""
        if account := self.account:
            settings = {"account_name": account} | settings
        for name, others in _ALSO.items():  # What obstore does not know.
            if not self.setting(name) and (value := self.setting(*others)):
                settings[name] = value
        return obstore().store.AzureStore(self.bucket, **self._with_provider(settings))

    def place(self, key: str) -> str:
        """The URL of an object, unsigned."""
        base = (
            self.setting("endpoint", "blobendpoint")
            or f"https://{self.account}.blob.core.windows.net"
        )
        return f"{base.rstrip('/')}/{self.bucket}/{quote(key)}"

    def _fixed(self, key: str) -> Request | None:
        if sas := self.setting("sas_key", "sas_token").lstrip("?"):
            return Request(f"{self.place(key)}?{sas}", {}, _USED_FOR)
        token = self.setting("token", "bearer_token")
        return self._bearing(key, token, _USED_FOR) if token else None

    def _bearing(self, key: str, token: str, seconds: float) -> Request:
        made = super()._bearing(key, token, seconds)
        return made._replace(headers=made.headers | {"x-ms-version": self._VERSION})
