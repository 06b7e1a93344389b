"""A stand-in for a server with OpenAI's completions API: it counts, and does on demand what real ones do now and then."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[dict[str, Any]] = []
        self.headers_seen: list[Any] = []
        self.mode = "count"
        self.gap_s = 0.002

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests; anything else is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "counter"}]}' if self.path == "/v1/models" else b"<html>"
        self._whole(200 if self.path == "/v1/models" else 404, body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append({"path": self.path, **asked})
        self.server.headers_seen.append(self.headers)
        if self.server.mode in ("429", "503", "400"):
            return self._whole(int(self.server.mode), b'{"error": {"message": "no, thank you"}}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        if self.server.mode == "a connection each":
            self.send_header("Connection", "close")
        self.end_headers()
        try:
            self._stream(asked)
        except OSError:
            self.close_connection = True  # the client hung up

    def _stream(self, asked: dict[str, Any]) -> None:
        count = asked["max_tokens"]
        for i in range(count):
            time.sleep(self.server.gap_s)
            if self.server.mode == "hang up" and i == 1:
                self.close_connection = True
                return
            if self.server.mode == "error" and i == 1:
                return self._end({"error": {"message": "out of memory"}})
            text = "" if self.server.mode == "pairs" and i % 2 == 0 else f"w{i} "
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "length" if i == count - 1 else None}
            if self.server.mode == "ids" and i % 2:
                choice["token_ids"] = [i, i]
            self._event({"choices": [choice]})
        prompt = asked["prompt"]
        usage = {"prompt_tokens": len(prompt.split()) if isinstance(prompt, str) else len(prompt), "completion_tokens": count}
        if self.server.mode == "ids":
            usage["completion_tokens"] = 0
        self._end({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 2}}})

    def _event(self, value: Any) -> None:
        data = f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _end(self, value: Any) -> None:
        self._event(value)
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
