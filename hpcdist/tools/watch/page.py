"""Serve a web page that shows runs while they train, protected by a token in its address."""

from __future__ import annotations

import hmac
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic_core import to_json

from hpcdist.errors import ConfigError
from hpcdist.tools.watch.view import ACTIVE, WatchedFolder, view

MAX_OPEN, LONGEST_S = 32, 10.0  # concurrent connections, and the seconds of each
DRAWN = 8  # runs whose curves are drawn by default: as many as the page has colours
PAGE = Path(__file__).with_name("page.html")
UPLOT = PAGE.with_name("uplot")  # plotting library, 1.6.32 from npm, unchanged; served without internet access
LOCAL = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(ThreadingHTTPServer):
    """A server of the page, and of the runs' state as JSON.

    Any user of a login node can reach its ports. The address therefore has a random token, as Jupyter's has; a request
    without it is refused. Files are read when a client asks, at most once per `every_s`. A connection is closed after
    LONGEST_S, or when there are MAX_OPEN newer ones. Raises ConfigError if the folder does not exist, or the address is
    not available.
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0, every_s: float = 2.0):
        self._watched, self._every_s = WatchedFolder(folder), every_s
        self._lock, self._read_at = threading.Lock(), -every_s
        self._host, self.token = host, secrets.token_urlsafe(24)
        self._open: dict[socket.socket, float] = {}  # start time of each connection, the oldest first
        try:
            super().__init__((host, port), _Request)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--host and --port must be an address of this machine that is free; got {host}:{port} ({error}). "
                "Omit them to take any free port."
            ) from None

    @property
    def address(self) -> str:
        """Return the page's address, with its token."""
        return f"http://{self._host}:{self.server_port}/{self.token}/"

    @property
    def tunnel(self) -> str | None:
        """Return the ssh command by which other machines reach the page; None if they already can."""
        port = self.server_port
        return f"ssh -L {port}:127.0.0.1:{port} {platform.node()}" if self._host in LOCAL else None

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serve requests until Ctrl-C."""
        with suppress(KeyboardInterrupt):
            super().serve_forever(poll_interval)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = time.monotonic()
        self._hang_up(list(self._open)[:-MAX_OPEN])
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that have lasted too long; called periodically while serving."""
        started_before = time.monotonic() - LONGEST_S
        self._hang_up([request for request, since in list(self._open.items()) if since < started_before])

    def _hang_up(self, requests: list[socket.socket]) -> None:
        for request in requests:
            self._open.pop(request, None)
            with suppress(OSError):  # already closed
                request.shutdown(socket.SHUT_RDWR)  # its thread reads end-of-file and closes it

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a client has disconnected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def state(self, chosen: str | None, drawn: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the state of all runs, with all details of the chosen run, or of the only one.

        Without a chosen run, the curves of the runs named in `drawn` are included, by default those of the first runs.
        """
        with self._lock:
            if time.monotonic() - self._read_at >= self._every_s:
                self._watched.update()
                self._read_at = time.monotonic()
            watched, views = self._watched, self._watched.views()
            current = chosen if chosen in watched.runs else next(iter(watched.runs)) if len(watched.runs) == 1 else None
            if drawn is None:
                drawn = sorted(watched.runs, key=lambda name: watched.runs[name].state not in ACTIVE)[:DRAWN]
            drawn_views = [view(name, run) for name, run in watched.runs.items() if current is None and name in drawn]
            return {
                "folder": str(watched.folder),
                "every_s": self._every_s,
                "ended": watched.ended,
                "planned": max(watched.planned, len(watched.runs)),
                "left_s": watched.left_s(views),
                "runs": views,
                "curves": {
                    run_view.name: {"loss": run_view.loss_curve, "metrics": run_view.metric_curves}
                    for run_view in drawn_views
                },
                "run": None if current is None else view(current, watched.runs[current]),
            }


def _page() -> bytes:
    """Return the page with uPlot and its licence inlined."""
    text, licence = PAGE.read_text("utf-8"), (UPLOT / "LICENSE").read_text("utf-8")
    for name in ("uPlot.min.css", "uPlot.iife.min.js"):
        text = text.replace(f"/* {name} */", f"/*\n{licence}\n*/\n{(UPLOT / name).read_text('utf-8')}")
    return text.encode()


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "hpcdist", ""

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:  # such as http://[
            return self._reply(HTTPStatus.BAD_REQUEST, "text/plain", b"The address must be one of HTTP.\n")
        _, token, *rest = [*url.path.split("/"), ""]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._reply(HTTPStatus.FORBIDDEN, "text/plain", b"The address must have the token that was printed.\n")
        elif rest[0] == "state.json":
            query = parse_qs(url.query, keep_blank_values=True)
            state = self.server.state(query.get("run", [None])[0], query.get("draw"))
            self._reply(HTTPStatus.OK, "application/json", to_json(state, inf_nan_mode="null"))
        elif url.path == f"/{token}/":
            self._reply(HTTPStatus.OK, "text/html; charset=utf-8", _page())
        else:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"There is nothing here.\n")

    def _reply(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the address contains the token."""
