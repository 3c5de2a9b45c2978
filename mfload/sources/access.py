"""Access to the objects of a bucket: credentials, signed requests, listings, and what refusals say.

The package obstore finds the credentials, signs, and lists. Bytes are read by mfload's own HTTP
client, at half the processor time of obstore's `get` with its copy into place.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from mfload import errors
from mfload.sources.client import Client, Timeouts
from mfload.sources.http import PATIENCE, STALLED, RequestTarget
from mfload.sources.tls import Tls

_SIGNED_FOR = 3600  # Seconds that a signed URL is valid for,
_USED_FOR = 900.0  # and after which it is signed anew.
_RETRIES = 4
_PAGE = 1000  # Objects in an answer to a listing.
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([\w.]{1,64})</Code>")
_REGION = re.compile(r"<Region>([\w-]{1,32})</Region>")
_PERMISSION = re.compile(r"to perform: (s3:\w+)")
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "InvalidToken", "ExpiredTokenException"}
_SECRETS = {"access_key_id", "secret_access_key", "session_token", "token", "skip_signature",
            "credential_provider", "profile"}  # fmt: skip
_NO_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, an identity of the machine, "
    "Options(store={…}); for a public bucket store={'skip_signature': True}"
)


class Answered(NamedTuple):
    """What a store answered in place of what it was asked for.

    Attributes:
        status: Of HTTP; 0 if no answer came.
        code: Its name for what is wrong, such as NoSuchKey.
        text: The body, shortened; it may quote credentials.
        region: Where the bucket is, if the answer says so.
    """

    status: int
    code: str = ""
    text: str = ""
    region: str | None = None

    @staticmethod
    def of(status: int, text: str, region: str | None = None) -> Answered:
        """Takes a body apart."""
        code, named = _CODE.search(text), _REGION.search(text)
        region = region or (named[1] if named else None)
        return Answered(status, code[1] if code else "", text, region)

    def __str__(self) -> str:
        return " ".join(filter(None, (str(self.status or ""), self.code))) or "no answer"


class Object(NamedTuple):
    """An object of a listing."""

    key: str
    size: int
    validator: str | None


class Access:
    """The objects of one bucket of S3, or of a store that speaks as it does.

    Pickles without what the environment gave: another process finds its own credentials.

    Args:
        url: The bucket's, such as `s3://bucket`.
        settings: Names and values as obstore takes them.
        timeout: Seconds that a request has. Default: `STALLED` without a byte.
        tls: Certificates.
    """

    def __init__(
        self, url: str, settings: tuple[tuple[str, Any], ...], timeout: float | None, tls: Tls
    ) -> None:
        self.url, self.settings, self.timeout, self.tls = url, settings, timeout, tls
        self.bucket = url.partition("://")[2]
        self.made = 0  # How often the store was made, with credentials found anew.
        self._region: str | None = None  # The one that an answer named.
        self._store: Any = None
        self._unsigned: Any = None
        self._own = {**self.environment(), **dict(settings)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Access) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.settings, self.timeout, self.tls)

    # -- the store of obstore ------------------------------------------------------------------

    def environment(self) -> dict[str, Any]:
        """Settings that the environment gives and obstore does not take from it."""
        return {}

    @property
    def store(self) -> Any:
        """The bucket as obstore knows it.

        Raises:
            FrameworkMissingError: obstore is not installed, or what reads a profile is not.
            UsageError: A setting is unknown or wrong.
        """
        if self._store is None:
            self._store = self._new(self._own)
            self.made += 1
        return self._store

    def _new(self, settings: dict[str, Any]) -> Any:
        stores = obstore().store
        more = dict(settings)
        client: dict[str, Any] = {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=self.seconds),
        }
        client |= {"timeout": timedelta(seconds=self.seconds)}
        if self.tls.ca_file is not None:
            with open(self.tls.ca_file, "rb") as file:
                client["root_certificate"] = file.read()
        retries = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=self.seconds)}
        more["client_options"] = client | dict(more.get("client_options") or {})
        more.setdefault("retry_config", retries)
        if self._region is not None:
            more["region"] = self._region
        try:
            return self.make(stores, more)
        except (obstore().exceptions.BaseError, ValueError, TypeError) as error:
            what = f"the settings of the store are invalid: {reason(error)}"
            raise errors.UsageError(what, file=self.url, expected="as obstore takes them") from None

    def make(self, stores: Any, settings: dict[str, Any]) -> Any:
        """Makes the store with obstore's module of stores."""
        given = set(map(_plain, settings))
        profile = settings.pop("profile", None)
        if not given & {"access_key_id", "credential_provider", "skip_signature"}:
            provider = _profile(profile, self.url)
            if provider is not None:
                settings["credential_provider"] = provider
                if not given & {"region", "default_region"}:
                    settings |= provider.config
        return stores.S3Store(self.bucket, **settings)

    @property
    def seconds(self) -> float:
        """That a request has."""
        return min(STALLED, PATIENCE if self.timeout is None else self.timeout)

    # -- signed requests -----------------------------------------------------------------------

    def place(self, key: str) -> str:
        """The URL of an object, unsigned."""
        if self._unsigned is None:
            # Signed with a key that is none, as URLs are given out signed alone.
            kept = {name: v for name, v in self._own.items() if _plain(name) not in _SECRETS}
            kept |= {"access_key_id": "-", "secret_access_key": "-", "skip_signature": False}
            self._unsigned = self._new(kept)
        signed = obstore().sign(self._unsigned, "GET", key, timedelta(seconds=60))
        return signed.partition("?")[0]

    def setting(self, name: str) -> str:
        """A setting, from what was given or from the environment; empty if there is none."""
        for given, value in self.settings:
            if _plain(given) == name:
                return str(value)
        return os.environ.get(f"AWS_{name.upper()}", "")

    @property
    def anonymous(self) -> bool:
        """Whether requests go out unsigned."""
        return self.setting("skip_signature").lower() in ("true", "1", "yes", "y", "on")

    def request(self, key: str) -> tuple[str, dict[str, str]]:
        """The URL that reads an object now, and headers for it.

        Raises SourcePermissionError if there are no credentials.
        """
        if self.anonymous:
            return self.place(key), {}
        try:
            return obstore().sign(self.store, "GET", key, timedelta(seconds=_SIGNED_FOR)), {}
        except (obstore().exceptions.BaseError, OSError, ValueError, RuntimeError) as error:
            raise errors.SourcePermissionError(
                "no credentials for the store were found",
                file=self.url,
                expected=_NO_CREDENTIALS,
                found=reason(error),
            ) from None

    @property
    def used_for(self) -> float:
        """Seconds for which what `request` gave may be used."""
        return _USED_FOR

    def pinned(self, validator: str) -> dict[str, str]:
        """Headers of a request that only this version may answer."""
        return {"If-Match": validator} if validator.startswith('"') else {}

    def renew(self, made: int, said: Answered) -> None:
        """Looks for credentials again, if no other thread has since the store was made last."""
        if said.region and self._elsewhere(said):
            self._region, self._unsigned = said.region, None
        if made == self.made:
            self._store = None

    def stale(self, said: Answered) -> bool:
        """Whether credentials or a signature may have been right before, or a region is wrong."""
        old = said.code in _SKEWED | _EXPIRED or "Request has expired" in said.text
        return old or (said.status in (301, 307, 400) and self._elsewhere(said))

    def _elsewhere(self, said: Answered) -> bool:
        asked = self._region or self.setting("region") or self.setting("default_region")
        own = any(map(self.setting, ("endpoint", "endpoint_url", "endpoint_url_s3")))
        return said.region not in (None, asked) and not own

    # -- listings ------------------------------------------------------------------------------

    def objects(self, prefix: str) -> Iterator[list[Object]]:
        """Objects below a prefix, of any depth, in pages."""
        with _asked(self, prefix):
            for page in obstore().list(self.store, prefix or None, chunk_size=_PAGE):
                yield [_object(each) for each in page]

    def level(self, prefix: str) -> tuple[list[str], list[Object]]:
        """Prefixes and objects directly below a prefix."""
        with _asked(self, prefix):
            found = obstore().list_with_delimiter(self.store, prefix or None)
        return list(found["common_prefixes"]), [_object(each) for each in found["objects"]]

    # -- errors --------------------------------------------------------------------------------

    def refused(self, said: Answered, key: str | None, name: str) -> errors.SourceError:
        """The error of an answer.

        Args:
            key: The object that was asked for; None for a listing.
            name: What the error is about, as the user wrote it.
        """
        kind, what, expected = _explained(said, key, self.bucket)
        if said.code == "NoSuchKey" and key is not None:
            what += near(self, key)
        return kind(what, file=name, expected=expected, found=str(said))


def _plain(name: str) -> str:
    """The name of a setting without the prefix that it has in the environment."""
    return name.lower().removeprefix("aws_")


def obstore() -> Any:
    """The package; raises FrameworkMissingError if it is not installed."""
    try:
        for name in ("obstore.exceptions", "obstore.store"):
            importlib.import_module(name)
        return importlib.import_module("obstore")
    except ImportError as error:
        what = "object stores are read with the package obstore, which is not installed"
        raise errors.missing(what, "stores") from error


def reason(error: BaseException) -> str:
    """The first line of an error of obstore, without URLs' queries and bodies."""
    text = str(error).partition("\n")[0]
    return errors.shown(re.sub(r"\?[^\s'\"]*", "?…", text), 200)


@contextmanager
def _asked(access: Access, prefix: str) -> Generator[None]:
    """Raises typed errors for those of obstore."""
    try:
        yield
    except (obstore().exceptions.BaseError, OSError, ValueError) as error:
        if isinstance(error, errors.MfloadError):
            raise
        text, name = str(error), f"{access.url}/{prefix}"
        found = _STATUS.search(text)
        if not found:
            what = f"could not list the store: {reason(error)}"
            raise errors.ReadError(what, file=name) from None
        raise access.refused(Answered.of(int(found[1]), text), None, name) from None


def _object(meta: Any) -> Object:
    return Object(meta["path"], meta["size"], meta["e_tag"])


def near(access: Access, key: str) -> str:
    """`, did you mean 'x'?` with names that lie beside a key; empty if they can't be listed."""
    directory, _, name = key.rpartition("/")
    try:
        prefixes, objects = access.level(directory)
    except errors.MfloadError:
        return ""
    names = [each.rpartition("/")[2] for each in (*prefixes, *(o.key for o in objects))]
    return errors.did_you_mean(name, names)


def _profile(profile: str | None, url: str) -> Any:
    """What gives the credentials of a profile, by boto3; None to leave the search to obstore."""
    if profile is None and any(
        os.environ.get(name)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE",
                     "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
                     "AWS_CONTAINER_CREDENTIALS_FULL_URI")
    ):  # fmt: skip
        return None
    kept = os.path.expanduser(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    config = os.path.expanduser(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"))
    asked = profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    if not asked and not os.path.exists(kept) and not os.path.exists(config):
        return None
    if importlib.util.find_spec("boto3") is None:
        if not asked and not os.path.exists(kept):
            return None
        what = "profiles of AWS are read with the package boto3, which is not installed"
        raise errors.missing(what, "boto3", file=url)
    import boto3
    import botocore.exceptions
    import botocore.session
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=asked))
    except botocore.exceptions.ProfileNotFound:
        names = botocore.session.Session().available_profiles
        what = f"no profile {asked!r} for the store{errors.did_you_mean(asked, names)}"
        raise errors.SourcePermissionError(what, file=url) from None
    except ValueError:  # It has no credentials.
        raise errors.SourcePermissionError(
            "no credentials for the store were found", file=url, expected=_NO_CREDENTIALS
        ) from None


def _explained(
    said: Answered, key: str | None, bucket: str
) -> tuple[type[errors.SourceError], str, str | None]:
    """The kind of an error, what is wrong, and what to do."""
    denied, missing = errors.SourcePermissionError, errors.SourceNotFoundError
    permission = _PERMISSION.search(said.text)
    right = permission[1] if permission else "s3:GetObject" if key else "s3:ListBucket"
    table: dict[str, tuple[type[errors.SourceError], str, str | None]] = {
        "InvalidAccessKeyId": (denied, "the store does not know the access key",
                               "a key of this endpoint"),
        "SignatureDoesNotMatch": (denied, "the secret key does not fit the access key", None),
        "RequestTimeTooSkewed": (denied, "the clock of this machine differs from the store's",
                                 "a clock that is set by NTP"),
        "NoSuchBucket": (missing, f"the bucket {bucket!r} does not exist", None),
        "NoSuchKey": (missing, "no such object in the bucket", None),
        "InvalidObjectState": (errors.SourceError, "the object is archived",
                               "an object that was restored from the archive"),
        **dict.fromkeys(_EXPIRED, (denied, "the session token has expired",
                                   "new temporary credentials")),
    }  # fmt: skip
    if said.code in table:
        return table[said.code]
    if said.region or said.status in (301, 307):
        where = f"region={said.region!r}" if said.region else "the bucket's region"
        what = "the bucket is in another region"
        return errors.SourceError, what, f"AWS_REGION or Options(store=…) with {where}"
    if said.status in (401, 403):
        return denied, "the store refuses access", f"the permission {right}"
    if said.status == 404:
        return missing, "no such object in the bucket" if key else "no such bucket", None
    if said.status in (429, 503):
        return errors.ReadError, "the store asks for fewer requests", "a load later"
    return errors.SourceError, "the store refuses the request", None


def region_of(access: Access, key: str) -> str | None:
    """The region that a store names for a bucket, by a request without credentials; or None."""
    target = RequestTarget.of(access.place(key))
    client = Client(access.tls, 0)
    with client.ask(target[:3], target.path, {}, Timeouts(access.seconds), method="HEAD") as answer:
        return answer.getheader("x-amz-bucket-region")


def key_of(url: str) -> tuple[str, str]:
    """Takes a URL apart: that of the bucket, and the key; raises UsageError for a malformed one."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    parts = key.rstrip("/").split("/") if key.rstrip("/") else []
    if not bucket or "@" in bucket or urlsplit(url).query or "#" in url:
        what = "the URL of the store is malformed"
    elif any(part in ("", ".", "..") for part in parts):
        what = "the URL of the store has empty parts, . or .."
    else:
        return f"{scheme.lower()}://{bucket}", key
    from mfload.sources.base import redacted

    raise errors.UsageError(what, expected="s3://bucket/path", found=redacted(url))
