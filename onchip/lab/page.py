"""The page as one file: style, scripts and data are put into site/index.html, so that it works from
the file system, from any server, and from an attachment.
"""

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent / "site"
NAME = "index.html"
_STYLE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">')
_SCRIPT = re.compile(r'<script src="(\w+\.js)"></script>')


def assemble(data: Mapping[str, Any], live: bool = False) -> str:
    """The whole page. live: a server answers its playground."""
    text = _read(NAME)
    text, styles = _inline(text, _STYLE, "style")
    text, scripts = _inline(text, _SCRIPT, "script")
    connect = "'self'" if live else "'none'"
    rules = f"default-src 'none'; img-src data:; connect-src {connect}; base-uri 'none'"
    rules += f"; form-action 'none'; style-src {styles}; script-src {scripts}"
    text = _put(text, "POLICY", rules)
    text = _put(text, "LIVE", "live" if live else "offline")
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return _put(text, "DATA", packed.replace("<", "\\u003c"))  # "</script>" would end the data


def write(folder: Path, data: Mapping[str, Any]) -> Path:
    """Write the page to a folder, which is created if missing, and return the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / NAME
    file.write_text(assemble(data), encoding="utf-8")
    return file


def _read(name: str) -> str:
    return (SITE / name).read_text(encoding="utf-8")


def _inline(text: str, pattern: re.Pattern[str], tag: str) -> tuple[str, str]:
    """The text with files in place of their names, and the hashes that let a browser run them."""
    hashes = []

    def element(match: re.Match[str]) -> str:
        content = f"\n{_read(match[1])}"
        hashes.append(f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'")
        return f"<{tag}>{content}</{tag}>"

    inlined = pattern.sub(element, text)
    return inlined, " ".join(hashes)


def _put(text: str, mark: str, value: str) -> str:
    before, _, after = text.partition(f"%{mark}%")
    return before + value + after
