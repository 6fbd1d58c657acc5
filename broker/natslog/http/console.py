"""The console in the browser: files of the package, and nothing from elsewhere.

The pages are ES modules that use the public API of this broker. A strict Content-Security-Policy lets a browser load
and send nothing but to the broker that served the page, and run no script but these files.

The page names its files under a path with a digest of all of them: a browser keeps them, and asks for the page only.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import web

from natslog.errors import NotFound
from natslog.http.endpoint import PlainCall

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_CHECKED = {"Cache-Control": "no-cache"}  # a browser asks whether its copy is current
_KEPT = {"Cache-Control": "public, max-age=31536000, immutable"}
_PAGE = "index.html"
_KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_VERSION = re.compile("[0-9a-f]{16}")
_LATER = ("vendor/arrow.js", "arrow-worker.js")  # loaded when a value is shown that needs it
LIBRARIES = "vendor/preact.js"
"""A file that is there if the libraries of the console were packaged."""


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


@cache
def files() -> dict[str, _File]:
    """By path, below `console/`."""
    return dict(_files(resources.files("natslog") / "console", ""))


@cache
def version() -> str:
    """Of all files together."""
    return hashlib.sha256("".join(sorted(file.tag for file in files().values())).encode()).hexdigest()[:16]


@cache
def page_file() -> _File:
    """The page, in which the paths of files have the version, with all modules: a browser requests them at once."""
    modules = [path for path in sorted(files()) if path.endswith(".js") and path not in _LATER]
    preloads = "".join(f'    <link rel="modulepreload" href="/console/{path}" />\n' for path in modules)
    text = files()[_PAGE].content.decode().replace("    <script", f"{preloads}    <script", 1)
    content = text.replace('"/console/', f'"/console/{version()}/').encode()
    return _File(content, "text/html", hashlib.sha256(content).hexdigest()[:32])


def _files(folder: Traversable, path: str) -> list[tuple[str, _File]]:
    found = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _files(entry, f"{path}{entry.name}/")
            continue
        suffix = "." + entry.name.rpartition(".")[2]
        kind = _KINDS.get(suffix) or mimetypes.guess_type(entry.name)[0] or "text/plain"
        content = entry.read_bytes()
        found.append((path + entry.name, _File(content, kind, hashlib.sha256(content).hexdigest()[:32])))
    return found


async def page(call: PlainCall) -> web.Response:
    """The console, for a browser

    The page shows what its address after # names.
    """
    return _answer(call.request, page_file() if LIBRARIES in files() else files()["unpackaged.html"], _CHECKED)


async def file(call: PlainCall) -> web.Response:
    """A file of the console

    Raises NotFound.
    """
    path = call.request.match_info["path"]
    stated, _, rest = path.partition("/")
    is_current = stated == version()
    if is_current or _VERSION.fullmatch(stated):  # of another version: a page that is open during an upgrade
        path = rest
    if (found := files().get(path)) is None:
        raise NotFound(f"the console has no file {path[:200]!r}")
    return _answer(call.request, found, _KEPT if is_current else _CHECKED)


def _answer(request: web.Request, found: _File, caching: Mapping[str, str]) -> web.Response:
    headers = {**_HEADERS, **caching, "ETag": f'"{found.tag}"'}
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    charset = None if found.kind.startswith("image/") else "utf-8"
    return web.Response(body=found.content, headers=headers, content_type=found.kind, charset=charset)
