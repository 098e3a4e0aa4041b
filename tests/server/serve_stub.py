"""A server process with a stub engine, for tests of signals and of TLS.

python -m tests.server.serve_stub PORT DRAIN_S [PEM]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mlxserve.config import ServerConfig
from mlxserve.errors import MlxServeError
from mlxserve.server.app import make_app
from mlxserve.server.lifecycle import bind, serve
from mlxserve.server.models import ModelRegistry
from tests.server.stub import StubEngine, StubLoader


class Dying(StubEngine):
    """Dies at the word 'die' in a prompt."""

    async def generate(self, request):  # type: ignore[no-untyped-def]
        if "die" in self.tokenizer.decode(request.prompt):
            self.dead = True
        async for delta in super().generate(request):
            yield delta


async def main(port: int, drain_s: float, pem: Path | None) -> None:
    loader = StubLoader()
    engine = loader.add(Dying())
    engine.script = ["tick ", 0.05] * 30
    config = ServerConfig(port=port, drain_s=drain_s, tls_certificate=pem, tls_key=pem)
    models = ModelRegistry(loader, 1000)
    app = make_app(config, models)
    listener = bind(config)
    print(listener.getsockname()[1], flush=True)
    await models.preload("stub")
    await serve(app, config, listener)


if __name__ == "__main__":
    try:
        port, drain_s, *pem = sys.argv[1:]
        asyncio.run(main(int(port), float(drain_s), Path(pem[0]) if pem else None))
    except MlxServeError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
