"""The explorer in a real browser: views served on this machine, and pages of which all trouble is written down."""

import shutil
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="no explorer: pip install 'millstream[view]'")
pytest.importorskip("uvicorn", reason="no explorer: pip install 'millstream[view]'")
sys.path.insert(0, str(Path(__file__).parent))

import uvicorn

from millstream.view.server import HOST, make_app
from millstream.view.view import View

TOKEN = "token-of-the-tests"
QUIET = (  # a browser of its own accord asks its maker for news
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@dataclass
class Opened:
    """A page, and what went wrong or over the network. What a test provokes, it takes out of `trouble`."""

    page: Any
    trouble: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])

    def never_scrolls_sideways(self) -> bool:
        sizes = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        return sizes[0] <= sizes[1]


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    """Chromium. Of a module: Playwright's loop would be in the way of other tests in this process."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no browser tests: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser tests: chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def serve_views() -> Generator[Callable[[Sequence[View]], str]]:
    """serve_views([view, ...]) -> the address, with its token, that the first of them is at."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(views: Sequence[View]) -> str:
        listener = socket.create_server((HOST, 0))
        server = uvicorn.Server(uvicorn.Config(make_app(views, token=TOKEN, title="tested"), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://{HOST}:{listener.getsockname()[1]}/{TOKEN}/{views[0].name}/"

    yield serve
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(10)


@pytest.fixture
def open_page(browser: Any) -> Generator[Callable[..., Opened]]:
    """open_page(address, width=1440, scheme="light") -> Opened. Afterwards there must have been no trouble."""
    opened: list[tuple[str, Opened, Any]] = []

    def open_at(address: str, *, width: int = 1440, height: int = 900, scheme: str = "light") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(10_000)
        found = Opened(page)
        page.on("console", lambda message: found.trouble.append(message.text))
        page.on("pageerror", lambda error: found.trouble.append(str(error)))
        page.on("dialog", lambda dialog: found.trouble.append(dialog.message))
        page.on("request", lambda asked: found.requests.append(asked.url))
        page.goto(address)
        opened.append((address, found, context))
        return found

    yield open_at
    for _, _, context in opened:
        context.close()
    for address, found, _ in opened:
        home = address[: address.index(TOKEN)]
        assert found.trouble == []
        assert [url for url in found.requests if not url.startswith((home, "data:", "blob:"))] == []
