"""Read untrusted JSON: every value is checked for its type, and unread fields are refused."""

import math
from collections.abc import Collection, Mapping
from typing import Any

REQUIRED: Any = object()


def check_size(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value < 2**31:
        raise ValueError(f"{name}={value!r} must be an integer in [1, 2**31)")


class Fields:
    """The fields of a JSON object, called `what` in errors. An absent field and null are the same:
    but for flags both give the default, or an error if it is REQUIRED. `reject_unread` refuses all
    other fields.
    """

    def __init__(self, data: Mapping[str, Any], what: str):
        self.data = data
        self.what = what
        self._read_names: set[str] = set()

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field, of any type; marks the field as read."""
        self._read_names.add(name)
        value = self.data.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.what} has no {name}")
        return default

    def size(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default:
            check_size(name, value)
        return value

    def positive(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.take(name, default)
        if value is not default and not (_is_number(value) and value > 0):
            raise ValueError(f"{name}={value!r} in {self.what} must be a number above 0")
        return value if value is default else float(value)

    def non_negative(self, name: str, default: float) -> float:
        value = self.take(name, default)
        if not (_is_number(value) and value >= 0):
            raise ValueError(f"{name}={value!r} in {self.what} must be a number of at least 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """null is false and not the default, as in transformers, which tests flags for truth."""
        if name in self.data and self.data[name] is None:
            default = False
        return self._typed(name, default, bool, "true or false")

    def text(self, name: str, default: Any = REQUIRED) -> str:
        return self._typed(name, default, str, "a string")

    def block(self, name: str) -> dict[str, Any]:
        return self._typed(name, {}, dict, "an object")

    def texts(self, name: str, default: list[str]) -> list[str]:
        value = self._typed(name, default, list, "a list")
        if not all(isinstance(item, str) for item in value):
            raise ValueError(f"{name}={value!r} in {self.what} must hold strings")
        return value

    def require_present(self, *names: str) -> None:
        """Fields with a default that depends on the program: they must be present, if only null."""
        for name in names:
            if name not in self.data:
                raise ValueError(f"{self.what} has no {name}")

    def must_be(self, name: str, expected: Any) -> None:
        """A field with one supported value; it may be absent."""
        value = self.take(name, expected)
        if value != expected:
            raise ValueError(f"{name}={value!r} in {self.what} is not served: only {expected!r} is")

    def reject_unread(self, harmless: Collection[str] = (), hint: str = "") -> None:
        """Refuse fields that were not read, are not harmless, and are neither null nor false."""
        for name in sorted(set(self.data) - self._read_names - set(harmless)):
            if self.data[name] not in (None, False):
                raise ValueError(
                    f"{name}={self.data[name]!r} in {self.what} is not known and may change the"
                    f" mathematics{hint.format(name)}"
                )

    def _typed(self, name: str, default: Any, kind: type, words: str) -> Any:
        value = self.take(name, default)
        if not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} in {self.what} must be {words}")
        return value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
