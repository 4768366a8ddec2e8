"""A TCP proxy that keeps every byte of both directions and can read the HTTP exchanges out of them."""
import http.client
import io
import socket
import threading
import time

READ_BYTES = 65536


class Connection:
    """One proxied connection. `closed_by_peer_at`: when the side that dialled us hung up."""

    def __init__(self):
        self.sent = bytearray()  # by whoever dialled
        self.answered = bytearray()  # by the target
        self.opened_at = time.monotonic()
        self.closed_by_peer_at = None
        self.done = threading.Event()


class Exchange:
    """One request and its answer, bodies decoded from their framing."""

    def __init__(self, method, path, headers, body, status, answer_headers, answer):
        self.method, self.path, self.headers, self.body = method, path, headers, body
        self.status, self.answer_headers, self.answer = status, answer_headers, answer


class Recorder:
    """Listens on a port of its own and forwards to `target` (host, port)."""

    def __init__(self, target):
        self.target = target
        self.connections = []
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            connection = Connection()
            with self.lock:
                self.connections.append(connection)
            try:
                target = socket.create_connection(self.target)
            except OSError:
                peer.close()
                connection.done.set()
                continue
            for end in (peer, target):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            up = threading.Thread(target=self._pump, args=(peer, target, connection, connection.sent, True), daemon=True)
            down = threading.Thread(target=self._pump, args=(target, peer, connection, connection.answered, False), daemon=True)
            up.start()
            down.start()
            threading.Thread(target=self._finish, args=(up, down, peer, target, connection), daemon=True).start()

    @staticmethod
    def _pump(source, sink, connection, kept, from_peer):
        try:
            while data := source.recv(READ_BYTES):
                kept += data
                sink.sendall(data)
        except OSError:
            pass
        if from_peer:
            connection.closed_by_peer_at = time.monotonic()
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    @staticmethod
    def _finish(up, down, peer, target, connection):
        up.join()
        # The dialling side is gone: so is the call.
        try:
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        down.join()
        peer.close()
        target.close()
        connection.done.set()

    def exchanges(self):
        """Every exchange that is complete in what was recorded, oldest connection first."""
        with self.lock:
            connections = list(self.connections)
        found = []
        for connection in connections:
            found += read_exchanges(bytes(connection.sent), bytes(connection.answered))
        return found

    def close(self):
        self.listener.close()


class _Bytes:
    """What http.client asks of a socket, over a reader that several messages share."""

    def __init__(self, reader):
        self.reader = reader

    def makefile(self, _mode):
        return self.reader


class _Shared(io.BytesIO):
    def close(self):  # http.client closes its file after each answer; the next one is still to come
        pass


def read_exchanges(sent, answered):
    requests, answers = _Shared(sent), _Shared(answered)
    found = []
    while True:
        line = requests.readline()
        if not line.endswith(b"\r\n"):
            return found
        method, path, _version = line.decode("ascii").split(" ", 2)
        headers = http.client.parse_headers(requests)
        body = read_body(requests, headers)
        response = http.client.HTTPResponse(_Bytes(answers), method=method)
        try:
            response.begin()
            answer = response.read()
        except (http.client.HTTPException, ValueError, OSError):
            return found
        found.append(Exchange(method, path, headers, body, response.status, response.headers, answer))


def read_body(reader, headers):
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = b""
        while size := int(reader.readline().split(b";")[0], 16):
            body += reader.read(size)
            reader.readline()
        reader.readline()
        return body
    return reader.read(int(headers.get("content-length", "0")))
