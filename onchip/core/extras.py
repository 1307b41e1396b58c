"""Optional packages: whether they are installed, and how they are installed."""

from importlib.util import find_spec


class MissingPackageError(ValueError):
    """A package of an extra is needed and not installed. The message says how to install it."""


def require(program: str, extra: str, *packages: str) -> None:
    """Raise MissingPackageError with one sentence if a program needs packages of an extra that are
    not installed. Nothing is imported.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"{program} needs {' and '.join(missing)}: {advise(extra)}")


def advise(extra: str) -> str:
    """The command that installs an extra of pyproject.toml. onchip is not on PyPI: pip installs it
    from a clone or from a wheel.
    """
    return (
        f"pip install '.[{extra}]' in a clone of onchip, or pip install 'FILE[{extra}]' with the"
        " FILE of its wheel"
    )
