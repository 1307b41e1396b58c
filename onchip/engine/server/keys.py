"""Who may ask, and whose prefixes a request may find.

Only keyed hashes of the keys are kept, under a secret that is drawn when the process starts. A
presented key is compared with every one of them in constant time. The salt of a tenant's pages is
derived from its key here, on the server: no client can name another's.
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
    """keys: none, and everybody may ask; all then share their prefixes."""

    def __init__(self, keys: Iterable[str] = ()):
        self._secret = secrets.token_bytes(32)
        keys = tuple(keys)
        for key in keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
                raise ValueError(
                    f"an API key has {len(key)} characters or some that no header can carry:"
                    f" at least {MIN_KEY_CHARS} printable ASCII characters are needed"
                )
        self._hashes = frozenset(self._hash(b"key", key.encode()) for key in keys)

    @property
    def is_open(self) -> bool:
        """Nobody is asked for a key."""
        return not self._hashes

    def find_salt(self, authorization: bytes | None) -> bytes | None:
        """The salt of whoever sent this Authorization header; None: it is nobody we know."""
        if self.is_open:
            return b""
        scheme, _, key = (authorization or b"").partition(b" ")
        presented = self._hash(b"key", key.strip())
        matches = [hmac.compare_digest(presented, one) for one in self._hashes]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._hash(b"salt", key.strip())

    def _hash(self, purpose: bytes, key: bytes) -> bytes:
        """The purpose is fixed per call and holds no colon: no two of them can be confused."""
        return hmac.digest(self._secret, purpose + b":" + key, hashlib.sha256)


def read_keys(file: str | Path | None) -> tuple[list[str], list[str]]:
    """(keys, warnings): those of a file, one a line, and of the environment, by commas."""
    keys = [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",")]
    warnings = []
    if file is not None:
        if Path(file).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            warnings.append(f"others on this machine can read {file}: chmod 600 {file}")
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
        file_keys = [line for line in lines if line and not line.startswith("#")]
        if not file_keys:
            raise ValueError(f"{file} holds no API key: one a line is expected")
        keys += file_keys
    return [key for key in keys if key], warnings
