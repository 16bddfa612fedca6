"""Comfy page: listens to what ComfyUI tells its page, over a plain WebSocket."""

import json
import socket
from types import TracebackType

_TEXT, _BINARY = 1, 2  # kinds of WebSocket messages
_PROGRESS_TEXT = 3  # kind of ComfyUI's binary events
_HANDSHAKE = (
    "GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class PageListener:
    """Connected to a ComfyUI; what runs from now on is heard."""

    def __init__(self, port: int):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._stream = self._socket.makefile("rb")
        self.events: dict[str, list] = {}  # type -> data, of the last prompt
        self._socket.sendall(_HANDSHAKE.encode())
        answer = self._stream.readline()
        assert b" 101 " in answer, answer
        while self._stream.readline().strip():
            pass
        self._message()  # how long the queue is: ComfyUI has registered us

    def __enter__(self) -> "PageListener":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()
        self._socket.close()

    def texts_of_one_prompt(self) -> list[tuple[str, str]]:
        """(node, text) of each progress text until the one prompt that was queued is done."""
        texts, was_queued = [], False
        self.events = {}
        while True:
            kind, data = self._message()
            if kind == _TEXT:
                event = json.loads(data)
                self.events.setdefault(event["type"], []).append(event["data"])
                if event["type"] != "status":
                    continue
                remaining = event["data"]["status"]["exec_info"]["queue_remaining"]
                if was_queued and not remaining:
                    return texts
                was_queued |= remaining > 0
            elif kind == _BINARY and int.from_bytes(data[:4], "big") == _PROGRESS_TEXT:
                end = 8 + int.from_bytes(data[4:8], "big")
                texts.append((data[8:end].decode(), data[end:].decode()))

    def _message(self) -> tuple[int, bytes]:
        """(kind, content) of the next one; ComfyUI never splits or masks them."""
        first, size = self._stream.read(2)
        assert first & 0x80, "a message in parts"
        if size >= 126:
            size = int.from_bytes(self._stream.read(2 if size == 126 else 8), "big")
        return first & 0x0F, self._stream.read(size)
