"""What MkDocs is told beside mkdocs.yml: pages of sources, and the README's beginning.

Pages link to the repository's files as they lie there (`../loop/fit.py`), so that links work where the repository is
read, too. On the site, each such file becomes a page; `../tests/test_fit.py#test_name` leads to the line of that test.
"""

from __future__ import annotations

import ast
import html
import logging
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

LOG = logging.getLogger("mkdocs.hooks.links")
ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?:#([\w-]+))?(?=\))")
PICTURE = re.compile(r'(?<=\ssrc=")(?!\w+:|[/#])[^"]+|(?<=\ssrcset=")(?!\w+:|[/#])[^"]+')
TAG = re.compile(r"<[a-z][^<>]*>")
ADDRESS = re.compile(r'\s(?:href|src|srcset)="([^"]*)"')
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash"}
INTRODUCTION = "<!-- the first part of README.md -->"
EXAMPLES = ROOT / "examples" / "README.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of something else."""
    if EXAMPLES.exists():
        files.append(File.generated(config, "examples/README.md", abs_src_path=str(EXAMPLES)))
    pages = [*files.documentation_pages()]
    for page in pages:  # grows while it is gone through: a page of the repository may link to another one
        for link, _ in LINK.findall(introduced(page.content_string)) if links(page.src_uri) else ():
            path = meant(page.src_uri, link)
            uri = path and place(path)
            if path and uri.startswith("source/") and files.get_file_from_path(uri) is None:
                pages.append(File.generated(config, uri, content=source(path)))
                files.append(pages[-1])
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Puts the README's first part in its place, and turns links to files of the repository to their pages."""
    here = page.file.src_uri

    def turned(link: re.Match[str]) -> str:
        path = meant(here, link[1])
        if path is None:
            return link[0]
        target = os.path.relpath(place(path), Path(here).parent)
        if not link[2]:
            return target
        return f"{target}#" + (f"__codelineno-0-{line_of(path, link[2])}" if path.suffix == ".py" else link[2])

    def placed(picture: re.Match[str]) -> str:
        """MkDocs turns the addresses of Markdown alone: those of raw HTML are as from the page's own file."""
        path = meant(here, picture[0])
        return get_relative_url(place(path), page.url) if path else picture[0]

    return PICTURE.sub(placed, LINK.sub(turned, introduced(markdown))) if links(here) else markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Tells MkDocs of the lines of a source: it looks for links' targets before code is put in.

    Long names of tests may be broken at each underscore: tables of them would be wider than the page.
    """
    page.present_anchor_ids |= set(re.findall(r'id="(__codelineno-[\d-]+)"', html))
    return re.sub(r"(?<=<code>)test_\w+(?=</code>)", lambda name: name[0].replace("_", "_<wbr>"), html)


def on_post_build(config: Any) -> None:
    """Warns, which fails a strict build, of each address that leads nowhere: of pages, pictures, styles and anchors."""
    for text in broken(Path(config.site_dir)):
        LOG.warning(text)


def broken(site: Path) -> list[str]:
    """What the pages of a site refer to within the site, and what isn't there."""
    pages = {path: path.read_text() for path in sorted(site.rglob("*.html"))}
    anchors: dict[Path, set[str]] = {}
    found = []
    for path, text in pages.items():
        addresses = dict.fromkeys(each for tag in TAG.findall(text) for each in ADDRESS.findall(tag))
        for address in addresses:
            parts = urlsplit(html.unescape(address))
            if parts.scheme or parts.netloc:
                continue
            base = site if parts.path.startswith("/") else path.parent
            target = Path(os.path.normpath(base / unquote(parts.path).lstrip("/"))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            where = f"{path.relative_to(site)}: {address} leads nowhere"
            if not target.is_relative_to(site) or not target.is_file():
                found.append(where)
            elif parts.fragment and target in pages:
                if target not in anchors:
                    anchors[target] = set(re.findall(r'\s(?:id|name)="([^"]+)"', pages[target]))
                if unquote(parts.fragment) not in anchors[target]:
                    found.append(f"{where}: the page has no such anchor")
    return found


def introduced(markdown: str) -> str:
    """A page with the README's first part, behind title and first sentences, where it asks for it.

    Links in there are as from docs/.
    """
    if INTRODUCTION not in markdown:
        return markdown
    first = (ROOT / "README.md").read_text().split("\n## Four promises")[0].split("\n\n", 2)[2]
    first = re.sub(r"\]\((?!\w+:|#)([^)]+)", lambda link: f"]({os.path.relpath(link[1], 'docs')}", first)
    return markdown.replace(INTRODUCTION, first.replace('src="docs/', 'src="'))


def links(here: str) -> bool:
    """Whether what looks like a link on a page is one: not in source code."""
    return not here.startswith("source/") or here.endswith(".md.md")


def meant(here: str, link: str) -> Path | None:
    """The file or directory of the repository that a page links to."""
    base = ROOT / "docs" / here
    if here == "examples/README.md":
        base = EXAMPLES
    elif here.startswith("source/"):
        base = ROOT / here.removeprefix("source/")
    path = Path(os.path.normpath(base.parent / link))
    return path if path.is_relative_to(ROOT) and path.exists() else None


def place(path: Path) -> str:
    """The page that shows a file of the repository, below docs/."""
    if path == ROOT / "README.md":
        return "index.md"
    if path == EXAMPLES:
        return "examples/README.md"
    if path.is_relative_to(ROOT / "docs") and path.suffix != ".py":
        return path.relative_to(ROOT / "docs").as_posix()
    return f"source/{path.relative_to(ROOT).as_posix()}.md"


def line_of(path: Path, name: str) -> int:
    """The line at which a function or class of a file begins."""
    for node in ast.walk(ast.parse(path.read_text())):
        if getattr(node, "name", None) == name:
            return int(node.lineno)  # type: ignore[attr-defined]
    raise ValueError(f"{path} has no {name}")


def source(path: Path) -> str:
    """A page that shows a file, or the files of a directory."""
    head = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    if path.suffix == ".md":
        return head + path.read_text()
    parts = [f"{head}# {path.relative_to(ROOT).as_posix()}\n"]
    for each in [path] if path.is_file() else sorted(path.rglob("*")):
        if each.suffix in LANGUAGES or each == path:
            title = "" if each == path else f"## {each.relative_to(path).as_posix()}\n\n"
            fence = f'``````{{.{LANGUAGES.get(each.suffix, "text")} linenums="1"}}'
            parts.append(f"{title}{fence}\n{each.read_text().rstrip()}\n``````\n")
    return "\n".join(parts)
