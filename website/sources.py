"""Pages of source files and folders: a link of a document to a file opens the file. They are plain
HTML: in the theme, and through Markdown, they would take longer than the rest of the site.
"""

import ast
from functools import cache
from html import escape
from pathlib import Path
from posixpath import dirname, relpath

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

FOLDER = "source/"
_DARK = '[data-theme="dark"]'
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">
<title>{path} - onchip</title>
<link rel="icon" href="{base}/assets/onchip.svg">
<link rel="stylesheet" href="{base}/assets/source.css">
<script src="{base}/assets/source.js" data-base="{base}"></script>
</head>
<body>
<header><a href="{base}/index.html">onchip</a><h1>{path}</h1></header>
<main>
{body}
</main>
</body>
</html>
"""


def page_of(path: str) -> str:
    """The page of a file or folder of the repository, as a path in the site."""
    return f"{FOLDER}{path}.html"


def make_pages(root: Path, paths: set[str]) -> dict[str, str]:
    """The HTML of each path, and of all that its folders hold, by `page_of`."""
    todo, done = sorted(paths), {}
    while todo:
        path = todo.pop()
        if page_of(path) in done:
            continue
        if (root / path).is_dir():
            entries = _entries(root / path)
            todo += (f"{path}/{entry.name}" for entry in entries)
            body = _list(path, entries)
        else:
            body = _quote(root / path)
        base = relpath(".", dirname(page_of(path)))
        done[page_of(path)] = _PAGE.format(path=escape(path), base=base, body=body)
    return done


def style() -> str:
    """The colours of the highlighted code, light and dark."""
    light, dark = HtmlFormatter(style="default"), HtmlFormatter(style="github-dark")
    return f"{light.get_style_defs('.highlight')}\n{dark.get_style_defs(f'{_DARK} .highlight')}\n"


def _entries(folder: Path) -> list[Path]:
    hidden = lambda x: x.name.startswith((".", "__pycache__")) or x.suffix == ".safetensors"
    return sorted(x for x in folder.iterdir() if not hidden(x))


def _list(path: str, entries: list[Path]) -> str:
    lines = []
    for entry in entries:
        link = relpath(page_of(f"{path}/{entry.name}"), dirname(page_of(path)))
        name = f'<a href="{escape(link)}"><code>{escape(entry.name)}</code></a>'
        lines.append(f"<li>{name} {escape(_subject(entry))}</li>")
    return "<ul>\n" + "\n".join(lines) + "\n</ul>"


def _subject(path: Path) -> str:
    """The first paragraph of the docstring of a module or package."""
    file = path / "__init__.py" if path.is_dir() else path
    if file.suffix != ".py" or not file.exists():
        return ""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def _quote(file: Path) -> str:
    try:
        lexer = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(file.read_text(encoding="utf-8"), lexer, _formatter())


@cache
def _formatter() -> HtmlFormatter:
    return HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
