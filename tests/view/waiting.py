"""Waiting for something to be so in a page."""

from typing import Any


def wait_until(page: Any, expression: str, arg: object = None) -> None:
    """Playwright's `wait_for_function` evaluates in the page, whose policy forbids that from the second look on."""
    for _ in range(500):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never so: {expression}")
