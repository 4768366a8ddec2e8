#!/usr/bin/env python3
"""A node agent for the Edge-Node contract, written from docs/contract and proto/iop alone.

It is a library for conformance.py and a small agent of its own:

    python agent.py --edge 127.0.0.1:7443 --node-id gpu-1 --edge-name edge-1 --trust-domain iop.example \\
                    --ca pki/ca.crt --cert pki/gpu-1.crt --key pki/gpu-1.key [--old]

What it serves comes from the request body, a JSON object whose "do" names a behaviour (class Provider).
It can also be told to break every rule it keeps otherwise; those are the `raw` calls of Session and
the `seq`, `kind` and `raw` arguments of Tunnel.

The protobuf code is generated when this module is first used, from proto/iop/*.proto, into a
directory below target/ (or $CONFORMANCE_GEN). Nothing generated is kept in the tree.
"""

import argparse
import hashlib
import importlib
import json
import os
import pathlib
import socket
import ssl
import struct
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALPN = "iop-edge-node/1"
MAX_RECORD = 16384


# ---------------------------------------------------------------- generated code

def generate():
    """The modules of runtime.proto and transport.proto, generated if the protos changed."""
    from grpc_tools import protoc

    protos = sorted((ROOT / "proto" / "iop").glob("*.proto"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in protos)).hexdigest()[:16]
    base = pathlib.Path(os.environ.get("CONFORMANCE_GEN", ROOT / "target" / "conformance-gen"))
    out = base / digest
    if not (out / "done").exists():
        base.mkdir(parents=True, exist_ok=True)
        fresh = pathlib.Path(tempfile.mkdtemp(dir=base))
        include = pathlib.Path(protoc.__file__).parent / "_proto"
        code = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{include}", f"--python_out={fresh}", *map(str, protos)])
        if code != 0:
            raise SystemExit(f"protoc ended with {code}")
        (fresh / "done").write_text("")
        try:
            fresh.rename(out)
        except OSError:  # another process was faster
            if not (out / "done").exists():
                raise
    sys.path.insert(0, str(out))
    return importlib.import_module("iop.runtime_pb2"), importlib.import_module("iop.transport_pb2")


rt, tp = generate()
TYPES = {m.DESCRIPTOR.full_name: m for m in [
    *(getattr(rt, name) for name in rt.DESCRIPTOR.message_types_by_name),
    *(getattr(tp, name) for name in tp.DESCRIPTOR.message_types_by_name),
]}
START, BODY, END, ERROR, USAGE = 1, 2, 3, 4, 5
CAPABILITIES, TRANSPORT_STATUS, PROVIDER_STATUS = 1, 2, 3
APPLIED, RESTART_REQUIRED, FAILED = 1, 2, 3
# What an Edge may send to a node; anything else is a fault of the Edge.
EDGE_SENDS = {
    "iop.RegisterResponse", "iop.NodeReadyResponse", "iop.RunRequest", "iop.ProviderTunnelRequest", "iop.CancelRequest",
    "iop.NodeCommandRequest", "iop.NodeConfigRefreshRequest", "iop.transport.Ping", "iop.transport.Pong",
    "iop.transport.GoAway", "iop.transport.Window",
}
# What may not come before ready=true.
AFTER_READY = {"iop.RunRequest", "iop.ProviderTunnelRequest", "iop.CancelRequest", "iop.NodeCommandRequest",
               "iop.NodeConfigRefreshRequest", "iop.transport.GoAway", "iop.transport.Window"}


# ---------------------------------------------------------------- encoding, in every legal way

def varint(value, pad=0):
    """A varint; with `pad`, longer than it has to be, which every decoder must accept."""
    out = bytearray()
    while True:
        low, value = value & 0x7F, value >> 7
        if value:
            out.append(low | 0x80)
        elif pad > len(out):
            out.append(low | 0x80)
            out.extend(b"\x80" * (pad - len(out) - 1) + b"\x00")
            return bytes(out)
        else:
            out.append(low)
            return bytes(out)


def read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def key(number, kind):
    return varint(number << 3 | kind)


def length_delimited(number, data, pad=0):
    return key(number, 2) + varint(len(data), pad) + data


def fields(data):
    """Top-level fields of an encoded message: (number, wire type, value bytes), in order."""
    at, out = 0, []
    while at < len(data):
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, end = read_varint(data, at)
        elif kind == 1:
            end = at + 8
        elif kind == 5:
            end = at + 4
        else:
            size, at = read_varint(data, at)
            end = at + size
        out.append((tag >> 3, kind, data[at:end]))
        at = end
    return out


# Fields nobody has defined, in every wire type, groups included.
UNKNOWN = (key(1900, 0) + varint(1 << 63), length_delimited(1901, b"\xff\x00 not utf-8"), key(1902, 1) + b"\x01" * 8,
           key(1903, 5) + b"\x02" * 4, key(1904, 3) + key(1, 0) + b"\x05" + key(1904, 4))


@dataclass(frozen=True)
class Style:
    """How messages are put on the wire. Every combination is legal."""
    reverse: bool = False   # fields in descending order of their numbers
    unknown: bool = False   # unknown fields before, between and after the known ones
    pad: int = 0            # length prefixes inside messages take at least this many bytes, 5 at most
    record: int = 0         # application bytes per TLS record; 0 is one record per message
    segment: int = 0        # ciphertext bytes per write to the TCP socket; 0 is one write

    def encode(self, message):
        if not (self.reverse or self.unknown or self.pad):
            return message.SerializeToString(deterministic=True)
        groups = {}
        for number, kind, value in fields(message.SerializeToString(deterministic=True)):
            head = key(number, kind) + (varint(len(value), self.pad) if kind == 2 else b"")
            groups.setdefault(number, []).append(head + value)
        ordered = [b"".join(groups[n]) for n in sorted(groups, reverse=self.reverse)]
        if not self.unknown:
            return b"".join(ordered)
        out = [UNKNOWN[0]]
        for at, chunk in enumerate(ordered):
            out += [chunk, UNKNOWN[(at + 1) % len(UNKNOWN)]]
        return b"".join(out + list(UNKNOWN[1:]))


PLAIN = Style()


def frame(envelope_bytes):
    """What goes on the stream: four bytes of length, big end first, then the envelope."""
    return struct.pack(">I", len(envelope_bytes)) + envelope_bytes


# ---------------------------------------------------------------- the session

class Closed(Exception):
    """The Edge ended the connection."""


class Late(Exception):
    """Something did not come in time."""


@dataclass
class Received:
    id: int
    reply_to: int
    type: str
    message: object
    raw: bytes = field(repr=False, default=b"")


class Session:
    """One connection to an Edge. A thread reads, answers pings and keeps the heartbeat; whoever owns
    the session sends and waits. TLS runs over memory buffers, so that records and TCP segments can be
    cut anywhere and reading never disturbs writing."""

    def __init__(self, address, *, ca=None, cert=None, key=None, alpn=ALPN, expect=None, style=PLAIN,
                 ping_every=0.4, mute=False, auto=True, tls=True, tls_max=None, timeout=5.0):
        self.style, self.ping_every, self.mute = style, ping_every, mute
        self.auto = {"command", "refresh"} if auto is True else set(auto or ())  # what is answered without being told
        self.inbox, self.cursor = [], 0
        self.changed = threading.Condition()
        self.closed = None          # why, once it is
        self.faults = []            # rules the Edge has broken on this connection
        self.runs, self.cancels = {}, {}
        self.accepted = self.ready = False
        self.paces = False          # Features{window:true} was sent on this connection
        self.paused = False         # stop reading the socket
        self.trace = None           # a list that takes ("out" | "in", framed envelope)
        self.observations = 0
        self.health = lambda adapter, target: "available"
        self.provider = None
        self._next_id, self._pings = 0, 0
        self._write_lock, self._tls_lock = threading.RLock(), threading.Lock()
        self._cork = None
        self._last_write = time.monotonic()
        self.sock = socket.create_connection(address, timeout=timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.tls = None
        try:
            if tls:
                self._handshake(ca, cert, key, alpn, tls_max, timeout)
                self._check_edge(expect, alpn)
        except BaseException:
            self.sock.close()
            raise
        self.sock.settimeout(0.1)
        self._reader = threading.Thread(target=self._read, name="agent-reader", daemon=True)
        self._reader.start()

    # TLS 1.3 on both sides with certificates; the name in the certificate is a URI, not a host.
    def _handshake(self, ca, cert, key, alpn, tls_max, timeout):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ca)
        if tls_max:
            context.maximum_version = tls_max
        else:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        if cert:
            context.load_cert_chain(cert, key)
        if alpn:
            context.set_alpn_protocols([alpn])
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out)
        deadline = time.monotonic() + timeout
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush_tls()
                self.sock.settimeout(max(0.01, deadline - time.monotonic()))
                data = self.sock.recv(65536)
                if not data:
                    raise Closed("end of stream during the handshake")
                self._in.write(data)
            except ssl.SSLError:
                self._flush_tls()
                raise
        self._flush_tls()

    def _flush_tls(self):
        with self._write_lock:
            with self._tls_lock:
                data = self._out.read()
            if data:
                self.sock.sendall(data)

    def _check_edge(self, expect, alpn):
        if alpn and self.tls.selected_alpn_protocol() != alpn:
            raise Closed(f"the Edge chose ALPN {self.tls.selected_alpn_protocol()!r}")
        if expect:
            names = [value for kind, value in self.tls.getpeercert().get("subjectAltName", ()) if kind == "URI"]
            if names != [expect]:
                raise Closed(f"the Edge's certificate says {names}, not {expect}")

    # ---- reading

    def _read(self):
        pending = bytearray()
        why = None
        while why is None:
            if self.paused:
                with self.changed:
                    self.changed.wait_for(lambda: not self.paused or self.closed, 0.1)
                    if self.closed:
                        return
                try:
                    self._beat()  # it does not read, and is not dead
                except OSError:
                    pass
                continue
            try:
                self._beat()
                data = self.sock.recv(262144)
            except socket.timeout:
                continue
            except OSError as error:
                why = "reset" if isinstance(error, ConnectionError) else f"socket: {error}"
                break
            if not data:
                why = "end of stream"
            elif self.tls is None:
                pending += data
            else:
                with self._tls_lock:
                    self._in.write(data)
                    try:
                        while True:
                            plain = self.tls.read(65536)
                            if not plain:
                                why = "close_notify"
                                break
                            pending += plain
                    except ssl.SSLWantReadError:
                        pass
                    except ssl.SSLZeroReturnError:
                        why = "close_notify"
                    except ssl.SSLError as error:
                        why = f"tls: {error.reason or error}"
            while len(pending) >= 4:
                size = struct.unpack_from(">I", pending)[0]
                if len(pending) < 4 + size:
                    break
                raw = bytes(pending[:4 + size])
                del pending[:4 + size]
                try:
                    self._take(raw)
                except OSError as error:
                    why = why or f"socket: {error}"
                except Exception as error:  # an undecodable envelope of the Edge is its fault
                    self.faults.append(f"undecodable envelope: {error!r}")
        if pending:
            self.faults.append(f"{len(pending)} bytes of an unfinished envelope before the end")
        with self.changed:
            self.closed = self.closed or why
            self.changed.notify_all()

    def _beat(self):
        if not self.mute and self.ping_every and time.monotonic() - self._last_write > self.ping_every:
            if self._write_lock.acquire(blocking=False):  # otherwise somebody is writing: it is not silent
                try:
                    self._pings += 1
                    self.send(tp.Ping(seq=self._pings))
                finally:
                    self._write_lock.release()

    def _take(self, raw):
        envelope = tp.Envelope.FromString(raw[4:])
        if self.trace is not None:
            self.trace.append(("in", raw))
        kind = TYPES.get(envelope.type)
        message = kind.FromString(envelope.payload) if kind else None
        item = Received(envelope.id, envelope.reply_to, envelope.type, message, raw)
        self._judge(item)
        if item.type == "iop.transport.Ping" and not self.mute:
            self.send(tp.Pong(seq=message.seq))
        elif item.type == "iop.NodeCommandRequest" and "command" in self.auto:
            self.answer_command(item)
        elif item.type == "iop.NodeConfigRefreshRequest" and "refresh" in self.auto:
            self.answer_refresh(item)
        tunnel = None
        with self.changed:
            if item.type == "iop.ProviderTunnelRequest":
                tunnel = self.runs[message.run_id] = Tunnel(self, message)
            elif item.type == "iop.RunRequest":
                self.runs[message.run_id] = Tunnel(self, message)
            elif item.type == "iop.CancelRequest" and message.run_id in self.runs:
                self.runs[message.run_id].cancelled.set()
            elif item.type == "iop.transport.Window" and message.run_id in self.runs:
                self.runs[message.run_id].grants.append(message.bytes)
            self.inbox.append(item)
            self.changed.notify_all()
        if tunnel and self.provider:
            threading.Thread(target=self.provider.serve, args=(tunnel,), daemon=True).start()

    def _judge(self, item):
        """Rules that an Edge keeps on every connection, whatever the case is about."""
        message = item.message
        if item.type not in EDGE_SENDS:
            self.faults.append(f"{item.type} is not an Edge's to send")
        if item.type in AFTER_READY and not self.ready:
            self.faults.append(f"{item.type} before ready=true")
        if item.type == "iop.RegisterResponse":
            if message.accepted == bool(message.reason) or message.accepted != message.HasField("config"):
                self.faults.append(f"RegisterResponse that is neither accepted nor refused: {message}")
            self.accepted |= message.accepted
        elif item.type == "iop.NodeReadyResponse":
            if message.ready == bool(message.reason):
                self.faults.append(f"NodeReadyResponse ready={message.ready} with reason {message.reason!r}")
            self.ready |= message.ready
        elif item.type in ("iop.ProviderTunnelRequest", "iop.RunRequest"):
            if message.run_id in self.runs:
                self.faults.append(f"run id {message.run_id} twice")
            if len(message.run_id) != 32 or set(message.run_id) - set("0123456789abcdef"):
                self.faults.append(f"run id {message.run_id!r} is not 32 lower-case hex digits")
        elif item.type == "iop.CancelRequest":
            if message.run_id not in self.runs:
                self.faults.append(f"cancel of {message.run_id!r}, which was never requested")
            self.cancels[message.run_id] = self.cancels.get(message.run_id, 0) + 1
            if self.cancels[message.run_id] > 1:
                self.faults.append(f"{message.run_id} cancelled twice")
        elif item.type == "iop.transport.Window":
            # wire.md 4.2: only to those who asked, only for a request that has begun, totals that never shrink
            run = self.runs.get(message.run_id)
            why = ("to a node that did not send Features{window:true}" if not self.paces else
                   "for a run that was never requested" if run is None else
                   "for a normalized run" if isinstance(run.request, rt.RunRequest) else
                   f"that shrinks: {run.grants[-1]}, then {message.bytes}" if run.grants and message.bytes < run.grants[-1] else
                   "for a run that the Edge has cancelled" if message.run_id in self.cancels else
                   "with an id, which is one-way" if item.id or item.reply_to else None)
            if why:
                self.faults.append(f"Window {why}")

    def wait(self, what, want, timeout=5.0, keep=False):
        """The next received envelope for which `want` holds; those before it stay for other waits."""
        deadline = time.monotonic() + timeout
        seen = 0
        with self.changed:
            while True:
                while seen < len(self.inbox):
                    item = self.inbox[seen]
                    if item is not None and want(item):
                        if not keep:
                            self.inbox[seen] = None
                        return item
                    seen += 1
                if self.closed:
                    raise Closed(f"waiting for {what}: connection ended ({self.closed})")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Late(f"no {what} within {timeout} s")
                self.changed.wait(left)

    def next(self, name, timeout=5.0):
        full = name if "." in name else "iop." + name
        return self.wait(full, lambda item: item.type == full, timeout).message

    def reply(self, request_id, timeout=5.0):
        return self.wait(f"the answer to {request_id}", lambda item: item.reply_to == request_id, timeout)

    def has(self, name):
        with self.changed:
            return any(item is not None and item.type == "iop." + name for item in self.inbox)

    def wait_closed(self, timeout=5.0):
        with self.changed:
            if not self.changed.wait_for(lambda: self.closed, timeout):
                raise Late(f"the connection was not closed within {timeout} s")
        return self.closed

    # ---- writing

    def send(self, message, reply_to=0, request=False, style=None):
        """Sends one message in this session's style; returns the envelope id of a request."""
        style = style or self.style
        self.paces |= isinstance(message, tp.Features) and message.window
        with self._write_lock:
            number = 0
            if request:
                self._next_id += 1
                number = self._next_id
            self.send_payload(message.DESCRIPTOR.full_name, style.encode(message), number, reply_to, style)
            return number

    def send_payload(self, name, payload, number=0, reply_to=0, style=None):
        style = style or self.style
        envelope = tp.Envelope(id=number, reply_to=reply_to, type=name, payload=payload)
        self.raw(frame(style.encode(envelope)), style)

    def raw(self, data, style=None):
        """Application bytes as they are."""
        style = style or self.style
        with self._write_lock:
            if self._cork is not None:
                self._cork.append(data)
                return
            if self.trace is not None:
                self.trace.append(("out", data))
            self._write(data, style)

    def _write(self, data, style):
        # In turns of a mebibyte: the Edge must see bytes while a large message is still being encrypted.
        turn, data = (style.record or MAX_RECORD) * 64, memoryview(data)
        for begin in range(0, len(data), turn):
            self._last_write = time.monotonic()
            cipher = part = data[begin:begin + turn]
            if self.tls is not None:
                step = style.record or MAX_RECORD
                with self._tls_lock:
                    for at in range(0, len(part), step):
                        self.tls.write(part[at:at + step])
                    cipher = self._out.read()
            step = style.segment or len(cipher) or 1
            view = memoryview(cipher)
            for at in range(0, len(cipher), step):
                self._send_all(view[at:at + step])

    def _send_all(self, view):
        # The socket's timeout is the reader's; a writer waits for the Edge as long as it reads.
        deadline = time.monotonic() + 20
        while view:
            try:
                view = view[self.sock.send(view):]
            except socket.timeout:
                if time.monotonic() > deadline:
                    raise

    def raw_tcp(self, data):
        """Bytes on the TCP socket, past TLS."""
        with self._write_lock:
            self._send_all(memoryview(data))

    class _Corked:
        def __init__(self, session):
            self.session = session

        def __enter__(self):
            self.session._write_lock.acquire()
            self.session._cork = []

        def __exit__(self, *_):
            data = b"".join(self.session._cork)
            self.session._cork = None
            try:
                self.session.raw(data)
            finally:
                self.session._write_lock.release()

    def corked(self):
        """Everything sent inside goes out together: as few records as possible, in one write."""
        return Session._Corked(self)

    class _Alone:
        def __init__(self, session):
            self.session, self.mute = session, session.mute

        def __enter__(self):
            self.session.mute = True
            self.session._write_lock.acquire()

        def __exit__(self, *_):
            self.session._write_lock.release()
            self.session.mute = self.mute

    def alone(self):
        """Nobody else writes, and no ping or pong stands inside of an envelope that is written in parts. What is
        received meanwhile is still taken in."""
        return Session._Alone(self)

    # ---- the steps of an agent

    def register(self, node_id, timeout=5.0, **extra):
        """Sends RegisterRequest; returns the answer."""
        number = self.send(rt.RegisterRequest(node_id=node_id, node_version="conformance", **extra), request=True)
        item = self.reply(number, timeout)
        if item.type != "iop.RegisterResponse":
            self.faults.append(f"a register was answered by {item.type}")
        if item.message.accepted:
            self.node_id, self.config = item.message.node_id, item.message.config
        return item.message

    def send_ready(self, node_id=None):
        return self.send(rt.NodeReadyRequest(node_id=self.node_id if node_id is None else node_id), request=True)

    def make_ready(self, node_id=None, timeout=5.0):
        return self.reply(self.send_ready(node_id), timeout).message

    def ping(self, timeout=5.0):
        """A round trip: what the Edge had to say before it has arrived when this returns."""
        with self._write_lock:
            self._pings += 1
            seq = 1_000_000 + self._pings
            self.send(tp.Ping(seq=seq))
        self.wait("pong", lambda item: item.type == "iop.transport.Pong" and item.message.seq == seq, timeout)

    def tunnel(self, timeout=5.0):
        """The next ProviderTunnelRequest."""
        return self.runs[self.next("ProviderTunnelRequest", timeout).run_id]

    def run(self, timeout=5.0):
        """The next RunRequest."""
        return self.runs[self.next("RunRequest", timeout).run_id]

    def observation(self):
        with self._write_lock:
            self.observations += 1
            return self.observations

    def answer_command(self, item):
        """CAPABILITIES with evidence, the other two with what there is, the rest with the error of D-57."""
        ask = item.message
        answer = rt.NodeCommandResponse(command_id=ask.command_id, type=ask.type)
        if ask.type == CAPABILITIES:
            answer.result.update({"adapter_key": ask.adapter, "target": ask.target, "provider_status": self.health(ask.adapter, ask.target),
                                  "health_observation_seq": str(self.observation()), "adapter": "diagnostic", "instance_key": "diagnostic"})
        elif ask.type == PROVIDER_STATUS:
            answer.result.update({f"state.{a.name or a.type}": "running" for a in self.config.adapters if ask.adapter in ("", a.name or a.type)})
        elif ask.type != TRANSPORT_STATUS:
            answer.error = "unsupported command"
        self.send(answer, reply_to=item.id)

    def answer_refresh(self, item, status=APPLIED, request_id=None, reply_to=None, message=""):
        """The answer to a refresh, which replaces the whole configuration or, unless APPLIED, none of it."""
        ask = item.message
        if status == APPLIED:
            self.config = ask.config
        self.send(rt.NodeConfigRefreshResponse(request_id=ask.request_id if request_id is None else request_id, status=status, message=message),
                  reply_to=item.id if reply_to is None else reply_to)

    def close(self, abort=False):
        """Ends the connection: with close_notify and FIN, or by reset."""
        with self.changed:
            self.closed = self.closed or "closed here"
            self.paused = False
            self.changed.notify_all()
        try:
            if abort:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif self.tls:
                with self._write_lock, self._tls_lock:
                    try:
                        self.tls.unwrap()
                    except ssl.SSLError:
                        pass
                self._flush_tls()
            if not abort:
                self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if threading.current_thread() is not self._reader:
            if abort:
                self.sock.close()  # before the reader is waited for: the reset must not wait
            self._reader.join(2)
        self.sock.close()


# ---------------------------------------------------------------- one tunnel

def headers(pairs):
    return [rt.HeaderEntry(key=name, value=value if isinstance(value, bytes) else value.encode("latin-1")) for name, value in pairs]


class Tunnel:
    """The answer to one ProviderTunnelRequest. Every frame takes the next sequence number unless it is told another."""

    def __init__(self, session, request):
        self.session, self.request, self.run_id = session, request, request.run_id
        self.sequence = self.sent = 0   # body bytes
        self.grants = []                # of the Windows of this run, in the order of their arrival
        self.cancelled = threading.Event()
        self.lock = threading.Lock()

    def frame(self, kind, seq=None, run_id=None, **content):
        with self.lock:
            if seq is None:
                seq = self.sequence + 1
            self.sequence = seq
            self.sent += len(content.get("body", b""))
        return rt.ProviderTunnelFrame(run_id=self.run_id if run_id is None else run_id, kind=kind, sequence=seq, **content)

    def send(self, kind, style=None, **content):
        self.session.send(self.frame(kind, **content), style=style)

    def start(self, status=200, head=(("content-type", "application/json"),), **more):
        self.send(START, status_code=status, headers=headers(head), **more)

    def body(self, data, cut=0, **more):
        """One BODY frame, or frames of `cut` bytes: a number, or a function that gives the next."""
        if not cut:
            return self.send(BODY, body=data, **more)
        at = 0
        while at < len(data):
            step = max(1, cut() if callable(cut) else cut)
            self.send(BODY, body=data[at:at + step], **more)
            at += step

    def room(self):
        """How many more body bytes are granted; None before the first Window, when nothing is paced."""
        return self.grants[-1] - self.sent if self.grants else None

    def wait_grant(self, more_than=0, timeout=5.0):
        """The newest grant, once it is larger than this."""
        with self.session.changed:
            if not self.session.changed.wait_for(lambda: self.session.closed or self.grants and self.grants[-1] > more_than, timeout):
                raise Late(f"no Window of more than {more_than} within {timeout} s; granted {self.grants[-3:]}, sent {self.sent}")
            if self.session.closed:
                raise Closed(f"waiting for a Window: connection ended ({self.session.closed})")
            return self.grants[-1]

    def paced(self, data, cut=65536, timeout=20.0):
        """The body in frames of at most `cut` bytes, never more than granted. False if the Edge cancels meanwhile."""
        at = 0
        while at < len(data):
            with self.session.changed:
                if not self.session.changed.wait_for(lambda: self.session.closed or self.cancelled.is_set() or self.room() is None or self.room() > 0, timeout):
                    raise Late(f"no larger Window within {timeout} s; granted {self.grants[-3:]}, sent {self.sent}")
                if self.session.closed:
                    raise Closed(f"the connection ended ({self.session.closed})")
                if self.cancelled.is_set():
                    return False
                room = self.room()
            step = cut if room is None else min(cut, room)
            self.body(data[at:at + step])
            at += step
        return True

    def usage(self, prompt=1, completion=1, **more):
        self.send(USAGE, usage=rt.Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion), **more)

    def end(self, **more):
        self.send(END, **more)

    def error(self, text, failure=None, **more):
        if failure is not None:
            more["failure"] = failure
        self.send(ERROR, error=text, **more)

    def answer(self, data=b'{"ok":true}', status=200, head=(("content-type", "application/json"),)):
        self.start(status, head)
        if data:
            self.body(data)
        self.end()

    def event(self, kind, **content):
        """A RunEvent of this id: right for a RunRequest, the wrong family for a tunnel."""
        self.session.send(rt.RunEvent(run_id=self.run_id, type=kind, **content))

    def wait_cancel(self, timeout=5.0):
        if not self.cancelled.wait(timeout):
            raise Late(f"no CancelRequest within {timeout} s")

    def stall(self, health="unavailable", seq=None, adapter=None, target=None, text="response_stalled", fence="confirmed", drop=()):
        """The one terminal of a stalled attempt, with the evidence the contract allows."""
        pair = {"available": "request_stalled", "unavailable": "provider_unhealthy", "unknown": "health_unknown"}
        metadata = {"provider_health": health, "liveness_classification": pair.get(health, "health_unknown"), "idle_duration_ms": "1000",
                    "run_id": self.run_id, "attempt_id": "a-" + self.run_id[-8:], "fence": fence,
                    "adapter": self.request.adapter if adapter is None else adapter,
                    "target": self.request.target if target is None else target}
        if seq is not None:
            metadata["health_observation_seq"] = str(seq)
        for name in drop:
            metadata.pop(name, None)
        self.error(text, rt.ExecutionFailure(failure_code="response_stalled", metadata=metadata))


class Provider:
    """A model server inside the agent. `{"do": …}` in the request body says what it does:

    echo   the request body comes back
    sse    `count` events and [DONE]
    big    `size` bytes that depend on their place only
    hang   a head, then nothing until a cancel
    """

    def __init__(self, old=False):
        self.old = old
        self.served = []

    @staticmethod
    def big(size):
        block = bytes(range(251))
        return (block * (size // 251 + 1))[:size]

    @staticmethod
    def events(count):
        return b"".join(b'data: {"n":%d,"text":"\xed\x95\x9c\xea\xb5\xad\xec\x96\xb4"}\n\n' % n for n in range(count)) + b"data: [DONE]\n\n"

    def serve(self, tunnel):
        try:
            self._serve(tunnel)
        except (OSError, Closed):
            pass  # the session is gone, and with it everybody who could be told

    def _serve(self, tunnel):
        ask = tunnel.request
        # An older agent does not know `operation`; `path` says the same to it.
        self.served.append(ask.path if self.old else (ask.operation or ask.path))
        try:
            what = json.loads(ask.body)
        except ValueError:
            return tunnel.error("invalid request: not JSON")
        do = what.get("do", "echo")
        if do == "sse":
            tunnel.start(head=[("content-type", "text/event-stream")])
            for event in self.events(what.get("count", 3)).split(b"\n\n")[:-1]:
                if tunnel.cancelled.is_set():
                    return tunnel.error("cancelled")
                tunnel.body(event + b"\n\n")
            tunnel.end()
        elif do == "big":
            data = self.big(what["size"])
            tunnel.start(head=[("content-type", "application/octet-stream"), ("content-length", str(len(data)))])
            if tunnel.cancelled.is_set() or not tunnel.paced(data, cut=262144, timeout=300):
                return tunnel.error("cancelled")
            tunnel.end()
        elif do == "hang":
            tunnel.start(head=[("content-type", "text/event-stream")])
            while not tunnel.cancelled.wait(0.5):
                if tunnel.session.closed:
                    return
            tunnel.error("cancelled")
        else:
            tunnel.start(head=[("content-type", "application/json"), ("content-length", str(len(ask.body)))])
            tunnel.body(ask.body, cut=4096)
            tunnel.end()


# ---------------------------------------------------------------- as a program

def serve_for_ever(arguments):
    host, port = arguments.edge.rsplit(":", 1)
    expect = f"spiffe://{arguments.trust_domain}/edge/{arguments.edge_name}"
    while True:
        try:
            session = Session((host.strip("[]"), int(port)), ca=arguments.ca, cert=arguments.cert, key=arguments.key, expect=expect, ping_every=10)
            session.provider = Provider(old=arguments.old)
            answer = session.register(arguments.node_id, timeout=10)
            if not answer.accepted:
                raise Closed(f"registration refused: {answer.reason}")
            if not arguments.old:
                session.send(tp.Features(window=True))
                answer = session.make_ready(timeout=10)
                if not answer.ready:
                    raise Closed(f"not ready: {answer.reason}")
            print("registered" if arguments.old else "ready", answer.node_id if arguments.old else session.node_id, flush=True)
            with session.changed:
                session.changed.wait_for(lambda: session.closed)
            raise Closed(session.closed)
        except (OSError, ssl.SSLError, Closed, Late) as error:
            print(f"again in {arguments.interval} s: {error}", file=sys.stderr, flush=True)
        threading.Event().wait(arguments.interval)


def main():
    parser = argparse.ArgumentParser(description="a small node agent")
    for name in ("edge", "node-id", "ca", "cert", "key"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--trust-domain", default="iop.example")
    parser.add_argument("--edge-name", default="edge-1")
    parser.add_argument("--interval", type=float, default=10)
    parser.add_argument("--old", action="store_true", help="an agent from before readiness and operations")
    serve_for_ever(parser.parse_args())


if __name__ == "__main__":
    main()
