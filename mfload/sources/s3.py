"""Buckets of S3, and of stores that speak as it does."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from mfload import errors
from mfload.sources.access import Access, Answered, Request, in_home, no_panic, obstore, reason
from mfload.sources.client import BROKEN, Client, Timeouts
from mfload.sources.http import RequestTarget

_SIGNED_FOR = timedelta(hours=1)
_USED_FOR = 900.0  # Seconds after which a URL is signed anew.
_SECRETS = {"access_key_id", "secret_access_key", "session_token", "token", "skip_signature",
            "credential_provider", "profile"}  # fmt: skip
_DEFAULT_REGION = "us-east-1"
_REGIONS = ("region", "default_region")
_ENDPOINTS = ("endpoint", "endpoint_url", "endpoint_url_s3")
# Where obstore itself finds what a machine or a pod is given, beside the keys.
_IDENTITIES = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE",
               "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
               "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")  # fmt: skip
_AGENT = "AWS_CONTAINER_CREDENTIALS_FULL_URI"  # Without a file of a token, boto3 asks it.
_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
_PERMISSION = re.compile(r"to perform: (s3:\w+)")
_OLD = re.compile(r"request has expired|difference between the request time", re.IGNORECASE)
_SKEWED = ("RequestTimeTooSkewed", "RequestExpired")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken")
_BUSY = ("SlowDown", "ServiceUnavailable", "RequestLimitExceeded", "TooManyRequests")

_Explained = tuple[type[errors.SourceError], str, str | None]
_DENIED, _MISSING = errors.SourcePermissionError, errors.SourceNotFoundError
_SKEW: _Explained = (
    _DENIED, "the clock of this machine differs from the store's", "a clock that is set by NTP",
)  # fmt: skip
_ENDED: _Explained = (
    _DENIED, "the session token has expired, or is not the store's", "new temporary credentials",
)  # fmt: skip
_KNOWN: dict[str, _Explained] = {
    "InvalidAccessKeyId": (
        _DENIED,
        "the store does not know the access key",
        "a key of this store; AWS_ENDPOINT_URL or Options(store={'endpoint': …}) names another",
    ),
    "SignatureDoesNotMatch": (
        _DENIED,
        "the secret key does not fit the access key",
        "the secret key of this access key",
    ),
    "InvalidObjectState": (
        errors.SourceError,
        "the object is archived",
        "an object that was restored from the archive",
    ),
    **dict.fromkeys(_SKEWED, _SKEW),
    **dict.fromkeys(_EXPIRED, _ENDED),
}


class S3Access(Access):
    """The objects of a bucket of S3 (see `Access`): URLs are signed here, without a request."""

    credentials = (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, an identity of the machine, or "
        "Options(store={…}); for a public bucket store={'skip_signature': True}"
    )

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._region: str | None = None  # The one that an answer named.
        self._profile: dict[str, str] = {}  # Region and endpoint of a profile.
        self._unsigned: Any = None

    addresses = _ENDPOINTS

    def setting(self, *names: str) -> str:
        """A setting: one that was given, or that of the environment, or of a profile; or ''."""
        for name in names:
            for given, value in self.settings:
                if _plain(given) == name:
                    return str(value)
            if found := os.environ.get(f"AWS_{name.upper()}") or self._profile.get(name, ""):
                return found
        return ""

    @property
    def anonymous(self) -> bool:
        """Whether requests go out unsigned."""
        return self.setting("skip_signature").lower() in ("true", "1", "yes", "y", "on")

    @property
    def own_endpoint(self) -> bool:
        """Whether it is a store that only speaks as S3 does."""
        return any(map(self.setting, _ENDPOINTS))

    @property
    def atomic(self) -> bool:
        """Of S3 itself it is (see `Access`)."""
        return not self.own_endpoint

    @property
    def region(self) -> str:
        """Where requests go."""
        return self._region or next(filter(None, map(self.setting, _REGIONS)), _DEFAULT_REGION)

    def make(self, settings: dict[str, Any]) -> Any:
        """Makes the store of obstore, which finds credentials, and boto3 those of profiles."""
        profile = settings.pop("profile", None)
        if not _SECRETS & set(map(_plain, settings)) and not self.anonymous:
            provider, config = _of_profile(profile, self)
            if provider is not None:
                settings["credential_provider"] = provider
            if not any(map(self.setting, _REGIONS)):
                self._profile |= {"region": config.get("region", "")}
            if not self.own_endpoint:
                self._profile |= {"endpoint": config.get("endpoint_url", "")}
        settings |= {name: value for name, value in self._profile.items() if value}
        if self._region is not None:
            settings["region"] = self._region
        return obstore().store.S3Store(self.bucket, **_together(settings))

    def place(self, key: str) -> str:
        """The URL of an object: one that is signed with a key that is none, without its query."""
        unsigned = self._unsigned  # Another thread may forget it meanwhile.
        if unsigned is None:
            _ = self.store  # It finds the profile.
            kept = {name: v for name, v in self.settings if _plain(name) not in _SECRETS}
            kept |= {"access_key_id": "-", "secret_access_key": "-", "skip_signature": False}
            unsigned = self._unsigned = self.made_of(kept)
        sign = partial(obstore().sign, unsigned, "GET", key, _SIGNED_FOR)
        try:
            return no_panic(sign).partition("?")[0]
        except (obstore().exceptions.BaseError, ValueError) as error:
            what = f"the settings of the store are invalid: {reason(error)}"
            raise errors.UsageError(what, file=self.url, expected="as obstore takes them") from None

    def request(self, key: str) -> Request:
        """The signed URL of an object (see `Access`)."""
        if self.anonymous:
            return Request(self.place(key), {}, _USED_FOR)
        # What has its keys signs at once, without the threads of obstore.
        url = self._sign(key) if self.setting("access_key_id") else self.sign(key)
        return Request(url, {}, _USED_FOR)

    def _sign(self, key: str) -> str:
        try:
            sign = partial(no_panic, partial(obstore().sign, self.store, "GET", key, _SIGNED_FOR))
            return sign() if self.setting("access_key_id") else self.bounded(sign, "signing")
        except errors.MfloadError:
            raise
        except (obstore().exceptions.BaseError, OSError, ValueError, RuntimeError) as error:
            raise self.without_credentials(reason(error)) from None

    sign = in_home(str)(_sign)
    """The signed URL of an object, with credentials that are asked for."""

    def stale(self, said: Answered) -> bool:
        """Whether the token, the signature or the region is out of date (see `Access`)."""
        old = said.code in (*_SKEWED, *_EXPIRED) or _OLD.search(said.text) is not None
        return old or (not self.own_endpoint and self._is_elsewhere(said))

    def _is_elsewhere(self, said: Answered) -> bool:
        """Whether the bucket is in another region than requests go to."""
        if said.status not in (301, 307, 400, 403):
            return False
        if said.status == 301 and said.region is None:
            said = said._replace(region=self.region_now())
        return said.region not in (None, self.region)

    def region_now(self) -> str | None:
        """The region that S3 names for the bucket, to anybody; None if it doesn't."""
        target = RequestTarget.of(self.place("-"))
        with (
            suppress(*BROKEN),
            Client(self.tls, 0).ask(
                target[:3], target.path, {}, Timeouts(self.seconds), method="HEAD"
            ) as answer,
        ):
            return answer.getheader("x-amz-bucket-region")

    def renew(self, made: int, said: Answered) -> None:
        """Also goes to the region that an answer named (see `Access`)."""
        region = said.region or (self.region_now() if said.status == 301 else None)
        if region and not self.own_endpoint:
            self._region, self._unsigned = region, None
        super().renew(made, said)

    def refused(self, said: Answered, key: str | None, name: str) -> errors.SourceError:
        """The error of an answer (see `Access`)."""
        kind, what, expected = self._explained(said, key)
        if kind is _MISSING and key is not None and said.code != "NoSuchBucket":
            what += self.near(key)
        return kind(what, file=name, expected=expected, found=str(said))

    def _explained(self, said: Answered, key: str | None) -> _Explained:
        if said.code in _KNOWN:
            return _KNOWN[said.code]
        if said.code == "NoSuchBucket" or (said.status == 404 and key is None):
            return _MISSING, f"the bucket {self.bucket!r} does not exist", None
        if said.status == 404:
            return _MISSING, "no such object in the bucket", None
        if _OLD.search(said.text):
            return _SKEW
        if said.status in (301, 307) or (said.status == 400 and said.region):
            where = f"region {said.region!r}" if said.region else "the bucket's region"
            what = "the bucket is in another region, or at another endpoint"
            return errors.SourceError, what, f"{where}, by AWS_REGION or Options(store={{…}})"
        if said.status in (401, 403):
            named = _PERMISSION.search(said.text)
            right = named[1] if named else "s3:ListBucket" if key is None else "s3:GetObject"
            who = "who asks without credentials" if self.anonymous else "these credentials"
            return _DENIED, f"the store refuses access to {who}", f"the permission {right}"
        if said.status == 429 or said.code in _BUSY:
            what = "the store asks for fewer requests"
            return errors.ReadError, what, "fewer loads at once, or Options(threads=…)"
        return errors.SourceError, "the store refuses the request", None


def _plain(name: str) -> str:
    """The name of a setting without the prefix that it has in the environment."""
    return name.lower().removeprefix("aws_")


def _together(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings whose keys have no session token: that of the environment belongs to others."""
    named = {_plain(name): name for name in settings}
    both = {"access_key_id", "secret_access_key"} <= {*named}
    with_token = bool({"session_token", "token"} & {*named})
    if not both or with_token or not os.environ.get("AWS_SESSION_TOKEN"):
        return settings
    keys = {name: settings[named[name]] for name in ("access_key_id", "secret_access_key")}
    rest = {name: value for name, value in settings.items() if _plain(name) not in keys}
    return {**rest, "credential_provider": lambda: {**keys, "expires_at": None}}


def _of_profile(profile: str | None, access: S3Access) -> tuple[Any, dict[str, str]]:
    """What gives the credentials of a profile, by boto3, and the profile's settings.

    (None, {}) leaves the search to obstore, which knows no profiles.

    Raises:
        FrameworkMissingError: There is a profile, and boto3 is not installed.
        SourcePermissionError: There is no such profile, or it has no credentials.
    """
    if profile is None and any(map(os.environ.get, _IDENTITIES)):
        return None, {}
    asked = profile or os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    kept, config = (
        os.path.exists(os.path.expanduser(os.environ.get(name, path)))
        for name, path in _FILES.items()
    )
    if not asked and not kept and not config and _AGENT not in os.environ:
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise access.without_credentials("AWS_EC2_METADATA_DISABLED")
        return None, {}
    if importlib.util.find_spec("boto3") is None:
        if not asked and not kept:  # The machine may have an identity.
            return None, {}
        what = "profiles of AWS are read with the package boto3, which is not installed"
        raise errors.missing(what, "boto3", file=access.url)
    import botocore.exceptions
    import botocore.session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = botocore.session.Session(profile=asked)
    try:
        config = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(config.get("services"), {})
        return Boto3CredentialProvider(session), config | dict(services.get("s3") or {})
    except botocore.exceptions.ProfileNotFound:
        meant = errors.did_you_mean(asked, session.available_profiles)
        raise _DENIED(f"no profile {asked!r} of AWS{meant}", file=access.url) from None
    except (ValueError, botocore.exceptions.BotoCoreError) as error:
        found = None if isinstance(error, ValueError) else type(error).__name__
        raise access.without_credentials(found) from None
