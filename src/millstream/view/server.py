"""Views -> web pages for this machine only: loopback, a random token in every address, no external resources."""

import hmac
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from millstream.core.registry import kind_at, kinds_with, plug
from millstream.core.remote import is_url
from millstream.errors import BadSetting, BadSource, MillstreamError, MissingExtra
from millstream.report import STYLE_SHEET, THEME
from millstream.training.folder import CONFIG, DATA, METRICS, PREDICTIONS, kind_of
from millstream.training.remote_run import local_run
from millstream.view import STATIC, Query, View, plain
from millstream.view.run_page import run_view

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import (
        FileResponse,
        HTMLResponse,
        JSONResponse,
        PlainTextResponse,
        RedirectResponse,
        Response,
    )
    from starlette.routing import Route
except ImportError:
    raise MissingExtra("The explorer needs starlette and uvicorn: pip install 'millstream[view]'") from None

HOST = "127.0.0.1"
# The report has its own script: it is shown in a frame without an origin, so that it cannot query the API.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_FILE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; sandbox allow-scripts"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def make_app(views: Sequence[View], *, token: str, title: str) -> Starlette:
    """The application: `/TOKEN/VIEW/` is a page, `/TOKEN/VIEW/api/NAME` a query, or an action if it is a
    POST; anything else is 404.
    """
    by_name = {view.name: view for view in views}
    folders = dict.fromkeys([STATIC, *(view.static for view in views)])
    static_files = {file.name: file for folder in folders for file in folder.iterdir()}
    static_files |= {file.name: file for file in (STYLE_SHEET, THEME)}

    def known(request: Request) -> bool:
        given = str(request.path_params["token"])
        name = request.headers.get("host", "").partition(":")[0].lower()
        local = name in (HOST, "localhost")  # any other name is a foreign site that resolves to this machine
        return local and hmac.compare_digest(given.encode(), token.encode())

    def guarded(handle: Callable[[Request], Response]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            response = handle(request) if known(request) else _missing()
            for name, value in _HEADERS.items():
                response.headers[name] = value
            response.headers.setdefault("Content-Security-Policy", _PAGE_POLICY)
            return response

        return answer

    def home(request: Request) -> Response:
        return RedirectResponse(f"/{token}/{views[0].name}/")

    def page(request: Request) -> Response:
        view = by_name.get(request.path_params["view"])
        if view is None:
            return _missing()
        body = (view.static / f"{view.name}.html").read_text()
        return HTMLResponse((STATIC / "page.html").read_text().format(view=view.name, body=body))

    def static(request: Request) -> Response:
        file = static_files.get(request.path_params["file"])
        return _missing() if file is None or file.suffix not in (".js", ".css") else FileResponse(file)

    def about(request: Request) -> Response:
        return JSONResponse({"title": title, "views": [{"name": view.name, "title": view.title} for view in views]})

    def answer(request: Request) -> Response:
        view = by_name.get(request.path_params["view"])
        if view is None:
            return _missing()
        query = (view.actions if request.method == "POST" else view.answers).get(request.path_params["name"])
        if query is None:
            return _missing()
        try:
            found = plain(query(Query(request.query_params)))
        except (MillstreamError, OSError, LookupError, ValueError) as error:
            return JSONResponse({"error": _sentence(error)}, status_code=400)
        body = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
        return Response(body, media_type="application/json")

    def whole_file(request: Request) -> Response:
        view = by_name.get(request.path_params["view"])
        place = None if view is None else view.files.get(request.path_params["name"])
        path = None if place is None else place()
        if path is None or not path.is_file():
            return _missing()
        return FileResponse(path, headers={"Content-Security-Policy": _FILE_POLICY})

    return Starlette(
        routes=[
            Route("/{token}/", guarded(home)),
            Route("/{token}/about", guarded(about)),
            Route("/{token}/static/{file}", guarded(static)),
            Route("/{token}/{view}/", guarded(page)),
            Route("/{token}/{view}/api/{name}", guarded(answer), methods=["GET", "POST"]),
            Route("/{token}/{view}/files/{name}", guarded(whole_file)),
        ]
    )


def serve(views: Sequence[View], *, port: int, title: str, notify: Callable[[str], None]) -> None:
    """Serve until interrupted. Port 0 is any free port."""
    token = secrets.token_urlsafe(16)
    with _listen(port) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/{token}/"
        server = uvicorn.Server(uvicorn.Config(make_app(views, token=token, title=title), log_level="warning"))
        notify(f"{title}: {address} (Ctrl-C to stop)")
        try:
            server.run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn has shut down and raises the signal again
            pass
    notify("stopped")


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise BadSetting(f"--port {port}: cannot listen on it ({error}); leave it out to use any free port") from None
    listener.listen(64)
    return listener


def _missing() -> Response:
    return PlainTextResponse(
        "Not found. Use the address that millstream view printed, with its token.\n", status_code=404
    )


def _sentence(error: BaseException) -> str:
    text: Any = error.args[0] if isinstance(error, KeyError | IndexError) and error.args else error
    return " ".join(str(text).split())


class KindView(Protocol):
    """How a kind of record plugs into the explorer: the module `millstream.KIND.view`."""

    def view_of(
        self, path: Path, *, run: Path | None = None, tokenizer: str | None = None, mapping: Path | None = None
    ) -> View:
        """The page of the records at a path, with the scores of a run, or the names of classes in a mapping."""
        ...

    def records_of(self, run: Path) -> Path | None:
        """Where the records are that a run was trained on; None if they cannot be shown with its scores."""
        ...


def views_of(
    path: Path,
    *,
    run: Path | None = None,
    tokenizer: str | None = None,
    mapping: Path | None = None,
    label: bool = False,
    notify: Callable[[str], None],
) -> list[View]:
    """The views of records or of a run folder, that of the path first; with `label`, before it one to judge answers."""
    if label:
        make = None if is_run(path) else getattr(_view_of_kind(kind_at(path)), "labelling_view_of", None)
        if make is None:
            raise BadSetting(f"--label: {path} has no answers to judge. Give a trace store")
        return [make(path), *views_of(path, run=run, tokenizer=tokenizer, mapping=mapping, notify=notify)]
    if mapping is not None and (is_run(path) or _kind_of_output(path) is not None):
        raise BadSetting(f"--mapping {mapping}: {path} has the names of its classes; use --mapping with reads")
    if is_run(path):
        path = local_run(path)
        if run is not None:
            raise BadSetting(f"--run {run}: {path} is a run itself; use --run with the records a run was trained on")
        return [run_view(path), *_views_of_records(path, tokenizer, notify)]
    if (kind := _kind_of_output(path)) is not None:
        if run is not None:
            raise BadSetting(f"--run {run}: {path} is an output, which is shown as it is")
        return [plug(kind, "view").output_view_of(path)]
    if run is not None and not is_run(run):
        raise BadSource(f"--run {run}: not a run of millstream train")
    kind = kind_at(path)
    if kind not in kinds_with("view") and not is_url(path) and not path.exists():
        raise BadSource(f"{path}: no such file or folder")
    shown = _view_of_kind(kind)
    found = local_run(run) if run is not None else None if is_url(path) else find_run(path)
    if found is not None and run is None:
        notify(f"showing the scores of {found}; for another run: --run FOLDER")
    records = shown.view_of(path, run=found, tokenizer=tokenizer, mapping=mapping)
    return [records] if found is None else [records, run_view(found)]


def _kind_of_output(path: Path) -> str | None:
    """The kind whose commands wrote this file, if it can be shown."""
    if is_url(path) or not path.is_file():
        return None
    asked = ((kind, getattr(plug(kind, "kind"), "is_output", None)) for kind in kinds_with("view"))
    return next((kind for kind, is_output in asked if is_output and is_output(path)), None)


def is_run(path: Path) -> bool:
    return path.is_dir() and (path / CONFIG).is_file() and ((path / METRICS).exists() or (path / DATA).exists())


def find_run(records: Path) -> Path | None:
    """The newest run next to the records, or in a folder next to them, that was trained on them."""
    around = records.resolve().parent
    cards = [card for pattern in (f"*/{DATA}", f"*/*/{DATA}") for card in around.glob(pattern)]
    runs = [card.parent for card in cards if (card.parent / PREDICTIONS).exists()]
    kind = kind_at(records)
    shown = _view_of_kind(kind)
    ours = [run for run in runs if kind_of(run) == kind and shown.records_of(run) == records.resolve()]
    return max(ours, key=lambda run: (run / PREDICTIONS).stat().st_mtime, default=None)


def _views_of_records(run: Path, tokenizer: str | None, notify: Callable[[str], None]) -> list[View]:
    """The view of the records a run was trained on, if they are still there."""
    shown = _view_of_kind(kind_of(run))
    records = shown.records_of(run)
    if records is None:
        return []
    try:
        return [shown.view_of(records, run=run, tokenizer=tokenizer)]
    except (MillstreamError, OSError) as error:
        notify(f"cannot show the records of this run: {error}")
        return []


def _view_of_kind(kind: str) -> KindView:
    return cast(KindView, plug(kind, "view"))
