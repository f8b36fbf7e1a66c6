"""Takes docs/report.png and docs/explorer.png of a finished demo: python docs/make_pictures.py [demo] [record]

Needs Playwright and Chromium. The explorer shows the given record of the store, with the alternatives of a token.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).parent
WIDTH = 1100


def main(demo: str = "demo", record: str = "2275") -> None:
    command = [sys.executable, "-m", "millstream", "view", f"{demo}/traces"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stderr
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            take_report(browser, Path(demo, "run", "report.html").resolve().as_uri())
            address = next(word for line in server.stderr for word in line.split() if word.startswith("http://"))
            take_explorer(browser, f"{address}#{record}")
        finally:
            browser.close()
            server.terminate()


def take_report(browser: Any, address: str) -> None:
    """The first finding, the figure, and the main detectors."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 860})
    page.goto(address)
    page.locator(".lead").evaluate("item => scrollTo(0, item.getBoundingClientRect().top + scrollY - 26)")
    page.screenshot(path=FOLDER / "report.png")


def take_explorer(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": WIDTH, "height": 860})
    page.goto(address)
    page.wait_for_timeout(20_000)  # scores after each layer are computed in the background
    page.locator(".tokens .answer").nth(1).focus()
    page.wait_for_timeout(500)
    page.screenshot(path=FOLDER / "explorer.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
