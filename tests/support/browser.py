"""Pages in a real browser: views served on this machine; errors and network requests are recorded.

`open_page(address)` opens one, `serve_views([view])` gives the address of a page of the explorer.
"""

import asyncio
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


@dataclass(frozen=True)
class Browser:
    """The page of this process, and the event loop that Playwright runs when it is used."""

    page: Any
    loop: asyncio.AbstractEventLoop


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


@pytest.fixture(scope="session")
def browser() -> Generator["Browser"]:
    """Chromium with one page for all tests of this process: starting it, or a page, takes seconds of computing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no browser tests: pip install playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser tests: chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(QUIET), timeout=PATIENCE_S * 1000)
        browser = Browser(launched.new_page(), asyncio.get_running_loop())
        asyncio._set_running_loop(None)
        yield browser
        asyncio._set_running_loop(browser.loop)
        launched.close()


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
def open_page(browser: Browser) -> Generator[Callable[..., Opened]]:
    """open_page(address, width=1440, scheme="light") -> Opened, once per test. At the end there must be no errors."""
    found, addresses = Opened(browser.page), list[str]()
    listeners: dict[str, Callable[[Any], None]] = {
        "console": lambda message: found.trouble.append(message.text),
        "pageerror": lambda error: found.trouble.append(str(error)),
        "dialog": lambda dialog: found.trouble.append(dialog.message),
        "request": lambda request: found.requests.append(request.url),
    }

    def open_at(address: str, *, width: int = 1440, height: int = 900, scheme: str = "light") -> Opened:
        assert not addresses
        addresses.append(address)
        found.page.mouse.move(0, 0)  # where nothing is to hover over
        found.page.set_viewport_size({"width": width, "height": height})
        found.page.emulate_media(color_scheme=scheme)
        found.page.goto(address)
        return found

    asyncio._set_running_loop(browser.loop)  # of Playwright; it would disturb other tests
    found.page.set_default_timeout(PATIENCE_S * 1000)
    for event, listener in listeners.items():
        found.page.on(event, listener)
    yield open_at
    if addresses:
        found.page.evaluate("localStorage.clear()")
    for event, listener in listeners.items():
        found.page.remove_listener(event, listener)
    found.page.goto("about:blank")
    asyncio._set_running_loop(None)
    assert found.trouble == []
    for address in addresses:
        home = address.partition(TOKEN)[0]  # for a file: its whole address
        assert [url for url in found.requests if not url.startswith((home, "data:", "blob:"))] == []
