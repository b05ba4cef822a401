"""A proxy in front of a server that can fall silent, as a frozen server and a pooler that hangs do: connections stay
open, what is sent is taken, and nothing comes back."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Proxy:
    """`silent` holds back every connection, new ones too; `forget()` lets only those that are open now stay silent."""

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._host, self._port = str(given.get("host") or "127.0.0.1"), int(given.get("port") or 5432)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self._listening.getsockname()[1])
        self.silent = threading.Event()
        self.opened = 0
        self._mute: set[socket.socket] = set()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """The connections that are open now never say anything again; others work."""
        self._mute |= set(self._pairs)
        self.silent.clear()

    def close(self) -> None:
        self._ended = True
        self._thread.join(10)
        for one in (*self._pairs, self._listening):
            one.close()

    def _run(self) -> None:
        self._selector.register(self._listening, selectors.EVENT_READ)
        while not self._ended:
            for key, _ in self._selector.select(0.02):
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._listening:
                    self._accept()
                elif self.silent.is_set() or source in self._mute:
                    # Read and dropped only from the client: the server's answers wait, as in a pooler that hangs.
                    self._selector.unregister(source)
                    threading.Thread(target=self._later, args=[source], daemon=True).start()
                else:
                    self._forward(source)

    def _later(self, source: socket.socket) -> None:
        while not self._ended and (self.silent.is_set() or source in self._mute):
            if source.fileno() < 0:
                return
            threading.Event().wait(0.02)
        with contextlib.suppress(OSError, ValueError, KeyError):
            self._selector.register(source, selectors.EVENT_READ)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        self.opened += 1
        if self._host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{self._host}/.s.PGSQL.{self._port}")
        else:
            server = socket.create_connection((self._host, self._port))
        for one, other in ((client, server), (server, client)):
            self._pairs[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, source: socket.socket) -> None:
        if (other := self._pairs.get(source)) is None:
            return  # its other side has just closed both
        try:
            data = source.recv(65536)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for one in (source, other):
            self._pairs.pop(one, None)
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._selector.unregister(one)
            one.close()


@contextlib.contextmanager
def in_front_of(dsn: str) -> Iterator[Proxy]:
    proxy = Proxy(dsn)
    try:
        yield proxy
    finally:
        proxy.close()
