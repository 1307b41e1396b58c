"""API keys, and the salt of each key's cached prefixes.

Only keyed hashes of the keys are stored, under a secret drawn when the process starts. A presented
key is compared with all of them in constant time. The server derives the salt of a tenant's pages
from its key, so no client can choose another tenant's salt.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

ENVIRONMENT = "ONCHIP_API_KEYS"
MIN_KEY_CHARS = 8


class Keyring:
    """keys: if empty, no key is required and all clients share their prefixes."""

    def __init__(self, keys: Iterable[str] = ()):
        self._secret = secrets.token_bytes(32)
        keys = tuple(keys)
        for key in keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
                raise ValueError(
                    f"an API key has {len(key)} characters, or some that are not printable ASCII:"
                    f" at least {MIN_KEY_CHARS} printable ASCII characters are needed"
                )
        self._hashes = frozenset(self._hash(b"key", key.encode()) for key in keys)

    @property
    def is_open(self) -> bool:
        """No key is required."""
        return not self._hashes

    def find_salt(self, authorization: bytes | None) -> bytes | None:
        """The salt of this Authorization header; None if its key is unknown."""
        if self.is_open:
            return b""
        scheme, _, key = (authorization or b"").partition(b" ")
        presented = self._hash(b"key", key.strip())
        matches = [hmac.compare_digest(presented, known) for known in self._hashes]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._hash(b"salt", key.strip())

    def _hash(self, purpose: bytes, key: bytes) -> bytes:
        """The purpose is a constant without a colon, so hashes of different purposes cannot
        collide.
        """
        return hmac.digest(self._secret, purpose + b":" + key, hashlib.sha256)


def read_keys(file: str | Path | None) -> tuple[list[str], list[str]]:
    """(keys, warnings): keys of a file, one per line, and of the environment, separated by
    commas.
    """
    keys = [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",")]
    warnings = []
    if file is not None:
        if Path(file).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            warnings.append(f"other users of this machine can read {file}: chmod 600 {file}")
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
        file_keys = [line for line in lines if line and not line.startswith("#")]
        if not file_keys:
            raise ValueError(f"{file} holds no API key: one per line is expected")
        keys += file_keys
    return [key for key in keys if key], warnings
