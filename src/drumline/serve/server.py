"""The process that serves a run: its port, the engine's thread, and an end at which no answer is lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from drumline.chats import ChatTemplate
from drumline.config import Device
from drumline.errors import ConfigError, MissingExtraError
from drumline.generate import make_engine, writing_run
from drumline.network import Endpoint, bound, is_loopback
from drumline.serve.jobs import Limits, Service
from drumline.signals import counting

try:
    import uvicorn

    from drumline.serve.app import make_app
except ImportError as error:
    if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
        raise
    raise MissingExtraError("drumline serve", extra="serve") from error


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Where to serve, to whom, and how much."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    slots: int = 16
    """Texts that are generated at the same time."""
    limits: Limits

    def __post_init__(self) -> None:
        if not self.api_key and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets other machines use the model, and anyone there could",
                fix="add --api_key KEY (or set DRUMLINE_API_KEY), or serve this machine only: --host 127.0.0.1",
            )
        if self.slots < 1:
            raise ConfigError(f"{self.slots} slots leave no room for a text", fix="use --slots 1 or more")


def serve_run(
    path: Path, config: ServeConfig, *, device: Device, trusts: bool = False, say: Callable[[str], None]
) -> None:
    """Serve a run's newest checkpoint until a signal comes, and answer then what was asked before it.

    say: gets a line when the server is ready, and one when it stops
    """
    listener = bound(config.host, config.port)
    run = writing_run(path, device=device, trusts=trusts)
    template = ChatTemplate(run.tokenizer, run.folder.path)
    known = run.tokenizer.vocab_size
    engine = make_engine(run.model, slots=config.slots, context=run.context, ends=template.ends, vocabulary=known)
    name = run.folder.path.resolve().name
    service = Service(run, engine, template, name=name, limits=config.limits)
    where = Endpoint(config.host, listener.getsockname()[1])
    kind = next((p.device.type for p in run.model.parameters()), torch.device("cpu").type)
    ready = (
        f"serving {name} (step {run.step:,}, {kind}, {config.slots} slots) at http://{where}, API at http://{where}/v1"
    )
    thread = threading.Thread(target=engine.run, name="engine", daemon=True)
    thread.start()
    settings = uvicorn.Config(
        make_app(service, api_key=config.api_key or None),
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(config.limits.timeout_s) + 1,
    )
    try:
        _Server(settings, service, ready=lambda: say(ready), stopping=lambda: say(_STOPPING)).run(sockets=[listener])
    finally:
        engine.close()
        thread.join(timeout=10)


_STOPPING = "stopping after the answers that have begun; once more to stop at once"


class _Server(uvicorn.Server):
    """uvicorn, with signals that are handled as everywhere in drumline."""

    def __init__(
        self, config: uvicorn.Config, service: Service, *, ready: Callable[[], None], stopping: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service, self._ready, self._stopping = service, ready, stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        def stop() -> None:
            self.force_exit = self.should_exit
            self.should_exit = self._service.draining = True

        with counting(stop):
            yield
