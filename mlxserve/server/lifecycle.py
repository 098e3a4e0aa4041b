"""From start to stop: the socket, signals, a bounded drain, and a process that ends when it must.

Knows: uvicorn and signals. Does not know what is served.

A first SIGTERM, SIGINT or SIGHUP begins the drain: /ready turns 503, new calls are refused, running ones get
drain_s; then engines are closed, which ends what is left with an error, and the process exits. A second
signal does not wait. An engine that cannot go on ends the process with exit code 70.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from mlxserve.config import ServerConfig
from mlxserve.errors import EngineStopped, UsageError
from mlxserve.server.answer import Service
from mlxserve.server.security import is_loopback

log = logging.getLogger("mlxserve.server")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
MOST_FILES = 10_240  # macOS's OPEN_MAX; it refuses more than that
_WATCH_S = 0.5
_LAST_WORDS_S = 2.0  # for connections to take their error once engines are closed


class Server(uvicorn.Server):
    """uvicorn's server with our own way to stop."""

    def __init__(self, app: Starlette, config: ServerConfig) -> None:
        self._config = config
        self._service: Service = app.state.service
        self._drain: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                timeout_graceful_shutdown=int(_LAST_WORDS_S),
                ssl_certfile=config.tls_certificate,
                ssl_keyfile=config.tls_key,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called by uvicorn around its main loop, in the loop's thread."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.stop)
        watch = asyncio.ensure_future(self._watch_engines())
        try:
            yield
        finally:
            watch.cancel()
            for number in STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """First call: drain. Second: now."""
        if self._drain is not None:
            self.force_exit = self.should_exit = True
            return
        self._service.draining = True
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        service = self._service
        if service.working:
            log.info("stopping; %d answers get up to %g s", service.working, self._config.drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                while service.working:
                    await asyncio.sleep(0.02)
        try:
            await service.models.close()
        finally:
            self.should_exit = True

    async def _watch_engines(self) -> None:
        """Ends the process when an engine has stopped for good, after callers got their errors."""
        while self._service.models.healthy:
            await asyncio.sleep(_WATCH_S)
        self._service.failed = "An engine has stopped and cannot go on."
        log.critical("%s Exiting.", self._service.failed)
        await asyncio.sleep(_WATCH_S)
        self.stop()


def bind(config: ServerConfig) -> socket.socket:
    """The socket, bound but not listening yet: until there is a server, callers are refused at once.

    Raises UsageError that names the address where it is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Cannot listen on {config.host} port {config.port}: {error.strerror or error}.", param="port"
        ) from None
    return listener


def check_tls(config: ServerConfig) -> None:
    """Raises UsageError where the certificate and its key cannot be used, so that no model is loaded in vain."""
    if config.tls_certificate is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password would be asked for on the terminal, where there may be none.
        context.load_cert_chain(config.tls_certificate, config.tls_key, password="")
    except OSError as error:
        files = f"{config.tls_certificate} and {config.tls_key}"
        raise UsageError(
            f"{files} are no certificate and key without a password: {error.strerror or error}.",
            param="tls_certificate",
        ) from None


def allow_many_connections() -> None:
    """Lets this process open as many files as it may: macOS begins with 256, fewer than there are clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a system that allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def warnings_for(config: ServerConfig) -> list[str]:
    """What a person should know before others reach this server."""
    made = []
    if not is_loopback(config.host) and not config.api_keys:
        made.append(
            f"Anyone who reaches {config.host} can use this server: it asks for no API key (--api-key)."
        )
    if not is_loopback(config.host) and config.tls_certificate is None:
        made.append("Traffic is not encrypted (--tls-certificate, --tls-key).")
    if "*" in config.cors_origins:
        made.append("Any web page may call this server (--cors-origin '*').")
    return made


async def serve(app: Starlette, config: ServerConfig, listener: socket.socket) -> None:
    """Serves until a signal. Raises EngineStopped where an engine could not go on."""
    server = Server(app, config)
    await server.serve(sockets=[listener])
    service: Service = app.state.service
    if service.failed is not None:
        raise EngineStopped(service.failed)
