"""Events of MkDocs. The documents are written for a reader of the repository: their links lead to
other documents, to source files and to folders. The site has a page for each of these, and the
links of its copy of a document lead there.

    docs/fold.md      -> fold.html                   README.md -> index.html (BROUGHT)
    onchip/core/x.py  -> source/onchip/core/x.py.html          (sources.py)
    onchip.lab        -> lab/index.html, in a frame on lab.html
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from onchip.lab import page as lab_page
from onchip.lab import record
from website import sources

ROOT = Path(__file__).parents[1]
# Documents outside of docs/, and their pages.
BROUGHT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/data/README.md": "data.md",
    "onchip/models/tiny/MODEL_CARD.md": "model_card.md",
}
_ORIGINS = {page: document for document, page in BROUGHT.items()}
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
# [text](target#fragment), [name]: target, <img src="target"
_LINK = re.compile(
    r"""(\]\(|^\[[^]]+\]: |<img src=")([^)\s#"]+)(\#[^)\s"]*)?(?=[)"]|$)""", re.MULTILINE
)
_PIPE_IN_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
_LAB = "lab/index.html"
_FRAME = f'<iframe class="lab" data-src="{_LAB}" title="The lab: interactive figures"></iframe>'
_FRAME += f'\n\n<a href="{_LAB}">The lab on a page of its own</a>'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_slug
    return config


def github_slug(heading: str, separator: str) -> str:
    """The fragment that GitHub gives to a heading: links of the documents have it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    # 404.html and sitemap.xml need the address of the site, which works from any folder.
    config.theme.static_templates.clear()
    for document, page in BROUGHT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / document)))
    documents = [(_origin(f), f.content_string) for f in files.documentation_pages()]
    linked = {target for origin, text in documents for target in _targets(origin, text)}
    found = {path for path in linked - _documents(files) if (ROOT / path).exists()}
    made = sources.make_pages(ROOT, found)  # MkDocs warns of links to the others
    made["assets/pygments.css"] = sources.style()
    made[_LAB] = lab_page.assemble(record.record_figures())
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_) -> str:
    if page.file.src_uri == "lab.md":  # the picture is for readers without the site
        page.meta["hide"] = ["toc"]
        markdown = re.sub(r"!\[[^]]*\]\(lab\.png\)", _FRAME, markdown)
    documents = _documents(files)
    parts = _FENCE.split(markdown)  # prose and fenced blocks alternate
    parts[::2] = (_to_site(part, page.file, documents) for part in parts[::2])
    return "".join(parts)


def _to_site(prose: str, file: File, documents: set[str]) -> str:
    def replace(link: re.Match[str]) -> str:
        opening, target, fragment = link[1], link[2], link[3] or ""
        if "://" in target:
            return link[0]
        path = _page_of(_resolve(_origin(file), target), documents)
        return f"{opening}{relpath(path, dirname(file.src_uri) or '.')}{fragment}"

    # GitHub needs the backslash before | of code in a table; Python-Markdown would print it.
    prose = _PIPE_IN_CODE.sub(lambda code: code[0].replace("\\|", "|"), prose)
    return _LINK.sub(replace, prose)


def _page_of(target: str, documents: set[str]) -> str:
    """The path inside the site's sources of a file of the repository."""
    if target in BROUGHT:
        return BROUGHT[target]
    return target.removeprefix("docs/") if target in documents else sources.page_of(target)


def _origin(file: File) -> str:
    """The path in the repository of the document that a page is made of."""
    return _ORIGINS.get(file.src_uri, f"docs/{file.src_uri}")


def _documents(files: Files) -> set[str]:
    """The files of the repository, as paths in it, that are in the site as they are."""
    return {_origin(f) for f in files if f.generated_by is None} | set(BROUGHT)


def _targets(origin: str, text: str) -> set[str]:
    links = (m[2] for part in _FENCE.split(text)[::2] for m in _LINK.finditer(part))
    return {_resolve(origin, link) for link in links if "://" not in link}


def _resolve(origin: str, target: str) -> str:
    return normpath(f"{dirname(origin) or '.'}/{target}")
