"""How the optional packages of onchip are installed."""


def advise(extra: str) -> str:
    """The command that installs an extra of pyproject.toml. onchip is not on PyPI: pip installs it
    from a clone or from a wheel.
    """
    return (
        f"pip install '.[{extra}]' in a clone of onchip, or pip install 'FILE[{extra}]' with the"
        " FILE of its wheel"
    )
