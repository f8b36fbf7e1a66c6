"""Pages in a real browser: views served on this machine; errors and network requests are recorded.

`open_page(address)` opens one, `serve_views([view])` gives the address of a page of the explorer.
"""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from support.effort import PATIENCE_S

if TYPE_CHECKING:
    from millstream.view import View

TOKEN = "token-of-the-tests"
QUIET = (  # no requests by the browser itself
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


@dataclass
class Opened:
    """A page, its errors and its requests. A test removes the errors it provokes from `trouble`."""

    page: Any
    trouble: list[str] = field(default_factory=list[str])
    requests: list[str] = field(default_factory=list[str])

    def never_scrolls_sideways(self) -> bool:
        sizes = self.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        return sizes[0] <= sizes[1]


def wait_until(page: Any, expression: str, arg: object = None) -> None:
    """Like Playwright's `wait_for_function`, which the content security policy of the page forbids."""
    end = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def browser() -> Generator[Any]:
    """Chromium, for one module: the event loop of Playwright would disturb other tests of the process."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no browser tests: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser tests: chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(QUIET), timeout=PATIENCE_S * 1000)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def serve_views() -> "Generator[Callable[[Sequence[View]], str]]":
    """serve_views([view, ...]) -> the address of the first view, with its token."""
    uvicorn: Any = pytest.importorskip("uvicorn", reason="no explorer: pip install 'millstream[view]'")
    from millstream.view.server import HOST, make_app

    running: list[tuple[Any, threading.Thread]] = []

    def serve(views: "Sequence[View]") -> str:
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
        thread.join(PATIENCE_S)


@pytest.fixture
def open_page(browser: Any) -> Generator[Callable[..., Opened]]:
    """open_page(address, width=1440, scheme="light") -> Opened. At the end there must be no errors."""
    opened: list[tuple[str, Opened, Any]] = []

    def open_at(address: str, *, width: int = 1440, height: int = 900, scheme: str = "light") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        found = Opened(page)
        page.on("console", lambda message: found.trouble.append(message.text))
        page.on("pageerror", lambda error: found.trouble.append(str(error)))
        page.on("dialog", lambda dialog: found.trouble.append(dialog.message))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(address)
        opened.append((address, found, context))
        return found

    yield open_at
    for _, _, context in opened:
        context.close()
    for address, found, _ in opened:
        home = address.partition(TOKEN)[0]  # for a file: its whole address
        assert found.trouble == []
        assert [url for url in found.requests if not url.startswith((home, "data:", "blob:"))] == []
