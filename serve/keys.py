"""Who may ask: API keys with names, known by their SHA-256 only, and what each is allowed.

Keys are long random strings, so that a plain hash is enough; ``printf %s "$KEY" | sha256sum`` makes
one. Promises: a key is in no log, message or process argument; all keys are compared in the same
time. With no keys configured everybody may ask.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from ebbtide.platform.config import Config
from ebbtide.platform.errors import ConfigError

KEYS_VARIABLE = "EBBTIDE_API_KEYS"
"""``name=key`` pairs, separated by commas; added to those of the job file."""
ANYONE = "anyone"

Amount = Annotated[int, Field(ge=1)]


class Limits(Config):
    """What one key may use; None is no limit. Tokens are those of prompts and answers."""

    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    concurrent_requests: Amount | None = None


class ApiKey(Config):
    """One client: a name for logs and metrics, the hash of its key, and limits of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    sha256: str
    limits: Limits | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_hash(cls, values: Any) -> Any:
        """Of the whole, as the message of a field's own check would repeat a key put there."""
        found = values.get("sha256", "0" * 64) if isinstance(values, dict) else "0" * 64
        if not (isinstance(found, str) and re.fullmatch("[0-9a-f]{64}", found)):
            raise ValueError('sha256 must be 64 hexadecimal digits (printf %s "$KEY" | sha256sum)')
        return values

    @model_validator(mode="after")
    def _check_name(self) -> ApiKey:
        if self.name == ANYONE:
            raise ValueError(f"the name {ANYONE} stands for those without a key; take another")
        return self


def hashed(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def from_variable(text: str, others: Sequence[ApiKey] = ()) -> list[ApiKey]:
    """The keys in ``EBBTIDE_API_KEYS``, beside those of the job file.

    Raises ConfigError, which does not repeat them.
    """
    if text and not text.strip(" ,"):
        raise ConfigError(f"{KEYS_VARIABLE} has no keys in it; unset it to serve everybody")
    found: list[ApiKey] = []
    for number, pair in enumerate(filter(None, text.split(",")), 1):
        name, _, key = pair.strip().partition("=")
        try:
            if len(key) < 16:
                raise ValueError
            found.append(ApiKey(name=name, sha256=hashed(key)))
        except ValueError:
            raise ConfigError(
                f"{KEYS_VARIABLE}: entry {number} is not name=key, with a key of 16 characters or"
                " more"
            ) from None
    for of in ("name", "sha256"):
        if len({getattr(key, of) for key in (*others, *found)}) < len(others) + len(found):
            raise ConfigError(f"{KEYS_VARIABLE} and http.keys: two keys have the same {of}")
    return found


def identify(authorization: str | None, keys: Sequence[ApiKey]) -> ApiKey | None:
    """Whose key is in an ``Authorization`` header; None if it is nobody's."""
    scheme, _, key = (authorization or "").partition(" ")
    digest = hashed(key.strip()) if scheme.lower() == "bearer" else ""
    found = None
    for each in keys:
        if hmac.compare_digest(each.sha256, digest):
            found = each
    return found
