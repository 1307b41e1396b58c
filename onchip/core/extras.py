"""How the optional packages of onchip are installed."""


def advise(extra: str) -> str:
    """The command that installs an extra of pyproject.toml. onchip is not on the package index: a
    clone or a file of a wheel is what pip can install it from.
    """
    return (
        f"pip install '.[{extra}]' in a clone of onchip, or pip install 'FILE[{extra}]' with the"
        " FILE of its wheel"
    )
