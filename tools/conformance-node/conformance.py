#!/usr/bin/env python3
"""Plays an independent node agent against an Edge, over real sockets, with real HTTP clients.

    python3.11 -m venv target/conformance-venv
    target/conformance-venv/bin/pip install -r tools/conformance-node/requirements.txt
    target/conformance-venv/bin/python tools/conformance-node/conformance.py --iop target/debug/iop --out target/conformance

Prints `ok name` or `FAIL name: why` per case and `N passed, N failed`; the exit code is 1 if one failed.
`--only TEXT` runs the cases whose names contain TEXT, `--list` names them with what they prove.

What is expected comes from docs/contract; the sentence is cited where a number or a shape is checked.
Waiting is always for something to be seen (a frame, bytes of an answer, a figure of the admin listener)
and has a deadline.
"""

import argparse
import http.client
import json
import os
import pathlib
import random
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import agent  # noqa: E402
from agent import (  # noqa: E402
    APPLIED, BODY, CAPABILITIES, END, FAILED, PROVIDER_STATUS, RESTART_REQUIRED, START, TRANSPORT_STATUS, Closed, Late, Provider,
    Session, Style, frame, length_delimited, rt, tp, varint)

DOMAIN = "iop.example"
EDGE_NAME = f"spiffe://{DOMAIN}/edge/edge-1"
SSE = [("content-type", "text/event-stream; charset=utf-8")]
JSON = [("content-type", "application/json")]


class Wrong(AssertionError):
    """What was seen is not what the contract says."""


def check(holds, why):
    if not holds:
        raise Wrong(why)


def equal(got, expected, what):
    if got != expected:
        raise Wrong(f"{what}: got {shorten(got)}, expected {shorten(expected)}")


def shorten(value):
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]}… ({len(text)} characters)"


def until(what, look, timeout=5.0):
    """Looks again and again until `look` gives something true."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise Late(f"{what}: not within {timeout} s, last seen {shorten(found)}")
        pause.wait(0.01)


def free_ports(count):
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


# ---------------------------------------------------------------- the Edge under test

CONFIG = """
listeners:
  nodes: "127.0.0.1:{nodes}"
  clients: "127.0.0.1:{clients}"
  admin: "127.0.0.1:{admin}"
pki:
  trust_domain: iop.example
  edge_name: edge-1
  ca: pki/ca.crt
  certificate: pki/edge-1.crt
  key: pki/edge-1.key
nodes:
  - id: n1
    concurrency: 1                 # legacy metadata: must limit nothing
    adapters:
      - name: a1
        type: openai_compat
        base_url: "http://127.0.0.1:9"
      - name: named
        type: vllm
        base_url: "http://127.0.0.1:9/base"
        profile:
          id: prof-1
          operations:
            - name: chat_completions
              method: POST
              path: /served/chat
          auth_header: x-secret
          auth_prefix: "Key "
        options: {{on_cancel: drain, pool_idle_ms: 1234, probe_path: /probe}}
      - type: ollama
        base_url: "http://127.0.0.1:9"
    providers:
      - {{id: p1, adapter: a1, target: t1, capacity: 16}}
      - {{id: p-two, adapter: a1, target: t-two, capacity: 2}}
      - {{id: p-one, adapter: a1, target: t-one, capacity: 1}}
      - {{id: p-long, adapter: a1, target: t-long, capacity: 4, long_capacity: 1}}
      - {{id: p-brief, adapter: a1, target: t-brief, capacity: 1, stall_timeout_ms: 60000, response_wait_ms: 600}}
      - {{id: p-named, adapter: named, target: t-named, capacity: 2, stall_timeout_ms: 4321, timeout_sec: 77, category: api}}
      - {{id: p-ill, adapter: a1, target: t-ill, capacity: 1, health: degraded}}
      - {{id: p-both-1, adapter: a1, target: t-both, capacity: 2}}
      - {{id: p-native, adapter: ollama, target: t-native, capacity: 2, stall_timeout_ms: 2222}}
      - {{id: p-unused, adapter: a1, target: t-unused, capacity: 1}}
      - {{id: p-off, adapter: a1, target: t-off, capacity: 1, enabled: false}}
  - id: n2
    name: host-two
    adapters:
      - {{name: a1, type: openai_compat, base_url: "http://127.0.0.1:9"}}
    providers:
      - {{id: p2, adapter: a1, target: t2, capacity: 2}}
      - {{id: p-both-2, adapter: a1, target: t-both, capacity: 2}}
models:
  - {{name: m1, providers: [p1]}}
  - {{name: two, providers: [p-two]}}
  - {{name: one, providers: [p-one]}}
  - {{name: long, providers: [p-long], long_threshold_bytes: 4 KiB}}
  - {{name: brief, providers: [p-brief]}}
  - {{name: named, providers: [p-named]}}
  - {{name: ill, providers: [p-ill]}}
  - {{name: m2, providers: [p2]}}
  - {{name: both, providers: [p-both-1, n2/p-both-2]}}
  - {{name: native, providers: [p-native]}}
  - {{name: none, providers: []}}
  - {{name: off, providers: [p-off]}}
limits: {{clients_max: 128, handshakes_max: 16, output_pool_bytes: 32 MiB, body_pool_bytes: 32 MiB, body_bytes_max: 8 MiB, queue_waiters_max: 6}}
timeouts: {{handshake_ms: 1500, head_ms: 3000, body_ms: 3000, keep_alive_ms: 20000, queue_wait_ms: 1200, write_stall_ms: 1200,
           heartbeat_ms: 400, dead_ms: 1500, registration_ms: 900, drain_ms: 8000,
           command_ms: 1500, refresh_ms: 2000}}
log: {{level: info, access: all}}
"""


class Edge:
    def __init__(self, iop, out, name="edge"):
        self.iop, self.out, self.name = iop, out, name
        self.host = "127.0.0.1"

    def make_pki(self):
        pki = self.out / "pki"
        other = self.out / "other-pki"
        for directory in (pki, other):
            subprocess.run([self.iop, "pki", "init", "--dir", directory, "--trust-domain", DOMAIN], check=True, capture_output=True, timeout=20)
        for directory, role, name in [(pki, "edge", "edge-1"), (pki, "edge", "edge-2"), (pki, "node", "n1"), (pki, "node", "host-two"),
                                      (pki, "node", "n-evil"), (pki, "node", "n2"), (other, "node", "n1")]:
            subprocess.run([self.iop, "pki", role, "--dir", directory, name], check=True, capture_output=True, timeout=20)

    def start(self):
        for attempt in range(3):
            self.nodes, self.clients, self.admin = free_ports(3)
            config = self.out / f"{self.name}.yaml"
            self.config, self.text = config, CONFIG.format(nodes=self.nodes, clients=self.clients, admin=self.admin)
            config.write_text(self.text)
            self.log = open(self.out / f"{self.name}.log", "ab")
            self.process = subprocess.Popen([self.iop, "edge", "--config", config], stdout=self.log, stderr=self.log)
            try:
                until("the Edge answers /readyz", self._up, 20)
                return self
            except Closed:
                continue
        raise SystemExit(f"the Edge does not start; see {self.log.name}")

    def _up(self):
        if self.process.poll() is not None:
            raise Closed("it ended")
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.admin}{path}", timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def post(self, path, body=b"", headers=(("x-iop-operator", "conformance"),)):
        """An order to the admin listener: its status and its JSON."""
        ask = urllib.request.Request(f"http://{self.host}:{self.admin}{path}", body, dict(headers))
        try:
            with urllib.request.urlopen(ask, timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def behind(self):
        """The nodes that do not have the newest configuration, and why."""
        return {one["node_id"]: one["refresh"] for one in self.status()["edge"]["outdated_nodes"]}

    def status(self):
        code, body = self.get("/status")
        equal(code, 200, "/status")
        return json.loads(body)

    def node(self, node_id):
        return next(n for n in self.status()["nodes"] if n["node_id"] == node_id)

    def provider(self, provider_id):
        return next(p for n in self.status()["nodes"] for p in n["providers"] if p["id"] == provider_id)

    def metrics(self):
        out = {}
        for line in self.get("/metrics")[1].decode().splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                out[name] = float(value)
        return out

    def metric(self, name, **labels):
        """The sum over all series of this name with these labels."""
        total, wanted = 0.0, [f'{k}="{v}"' for k, v in labels.items()]
        for series, value in self.metrics().items():
            if re.split(r"[{]", series)[0] == name and all(w in series for w in wanted):
                total += value
        return total

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self.log.close()


# ---------------------------------------------------------------- an HTTP client that sees every byte

class Http:
    """One request at a time over a raw socket; the answer is decoded as it arrives."""

    def __init__(self, edge, timeout=6.0, receive_buffer=0):
        self.timeout = timeout
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(timeout)
        self.sock.connect((edge.host, edge.clients))
        self.raw = bytearray()
        self._fresh()

    def _fresh(self):
        self.status, self.headers, self.body, self.ending = None, [], bytearray(), None
        self._left = None  # bytes still to come of a chunk, or of the body with a length
        self._coding = None

    def send(self, path, body=b"", headers=(), method="POST", version="1.1"):
        self._fresh()
        head = [f"{method} {path} HTTP/{version}", "Host: edge", f"Content-Length: {len(body)}", "Content-Type: application/json"]
        head += [f"{name}: {value}" for name, value in headers]
        self.sock.sendall("\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body)
        return self

    def _more(self, deadline):
        left = deadline - time.monotonic()
        if left <= 0:
            raise Late(f"no more bytes of the answer within {self.timeout} s; status {self.status}, body so far {shorten(bytes(self.body[-200:]))}")
        self.sock.settimeout(left)
        try:
            data = self.sock.recv(65536)
        except socket.timeout:
            return
        except OSError:
            self.ending = "reset"
            return
        if data:
            self.raw += data
        else:
            self.ending = "complete" if self._coding == "close" else "cut"

    def head(self):
        deadline = time.monotonic() + self.timeout
        while b"\r\n\r\n" not in self.raw:
            if self.ending:
                return self
            self._more(deadline)
        head, _, rest = bytes(self.raw).partition(b"\r\n\r\n")
        self.raw = bytearray(rest)
        lines = head.split(b"\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = [(n.strip().lower().decode("latin-1"), v.strip()) for n, _, v in (line.partition(b":") for line in lines[1:])]
        names = dict(self.headers)
        if names.get("transfer-encoding", b"").lower() == b"chunked":
            self._coding = "chunked"
        elif "content-length" in names:
            self._coding, self._left = "length", int(names["content-length"])
        elif self.status in (204, 304):
            self._coding, self._left = "length", 0
        else:
            self._coding = "close"
        self._decode()
        return self

    def header(self, name):
        return [value for key, value in self.headers if key == name]

    def _decode(self):
        while not self.ending or self.raw:
            if self._coding == "close":
                self.body += self.raw
                self.raw.clear()
                return
            if self._coding == "length":
                take = min(self._left, len(self.raw))
                self.body += self.raw[:take]
                del self.raw[:take]
                self._left -= take
                if self._left == 0:
                    self.ending = "complete"
                return
            if self._left and self._left > 0:
                take = min(self._left, len(self.raw))
                self.body += self.raw[:take]
                del self.raw[:take]
                self._left -= take
                if self._left:
                    return
                self._left = -2  # the line end after a chunk
            if self._left == -2:
                if len(self.raw) < 2:
                    return
                check(self.raw[:2] == b"\r\n", "a chunk without line end")
                del self.raw[:2]
                self._left = None
            line, found, rest = bytes(self.raw).partition(b"\r\n")
            if not found:
                return
            size = int(line, 16)
            if size == 0:
                if len(rest) < 2:
                    return
                check(rest[:2] == b"\r\n", "trailers were sent")
                self.raw = bytearray(rest[2:])
                self.ending = "complete"
                return
            self.raw = bytearray(rest)
            self._left = size

    def wait_body(self, size=None, part=None):
        """Until the body has so many bytes, or contains this part."""
        if self.status is None:
            self.head()
        deadline = time.monotonic() + self.timeout
        while not (len(self.body) >= size if size is not None else part in self.body):
            if self.ending:
                raise Wrong(f"the answer ended ({self.ending}) before {size or part!r}: {shorten(bytes(self.body))}")
            self._more(deadline)
            self._decode()
        return bytes(self.body)

    def finish(self):
        """Reads to the end; what kind of end is in `ending`: complete, cut (FIN in the middle) or reset."""
        if self.status is None:
            self.head()
        deadline = time.monotonic() + self.timeout
        while not self.ending:
            self._more(deadline)
            if self.status is not None:
                self._decode()
        return self

    def error(self):
        """The fields of an error made by the Edge: JSON shape, x-request-id, x-iop-error-source (D-11)."""
        self.finish()
        equal(self.ending, "complete", f"end of the error answer with status {self.status}")
        check(self.header("x-request-id"), f"{self.status} without x-request-id")
        source = self.header("x-iop-error-source")
        check(source and source[0] in (b"edge", b"node", b"provider"), f"{self.status} with x-iop-error-source {source}")
        answer = json.loads(self.body)
        check(isinstance(answer.get("error"), dict) and answer["error"].get("message"), f"{self.status} with body {shorten(bytes(self.body))}")
        return answer["error"]

    def close(self, abort=False):
        try:
            if abort:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.sock.close()
        except OSError:
            pass


def chat(model, **more):
    """A request body whose bytes no serializer would make again: only the model may change (D-12)."""
    rest = "".join(f',{json.dumps(k)}:{json.dumps(v)}' for k, v in more.items())
    return ('{ "messages":[{"role":"user","content":"\\u00e9\\ud83c\\udf0d 한국어"}],"n":1e400,\n\t"big":9223372036854775808,"model" :  "'
            + model + '","nested":{"model":"' + model + '"}' + rest + " }").encode()


def sse_events(data):
    """Events as a client of event streams sees them."""
    out = []
    for block in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[5:].lstrip() for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            out.append(b"\n".join(lines))
    return out


# ---------------------------------------------------------------- what a case works with

class Case:
    def __init__(self, edge):
        self.edge, self.opened = edge, []
        self.before = edge.metrics()

    def grew(self, name, **labels):
        now, before = 0.0, 0.0
        wanted = [f'{k}="{v}"' for k, v in labels.items()]
        after = self.edge.metrics()
        for series, value in after.items():
            if series.split("{")[0] == name and all(w in series for w in wanted):
                now += value
                before += self.before.get(series, 0.0)
        return now - before

    def wait_grew(self, name, by=1, timeout=5.0, **labels):
        return until(f"{name}{labels or ''} grew by {by}", lambda: self.grew(name, **labels) >= by, timeout)

    def session(self, cert="n1", ca_dir="pki", **options):
        pki = self.edge.out / "pki"
        own = self.edge.out / ca_dir
        options.setdefault("expect", EDGE_NAME)
        session = Session((self.edge.host, self.edge.nodes), ca=pki / "ca.crt", cert=cert and own / f"{cert}.crt",
                          key=cert and own / f"{cert}.key", **options)
        self.opened.append(session)
        return session

    def pending(self, node="n1", **options):
        session = self.session(cert={"n2": "host-two"}.get(node, node), **options)
        answer = session.register(node)
        check(answer.accepted, f"registration refused: {answer.reason}")
        return session

    def ready(self, node="n1", **options):
        session = self.pending(node, **options)
        answer = session.make_ready()
        check(answer.ready, f"ready refused: {answer.reason}")
        return session

    def http(self, **options):
        client = Http(self.edge, **options)
        self.opened.append(client)
        return client

    def post(self, model="m1", path="/v1/chat/completions", headers=(), version="1.1", more=None, **options):
        return self.http(**options).send(path, chat(model, **(more or {})), headers, version=version)

    def call(self, session, model="m1", data=b'{"fine":1}'):
        """One whole request, to show that everything still works."""
        client = self.post(model)
        session.tunnel().answer(data)
        client.finish()
        equal((client.status, bytes(client.body), client.ending), (200, data, "complete"), "a plain request")
        client.close()

    def in_flight(self, provider="p1", figure=0, timeout=4.0):
        until(f"in_flight of {provider} is {figure}", lambda: self.edge.provider(provider)["in_flight"] == figure, timeout)

    def held(self, count):
        until(f"{count} leases are held", lambda: self.edge.metric("iop_edge_leases_held") == count)

    def idle(self):
        self.held(0)

    def ask(self, kind, node="n1", **more):
        """An operator's question to a node, whose answer is waited for elsewhere."""
        return Asked(self.edge, node, {"type": kind, **more})

    def reload(self, **parts):
        """The configuration with these parts of CONFIG_PARTS put in; `restore` takes them out again."""
        self.write(**parts)
        status, answer = self.edge.post("/reload")
        equal(status, 200, f"/reload says {answer}; status")
        return answer

    def write(self, **parts):
        text = self.edge.text
        for old, new in parts.values():
            check(text.count(old) == 1, f"{old!r} is not once in the configuration")
            text = text.replace(old, new)
        self.edge.config.write_text(text)

    def restore(self):
        if self.edge.process.poll() is None and self.edge.config.read_text() != self.edge.text:
            self.edge.config.write_text(self.edge.text)
            equal(self.edge.post("/reload")[0], 200, "status of the reload back")

    def behind(self, expected, timeout=4.0):
        until(f"the nodes behind are {expected}", lambda: self.edge.behind() == expected, timeout)

    def finish(self):
        """Everything is let go; nothing may be left of the case at the Edge (leases, runs, waiters)."""
        faults = []
        for one in self.opened:
            if isinstance(one, Session):
                faults += one.faults
            one.close()
        check(not faults, f"the Edge broke the contract: {faults[:3]}")

        def quiet():
            now = self.edge.metrics()
            return all(now[k] == 0 for k in ("iop_edge_leases_held", "iop_edge_runs", "iop_edge_sessions", "iop_edge_clients"))
        until("the Edge holds no lease, run, node or client", quiet, 8)
        self.restore()
        granted = self.edge.metric("iop_edge_leases_granted_total")
        equal(self.edge.metric("iop_edge_leases_returned_total"), granted, "leases returned, of those granted")
        check(self.edge.process.poll() is None, "the Edge ended")


class Asked(threading.Thread):
    """An operator who asks a node something over the admin listener."""

    def __init__(self, edge, node, question):
        super().__init__(daemon=True)
        self.edge, self.node, self.question, self.got = edge, node, question, None
        self.start()

    def run(self):
        began = time.monotonic()
        try:  # operating.md: a command wants no header
            self.got = self.edge.post(f"/nodes/{self.node}/commands", json.dumps(self.question).encode(), headers=())
        except Exception as error:
            self.got = (type(error).__name__, str(error))
        self.took = time.monotonic() - began

    def answer(self, timeout=5.0):
        self.join(timeout)
        if self.got is None:
            raise Late(f"the operator has no answer within {timeout} s")
        return self.got

    def result(self, timeout=5.0):
        """The fields of a node's own answer."""
        status, answer = self.answer(timeout)
        equal(status, 200, f"the command ended as {answer}; status")
        equal(set(answer), {"node_id", "type", "error", "result"}, "fields of the answer")
        equal((answer["node_id"], answer["type"]), (self.node, self.question["type"]), "whose answer it is")
        return answer

    def refused(self, status, code, timeout=5.0):
        got, answer = self.answer(timeout)
        equal((got, answer.get("error", {}).get("code") if isinstance(answer.get("error"), dict) else answer), (status, code), "end of the command")
        check(answer["error"]["message"], "an error without a message")


# ---------------------------------------------------------------- identity

def refused(t, **options):
    """A peer that must not get as far as a registration: it sends one and gets no answer."""
    registrations = t.edge.metric("iop_edge_node_registrations_total")
    try:
        session = t.session(**options)
    except (ssl.SSLError, OSError, Closed) as error:
        return str(error)
    try:
        session.send(rt.RegisterRequest(node_id="n1"), request=True)
    except OSError:
        pass
    why = session.wait_closed()
    equal([i.type for i in session.inbox if i], [], "answers to a refused peer")
    equal(t.edge.metric("iop_edge_node_registrations_total"), registrations, "registrations")
    return why


# Proves [R-011]
def test_peer_without_certificate_is_refused(t):
    owner = t.ready()
    refused(t, cert=None)
    t.call(owner)


# Proves [R-012]
def test_peer_of_another_authority_is_refused(t):
    owner = t.ready()
    refused(t, cert="n1", ca_dir="other-pki")
    t.call(owner)


# Proves [R-013]
def test_certificate_of_an_edge_is_refused(t):
    owner = t.ready()
    refused(t, cert="edge-2")
    t.call(owner)


# Proves [R-014]
def test_certificate_of_an_unknown_name_is_refused(t):
    owner = t.ready()
    refused(t, cert="n-evil")
    # n2 is a node id whose certificate says another name (host-two): the id is no identity.
    refused(t, cert="n2")
    t.call(owner)


# Proves [R-014]
def test_certificate_of_another_node_does_not_register(t):
    owner = t.ready()
    other = t.session(cert="host-two")
    answer = other.register("n1")
    check(not answer.accepted and answer.reason and not answer.HasField("config"), f"answer {answer}")
    other.wait_closed()  # A-05: answered, then closed
    t.call(owner)


# Proves [R-007]
def test_wrong_alpn_old_tls_and_plaintext_are_refused(t):
    refused(t, alpn=None)
    refused(t, alpn="h2")
    refused(t, tls_max=ssl.TLSVersion.TLSv1_2)
    with socket.create_connection((t.edge.host, t.edge.nodes), timeout=5) as plain:
        plain.sendall(b"IOPEN/1\n" + frame(tp.Envelope(id=1, type="iop.RegisterRequest").SerializeToString()))
        try:
            while plain.recv(4096):
                pass
        except ConnectionError:
            pass
    t.ready()


# Proves [R-021]
def test_unknown_node_id_is_refused_and_closed(t):
    session = t.session()
    answer = session.register("n-none")
    check(not answer.accepted and answer.reason and not answer.HasField("config"), f"answer {answer}")
    session.wait_closed()
    t.ready()


# ---------------------------------------------------------------- registration and readiness

# Proves [R-021] [R-022] [R-023] [R-024] [R-025] [R-030] [R-035] [R-039] [R-280] [R-281] [R-282] [R-283] [R-284] [R-285] [R-353]
def test_register_then_ready(t):
    def pending_shape():
        node = t.edge.node("n1")
        check(node["connected"] is False, "connected before ready")
        provider = next(p for p in node["providers"] if p["id"] == "p1")
        figures = {k: v for k, v in provider.items() if isinstance(v, int) and not isinstance(v, bool)}
        return (provider["status"], provider["health"], set(figures.values())) == ("unavailable", "offline", {0})

    session = t.session()
    answer = session.register("n1")
    check(answer.accepted and not answer.reason, f"answer {answer}")
    equal(answer.node_id, "n1", "node_id of the answer")
    check(pending_shape(), "a pending node's provider is not shown as offline with zeros")
    ready = session.make_ready(answer.node_id)
    check(ready.ready and not ready.reason, f"answer {ready}")
    until("n1 is connected", lambda: t.edge.node("n1")["connected"])
    provider = t.edge.provider("p1")
    equal((provider["status"], provider["health"], provider["capacity"], provider["in_flight"]), ("available", "available", 16, 0), "p1")
    equal((provider["type"], provider["category"], provider["adapter"], provider["targets"]), ("openai_compat", "local_inference", "a1", ["t1"]), "p1")
    off = t.edge.provider("p-off")
    equal((off["capacity"], off["in_flight"], off["queued"]), (0, 0, 0), "figures of a disabled provider")
    check(off["status"] not in ("available",), f"disabled provider with status {off['status']}")
    session.close()
    until("n1 is offline again", lambda: not t.edge.node("n1")["connected"] and pending_shape())
    t.ready()
    until("p1 is back", lambda: t.edge.provider("p1")["capacity"] == 16)


# Proves [R-022] [R-292] [R-293] [R-294] [R-295] [R-297]
def test_configuration_carries_adapters_and_profile(t):
    session = t.pending()
    config = session.config
    adapters = {a.name or a.type: a for a in config.adapters}
    equal(sorted(adapters), ["a1", "named", "ollama"], "adapters")
    equal(config.runtime.concurrency, 1, "runtime.concurrency")
    plain, named = adapters["a1"], adapters["named"]
    equal((plain.type, plain.WhichOneof("config"), plain.openai_compat.base_url), ("openai_compat", "openai_compat", "http://127.0.0.1:9"), "a1")
    # D-54: the sum over the enabled providers of the adapter, referenced by a model or not.
    equal(plain.capacity, 16 + 2 + 1 + 4 + 1 + 1 + 2 + 1, "capacity of a1")
    equal((named.type, named.WhichOneof("config"), named.vllm.base_url, named.capacity), ("vllm", "vllm", "http://127.0.0.1:9/base", 2), "named")
    profile = named.vllm.protocol_profile
    equal((profile.id, profile.auth_header, profile.auth_prefix), ("prof-1", "x-secret", "Key "), "profile")
    equal([(o.name, o.method, o.path) for o in profile.operations], [("chat_completions", "POST", "/served/chat")], "operations")
    equal((named.options.on_cancel, named.options.pool_idle_ms, named.options.probe_path), ("drain", 1234, "/probe"), "options")
    equal(adapters["ollama"].ollama.base_url, "http://127.0.0.1:9", "ollama")


# Proves [R-004] [R-005] [R-006] [R-050]
def test_second_node_id_is_refused_and_the_first_keeps_all(t):
    session = t.ready()
    client = t.post()
    tunnel = session.tunnel()
    tunnel.start(head=SSE)
    tunnel.body(b"data: 1\n\n")
    client.wait_body(part=b"data: 1\n\n")
    for second in ("n2", "n-none", ""):
        number = session.send(rt.RegisterRequest(node_id=second), request=True)
        answer = session.reply(number).message
        check(not answer.accepted and answer.reason and not answer.HasField("config"), f"answer {answer}")
    tunnel.body(b"data: [DONE]\n\n")
    tunnel.end()
    equal((bytes(client.finish().body), client.ending), (b"data: 1\n\ndata: [DONE]\n\n", "complete"), "the running answer")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")
    t.call(session)
    t.ready("n2")  # the id was not claimed
    check(session.make_ready().ready, "the first binding is no longer ready")


# Proves [R-004] [R-024]
def test_same_node_id_again_changes_nothing(t):
    session = t.pending()
    first = session.config.SerializeToString(deterministic=True)
    again = session.register("n1")
    check(again.accepted, f"refused: {again.reason}")
    equal(again.config.SerializeToString(deterministic=True), first, "payload of the repeated registration")
    check(session.make_ready().ready, "not ready")
    client = t.post()
    tunnel = session.tunnel()
    again = session.register("n1")  # A-03: also while ready, with a run
    check(again.accepted, f"refused: {again.reason}")
    equal(again.config.SerializeToString(deterministic=True), first, "payload of the repeated registration")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")
    equal(t.grew("iop_edge_node_activations_total"), 1, "activations")
    tunnel.answer()
    equal(client.finish().status, 200, "status of the running request")
    t.call(session)


# Proves [R-040] [R-041] [R-042]
def test_duplicate_ready_is_true_and_activates_nothing(t):
    session = t.ready()
    client = t.post("one")
    tunnel = session.tunnel()
    check(session.make_ready().ready, "a duplicate ready was refused")
    equal(t.grew("iop_edge_node_activations_total"), 1, "activations")
    t.in_flight("p-one", 1)
    waiting = t.post("one")
    t.wait_grew("iop_edge_queue_entries_total")
    check(session.make_ready().ready, "a duplicate ready was refused")
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "a duplicate ready dispatched beyond the capacity")
    tunnel.answer()
    equal(client.finish().status, 200, "status")
    session.tunnel().answer()
    equal(waiting.finish().status, 200, "status")


# Proves [R-038] [R-046] [R-355]
def test_ready_of_another_or_no_id_is_false(t):
    stranger = t.session()
    number = stranger.send(rt.NodeReadyRequest(node_id="n1"), request=True)
    answer = stranger.reply(number).message
    check(not answer.ready and answer.reason, f"ready without registration: {answer}")
    stranger.close()
    session = t.pending()
    for wrong in ("n2", ""):
        answer = session.make_ready(wrong)
        check(not answer.ready and answer.reason, f"ready as {wrong!r}: {answer}")
    check(session.make_ready().ready, "the owner lost its place by a wrong id")
    answer = session.make_ready("n2")
    check(not answer.ready and answer.reason, f"ready as n2: {answer}")
    t.call(session)


# Proves [R-044] [R-045] [R-047] [R-078] [R-355]
def test_superseded_while_pending(t):
    first = t.pending()
    silent_owner = t.pending()    # supersedes the first
    second = t.pending()          # and this one the second
    claimed = time.monotonic()
    answer = first.register("n1")  # states.md row 3: it does not claim the id back
    check(not answer.accepted and answer.reason, f"registration on a superseded connection: {answer}")
    answer = first.make_ready()
    check(not answer.ready and answer.reason, f"ready of a superseded connection: {answer}")
    first.wait_closed(6)
    check(second.make_ready().ready, "the newest connection is not ready")
    t.call(second)
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")
    equal(t.grew("iop_edge_node_activations_total"), 1, "activations")
    # D-60: without a ready it is closed 5 s after the claim, not before.
    silent_owner.wait_closed(7)
    check(time.monotonic() - claimed > 4.5, "the superseded connection was closed before its 5 s")
    t.call(second)
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences after the superseded connections closed")


# Proves [R-054] [R-055] [R-072] [R-073] [R-078] [R-164] [R-280]
def test_superseded_while_ready(t):
    first = t.ready()
    clients = [t.post() for _ in range(3)]
    old = [first.tunnel() for _ in clients]
    for tunnel in old:
        tunnel.start(head=SSE)
        tunnel.body(b"data: 1\n\n")
    for client in clients:
        client.wait_body(part=b"data: 1\n\n")
    second = t.pending()
    first.wait_closed()
    for client in clients:
        client.finish()
        check(b"[DONE]" not in client.body and b"error" in client.body, f"end of a lost stream: {bytes(client.body)}")
    t.idle()
    equal(t.grew("iop_edge_leases_returned_total", by="fence"), 3, "leases returned by the fence")
    equal(t.grew("iop_edge_node_fences_total"), 1, "fences")
    check(not t.edge.node("n1")["connected"], "connected while the new owner is pending")
    check(second.make_ready().ready, "the new owner is not ready")
    client = t.post()
    tunnel = second.tunnel()
    # Terminals of the old generation's runs, sent over the new connection: S-20.
    for stale in old:
        second.send(rt.ProviderTunnelFrame(run_id=stale.run_id, kind=END, sequence=3))
    second.ping()
    t.in_flight("p1", 1)
    tunnel.answer()
    equal(client.finish().status, 200, "status")
    t.idle()
    equal(t.grew("iop_edge_leases_returned_total"), 4, "leases returned")


# Proves [R-031] [R-032] [R-042] [R-077] [R-285]
def test_waiters_are_served_at_ready_and_not_before(t):
    session = t.pending()
    clients = [t.post("two") for _ in range(2)]
    t.wait_grew("iop_edge_queue_entries_total", 2)
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "a pending node got work")
    check(session.make_ready().ready, "not ready")
    for client in clients:
        session.tunnel().answer()
    for client in clients:
        equal(client.finish().status, 200, "status")
    order = [i.type for i in session.inbox if i]  # consumed ones are gone; faults would name a request before ready
    check("iop.RunRequest" not in order, f"unexpected {order}")


# Proves [R-025] [R-031] [R-032] [R-049] [R-352] [R-353]
def test_old_agent_stays_pending(t):
    old = t.pending()
    old.provider = Provider(old=True)
    client = t.post()
    client.head()  # queue_wait_ms
    equal(client.status, 503, "status")
    check(client.header("retry-after"), "503 without Retry-After (D-11)")
    client.error()
    old.ping()
    check(not t.edge.node("n1")["connected"], "an agent that never said ready is connected")
    equal([i.type for i in old.inbox if i and i.type not in ("iop.transport.Ping", "iop.transport.Pong")], [], "messages to a pending node")
    equal(t.grew("iop_edge_node_activations_total"), 0, "activations")
    check(not old.closed, f"the pending connection was closed: {old.closed}")


# Proves [R-099]
def test_agent_that_knows_no_operation_serves_by_path(t):
    old = t.ready()
    old.provider = Provider(old=True)
    client = t.post("named")
    equal(client.finish().status, 200, "status")
    equal(old.provider.served, ["/served/chat"], "what the agent called")


def test_registration_has_a_deadline_that_heartbeats_do_not_move(t):
    began = time.monotonic()
    silent = t.session(ping_every=0.1)
    silent.ping()
    silent.wait_closed(4)  # states.md row 15, registration_ms
    check(time.monotonic() - began > 0.7, "closed before the deadline")
    pending = t.pending()  # a pending owner has none: A-08
    until("time passes", lambda: time.monotonic() - began > 2.5)
    pending.ping()


# ---------------------------------------------------------------- the tunnel

# Proves [R-084] [R-085] [R-089] [R-093] [R-095] [R-096] [R-102] [R-104] [R-116] [R-155] [R-227] [R-233] [R-347]
def test_request_as_the_node_sees_it(t):
    session = t.ready()
    sent = chat("m1", stream=True)
    secrets = [("Authorization", "Bearer sk-marker"), ("X-Api-Key", "sk-marker"), ("Api-Key", "sk-marker"), ("Cookie", "c=sk-marker"),
               ("Proxy-Authorization", "Basic sk-marker"), ("Connection", "keep-alive, X-Hop"), ("X-Hop", "sk-marker"), ("TE", "trailers"),
               ("X-Mine", "kept"), ("Accept", "text/event-stream"), ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
               ("X-Request-Id", "req-1")]
    client = t.http().send("/v1/chat/completions", sent, secrets)
    tunnel = session.tunnel()
    ask = tunnel.request
    # Top level `model` becomes the target, everything else keeps its bytes, the nested one too (D-12, D-31).
    equal(ask.body, sent.replace(b'"model" :  "m1"', b'"model" :  "t1"'), "body")
    equal((ask.adapter, ask.target, ask.method, ask.path, ask.operation, ask.stream), ("a1", "t1", "POST", "/v1/chat/completions", "", True), "request")
    equal((ask.timeout_sec, ask.response_stall_timeout_ms), (0, 0), "timeouts of a provider without any (A-59)")
    check(not ask.credential_lease and not ask.HasField("credential_binding"), "a credential with the credential plane off")
    names = {h.key.lower(): h.value for h in ask.headers}
    for banned in ("authorization", "x-api-key", "api-key", "cookie", "proxy-authorization", "connection", "x-hop", "te", "content-length",
                   "transfer-encoding", "host", "keep-alive"):
        check(banned not in names, f"header {banned} reached the node (D-13)")
    check(b"sk-marker" not in ask.SerializeToString(), "a client's secret reached the node")
    equal((names.get("x-mine"), names.get("accept"), names.get("content-type")), (b"kept", b"text/event-stream", b"application/json"), "headers")
    equal((names.get("traceparent"), names.get("x-request-id")), (b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"req-1"), "trace (D-26)")
    check(b'"m1"' not in ask.SerializeToString().replace(ask.body, b""), "the client's model name travels outside the body")
    tunnel.answer()
    client.finish()
    equal((client.status, client.header("x-request-id")), (200, [b"req-1"]), "answer")


# Proves [R-097] [R-116] [R-155]
def test_operation_and_timeouts_come_from_the_selected_provider(t):
    session = t.ready()
    client = t.post("named")
    tunnel = session.tunnel()
    ask = tunnel.request
    equal((ask.adapter, ask.target, ask.operation, ask.method), ("named", "t-named", "chat_completions", "POST"), "request")
    check(ask.path, "no path beside the operation")
    equal((ask.timeout_sec, ask.response_stall_timeout_ms), (77, 4321), "timeouts")
    tunnel.answer()
    equal(client.finish().status, 200, "status")
    # Not in the profile: operation is empty and the path decides (D-09, D-62).
    client = t.post("named", path="/v1/embeddings")
    tunnel = session.tunnel()
    equal((tunnel.request.operation, tunnel.request.path), ("", "/v1/embeddings"), "embeddings")
    tunnel.answer()
    equal(client.finish().status, 200, "status")
    client = t.post("m1", path="/v1/completions")
    tunnel = session.tunnel()
    equal((tunnel.request.operation, tunnel.request.path), ("", "/v1/completions"), "completions")
    tunnel.answer()
    equal(client.finish().status, 200, "status")


ANSWER = (b'data: {"a":"\xed\x95\x9c\xea\xb5\xad\xec\x96\xb4 \xf0\x9f\x8c\x8d"}\r\n\r\n: comment\n\ndata:no space\ndata: two\n\n' + bytes(range(256))
          + b'\xff\xfe broken utf-8 \xc3\n\nevent: x\ndata: {"usage":{"total_tokens":1}}\n\ndata: [DONE]\n\n')


def exact(t, style, cut, data=ANSWER, head=SSE):
    session = t.ready(style=style)
    client = t.post()
    tunnel = session.tunnel()
    tunnel.start(head=head)
    tunnel.body(data, cut=cut)
    tunnel.end()
    client.finish()
    equal((client.status, client.ending), (200, "complete"), "answer")
    check(bytes(client.body) == data, f"the client got other bytes: {len(client.body)} of {len(data)}")
    session.close()


# Proves [R-001] [R-105] [R-108]
def test_bytes_are_exact_in_any_field_order(t):
    for cut in (1, 7, 0):
        exact(t, Style(reverse=True), cut)


# Proves [R-001] [R-105]
def test_bytes_are_exact_with_unknown_fields(t):
    for style in (Style(unknown=True), Style(unknown=True, reverse=True), Style(unknown=True, pad=5)):
        exact(t, style, 19)


# Proves [R-001] [R-105]
def test_bytes_are_exact_with_long_varints(t):
    for pad in (2, 3, 4, 5):
        exact(t, Style(pad=pad), 23)
    exact(t, Style(pad=5, reverse=True, unknown=True), 23)


# Proves [R-001] [R-105]
def test_bytes_are_exact_with_a_record_per_byte(t):
    exact(t, Style(record=1), 40)
    exact(t, Style(record=1, reverse=True, unknown=True), 100)
    exact(t, Style(record=3, segment=1), 100)


# Proves [R-001] [R-105]
def test_bytes_are_exact_in_any_tcp_segment(t):
    big = Provider.big(120_000)
    for segment in (1, 5, 1448, 16383, 16405, 16406):
        exact(t, Style(segment=segment), 0 if segment > 5 else 300, data=big if segment > 1000 else ANSWER)
    exact(t, Style(record=4095, segment=4096), 50_000, data=big)


# Proves [R-001] [R-105]
def test_bytes_are_exact_when_a_whole_answer_is_one_write(t):
    session = t.ready()
    for style in (Style(), Style(reverse=True), Style(unknown=True)):
        session.style = style
        client = t.post()
        tunnel = session.tunnel()
        with session.corked():
            tunnel.start(head=SSE)
            tunnel.body(ANSWER, cut=11)
            tunnel.end()
        client.finish()
        check(bytes(client.body) == ANSWER and client.ending == "complete", f"{len(client.body)} bytes, {client.ending}")


# Proves [R-105] [R-108]
def test_bytes_are_exact_for_bodies_of_every_size(t):
    session = t.ready()
    dice = random.Random(7)
    data = Provider.big(3_000_000)
    for cut in (65_535, 65_536, 262_144, 1_048_000, 0, lambda: dice.randint(1, 300_000)):
        client = t.post()
        tunnel = session.tunnel()
        tunnel.start(head=[("content-type", "application/octet-stream")])
        writer = threading.Thread(target=tunnel.body, args=(data, cut), daemon=True)
        writer.start()
        client.wait_body(size=len(data))
        writer.join(5)
        tunnel.end()
        client.finish()
        check(bytes(client.body) == data and client.ending == "complete", f"cut {cut}: {len(client.body)} bytes, {client.ending}")
        client.close()
    # Assembled: body first, up to 1 MiB. Cut through: unknown fields before and after a larger body.
    for style, size in ((Style(reverse=True), 1_040_000), (Style(unknown=True), 2_500_000), (Style(unknown=True, pad=5), 2_500_000)):
        client = t.post()
        tunnel = session.tunnel()
        tunnel.start(head=[("content-type", "application/octet-stream")])
        writer = threading.Thread(target=tunnel.body, args=(data[:size],), kwargs={"style": style}, daemon=True)
        writer.start()
        client.wait_body(size=size)
        writer.join(5)
        tunnel.end()
        client.finish()
        check(bytes(client.body) == data[:size] and client.ending == "complete", f"{style}: {len(client.body)} bytes, {client.ending}")
        client.close()


# Proves [R-105] [R-108]
def test_a_body_of_twenty_mebibytes_in_one_frame_is_cut_through(t):
    session = t.ready()
    data = Provider.big(20 << 20)  # D-02: up to 64 MiB when run_id, kind and sequence precede body
    client = t.post(timeout=15)
    tunnel = session.tunnel()
    tunnel.start(head=[("content-type", "application/octet-stream"), ("content-length", str(len(data)))])
    writer = threading.Thread(target=tunnel.body, args=(data,), daemon=True)
    writer.start()
    client.finish()
    writer.join(5)
    tunnel.end()
    check(bytes(client.body) == data, f"{len(client.body)} bytes, {client.ending}")
    t.call(session)


# Proves [R-105] [R-106] [R-108] [R-110]
def test_usage_metadata_and_empty_bodies_never_reach_the_client(t):
    session = t.ready()
    client = t.post()
    tunnel = session.tunnel()
    tunnel.usage()  # even before the head: it orders nothing
    tunnel.start(head=SSE, metadata={"marker": "m-start"})
    tunnel.body(b"")
    tunnel.body(b"data: 1\n\n", metadata={"marker": "m-body"}, usage=rt.Usage(total_tokens=5))
    tunnel.usage(3, 4, metadata={"marker": "m-usage"})
    tunnel.body(b"", metadata={"marker": "m-empty"})
    tunnel.body(b"data: [DONE]\n\n")
    tunnel.usage(5, 6)
    tunnel.end(usage=rt.Usage(total_tokens=11), metadata={"marker": "m-end"})
    client.finish()
    equal((client.status, bytes(client.body), client.ending), (200, b"data: 1\n\ndata: [DONE]\n\n", "complete"), "answer")
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")


def test_empty_answers(t):
    session = t.ready()
    for status, head in ((200, JSON), (200, JSON + [("content-length", "0")]), (204, []), (304, [("etag", '"x"')])):
        client = t.post()
        session.tunnel().answer(b"", status, head)
        client.finish()
        equal((client.status, bytes(client.body), client.ending), (status, b"", "complete"), f"{status} with {head}")
        # The connection is in step: the next request on it is served.
        client.send("/v1/chat/completions", chat("m1"))
        session.tunnel().answer(b"next")
        equal(bytes(client.finish().body), b"next", "the next answer on the connection")


# Proves [R-105]
def test_status_and_headers_pass_through(t):
    session = t.ready()
    head = [("Content-Type", "application/problem+json"), ("Set-Cookie", "a=1; Path=/"), ("Retry-After", "17"), ("Set-Cookie", "b=2"),
            ("X-Latin", b"caf\xe9"), ("X-Empty", ""), ("Connection", "close, X-Gone"), ("X-Gone", "1"), ("Keep-Alive", "timeout=5"),
            ("Transfer-Encoding", "chunked"), ("Upgrade", "h2c"), ("Proxy-Authenticate", "Basic"), ("Content-Encoding", "identity"), ("Set-Cookie", "c=3")]
    for status in (200, 201, 400, 401, 404, 418, 429, 500, 503, 529):
        client = t.post()
        session.tunnel().answer(b'{"provider":"says"}', status, head)
        client.finish()
        equal((client.status, bytes(client.body), client.ending), (status, b'{"provider":"says"}', "complete"), "answer")
        equal(client.header("set-cookie"), [b"a=1; Path=/", b"b=2", b"c=3"], "duplicates in order")
        equal((client.header("x-latin"), client.header("retry-after"), client.header("content-type"), client.header("x-empty")),
              ([b"caf\xe9"], [b"17"], [b"application/problem+json"], [b""]), "headers")
        for banned in ("x-gone", "keep-alive", "upgrade", "proxy-authenticate"):
            check(not client.header(banned), f"{banned} reached the client")
        check(len(client.header("transfer-encoding")) + len(client.header("content-length")) == 1, "framing of the answer (D-28)")
        check(not client.header("x-iop-error-source"), "a provider's answer is marked as an error of the gateway")
        client.close()


def test_a_provider_header_cannot_split_the_answer(t):
    session = t.ready()
    for name, value in (("x-a", b"1\r\nX-Evil: 1"), ("x-a", b"1\nX-Evil: 1"), ("x-a\r\nX-Evil", b"1"), ("x a", b"1"), ("x:a", b"1"), ("", b"1"), ("x-a", b"\x00")):
        client = t.post()
        session.tunnel().answer(b"{}", head=JSON + [(name, value)])
        client.finish()
        check(not client.header("x-evil") and b"X-Evil" not in client.body, f"{name!r}: {value!r} made a header of its own")
        equal(client.ending, "complete", "end")
        check((client.status, bytes(client.body)) == (200, b"{}") or client.status >= 500, f"{client.status} {bytes(client.body)}")
        client.close()
    t.held(0)
    t.call(session)


def test_each_body_frame_reaches_the_client_before_the_next_is_sent(t):
    session = t.ready()
    for kind in (SSE, [("content-type", "application/x-ndjson")], [("content-type", "application/octet-stream")], []):
        client = t.post()
        tunnel = session.tunnel()
        tunnel.start(head=kind)
        client.head()  # the head alone, before any body
        for n in range(5):
            tunnel.body(b"%d\n" % n)
            client.wait_body(part=b"%d\n" % n)
        tunnel.end()
        equal(client.finish().ending, "complete", "end")


def test_http_1_0_clients_get_the_bytes_until_close(t):
    session = t.ready()
    client = t.post(version="1.0")
    tunnel = session.tunnel()
    tunnel.start(head=SSE)
    tunnel.body(ANSWER, cut=50)
    tunnel.end()
    client.finish()
    check(not client.header("transfer-encoding"), "chunks for HTTP/1.0")
    equal((bytes(client.body), client.ending), (ANSWER, "complete"), "answer")
    client = t.post(version="1.0")
    tunnel = session.tunnel()
    tunnel.start(head=JSON)
    tunnel.body(b"half")
    client.wait_body(part=b"half")
    tunnel.error("provider broke")
    equal(client.finish().ending, "reset", "end of a broken HTTP/1.0 answer (D-28)")


# Proves [R-092]
def test_standard_http_clients_are_served(t):
    session = t.ready()
    session.provider = Provider()
    url = f"http://{t.edge.host}:{t.edge.clients}/v1/chat/completions"
    body = b'{"model":"m1","do":"sse","count":200}'
    ask = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(ask, timeout=10) as answer:
        equal(answer.read(), Provider.events(200), "events")
    connection = http.client.HTTPConnection(t.edge.host, t.edge.clients, timeout=10)
    for n in range(20):
        connection.request("POST", "/v1/chat/completions", b'{"model":"m1","do":"echo","n":%d}' % n, {"content-type": "application/json"})
        answer = connection.getresponse()
        equal((answer.status, answer.read()), (200, b'{"model":"t1","do":"echo","n":%d}' % n), "echo")
    connection.request("POST", "/v1/chat/completions", b'{"model":"m1","do":"big","size":5000000}', {"content-type": "application/json"})
    check(connection.getresponse().read() == Provider.big(5_000_000), "big answer")
    connection.close()


# Proves [R-089]
def test_the_agent_as_a_program(t):
    pki = t.edge.out / "pki"
    command = [sys.executable, pathlib.Path(agent.__file__), "--edge", f"{t.edge.host}:{t.edge.nodes}", "--node-id", "n2", "--ca", pki / "ca.crt",
               "--cert", pki / "host-two.crt", "--key", pki / "host-two.key", "--interval", "0.2"]
    with open(t.edge.out / "agent.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until("n2 is connected", lambda: t.edge.node("n2")["connected"], 10)
        client = t.http().send("/v1/chat/completions", b'{"model":"m2","do":"echo"}')
        client.finish()
        equal((client.status, bytes(client.body)), (200, b'{"model":"t2","do":"echo"}'), "echo")
        client = t.http(timeout=15).send("/v1/chat/completions", b'{"model":"m2","do":"big","size":9000001}')  # paced
        check(bytes(client.finish().body) == Provider.big(9_000_001) and client.ending == "complete", f"{len(client.body)} bytes, {client.ending}")
    finally:
        process.kill()
        process.wait(5)


# Proves [R-002] [R-053]
def test_interleaved_tunnels_keep_to_themselves(t):
    session = t.ready()
    clients = [t.post(more={"mark": n}) for n in range(12)]
    tunnels = {}
    for _ in clients:
        tunnel = session.tunnel()
        tunnels[json.loads(tunnel.request.body)["mark"]] = tunnel
    dice = random.Random(3)
    expected = {n: b"" for n in tunnels}
    with session.corked():
        for n, tunnel in tunnels.items():
            tunnel.start(head=SSE)
    for turn in range(30):
        with session.corked():
            for n in dice.sample(sorted(tunnels), 9):
                piece = b"<%d:%d>" % (n, turn) * dice.randint(1, 40)
                expected[n] += piece
                tunnels[n].body(piece)
    session.ping()
    for n in sorted(tunnels, reverse=True):
        tunnels[n].end()
    for n, client in enumerate(clients):
        check(bytes(client.finish().body) == expected[n] and client.ending == "complete", f"answer {n} is not its own")


# Proves [R-082] [R-086] [R-116] [R-234] [R-237]
def test_native_provider_gets_a_run_request(t):
    session = t.ready()
    client = t.post("native")
    item = session.wait("a request", lambda i: i.type in ("iop.RunRequest", "iop.ProviderTunnelRequest"))
    equal(item.type, "iop.RunRequest", "family for a native provider")
    run = session.runs[item.message.run_id]
    ask = run.request
    equal((ask.adapter, ask.target, ask.response_stall_timeout_ms, ask.timeout_sec), ("ollama", "t-native", 2222, 0), "request")
    given = json.loads(ask.input)
    check("model" not in given and given["messages"][0]["role"] == "user", f"input {shorten(ask.input)}")  # D-50
    run.event("start")
    run.event("delta", delta="안녕")
    run.event("complete", usage=rt.Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2))
    client.finish()
    equal(client.status, 200, "status")
    equal(json.loads(client.body)["choices"][0]["message"]["content"], "안녕", "content")


# Proves [R-087] [R-234] [R-303]
def test_native_run_is_streamed_event_by_event(t):
    session = t.ready()
    client = t.post("native", more={"stream": True, "stream_options": {"include_usage": True}})
    item = session.wait("a request", lambda i: i.type == "iop.RunRequest")
    check(json.loads(item.message.input)["stream"] is True, "stream stays in the input")
    run = session.runs[item.message.run_id]
    run.event("start")
    for text in ("a\n", '"b"', "다"):
        run.event("delta", delta=text)
        client.wait_body(part=json.dumps(text, ensure_ascii=False)[1:-1].encode())
    run.event("progress", delta="never")
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    run.event("complete", usage=rt.Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3),
              metadata={"openai_tool_calls": json.dumps(calls)})
    client.finish()
    equal((client.status, client.ending), (200, "complete"), "ending")
    events = sse_events(bytes(client.body))
    equal(events[-1], b"[DONE]", "last event")
    chunks = [json.loads(event) for event in events[:-1]]
    equal(chunks[-1]["usage"]["total_tokens"], 3, "usage")
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    equal("".join(choice["delta"].get("content") or "" for choice in choices), 'a\n"b"다', "content")
    called = [choice["delta"]["tool_calls"] for choice in choices if "tool_calls" in choice["delta"]]
    equal(called, [[{"index": 0, **calls[0]}]], "tool calls")
    equal(choices[-1]["finish_reason"], "tool_calls", "finish reason")


def test_head_of_up_to_256_kib_is_forwarded(t):
    session = t.ready()
    client = t.post()
    session.tunnel().answer(b"{}", head=JSON + [(f"x-{n}", "v" * 2000) for n in range(100)])
    client.finish()
    equal((client.status, len([1 for name, _ in client.headers if name.startswith("x-")]) >= 100), (200, True), "a head of 200 KiB")


# ---------------------------------------------------------------- order of frames

def test_first_sequence_may_be_zero_or_one(t):
    session = t.ready()
    for first in (0, 1):
        client = t.post()
        tunnel = session.tunnel()
        tunnel.start(head=JSON, seq=first)
        tunnel.body(b"{}")
        tunnel.end()
        equal((client.finish().status, client.ending, bytes(client.body)), (200, "complete", b"{}"), f"first sequence {first}")
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")


# Proves [R-087]
def test_unknown_frame_kinds_count_in_the_sequence_and_go_nowhere(t):
    session = t.ready()
    client = t.post()
    tunnel = session.tunnel()
    tunnel.send(0)
    tunnel.start(head=SSE)
    tunnel.send(6, body=b"data: not this\n\n")
    tunnel.body(b"data: 1\n\n")
    tunnel.send(77, body=b"data: nor this\n\n", status_code=500)
    tunnel.end()
    equal((bytes(client.finish().body), client.ending), (b"data: 1\n\n", "complete"), "answer")
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")


def violation(t, misstep, before_head=False, terminal=False, head=SSE):
    """One stream breaks its form (A-29): the run fails, a CancelRequest goes out unless the frame was terminal, the
    lease stays until a terminal and comes back once, the connection and its other runs go on."""
    session = t.ready()
    neighbour = t.post()
    other = session.tunnel()
    other.start(head=SSE)
    other.body(b"data: a\n\n")
    client = t.post("one")
    tunnel = session.tunnel()
    if not before_head:
        tunnel.start(head=head)
        tunnel.body(b"data: 1\n\n")
        client.wait_body(part=b"data: 1\n\n")
    misstep(tunnel)
    if before_head:
        client.head()
        check(client.status and client.status >= 500, f"status {client.status}")
        client.error()
    else:
        client.finish()
        check(b"[DONE]" not in client.body and client.body.startswith(b"data: 1\n\n"), f"body {bytes(client.body)}")
        check(any(b"error" in e for e in sse_events(bytes(client.body))[1:]), f"no error event (D-10): {bytes(client.body)}")
    if terminal:
        t.held(1)  # the neighbour's
        session.ping()
        check(not tunnel.cancelled.is_set(), "CancelRequest after a terminal")
    else:
        tunnel.wait_cancel()
        t.held(2)  # D-08: only a terminal or a fence frees it
        queued = t.post("one")
        t.wait_grew("iop_edge_queue_entries_total")
        session.ping()
        check(not session.has("ProviderTunnelRequest"), "the lease of a cancelled run was given away")
        tunnel.error("cancelled")
        session.tunnel().answer()
        equal(queued.finish().status, 200, "status of the request that waited")
    other.body(b"data: [DONE]\n\n")
    other.end()
    equal((bytes(neighbour.finish().body), neighbour.ending), (b"data: a\n\ndata: [DONE]\n\n", "complete"), "the neighbour's answer")
    t.call(session, "one")
    t.in_flight("p-one", 0)
    check(t.grew("iop_edge_stream_violations_total") >= 1, "the violation is not counted")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# Proves [R-162] [R-174]
def test_sequence_gap_fails_the_run_alone(t):
    violation(t, lambda tunnel: tunnel.body(b"data: 2\n\n", seq=9))


# Proves [R-162] [R-174]
def test_sequence_repeat_fails_the_run_alone(t):
    violation(t, lambda tunnel: tunnel.body(b"data: 2\n\n", seq=2))


# Proves [R-162]
def test_first_sequence_of_two_fails_the_run_alone(t):
    violation(t, lambda tunnel: tunnel.start(head=SSE, seq=2), before_head=True)


# Proves [R-162]
def test_second_head_fails_the_run_alone(t):
    violation(t, lambda tunnel: tunnel.start(head=SSE))


# Proves [R-162]
def test_body_before_the_head_fails_the_run_alone(t):
    violation(t, lambda tunnel: tunnel.body(b"data: 1\n\n"), before_head=True)


# Proves [R-162] [R-174]
def test_end_before_the_head_fails_the_run_alone(t):
    violation(t, lambda tunnel: tunnel.end(), before_head=True, terminal=True)


# Proves [R-162] [R-174]
def test_terminal_with_a_gap_fails_the_run_and_returns_the_lease(t):
    violation(t, lambda tunnel: tunnel.end(seq=9), terminal=True)


# Proves [R-092] [R-162]
def test_run_event_on_a_tunnel_fails_the_run_alone(t):
    violation(t, lambda tunnel: tunnel.event("delta", delta="never in the body"))


# Proves [R-092] [R-162] [R-174]
def test_terminal_run_event_on_a_tunnel_returns_the_lease(t):
    violation(t, lambda tunnel: tunnel.event("complete"), terminal=True)


# Proves [R-162] [R-164]
def test_nothing_counts_after_a_terminal(t):
    session = t.ready()
    held = t.post("one")
    first = session.tunnel()
    first.start(head=SSE)
    first.body(b"data: 1\n\n")
    with session.corked():  # two terminals and more, in one record
        first.end()
        first.end()
        first.error("late")
        first.body(b"data: late\n\n")
        first.start(head=SSE)
        first.usage()
        first.event("complete")
    equal((bytes(held.finish().body), held.ending), (b"data: 1\n\n", "complete"), "answer")
    t.idle()
    equal(t.grew("iop_edge_leases_returned_total"), 1, "leases returned")
    client = t.post("one")
    tunnel = session.tunnel()
    first.end()  # the slot is another run's now
    first.error("late")
    session.ping()
    t.in_flight("p-one", 1)
    tunnel.answer()
    equal(client.finish().status, 200, "status")
    equal(t.grew("iop_edge_leases_returned_total"), 2, "leases returned")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# Proves [R-164]
def test_frames_of_unknown_runs_change_nothing(t):
    session = t.ready()
    client = t.post("one")
    tunnel = session.tunnel()
    for run_id in ("", "x", "0" * 32, "f" * 32, tunnel.run_id.upper() if tunnel.run_id.upper() != tunnel.run_id else "A" * 32,
                   tunnel.run_id + "0", tunnel.run_id[:-1], tunnel.run_id[:-1] + ("0" if tunnel.run_id[-1] != "0" else "1"), "é" * 16):
        session.send(rt.ProviderTunnelFrame(run_id=run_id, kind=BODY, sequence=1, body=b"stray"))
        session.send(rt.ProviderTunnelFrame(run_id=run_id, kind=END, sequence=2))
        session.send(rt.RunEvent(run_id=run_id, type="complete"))
    session.ping()
    t.in_flight("p-one", 1)
    tunnel.answer(b"mine")
    equal((client.finish().status, bytes(client.body)), (200, b"mine"), "answer")
    equal(t.grew("iop_edge_leases_returned_total"), 1, "leases returned")


def test_more_than_a_hundred_violations_a_minute_close_the_session(t):
    session = t.ready()
    client = t.post()
    session.tunnel()
    for n in range(100):
        session.send(rt.ProviderTunnelFrame(run_id="%032x" % n, kind=END, sequence=1))
    session.ping()  # D-41: more than 100, so a hundred are borne
    try:
        for n in range(60):
            session.send(rt.ProviderTunnelFrame(run_id="%032x" % (n + 100), kind=END, sequence=1))
    except OSError:
        pass
    session.wait_closed()
    client.head()
    equal(client.status, 503, "status of the request whose node was fenced")
    equal(t.grew("iop_edge_node_fences_total"), 1, "fences")
    t.idle()


# ---------------------------------------------------------------- errors of the node and the provider

# Proves [R-162] [R-174]
def test_error_before_the_head(t):
    session = t.ready()
    for text, codes in (("provider broke somehow", (502, 503, 504)), ("", (502, 503, 504)), ("draining", (503,))):
        client = t.post("one")
        session.tunnel().error(text)
        client.head()
        check(client.status in codes, f"{text!r} became {client.status}, not one of {codes} (D-40)")
        check(client.error(), "no error")
        if client.status == 503:
            check(client.header("retry-after"), "503 without Retry-After (D-11)")
        t.held(0)


def test_error_after_the_head(t):
    session = t.ready()
    # Event streams: one event in the surface's shape, a clean end, no [DONE] (D-10).
    client = t.post()
    tunnel = session.tunnel()
    tunnel.start(head=SSE)
    tunnel.body(b"data: 1\n\n")
    tunnel.error("provider broke")
    client.finish()
    equal(client.ending, "complete", "end of the stream")
    events = sse_events(bytes(client.body))
    equal((events[0], len(events)), (b"1", 2), f"events of {bytes(client.body)}")
    check(json.loads(events[1])["error"]["message"], "error event")
    # Anything else: the connection is aborted.
    for head, body in ((JSON, b'{"half'), (JSON + [("content-length", "100")], b'{"half'), ([], b"half")):
        client = t.post()
        tunnel = session.tunnel()
        tunnel.start(head=head)
        tunnel.body(body)
        client.wait_body(part=body)
        tunnel.error("provider broke")
        client.finish()
        equal((client.ending, bytes(client.body)), ("reset", body), f"end of a broken answer with {head}")
    t.idle()


def test_error_event_is_an_event_even_after_half_an_event(t):
    session = t.ready()
    client = t.post()
    tunnel = session.tunnel()
    tunnel.start(head=SSE)
    tunnel.body(b'data: 1\n\ndata: {"half":"of an ev')
    tunnel.error("provider broke")
    client.finish()
    last = sse_events(bytes(client.body))[-1]
    try:
        found = json.loads(last)
    except ValueError:
        raise Wrong(f"the last event is {last}: no client can read the error (D-10, one in-band error event)")
    check(found["error"]["message"], "error event")


def test_content_length_is_kept(t):
    session = t.ready()
    for length, bodies in ((6, [b"12345"]), (4, [b"12345"]), (4, [b"1234", b"5"]), (0, [b"1"])):
        client = t.post("one")
        tunnel = session.tunnel()
        tunnel.start(head=JSON + [("content-length", str(length))])
        client.head()
        with session.corked():
            for body in bodies:
                tunnel.body(body)
            tunnel.end()
        client.finish()
        # D-28: fewer bytes at END and more bytes both abort; what a client has got by then is a part of the length.
        check(client.raw == b"" and b"12345"[:length].startswith(bytes(client.body)), f"length {length}: body {bytes(client.body)} {bytes(client.raw)}")
        if length > 5:
            equal(client.ending, "reset", "an answer that stops before its length")
        t.held(0)
        client.close()
    t.in_flight("p-one", 0)
    t.call(session, "one")


def test_error_cancelled_of_a_run_nobody_cancelled(t):
    session = t.ready()
    client = t.post()
    session.tunnel().error("cancelled")
    error = client.error() if client.head() else None
    equal((client.status, client.header("x-iop-error-source"), error["code"] != "client_gone"), (502, [b"node"], True), f"answer {error}")


# ---------------------------------------------------------------- cancel

# Proves [R-246] [R-251] [R-253] [R-162]
def test_client_leaves_in_every_phase(t):
    session = t.ready()
    for phase in ("before the head", "after the head", "in the body"):
        for abort in (False, True):
            client = t.post("one")
            tunnel = session.tunnel()
            if phase != "before the head":
                tunnel.start(head=SSE)
                client.head()
            if phase == "in the body":
                tunnel.body(b"data: 1\n\n")
                client.wait_body(part=b"data: 1\n\n")
            left = time.monotonic()
            client.close(abort=abort)
            tunnel.wait_cancel()
            check(time.monotonic() - left < 1, f"{phase}: cancelled only after {time.monotonic() - left:.2f} s")
            t.held(1)  # until the terminal
            if phase == "before the head":
                tunnel.start(head=SSE)
            tunnel.body(b"data: nobody reads this\n\n", cut=5)
            tunnel.error("cancelled")
            t.held(0)
    t.in_flight("p-one", 0)
    t.call(session, "one")
    equal(t.grew("iop_edge_cancels_sent_total"), 6, "cancels")
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")


# Proves [R-246]
def test_client_that_closes_its_sending_side_has_left(t):
    session = t.ready()
    client = t.post("one")
    tunnel = session.tunnel()
    client.sock.shutdown(socket.SHUT_WR)  # D-27
    tunnel.wait_cancel()
    tunnel.error("cancelled")
    t.in_flight("p-one", 0)


# Proves [R-162] [R-246]
def test_cancel_crossing_an_end(t):
    session = t.ready()
    for _ in range(20):
        client = t.post("one")
        tunnel = session.tunnel()
        tunnel.start(head=SSE)
        client.head()
        client.close(abort=True)
        tunnel.end()  # at the same time; a cancel may or may not come
    t.in_flight("p-one", 0)
    equal(t.grew("iop_edge_leases_returned_total"), 20, "leases returned")
    t.call(session, "one")


# Proves [R-247]
def test_response_wait_ends_the_request_and_cancels(t):
    session = t.ready()
    client = t.post("brief")
    began = time.monotonic()
    tunnel = session.tunnel()
    client.head()
    equal(client.status, 504, "status")
    check(0.4 < time.monotonic() - began < 3, f"after {time.monotonic() - began:.2f} s, not 0.6 s")
    client.error()
    tunnel.wait_cancel()
    t.held(1)
    tunnel.answer(b"too late")
    t.held(0)
    # Frames move the deadline; silence after one ends an event stream in band.
    client = t.post("brief")
    tunnel = session.tunnel()
    tunnel.start(head=SSE)
    for n in range(4):
        began = time.monotonic()
        until("time passes", lambda: time.monotonic() - began > 0.35)
        tunnel.body(b"data: %d\n\n" % n)
        client.wait_body(part=b"data: %d\n\n" % n)
    client.finish()
    check(b"error" in client.body and b"[DONE]" not in client.body, f"body {bytes(client.body)}")
    tunnel.wait_cancel()
    tunnel.error("cancelled")
    t.in_flight("p-brief", 0)


# Proves [R-248] [R-246]
def test_client_that_reads_nothing_is_cut_and_others_go_on(t):
    session = t.ready()
    slow = t.post(receive_buffer=4096)
    tunnel = session.tunnel()
    tunnel.start(head=[("content-type", "application/octet-stream")])
    neighbour = t.post()
    other = session.tunnel()
    other.start(head=SSE)
    # More than the socket takes and less than the output pool of 32 MiB.
    tunnel.body(Provider.big(12 << 20), cut=262_144)
    n = 0
    deadline = time.monotonic() + 8
    while not tunnel.cancelled.is_set():  # write_stall_ms
        check(time.monotonic() < deadline, "a client that reads nothing is never cut (D-06)")
        other.body(b"data: %d\n\n" % n)
        neighbour.wait_body(part=b"data: %d\n\n" % n)
        n += 1
        tunnel.cancelled.wait(0.05)
    tunnel.error("cancelled")
    other.end()
    equal(neighbour.finish().ending, "complete", "the neighbour's answer")
    check(t.grew("iop_edge_failures_total", reason="client_too_slow") == 1, "client_too_slow is not counted")


# ---------------------------------------------------------------- capacity and queue

# Proves [R-174] [R-239] [R-240] [R-269] [R-271]
def test_capacity_and_fifo(t):
    session = t.ready()
    clients, order = [], []
    for n in range(5):
        clients.append(t.post("one", more={"mark": n}))
        t.wait_grew("iop_edge_submits_total", n + 1)
    until("one runs and four wait", lambda: (lambda p: p["in_flight"] == 1 and p["queued"] == 4)(t.edge.provider("p-one")))
    for n in range(5):
        tunnel = session.tunnel()
        session.ping()
        check(not session.has("ProviderTunnelRequest"), "two at once on a capacity of one")
        order.append(json.loads(tunnel.request.body)["mark"])
        tunnel.answer()
    equal(order, [0, 1, 2, 3, 4], "order of service")
    for client in clients:
        equal(client.finish().status, 200, "status")
    t.in_flight("p-one", 0)


# Proves [R-240] [R-241] [R-238]
def test_capacity_not_concurrency_is_the_gate(t):
    session = t.ready()  # its configuration says concurrency 1
    clients = [t.post("two") for _ in range(3)]
    tunnels = [session.tunnel(), session.tunnel()]
    t.wait_grew("iop_edge_queue_entries_total")
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "three at once on a capacity of two")
    tunnels[1].answer()
    tunnels.append(session.tunnel())
    tunnels[0].answer()
    tunnels[2].answer()
    for client in clients:
        equal(client.finish().status, 200, "status")


# Proves [R-271]
def test_queue_is_bounded_in_number_and_time(t):
    session = t.ready()
    first = t.post("one")
    tunnel = session.tunnel()
    waiting = [t.post("one") for _ in range(6)]  # queue_waiters_max
    t.wait_grew("iop_edge_queue_entries_total", 6)
    extra = t.post("one").head()
    equal(extra.status, 429, "status of the seventh waiter")
    check(extra.header("retry-after"), "429 without Retry-After (D-30)")
    extra.error()
    for client in waiting:  # queue_wait_ms
        equal(client.head().status, 503, "status after the wait")
        check(client.header("retry-after"), "503 without Retry-After (D-11)")
        client.error()
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "a waiter that timed out was dispatched")
    tunnel.answer()
    equal(first.finish().status, 200, "status")
    t.call(session, "one")


# Proves [R-246] [R-271]
def test_waiters_that_left_are_never_dispatched(t):
    session = t.ready()
    first = t.post("one")
    tunnel = session.tunnel()
    waiting = []
    for n in range(4):
        waiting.append(t.post("one", more={"mark": n}))
        t.wait_grew("iop_edge_queue_entries_total", n + 1)
    for client in waiting[:3]:
        client.close(abort=True)
    t.wait_grew("iop_edge_clients_gone_total", 3, phase="waiting")
    tunnel.answer()
    last = session.tunnel()
    equal(json.loads(last.request.body)["mark"], 3, "who is served after three left")
    last.answer()
    equal((first.finish().status, waiting[3].finish().status), (200, 200), "status")
    equal(t.grew("iop_edge_leases_granted_total"), 2, "leases granted")
    equal(len(session.cancels), 0, "cancels for requests that were never sent")


# Proves [R-270] [R-272]
def test_long_requests_have_their_own_bound(t):
    session = t.ready()
    padding = {"pad": "x" * 5000}
    long1 = t.post("long", more={**padding, "mark": "l1"})
    first = session.tunnel()
    long2 = t.post("long", more={**padding, "mark": "l2"})
    t.wait_grew("iop_edge_queue_entries_total")
    until("one long runs, one waits", lambda: (lambda p: (p["in_flight"], p["long_in_flight"], p["queued"], p["long_queued"]) == (1, 1, 1, 1))(
        t.edge.provider("p-long")))
    short = t.post("long", more={"mark": "s"})  # passes the long one that waits (D-16)
    tunnel = session.tunnel()
    equal(json.loads(tunnel.request.body)["mark"], "s", "who is served")
    tunnel.answer()
    first.answer()
    session.tunnel().answer()
    equal([c.finish().status for c in (long1, long2, short)], [200] * 3, "status")


# Proves [R-232] [R-238] [R-074]
def test_a_group_over_two_nodes(t):
    one, two = t.ready("n1"), t.ready("n2")
    clients = [t.post("both") for _ in range(4)]
    tunnels = [one.tunnel(), one.tunnel(), two.tunnel(), two.tunnel()]  # least loaded first: two each
    for tunnel in tunnels:
        tunnel.answer()
    equal([c.finish().status for c in clients], [200] * 4, "status")
    two.close(abort=True)
    until("n2 is offline", lambda: not t.edge.node("n2")["connected"])
    clients = [t.post("both") for _ in range(2)]
    for _ in clients:
        one.tunnel().answer()
    equal([c.finish().status for c in clients], [200] * 2, "status")


def test_models_without_any_provider_fail_at_once(t):
    t.ready()
    for model, status in (("none", 503), ("off", 503), ("never-heard-of", 404)):
        client = t.post(model).head()
        equal(client.status, status, f"model {model} (D-11)")
        client.error()


# ---------------------------------------------------------------- the node is lost

def lost(t, lose):
    """Streams in every phase when their node goes: D-10, and 503 before the head (D-11)."""
    session = t.ready()
    plans = {"sse": (SSE, b"data: 1\n\n"), "length": (JSON + [("content-length", "50")], b'{"half'), "chunks": (JSON, b'{"half'), "nothing": None}
    clients = {name: t.post() for name in plans}
    for client in clients.values():
        client.tunnel = None
    tunnels = [session.tunnel() for _ in plans]
    # Which tunnel is whose does not matter: the first three get the three kinds of answer.
    for tunnel, plan in zip(tunnels, plans.values()):
        if plan:
            tunnel.start(head=plan[0])
            tunnel.body(plan[1])
    session.ping()
    lose(session)
    seen = []
    for client in clients.values():
        client.finish()
        kind = (client.header("content-type") or [b""])[0]
        if client.status == 503:
            check(client.header("retry-after"), "503 without Retry-After (D-11)")
            client.error()
            seen.append("nothing")
        elif kind.startswith(b"text/event-stream"):
            equal(client.ending, "complete", "end of the event stream")
            events = sse_events(bytes(client.body))
            check(events[0] == b"1" and len(events) == 2 and json.loads(events[1])["error"]["message"], f"events {events}")
            check(b"[DONE]" not in client.body, "[DONE] after a loss")
            seen.append("sse")
        else:
            equal((client.ending, bytes(client.body)), ("reset", b'{"half'), "a broken answer")
            seen.append("length" if client.header("content-length") else "chunks")
    equal(sorted(seen), sorted(plans), "the four answers")
    t.idle()
    equal(t.grew("iop_edge_leases_returned_total", by="fence"), 4, "leases returned by the fence")
    equal(t.grew("iop_edge_node_fences_total"), 1, "fences")
    until("n1 is offline", lambda: not t.edge.node("n1")["connected"])
    equal(t.edge.provider("p1")["in_flight"], 0, "in_flight")
    t.call(t.ready())


# Proves [R-070] [R-073] [R-074] [R-285]
def test_node_resets_in_the_middle_of_streams(t):
    lost(t, lambda session: session.close(abort=True))


# Proves [R-070] [R-073] [R-074]
def test_node_closes_cleanly_in_the_middle_of_streams(t):
    lost(t, lambda session: session.close())


# Proves [R-071] [R-073] [R-074]
def test_silent_node_is_dead_after_the_timeout(t):
    def fall_silent(session):
        session.mute = True
        session.wait_closed(6)  # dead_ms
    lost(t, fall_silent)


# Proves [R-070] [R-073]
def test_node_lost_in_the_middle_of_an_envelope(t):
    def half(session):
        tunnel = next(iter(session.runs.values()))
        data = frame(Style().encode(tp.Envelope(type="iop.ProviderTunnelFrame", payload=tunnel.frame(BODY, body=b"data: [DONE]\n\n").SerializeToString())))
        session.raw(data[:20])
        session.close(abort=True)
    lost(t, half)


# Proves [R-072] [R-078]
def test_loss_of_a_pending_node_fences_nothing(t):
    pending = t.pending("n2")
    owner = t.ready("n1")
    pending.close(abort=True)
    t.call(owner)
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# ---------------------------------------------------------------- heartbeat, unknown and wrong messages

def test_ping_and_pong(t):
    early = t.session()
    early.ping()  # legal from the verified identity on
    early.close()
    session = t.session(ping_every=0)
    session.send(tp.Ping(seq=2**64 - 1))
    session.wait("the greatest seq", lambda i: i.type == "iop.transport.Pong" and i.message.seq == 2**64 - 1)
    session.register("n1")
    check(session.make_ready().ready, "not ready")
    # The Edge pings when it has written nothing for heartbeat_ms, and lives on our pongs alone.
    for _ in range(6):
        session.wait("a ping of the Edge", lambda i: i.type == "iop.transport.Ping", 2)
    session.send(tp.Pong(seq=99))  # nobody asked
    t.call(session)


# Proves [R-071]
def test_any_byte_is_liveness(t):
    session = t.ready()
    client = t.post()
    tunnel = session.tunnel()
    session.ping()
    session.mute = True  # no ping or pong of ours, only an envelope that takes longer than dead_ms to arrive
    data = frame(tp.Envelope(type="iop.ProviderTunnelFrame", payload=tunnel.frame(START, status_code=201).SerializeToString()).SerializeToString())
    began = time.monotonic()
    for n in range(6):
        session.raw(data[n * 10:n * 10 + 10] if n < 5 else data[50:])
        if n < 5:
            until("a part of dead_ms passes", lambda: time.monotonic() - began > 0.45 * (n + 1))
    session.mute = False
    session.ping()
    tunnel.end()
    equal(client.finish().status, 201, "status")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# Proves [R-001]
def test_unknown_messages_are_ignored_once_registered(t):
    session = t.pending()
    def strange():
        for name in ("iop.FutureThing", "iop.transport.Future", "other.package.RunEvent", "", "RunEvent", "iop.RunEvent2", "x" * 300):
            session.send_payload(name, b"\x00\xff not protobuf at all", number=7)
        session.ping()
    strange()
    check(session.make_ready().ready, "not ready")
    client = t.post()
    tunnel = session.tunnel()
    strange()
    tunnel.answer()
    equal(client.finish().status, 200, "status")
    equal(t.grew("iop_edge_envelopes_ignored_total"), 14, "ignored envelopes")


def test_frames_of_a_pending_node_are_dropped(t):
    session = t.pending()  # states.md row 10
    session.send(rt.ProviderTunnelFrame(run_id="0" * 32, kind=END, sequence=1))
    session.send(rt.RunEvent(run_id="0" * 32, type="complete"))
    session.send(rt.NodeCommandResponse(command_id="x"), reply_to=5)
    session.send(rt.NodeConfigRefreshResponse(request_id="x"), reply_to=5)
    session.send(tp.GoAway(grace_ms=5))  # row 19: no effect on a pending node
    session.ping()
    check(session.make_ready().ready, "not ready")
    t.call(session)


def test_answers_nobody_asked_for_are_dropped(t):
    session = t.ready()
    session.send(rt.NodeCommandResponse(command_id="x", type=CAPABILITIES, result={"provider_status": "available"}), reply_to=12345)
    session.send(rt.NodeConfigRefreshResponse(request_id="x", status=rt.NODE_CONFIG_REFRESH_STATUS_APPLIED), reply_to=12345)
    session.ping()
    t.call(session)
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


def closes(t, send, register=True):
    """A ready node that sends this is cut off and fenced: its one run ends, its lease comes back once."""
    session = t.ready()
    client = t.post("one")
    tunnel = session.tunnel()
    try:
        send(session, tunnel)
    except OSError:
        pass
    session.wait_closed()
    client.finish()
    check(client.status != 200 or client.ending == "reset", f"answer {client.status}, {client.ending}: {bytes(client.body)}")
    t.idle()
    equal(t.grew("iop_edge_leases_returned_total", by="fence"), 1, "leases returned by the fence")
    equal(t.grew("iop_edge_node_fences_total"), 1, "fences")
    t.call(t.ready())


def test_messages_in_the_wrong_direction_close_and_fence(t):
    wrong = [rt.RegisterResponse(accepted=True), rt.NodeReadyResponse(ready=True), rt.RunRequest(run_id="x"), rt.ProviderTunnelRequest(run_id="x"),
             rt.CancelRequest(run_id="x"), rt.NodeCommandRequest(command_id="x"), rt.NodeConfigRefreshRequest(request_id="x"), tp.Window(run_id="x")]
    for message in wrong:
        sub = Case(t.edge)
        try:
            closes(sub, lambda session, tunnel: session.send(message))
            sub.finish()
        except (Wrong, Late, Closed) as error:
            raise Wrong(f"{message.DESCRIPTOR.full_name}: {error}")
        finally:
            for one in sub.opened:
                one.close()


def test_messages_before_registration_close(t):
    owner = t.ready()
    for message in (rt.RunEvent(run_id="x", type="complete"), rt.ProviderTunnelFrame(run_id="x"), rt.NodeCommandResponse(command_id="x"),
                    rt.NodeConfigRefreshResponse(request_id="x"), tp.GoAway(), tp.Features(window=True)):
        session = t.session()
        session.send(message)
        session.wait_closed()
        session.close()
    session = t.session()
    session.send_payload("iop.FutureThing", b"")
    session.wait_closed()
    equal(t.grew("iop_edge_failures_total", reason="registration_timeout"), 0, "connections that waited for their registration deadline instead")
    t.call(owner)


def envelope(kind, payload, extra=b""):
    return frame(length_delimited(3, kind.encode()) + length_delimited(4, payload) + extra)


MALFORMED = {
    "an envelope of random bytes": lambda run: frame(b"\xff" * 40),
    "an envelope cut off in a field": lambda run: frame(length_delimited(3, b"iop.RunEvent")[:-3]),
    "an envelope whose payload is longer than it": lambda run: frame(length_delimited(3, b"iop.RunEvent") + b"\x22\x7f\x00"),
    "a varint of eleven bytes": lambda run: frame(b"\x08" + b"\xff" * 10 + b"\x01"),
    "field number zero": lambda run: frame(b"\x02\x01\x00" + length_delimited(3, b"iop.RunEvent")),
    "a type that is not UTF-8": lambda run: envelope("", b"", length_delimited(3, b"iop.\xff\xfe")),
    "a length of zero": lambda run: struct.pack(">I", 0),
    "a payload that is not its message": lambda run: envelope("iop.ProviderTunnelFrame", b"\xff" * 30),
    "a payload cut off": lambda run: envelope("iop.ProviderTunnelFrame", rt.ProviderTunnelFrame(run_id=run, kind=END, sequence=1).SerializeToString()[:-1]),
    "a run_id that is not UTF-8": lambda run: envelope("iop.ProviderTunnelFrame", length_delimited(1, b"\xff\xfe") + b"\x18\x03\x20\x01"),
    "a string it does not use that is not UTF-8": lambda run: envelope(
        "iop.ProviderTunnelFrame", rt.ProviderTunnelFrame(run_id=run, kind=START, sequence=1, status_code=200).SerializeToString() + length_delimited(8, b"\xff")),
    "a map key that is not UTF-8": lambda run: envelope(
        "iop.ProviderTunnelFrame", rt.ProviderTunnelFrame(run_id=run, kind=START, sequence=1, status_code=200).SerializeToString()
        + length_delimited(10, length_delimited(1, b"\xff") + length_delimited(2, b"v"))),
    "a number where a string belongs": lambda run: envelope("iop.RunEvent", b"\x08\x05"),
    "a group that never ends": lambda run: envelope("iop.RunEvent", length_delimited(1, b"x") + b"\x83\x7d\x08\x01"),
}


def test_malformed_bytes_close_and_fence(t):
    for name, make in MALFORMED.items():
        sub = Case(t.edge)
        try:
            closes(sub, lambda session, tunnel: session.raw(make(tunnel.run_id)))
            sub.finish()
        except (Wrong, Late, Closed) as error:
            raise Wrong(f"{name}: {error}")
        finally:
            for one in sub.opened:
                one.close()


def test_a_damaged_tls_record_closes_and_fences(t):
    closes(t, lambda session, tunnel: session.raw_tcp(b"\x17\x03\x03\x00\x20" + b"\x55" * 32))


HUGE = {
    "a length of four gibibytes": lambda s, r: s.raw(b"\xff\xff\xff\xff"),
    "a length of 64 MiB and much more": lambda s, r: s.raw(struct.pack(">I", (64 << 20) + (1 << 20)) + b"\x1a"),
    "an unknown message of 2 MiB": lambda s, r: s.send_payload("iop.FutureThing", b"\x00" * (2 << 20)),
    "a command answer of 2 MiB": lambda s, r: s.send(rt.NodeCommandResponse(command_id="x", error="e" * (2 << 20))),
    "a head of 300 KiB": lambda s, r: r.start(head=JSON + [(f"x-{n}", "v" * 1000) for n in range(300)]),
    "a body of 2 MiB before its run id": lambda s, r: s.send(
        rt.ProviderTunnelFrame(run_id=r.run_id, kind=BODY, sequence=2, body=b"\x00" * (2 << 20)), style=Style(reverse=True)),
}


def test_huge_envelopes_close_and_fence(t):
    for name, send in HUGE.items():
        sub = Case(t.edge)
        try:
            closes(sub, lambda session, tunnel: send(session, tunnel))
            sub.finish()
        except (Wrong, Late, Closed) as error:
            raise Wrong(f"{name}: {error}")
        finally:
            for one in sub.opened:
                one.close()


# What may follow a body that is being cut through, and breaks it (D-02).
TAILS = {
    "an error that is not UTF-8": length_delimited(8, b"\xff\xff"),
    "a second run_id": length_delimited(1, b"0" * 32),
    "a second kind": b"\x18\x02",
    "a second sequence": b"\x20\x02",
    "a second body": length_delimited(7, b"more"),
    "a field cut off": b"\x42\x7f\x00",
    "field number zero": b"\x00\x00",
}


# Proves [R-073]
def test_malformed_tail_of_a_body_that_is_cut_through(t):
    for name, tail in TAILS.items():
        sub = Case(t.edge)
        try:
            malformed_tail(sub, tail)
            sub.finish()
        except (Wrong, Late, Closed) as error:
            raise Wrong(f"{name}: {error}")
        finally:
            for one in sub.opened:
                one.close()


def malformed_tail(t, tail):
    session = t.ready()  # S-69
    clients = [t.post(), t.post()]
    tunnels = [session.tunnel(), session.tunnel()]
    for tunnel in tunnels:
        tunnel.start(head=SSE)
    good = tunnels[0].frame(BODY, body=b"data: x\n\n" * 200_000).SerializeToString()
    try:
        session.raw(envelope("iop.ProviderTunnelFrame", good + tail))
    except OSError:
        pass
    session.wait_closed()
    for client in clients:
        client.finish()
        check(b"[DONE]" not in client.body, "a clean end after a malformed frame")
        check(any(b"error" in e for e in sse_events(bytes(client.body))[-1:]), f"no error event at the end: {bytes(client.body[-80:])}")
    t.idle()
    equal(t.grew("iop_edge_leases_returned_total", by="fence"), 2, "leases returned by the fence")
    equal(t.grew("iop_edge_node_fences_total"), 1, "fences")


def test_last_value_of_a_repeated_field_counts(t):
    """Protobuf's own rule, for the fields that come before a body: types and numbers written twice."""
    session = t.ready()
    client = t.post()
    tunnel = session.tunnel()
    head = tunnel.frame(START, status_code=500, headers=agent.headers(JSON)).SerializeToString() + rt.ProviderTunnelFrame(status_code=201).SerializeToString()
    session.raw(frame(length_delimited(3, b"iop.FutureThing") + length_delimited(3, b"iop.ProviderTunnelFrame") + length_delimited(4, head)))
    tunnel.body(b"{}")
    tunnel.end()
    client.finish()
    equal((client.status, bytes(client.body)), (201, b"{}"), "answer")


# ---------------------------------------------------------------- what is optional

def test_node_that_goes_away_gets_no_new_work(t):
    one, two = t.ready("n1"), t.ready("n2")
    client = t.post("m1")
    tunnel = one.tunnel()
    tunnel.start(head=SSE)
    one.send(tp.GoAway(grace_ms=5000))
    one.ping()
    clients = [t.post("both") for _ in range(2)]
    for _ in clients:
        two.tunnel().answer()
    equal([c.finish().status for c in clients], [200, 200], "status")
    waiting = t.post("m1")
    t.wait_grew("iop_edge_queue_entries_total")
    tunnel.body(b"data: [DONE]\n\n")
    tunnel.end()
    equal(client.finish().ending, "complete", "the running answer")
    one.ping()
    check(not one.has("ProviderTunnelRequest"), "work for a node that goes away")
    one.close()
    t.ready("n1").tunnel().answer()  # a new generation serves the waiter
    equal(waiting.finish().status, 200, "status")


# Proves [R-163] [R-174]
def test_evidence_that_does_not_fit_lowers_nothing_and_returns_the_lease(t):
    session = t.ready()
    for name, stall in {
        "another adapter": lambda r: r.stall(seq=session.observation(), adapter="named"),
        "another target": lambda r: r.stall(seq=session.observation(), target="t1"),
        "a sequence that is no number": lambda r: r.stall(seq="+7"),
        "a sequence of zero": lambda r: r.stall(seq="0"),
        "no sequence": lambda r: r.stall(seq=None),
        "a crossed pair": lambda r: r.error("response_stalled", rt.ExecutionFailure(failure_code="response_stalled", metadata={
            "provider_health": "unavailable", "liveness_classification": "request_stalled", "adapter": "a1", "target": "t-ill",
            "health_observation_seq": str(session.observation())})),
        "a legacy error text": lambda r: r.error("response_stalled"),
        "another failure code": lambda r: r.error("x", rt.ExecutionFailure(failure_code="exploded", metadata={
            "provider_health": "unavailable", "liveness_classification": "provider_unhealthy", "adapter": "a1", "target": "t-ill",
            "health_observation_seq": str(session.observation())})),
        "an available provider": lambda r: r.stall("available", seq=session.observation()),
        "an unknown provider": lambda r: r.stall("unknown", seq=session.observation()),
    }.items():
        client = t.post("ill")
        tunnel = session.tunnel()
        stall(tunnel)
        client.head()
        check(client.status and client.status >= 500, f"{name}: status {client.status}")
        client.error()
        t.idle()
        client.close()
    provider = t.edge.provider("p-ill")
    until("p-ill is as configured", lambda: (lambda p: (p["status"], p["health"], p["capacity"]) == ("available", "degraded", 1))(t.edge.provider("p-ill")), 2)
    t.call(session, "ill")
    equal(provider["in_flight"], 0, "in_flight")


# Proves [R-170] [R-171] [R-254] [R-274] [R-275] [R-276] [R-277] [R-278] [R-182] [R-183] [R-184] [R-194] [R-259] [R-279]
def test_unavailable_provider_is_put_aside_until_a_probe_finds_it(t):
    session = t.ready()
    session.health = lambda adapter, target: "available"
    client = t.post("ill")
    session.tunnel().stall("unavailable", seq=session.observation())
    client.head()
    check(client.status >= 500, f"status {client.status}")
    shown = until("p-ill is unavailable", lambda: (lambda p: p if p["status"] == "unavailable" else None)(t.edge.provider("p-ill")), 3)
    equal((shown["health"], shown["adapter"], shown["targets"], shown["capacity"], shown["in_flight"], shown["queued"], shown["long_context_capacity"]),
          ("unavailable", "a1", ["t-ill"], 0, 0, 0, 0), "p-ill")
    t.call(session, "m1")  # others on the same adapter go on
    command = session.next("NodeCommandRequest", 8)  # D-58: after 5 s, +-20 %
    equal((command.type, command.adapter, command.target), (CAPABILITIES, "a1", "t-ill"), "probe")
    until("p-ill is back", lambda: t.edge.provider("p-ill")["status"] == "available", 3)
    equal(t.edge.provider("p-ill")["health"], "degraded", "its configured health")
    t.call(session, "ill")
    # A newer generation inherits nothing.
    client = t.post("ill")
    session.tunnel().stall("unavailable", seq=session.observation())
    client.finish()
    session.close()
    session = t.ready()
    t.call(session, "ill")


def backlog(t, session=None):
    """A node that does not read, and requests too large for its socket: the first is begun, the last is not."""
    session = session or t.ready()
    session.paused = True
    clients = []
    for n in range(4):  # one after another: a body that was sent later could be whole before
        clients.append(t.http(timeout=15).send("/v1/chat/completions", chat("m1", mark=n, pad="x" * 1_500_000)))
        t.wait_grew("iop_edge_leases_granted_total", n + 1)
    t.wait_grew("iop_edge_runs_dispatched_total")
    return session, clients


# Proves [R-073] [R-077]
def test_request_that_was_never_begun_goes_to_the_next_connection(t):
    # states.md machine 1, fence (2): it goes back to its place and is served by the next generation.
    session, clients = backlog(t)
    session.close(abort=True)
    until("the node is fenced", lambda: t.grew("iop_edge_node_fences_total") == 1)
    begun = int(t.grew("iop_edge_runs_dispatched_total"))
    check(begun < 4, "all were begun: nothing was shown")
    second = t.ready()
    for _ in range(4 - begun):
        second.tunnel().answer(b"served")
    equal(sorted(c.finish().status for c in clients), sorted([200] * (4 - begun) + [503] * begun), f"statuses with {begun} begun")


# Proves [R-251]
def test_request_that_was_never_begun_is_withdrawn_when_its_client_leaves(t):
    session, clients = backlog(t)  # D-02: its lease is returned at once and nothing is sent
    clients[3].close(abort=True)
    t.held(3)  # whether it waited for the socket or was not handed to its writer yet
    session.paused = False
    marks = []
    for _ in range(3):
        tunnel = session.tunnel(15)
        marks.append(json.loads(tunnel.request.body.replace(b"1e400", b"1"))["mark"])
        tunnel.answer()
    equal(sorted(marks), [0, 1, 2], "requests that were sent")
    session.ping()
    check(not session.has("ProviderTunnelRequest") and not session.has("CancelRequest"), "the withdrawn request or a cancel was sent")
    equal([c.finish().status for c in clients[:3]], [200] * 3, "statuses")


# ---------------------------------------------------------------- pacing

# wire.md 4.2 and D-06. What holds for every Window (only to those who asked, only for tunnels that were requested and not
# cancelled, totals that never shrink) Session judges on each connection, in every case.
MIB = 1 << 20
BYTES = [("content-type", "application/octet-stream")]
PATIENT = {"stall": ("write_stall_ms: 1200", "write_stall_ms: 20000")}  # D-29: a client may stop reading for so long


def pacing(t, node="n1", **options):
    """A ready node that has asked for Windows."""
    session = t.pending(node, **options)
    session.send(tp.Features(window=True))
    check(session.make_ready().ready, "not ready")
    return session


def windows(session):
    return [i.message for i in session.inbox if i and i.type == "iop.transport.Window"]


def begin(t, session, model="m1", head=BYTES, **options):
    """A request of which the node has the first Window and its client the head."""
    client = t.post(model, **options)
    tunnel = session.tunnel()
    equal(tunnel.wait_grant(), MIB, "the first grant (D-06)")
    tunnel.start(head=head)
    equal(client.head().status, 200, "status")
    return client, tunnel


def fill(t, tunnel, data, timeout=20):
    """Sends what is granted, and no more, until the client's socket takes nothing: the grant is used up, and what the Edge
    holds for the client stays the same over twenty looks. Returns how many bytes that were."""
    looks = []

    def stuck():
        room = tunnel.room()
        if room:
            tunnel.body(data[tunnel.sent:tunnel.sent + room], cut=65536)
            looks.clear()
            return False
        tunnel.session.ping()
        looks.append((tunnel.grants[-1], t.edge.metric("iop_edge_pool_used_bytes", pool="output")))
        return len(looks) >= 20 and len(set(looks[-20:])) == 1 and looks[-1][1] > 0
    until("the client's socket takes no more", stuck, timeout)
    check(tunnel.sent < len(data), f"all {len(data)} bytes were granted to a client that reads nothing")
    return tunnel.sent


class Writer(threading.Thread):
    """The rest of an answer as its node sends it: paced, then END."""

    def __init__(self, tunnel, data, cut=65536):
        super().__init__(daemon=True)
        self.tunnel, self.data, self.cut, self.failed = tunnel, data, cut, None
        self.start()

    def run(self):
        try:
            if self.tunnel.paced(self.data, self.cut):
                self.tunnel.end()
            else:
                self.failed = "cancelled"
        except Exception as error:
            self.failed = error

    def done(self):
        self.join(10)
        check(not self.is_alive() and not self.failed, f"the node's writer: {self.failed or 'still writes'}")


def lock_step(client, tunnel, data, upto, step=65536):
    """The client has every piece before the next is sent; nothing is ever pending for it. Returns how far each grant reached
    beyond what was sent."""
    ahead, seen = [], len(tunnel.grants)
    while tunnel.sent < upto:
        tunnel.body(data[tunnel.sent:tunnel.sent + step])
        client.wait_body(size=tunnel.sent)
        # "more as often as the client's socket has taken half": it has all of it, so at least half a mebibyte is left
        until("a grant after half was taken", lambda: tunnel.room() >= MIB // 2)
        check(tunnel.room() <= 16 * MIB, f"{tunnel.room()} bytes beyond what was sent are granted (D-06: 16 MiB)")
        if len(tunnel.grants) > seen:
            ahead.append(tunnel.room())
            seen = len(tunnel.grants)
    return ahead


def test_first_window_comes_with_the_request(t):
    for style in (Style(), Style(unknown=True), Style(reverse=True, pad=5)):
        session = pacing(t, style=style)
        for n in range(3):
            client = t.post()
            tunnel = session.tunnel()
            tunnel.wait_grant()  # before the node has sent anything for this run
            session.ping()
            equal(tunnel.grants, [MIB], "Windows before the first frame")
            order = [i.type for i in session.inbox if i and i.type == "iop.transport.Window"]
            equal(len(order), n + 1, "Windows on the connection")
            tunnel.answer(b"small")
            equal((bytes(client.finish().body), client.ending), (b"small", "complete"), "answer")
            equal(tunnel.grants, [MIB], "Windows of a small answer")
        session.close()
        t.idle()
    session = pacing(t)
    for path in ("completions", "embeddings", "responses", "messages", "messages/count_tokens"):  # on every surface
        client = t.http().send("/v1/" + path, b'{"model":"m1","messages":[{"role":"user","content":"x"}],"input":"x","prompt":"x","max_tokens":4}')
        tunnel = session.tunnel()
        equal(tunnel.wait_grant(), MIB, f"the first grant of {path}")
        tunnel.answer()
        equal(client.finish().status, 200, f"status of {path}")


def test_only_the_connection_that_asked_gets_windows(t):
    def served(session):
        client = t.post()
        tunnel = session.tunnel()
        tunnel.start(head=BYTES)
        tunnel.body(Provider.big(2 * MIB), cut=262144)
        tunnel.end()
        check(bytes(client.finish().body) == Provider.big(2 * MIB), "the answer")
        session.ping()
        return len(tunnel.grants)

    for features in ([], [tp.Features()], [tp.Features(window=False)]):
        session = t.pending()
        for one in features:
            session.send(one)
        check(session.make_ready().ready, "not ready")
        equal((served(session), len(windows(session))), (0, 0), f"Windows after {features}")
        if features:  # states.md 1, row 20: in Ready it is remembered as well
            session.send(tp.Features(window=True))
            session.ping()
            check(served(session) > 0, "no Window after a Features{window:true} sent when ready")
        session.close()
        t.idle()
    session = pacing(t)
    session.send(tp.Features(window=True))  # twice is once
    check(served(session) > 0, "no Window")
    session.close()
    t.idle()
    equal(served(t.ready()), 0, "Windows on a later connection that did not ask")
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")


def test_one_node_asks_and_the_other_does_not(t):
    one, two = pacing(t, "n1"), t.ready("n2")
    clients = [t.post("both") for _ in range(4)]
    until("both nodes have work", lambda: one.has("ProviderTunnelRequest") and two.has("ProviderTunnelRequest"))
    until("four requests", lambda: len(one.runs) + len(two.runs) == 4)
    for session in (one, two):
        for tunnel in list(session.runs.values()):
            tunnel.answer(b"both")
        session.ping()
    equal([bytes(c.finish().body) for c in clients], [b"both"] * 4, "answers")
    equal([tunnel.grants for tunnel in one.runs.values()], [[MIB]] * len(one.runs), "Windows of the node that asked")
    equal(windows(two), [], "Windows of the other")


def test_window_is_no_capacity(t):
    session = pacing(t)
    first, tunnel = begin(t, session, "one", timeout=10)
    waiting = t.post("one")
    t.wait_grew("iop_edge_queue_entries_total")
    session.ping()
    equal((len(windows(session)), session.has("ProviderTunnelRequest")), (1, False), "Windows and requests while the second waits")
    tunnel.end()
    second = session.tunnel()
    equal(second.wait_grant(), MIB, "the first grant of the second")
    second.answer(b"second")
    equal((first.finish().ending, bytes(waiting.finish().body)), ("complete", b"second"), "answers")


def test_normalized_runs_get_no_window(t):
    session = pacing(t)
    client = t.post("native", more={"stream": True}, timeout=15)
    run = session.run()
    run.event("start")
    for _ in range(24):
        run.event("delta", delta="한" * 30_000)
    run.event("complete")
    equal((client.finish().status, client.ending), (200, "complete"), "end of the run")
    check(len(client.body) > 2 * MIB, f"{len(client.body)} bytes")
    session.ping()
    equal(windows(session), [], "Windows of a normalized run")
    client, tunnel = begin(t, session)  # and on the same connection a tunnel has one
    tunnel.end()
    equal(client.finish().ending, "complete", "the tunnel")


def test_no_request_that_was_not_begun_has_a_window(t):
    session, clients = backlog(t, pacing(t))
    clients[3].close(abort=True)
    t.held(3)  # whether it waited for the socket or was not handed to its writer yet
    session.paused = False
    for _ in range(3):
        tunnel = session.tunnel(20)
        equal(tunnel.wait_grant(timeout=10), MIB, "the first grant")
        tunnel.answer(b"large")
    equal([bytes(c.finish().body) for c in clients[:3]], [b"large"] * 3, "answers")
    session.ping()
    equal(len(windows(session)), 3, "Windows; one request was withdrawn")
    order = [i.message.run_id for i in session.inbox if i and i.type == "iop.transport.Window"]
    check(set(order) <= set(session.runs), "a Window names the withdrawn run")


def stops_reading(t, head, size=24 * MIB):
    t.reload(**PATIENT)
    session, data = pacing(t), Provider.big(size)
    client, tunnel = begin(t, session, head=head, receive_buffer=4096, timeout=30)
    other, beside = begin(t, session, timeout=15)
    stuck = fill(t, tunnel, data)
    # It hears nothing more, while a neighbour on the same connection is granted what its client takes.
    lock_step(other, beside, data, 4 * MIB)
    session.ping()
    equal(tunnel.grants[-1], stuck, "the grant while the client reads nothing")
    check(not tunnel.cancelled.is_set(), "cancelled")
    writer = Writer(tunnel, data[stuck:])
    client.wait_body(size=stuck)  # the client reads, and so more was granted
    tunnel.wait_grant(stuck)
    client.finish()
    writer.done()
    beside.end()
    equal((client.finish().ending, other.finish().ending), ("complete", "complete"), "ends")
    check(bytes(client.body) == data, f"{len(client.body)} bytes of {size}, or others")
    check(bytes(other.body) == data[:4 * MIB], "the neighbour's bytes")
    equal(t.grew("iop_edge_cancels_sent_total"), 0, "cancels")
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")


def test_client_that_stops_reading_stops_its_node(t):
    stops_reading(t, BYTES)


def test_client_that_stops_reading_an_answer_with_a_length_stops_its_node(t):
    stops_reading(t, BYTES + [("content-length", str(24 * MIB))])


def test_client_that_stops_reading_an_event_stream_stops_its_node(t):
    stops_reading(t, SSE)


def test_grants_grow_with_a_client_that_reads_and_begin_again_after_a_stop(t):
    t.reload(**PATIENT)
    session, data = pacing(t), Provider.big(40 * MIB)
    client, tunnel = begin(t, session, timeout=30)
    ahead = lock_step(client, tunnel, data, 8 * MIB)
    check(max(ahead) >= 8 * MIB, f"nothing was ever pending, and the grants reached {ahead} bytes ahead (D-06: it doubles up to 16 MiB)")
    stuck = fill(t, tunnel, data)
    # D-06: the size is 1 MiB again. It may have doubled once, if the socket took the whole rest at once.
    until("the client reads, and a grant comes", lambda: client.wait_body(size=min(stuck, len(client.body) + 65536)) and tunnel.grants[-1] > stuck, 20)
    check(tunnel.grants[-1] <= stuck + 2 * MIB, f"{tunnel.grants[-1] - stuck} bytes are granted at once after a stop")
    writer = Writer(tunnel, data[stuck:])
    client.finish()
    writer.done()
    check(bytes(client.body) == data and client.ending == "complete", f"{len(client.body)} bytes, {client.ending}")


def test_a_paced_answer_of_forty_mebibytes_is_whole(t):
    session, data = pacing(t), Provider.big(40 * MIB)
    client, tunnel = begin(t, session, head=BYTES + [("content-length", str(len(data)))], timeout=30)
    writer = Writer(tunnel, data, cut=100_001)
    client.finish()
    writer.done()
    check(bytes(client.body) == data, f"{len(client.body)} bytes, {client.ending}")
    check(20 * MIB < tunnel.grants[-1] <= len(data) + 16 * MIB, f"grants {tunnel.grants}")


def test_every_answer_on_a_kept_connection_is_paced_anew(t):
    session, data = pacing(t), Provider.big(5 * MIB)
    kept = t.http(timeout=15)
    for client, version in ((kept, "1.1"), (kept, "1.1"), (kept, "1.1"), (t.http(timeout=15), "1.0")):
        client.send("/v1/chat/completions", chat("m1"), version=version)
        tunnel = session.tunnel()
        equal(tunnel.wait_grant(), MIB, "the first grant")
        tunnel.start(head=BYTES)
        writer = Writer(tunnel, data)
        client.finish()
        writer.done()
        check(bytes(client.body) == data and client.ending == "complete", f"HTTP/{version}: {len(client.body)} bytes, {client.ending}")


def test_grants_come_while_a_large_frame_is_arriving(t):
    # D-06: as often as the client's socket has taken half, not as often as a frame has ended. A node that makes one frame
    # of a large answer waits inside of it.
    for style in (Style(), Style(record=1000)):
        session, data = pacing(t, style=style), Provider.big(6 * MIB)
        client, tunnel = begin(t, session, timeout=15)
        payload = tunnel.frame(BODY, body=data).SerializeToString(deterministic=True)
        whole = frame(tp.Envelope(type="iop.ProviderTunnelFrame", payload=payload).SerializeToString(deterministic=True))
        head = len(whole) - len(data)
        sent = 0
        reader = threading.Thread(target=client.wait_body, kwargs={"size": len(data)}, daemon=True)
        reader.start()
        with session.alone():
            while sent < len(data):
                step = min(tunnel.wait_grant(sent), len(data)) - sent
                session.raw(whole[head + sent if sent else 0:head + sent + step])
                sent += step
        reader.join(15)
        check(len(tunnel.grants) > 2, f"grants {tunnel.grants}")
        tunnel.end()
        check(bytes(client.finish().body) == data and client.ending == "complete", f"{len(client.body)} bytes, {client.ending}")
        session.close()
        t.idle()


def test_grants_count_body_bytes_alone(t):
    session = pacing(t)
    client, tunnel = begin(t, session, head=SSE + [(f"x-{n}", "v" * 1000) for n in range(60)])
    for _ in range(200):  # neither usage nor metadata nor an empty body nor an unknown kind is granted or used
        tunnel.usage(metadata={"k": "v" * 4000})
        tunnel.body(b"")
        tunnel.send(9, body=b"")
    session.ping()
    equal(tunnel.grants, [MIB], "Windows before any byte of the body")
    data = Provider.big(2 * MIB)
    lock_step(client, tunnel, data, MIB // 4)
    session.ping()
    equal(tunnel.grants, [MIB], "Windows after a quarter")
    lock_step(client, tunnel, data, MIB)
    check(tunnel.wait_grant(MIB) <= 17 * MIB, f"grants {tunnel.grants}")
    tunnel.end()
    check(bytes(client.finish().body) == data[:MIB], "the answer")
    # A quarter in frames of four bytes: what the Edge adds to them on its way to the client is not granted either.
    client, tunnel = begin(t, session, timeout=30)
    for at in range(0, MIB // 4, 4096):  # many in one write, and never silent for long
        with session.corked():
            tunnel.body(data[at:at + 4096], cut=4)
    client.wait_body(size=MIB // 4)
    session.ping()
    equal(tunnel.grants, [MIB], "Windows after a quarter in small frames")
    tunnel.end()
    check(bytes(client.finish().body) == data[:MIB // 4], "the answer in small frames")


def test_a_node_that_ignores_its_grants_is_not_punished(t):
    t.reload(**PATIENT)
    session, data = pacing(t), Provider.big(20 * MIB)
    # To a client that reads: twenty times the first grant in one frame, and in many.
    for cut in (0, 262144):
        client, tunnel = begin(t, session, timeout=30)
        writer = threading.Thread(target=tunnel.body, args=(data,), kwargs={"cut": cut}, daemon=True)
        writer.start()
        client.wait_body(size=len(data))
        writer.join(10)
        tunnel.end()
        check(bytes(client.finish().body) == data and client.ending == "complete", f"{len(client.body)} bytes, {client.ending}")
    # To one that does not read until all of it is at the Edge, which has a pool of 32 MiB.
    client, tunnel = begin(t, session, receive_buffer=4096, timeout=30)
    tunnel.body(data, cut=262144)
    session.ping()
    check(tunnel.grants[-1] < len(data), f"grants {tunnel.grants} for a client that reads nothing")
    t.call(session)
    client.wait_body(size=len(data))
    tunnel.end()
    check(bytes(client.finish().body) == data and client.ending == "complete", f"{len(client.body)} bytes, {client.ending}")
    equal(t.grew("iop_edge_cancels_sent_total"), 0, "cancels")
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")
    check(not session.closed, f"the connection was closed: {session.closed}")


# Proves [R-247]
def test_a_node_whose_grant_is_used_up_is_waited_for(t):
    t.reload(**PATIENT)
    session, data = pacing(t), Provider.big(24 * MIB)
    client, tunnel = begin(t, session, "brief", receive_buffer=4096, timeout=30)  # response_wait_ms 600
    stuck = fill(t, tunnel, data)
    began = time.monotonic()
    until("time passes", lambda: time.monotonic() - began > 2)
    session.ping()
    equal((tunnel.cancelled.is_set(), tunnel.grants[-1]), (False, stuck), "cancelled, grant")  # D-06, A-64: the wait rests
    began = time.monotonic()
    client.wait_body(size=stuck)
    tunnel.wait_grant(stuck)
    tunnel.wait_cancel()  # with a grant the node is waited for as ever: its wait begins after `began`
    check(time.monotonic() - began > 0.5, f"cancelled {time.monotonic() - began:.2f} s after the client went on")
    equal(client.finish().ending, "reset", "end of the answer")
    tunnel.error("cancelled")
    t.in_flight("p-brief", 0)
    equal(t.grew("iop_edge_failures_total", reason="client_too_slow"), 0, "clients that were too slow")
    # And the whole of an answer whose node waits longer than that.
    client, tunnel = begin(t, session, "brief", receive_buffer=4096, timeout=30)
    stuck = fill(t, tunnel, data)
    began = time.monotonic()
    until("time passes", lambda: time.monotonic() - began > 1.2)
    writer = Writer(tunnel, data[stuck:])
    client.finish()
    writer.done()
    check(bytes(client.body) == data and client.ending == "complete", f"{len(client.body)} bytes, {client.ending}")


# D-06: "without Window, large bodies to clients slower than the provider depend on the pool", so with it they do not.
def test_clients_of_a_node_that_paces_do_not_depend_on_the_pool(t):
    t.reload(**PATIENT)
    session, data = pacing(t), Provider.big(24 * MIB)
    runs = []
    for _ in range(14):  # of 1 MiB each, with a pool of 32 MiB of which 75 % may be used
        runs.append(begin(t, session, receive_buffer=4096, timeout=30))
        fill(t, runs[-1][1], data)
        equal(sum(tunnel.cancelled.is_set() for _, tunnel in runs), 0, f"clients cut of {len(runs)}, whose node has kept to its grants")


# Proves [R-248] [R-246]
def test_client_that_reads_nothing_is_cut_though_its_node_is_paced(t):
    session, data = pacing(t), Provider.big(24 * MIB)
    client, tunnel = begin(t, session, receive_buffer=4096)
    equal(tunnel.paced(data), False, "all of it was granted")
    granted = tunnel.grants[-1]
    check(tunnel.sent <= granted < len(data), f"sent {tunnel.sent}, granted {granted}")
    tunnel.body(data[:MIB])  # of a run that is over
    other, beside = begin(t, session)
    lock_step(other, beside, data, 2 * MIB)
    tunnel.error("cancelled")
    beside.end()
    equal(other.finish().ending, "complete", "the neighbour's answer")
    session.ping()
    equal(tunnel.grants[-1], granted, "the grant after the cancel")
    equal(t.grew("iop_edge_failures_total", reason="client_too_slow"), 1, "client_too_slow")


def test_a_cancelled_run_gets_no_window(t):
    t.reload(**PATIENT)
    session, data = pacing(t), Provider.big(24 * MIB)
    for full in (True, False):
        client, tunnel = begin(t, session, receive_buffer=4096)
        other, beside = begin(t, session)
        if full:
            fill(t, tunnel, data)
        else:  # half of the grant is about to be taken
            tunnel.body(data[:MIB // 2 - 1000])
            client.wait_body(size=1000)
        client.close(abort=True)
        tunnel.wait_cancel()
        session.ping()
        had = list(tunnel.grants)
        tunnel.body(data[:2 * MIB], cut=65536)  # dropped: no fault, and nobody takes it
        lock_step(other, beside, data, 2 * MIB)  # the neighbour is granted more
        session.ping()
        equal(tunnel.grants, had, "grants after the cancel")
        tunnel.error("cancelled")
        lock_step(other, beside, data, 6 * MIB)
        session.ping()
        equal(tunnel.grants, had, "grants after the terminal")
        beside.end()
        equal(other.finish().ending, "complete", "the neighbour's answer")
        t.idle()
    equal(t.grew("iop_edge_stream_violations_total"), 0, "violations")


def test_a_finished_run_gets_no_window(t):
    t.reload(**PATIENT)
    session, data = pacing(t), Provider.big(24 * MIB)
    client, tunnel = begin(t, session, receive_buffer=4096, timeout=30)
    other, beside = begin(t, session)
    stuck = fill(t, tunnel, data)
    tunnel.end()  # needs no grant
    session.ping()
    had = list(tunnel.grants)
    equal((bytes(client.finish().body) == data[:stuck], client.ending), (True, "complete"), "the rest is read after the END")
    lock_step(other, beside, data, 2 * MIB)
    session.ping()
    equal(tunnel.grants, had, "grants after the END")
    beside.error("provider unreachable")
    session.ping()
    had = list(beside.grants)
    equal(other.finish().ending, "reset", "the neighbour's answer")
    t.call(session)
    session.ping()
    equal(beside.grants, had, "grants after the ERROR")


def test_a_second_run_has_windows_of_its_own(t):
    one, two = pacing(t, "n1"), pacing(t, "n2")
    client, other, first = stalled(t, one, two, lambda s, r: (r.wait_grant(), r.stall("available", seq=s.observation())))
    again = other.tunnel()
    equal((first.grants, again.wait_grant()), ([MIB], MIB), "first grants")
    again.start(head=BYTES)
    data = Provider.big(8 * MIB)
    lock_step(client, again, data, len(data))
    again.end()
    check(bytes(client.finish().body) == data, f"{len(client.body)} bytes")
    for session in (one, two):
        session.ping()
    equal(first.grants, [MIB], "grants of the run that stalled")


# ---------------------------------------------------------------- commands

def asked(session, timeout=5.0):
    """The next command with its envelope."""
    item = session.wait("a command", lambda i: i.type == "iop.NodeCommandRequest", timeout)
    check(item.id > 0 and item.reply_to == 0, f"a command with id {item.id} and reply_to {item.reply_to}")
    check(item.message.command_id, "a command without command_id")
    return item


def answered(session, item, error="", command_id=None, reply_to=None, kind=None, **result):
    session.send(rt.NodeCommandResponse(command_id=item.message.command_id if command_id is None else command_id,
                                        type=item.message.type if kind is None else kind, error=error, result=result),
                 reply_to=item.id if reply_to is None else reply_to)


# Proves [R-254]
def test_an_operator_asks_and_the_node_answers(t):
    session = t.ready(auto=())
    ask = t.ask("capabilities", provider="p1")
    item = asked(session)
    equal((item.message.type, item.message.adapter, item.message.target), (CAPABILITIES, "a1", "t1"), "capabilities of p1")
    session.answer_command(item)
    answer = ask.result()
    equal((answer["error"], {k: answer["result"][k] for k in ("adapter_key", "target", "provider_status", "health_observation_seq")}),
          ("", {"adapter_key": "a1", "target": "t1", "provider_status": "available", "health_observation_seq": "1"}), "answer")
    equal(answer["result"]["instance_key"], "diagnostic", "the whole answer is shown")
    ask = t.ask("transport_status")
    item = asked(session)
    equal(item.message.type, TRANSPORT_STATUS, "type")
    answered(session, item, anything="한국어")
    equal(ask.result()["result"], {"anything": "한국어"}, "transport status")
    ask = t.ask("provider_status")
    item = asked(session)
    equal((item.message.type, item.message.adapter, item.message.target), (PROVIDER_STATUS, "", ""), "status of all")
    session.answer_command(item)
    equal(ask.result()["result"], {"state.a1": "running", "state.named": "running", "state.ollama": "running"}, "provider status")
    ask = t.ask("provider_status", provider="p-named")
    item = asked(session)
    equal((item.message.type, item.message.adapter), (PROVIDER_STATUS, "named"), "status of the adapter of p-named")
    session.answer_command(item)
    equal(ask.result()["result"], {"state.named": "running"}, "provider status")
    equal((t.grew("iop_edge_node_commands_total"), t.grew("iop_edge_node_commands_ended_total", how="answered")), (4, 4), "commands")


# Proves [R-254] [R-259]
def test_commands_answered_in_another_order_are_matched(t):
    session = t.ready(auto=())
    busy = t.post("one")
    tunnel = session.tunnel()
    asks = {p: t.ask("capabilities", provider=p) for p in ("p1", "p-one", "p-two")}  # p-one is full: no matter
    items = [asked(session) for _ in asks]
    equal(len({i.message.command_id for i in items}), 3, "different command ids")
    t.in_flight("p-one", 1)
    for item in reversed(items):
        session.answer_command(item)
    for provider, target in (("p1", "t1"), ("p-one", "t-one"), ("p-two", "t-two")):
        equal(asks[provider].result()["result"]["target"], target, f"answer about {provider}")
    tunnel.answer()
    equal(busy.finish().status, 200, "status")
    equal(t.grew("iop_edge_leases_granted_total"), 1, "leases granted")


# Proves [R-254]
def test_a_command_that_is_never_answered_ends_in_time(t):
    session = t.ready(auto=())
    client = t.post()
    tunnel = session.tunnel()
    ask = t.ask("transport_status")
    item = asked(session)
    ask.refused(504, "command_timeout")
    check(1.2 < ask.took < 3.5, f"after {ask.took:.2f} s, not 1.5 s")
    answered(session, item, late="1")  # dropped
    ask = t.ask("transport_status")
    item = asked(session)
    answered(session, item, fresh="1")
    equal(ask.result()["result"], {"fresh": "1"}, "the next answer")
    tunnel.answer()
    equal(client.finish().status, 200, "status of a request beside it")
    equal((t.grew("iop_edge_node_commands_ended_total", how="timed_out"), t.grew("iop_edge_node_commands_ended_total", how="answered")), (1, 1), "ends")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# Proves [R-254]
def test_an_answer_with_another_id_is_none(t):
    session = t.ready(auto=())
    ask = t.ask("transport_status")
    item = asked(session)
    for wrong in ({"command_id": "x", "reply_to": item.id + 1000}, {"command_id": "x"}, {"command_id": ""}, {"reply_to": item.id + 1000}, {"reply_to": 0}):
        answered(session, item, wrong="1", **wrong)  # wire.md: a reply whose id is not outstanding on that connection is dropped
    session.ping()
    check(ask.got is None, f"another command's answer was taken: {ask.got}")
    answered(session, item, right="1")
    equal(ask.result()["result"], {"right": "1"}, "the right answer")
    answered(session, item, again="1")
    ask = t.ask("transport_status")
    item = asked(session)
    answered(session, item, command_id=item.message.command_id + "0", reply_to=item.id + 1000, wrong="1")
    ask.refused(504, "command_timeout")
    ask = t.ask("transport_status")
    answered(session, asked(session), fine="1")
    equal(ask.result()["result"], {"fine": "1"}, "the next answer")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# Proves [R-254]
def test_a_node_answers_a_command_with_an_error(t):
    session = t.ready(auto=())
    for error in ("unsupported command", "말이 안 됨", "e" * 5000):
        ask = t.ask("provider_status")
        answered(session, asked(session), error=error, partial="1")
        answer = ask.result()  # operating.md: "the node's own words"
        equal((answer["error"], answer["result"]), (error, {"partial": "1"}), "an answer with an error")
    ask = t.ask("provider_status")
    answered(session, asked(session), fine="1")
    answer = ask.result()
    equal((answer["error"], answer["result"]), ("", {"fine": "1"}), "the next answer")
    t.call(session)


def test_map_entries_in_every_legal_form(t):
    session = t.ready(auto=())

    def entry(*parts):
        return length_delimited(4, b"".join(parts))
    name, value = (lambda text: length_delimited(1, text.encode())), (lambda text: length_delimited(2, text.encode()))
    ask = t.ask("capabilities", provider="p1")
    item = asked(session)
    payload = b"".join([
        agent.UNKNOWN[4], entry(value("1"), name("z-value-first")), entry(name("a"), agent.UNKNOWN[0], value("2"), agent.UNKNOWN[1]),
        entry(name("twice"), value("old")), agent.UNKNOWN[2], entry(name("target"), value("t1")), entry(name("empty")), entry(value("no key")),
        length_delimited(1, item.message.command_id.encode()), entry(name("twice"), value("new")), agent.UNKNOWN[3], b"\x10\x01",
        entry(name("named-twice"), name("last-name"), value("x"), value("last")), length_delimited(4, name("padded") + value("3"), pad=4)])
    session.send_payload("iop.NodeCommandResponse", payload, reply_to=item.id)
    answer = ask.result()
    equal(answer["result"], {"z-value-first": "1", "a": "2", "twice": "new", "target": "t1", "empty": "", "": "no key", "last-name": "last", "padded": "3"}, "result")
    for style in (Style(reverse=True), Style(unknown=True), Style(reverse=True, unknown=True, pad=3, record=1)):
        session.style = style
        ask = t.ask("capabilities", provider="p1")
        session.answer_command(asked(session))
        equal(ask.result()["result"]["provider_status"], "available", f"answer as {style}")


def test_questions_that_cannot_be_asked(t):
    session = t.pending(auto=())
    t.ask("transport_status", node="n1").refused(503, "node_not_ready")
    session.ping()
    check(not session.has("NodeCommandRequest"), "a pending node was asked")
    check(session.make_ready().ready, "not ready")
    t.ask("transport_status", node="n-none").refused(404, "node_unknown")
    t.ask("capabilities", provider="p-none").refused(404, "provider_unknown")
    t.ask("capabilities", provider="p2").refused(404, "provider_unknown")  # of another node
    for question in ({"type": "run"}, {"type": "capabilities"}, {}):
        ask = Asked(t.edge, "n1", question)
        equal(ask.answer()[0], 400, f"status of {question}")
    session.ping()
    check(not session.has("NodeCommandRequest"), "a question that is none was asked")
    asks = [t.ask("transport_status") for _ in range(7)]
    items = [asked(session) for _ in asks]
    t.ask("transport_status").refused(503, "commands_busy")
    other = t.ready("n2")
    t.ask("transport_status", node="n2").result()
    answered(session, items[3])
    until("one is answered", lambda: sum(not a.is_alive() for a in asks) == 1)
    asks.append(t.ask("transport_status"))
    asked(session)
    session.close(abort=True)
    equal(sorted(a.answer()[0] for a in asks), [200] + [503] * 7, "answers when the node is lost")
    check(sum(a.got[1].get("error", {}) != "" and a.got[1]["error"]["code"] == "node_lost" for a in asks if a.got[0] == 503) == 7, "node_lost")
    other.ping()
    session = t.ready()
    t.ask("transport_status").result()


def test_answers_of_a_node_are_not_lost_on_their_way_to_the_operator(t):
    session = t.ready(auto=())
    stop = threading.Event()

    def scrape():  # makes it likelier, and is not needed
        while not stop.is_set():
            t.edge.metrics()
    threading.Thread(target=scrape, daemon=True).start()
    try:
        for n in range(1000):
            ask = t.ask("transport_status")
            answered(session, asked(session), n=str(n))
            equal(ask.result()["result"], {"n": str(n)}, f"answer {n}")
    finally:
        stop.set()


def test_admin_refuses_a_large_question_in_its_own_words(t):
    t.ready()
    with urllib.request.urlopen(urllib.request.Request(f"http://{t.edge.host}:{t.edge.admin}/nodes/n1/commands", b'{"type":"transport_status"}')) as answer:
        equal(answer.status, 200, "status")
    try:
        urllib.request.urlopen(urllib.request.Request(f"http://{t.edge.host}:{t.edge.admin}/nodes/n1/commands", b'{"type":"transport_status"}' + b" " * 70_000))
        raise Wrong("a question of 70 000 bytes was asked")
    except urllib.error.HTTPError as error:
        code, body = error.code, error.read()
    check(body.startswith(b"{") and json.loads(body)["error"]["code"], f"{code} {body}: not of the form of operating.md")


# ---------------------------------------------------------------- configuration refresh

# What a reload puts into the configuration: each a text of it and what stands there instead.
FRESH = {  # a new adapter, provider and model: a new binding of n1
    "adapter": ("      - type: ollama\n", "      - {name: fresh, type: openai_compat, base_url: \"http://127.0.0.1:9/fresh\"}\n      - type: ollama\n"),
    "provider": ("      - {id: p-unused,", "      - {id: p-new, adapter: fresh, target: t-new, capacity: 2}\n      - {id: p-unused,"),
    "model": ("  - {name: none,", "  - {name: new, providers: [p-new]}\n  - {name: none,"),
}
NEWER = {  # the same, and one more adapter, provider and model
    "adapter": (FRESH["adapter"][0], "      - {name: fresher, type: vllm, base_url: \"http://127.0.0.1:9/fresher\"}\n" + FRESH["adapter"][1]),
    "provider": (FRESH["provider"][0], "      - {id: p-newer, adapter: fresher, target: t-newer, capacity: 3}\n" + FRESH["provider"][1]),
    "model": (FRESH["model"][0], "  - {name: newer, providers: [p-newer]}\n" + FRESH["model"][1]),
}
MOVED = {"adapter": FRESH["adapter"], "provider": ("{id: p-two, adapter: a1,", "{id: p-two, adapter: fresh,")}  # an old provider on the new adapter


def refreshed(session, timeout=5.0):
    """The next refresh with its envelope."""
    item = session.wait("a refresh", lambda i: i.type == "iop.NodeConfigRefreshRequest", timeout)
    check(item.id > 0 and item.message.request_id and item.message.HasField("config"), f"refresh {item}")
    return item


def adapters(config):
    return {a.name or a.type: a.capacity for a in config.adapters}


def waits(t, model):
    """A request that is not served, but waits for something that serves it."""
    before = t.grew("iop_edge_queue_entries_total")
    client = t.post(model)
    t.wait_grew("iop_edge_queue_entries_total", before + 1)
    return client


def unserved(client, session):
    equal(client.head().status, 503, "status of a request that nobody may serve")  # queue_wait_ms
    check(client.header("retry-after"), "503 without Retry-After (D-11)")
    client.close()
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "a binding that is not applied was used")


# Proves [R-260]
def test_refresh_comes_only_when_the_payload_of_the_node_differs(t):
    one, two = t.ready("n1"), t.ready("n2")
    equal(t.edge.post("/reload", headers=())[0], 403, "status of an order without x-iop-operator")
    equal(t.reload()["changed"], [], "changes of the same file")
    t.reload(model=("  - {name: none,", "  - {name: alias, providers: [p1]}\n  - {name: none,"), wait=("stall_timeout_ms: 4321", "stall_timeout_ms: 4322"),
             health=("health: degraded", "health: poor"), order=("queue_wait_ms: 1200", "queue_wait_ms: 1300"))
    t.call(one, "alias")
    equal(t.edge.provider("p-ill")["health"], "poor", "configured health")
    for session in (one, two):
        session.ping()
        check(not session.has("NodeConfigRefreshRequest"), "a refresh although nothing of the payload changed")
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 0, "refreshes")
    t.reload(capacity=("{id: p2, adapter: a1, target: t2, capacity: 2}", "{id: p2, adapter: a1, target: t2, capacity: 5}"))
    equal(adapters(refreshed(two).message.config), {"a1": 7}, "payload of n2")
    t.behind({})
    t.reload(**FRESH)
    config = refreshed(one).message.config
    equal(adapters(config), {"a1": 28, "named": 2, "ollama": 2, "fresh": 2}, "payload of n1")
    equal(config.runtime.concurrency, 1, "a refresh carries the whole configuration")
    t.behind({})
    equal(adapters(refreshed(two).message.config), {"a1": 4}, "n2 goes back")
    t.call(one, "new")
    equal((t.grew("iop_edge_config_refreshes_sent_total"), t.grew("iop_edge_config_refreshes_total", result="applied")), (3, 3), "refreshes")
    for session in (one, two):
        check(not session.has("NodeConfigRefreshRequest"), "one more refresh")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# Proves [R-260]
def test_sighup_reloads_and_a_refused_file_changes_nothing(t):
    session = t.ready()
    t.write(broken=("{id: p-two, adapter: a1,", "{id: p-two, adapter: nowhere,"), **FRESH)
    status, answer = t.edge.post("/reload")
    problem = answer["error"]["problems"][0]
    equal((status, set(problem)), (422, {"file", "line", "field", "what"}), f"refusal {answer}")
    t.wait_grew("iop_edge_config_reloads_refused_total")
    t.edge.process.send_signal(signal.SIGHUP)
    t.wait_grew("iop_edge_config_reloads_refused_total", 2)
    equal(t.post("new").head().status, 404, "a model of a refused file")
    t.call(session)
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 0, "refreshes")
    t.write(**FRESH)
    t.edge.process.send_signal(signal.SIGHUP)
    refreshed(session)
    t.behind({})
    t.call(session, "new")
    equal(t.grew("iop_edge_config_reloads_total"), 1, "reloads")


# Proves [R-260]
def test_a_new_binding_is_served_only_after_applied(t):
    session = t.ready(auto={"command"})
    t.reload(**FRESH)
    item = refreshed(session)
    t.behind({"n1": "pending"})
    equal(t.edge.metric("iop_edge_nodes_outdated"), 1, "iop_edge_nodes_outdated")
    client = waits(t, "new")
    t.call(session)  # what was applied before goes on
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "a binding that is not applied was used")
    session.answer_refresh(item)
    tunnel = session.tunnel()
    equal((tunnel.request.adapter, tunnel.request.target), ("fresh", "t-new"), "binding")
    tunnel.answer()
    equal(client.finish().status, 200, "status of the request that waited")
    t.behind({})
    equal(t.edge.metric("iop_edge_nodes_outdated"), 0, "iop_edge_nodes_outdated")


def not_applied(t, status, shown):
    session = t.ready(auto={"command"})
    t.reload(**FRESH)
    session.answer_refresh(refreshed(session), status, message="why not")
    t.behind({"n1": shown})
    equal(t.edge.metric("iop_edge_nodes_outdated"), 1, "iop_edge_nodes_outdated")
    t.wait_grew("iop_edge_config_refreshes_total", result=shown)
    client = waits(t, "new")
    t.call(session)
    unserved(client, session)
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 1, "refreshes: none again by itself")
    t.reload(**FRESH)  # operating.md: the next reload tries again
    session.answer_refresh(refreshed(session))
    t.behind({})
    t.call(session, "new")
    # And so does the next connection: its registration carries the newest.
    t.reload(**NEWER)
    session.answer_refresh(refreshed(session), status)
    t.behind({"n1": shown})
    session.close()
    session = t.pending(auto={"command"})
    equal(adapters(session.config)["fresher"], 3, "payload of the next registration")
    check(session.make_ready().ready, "not ready")
    t.call(session, "newer")
    t.behind({})
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 3, "refreshes")


def test_failed_refresh_keeps_the_old_bindings(t):
    not_applied(t, FAILED, "failed")


def test_refresh_that_needs_a_restart_keeps_the_old_bindings(t):
    not_applied(t, RESTART_REQUIRED, "restart_required")


def test_refresh_answered_with_a_status_nobody_knows(t):
    session = t.ready(auto={"command"})
    for status in (0, 77):
        t.reload(**FRESH)
        session.answer_refresh(refreshed(session), status)
        client = waits(t, "new")
        unserved(client, session)
        until("n1 is shown as behind", lambda: t.edge.behind().get("n1"))
    t.call(session)
    t.reload(**FRESH)
    session.answer_refresh(refreshed(session))
    t.call(session, "new")


def test_late_answer_to_a_refresh_counts_for_its_own_payload(t):
    session = t.ready(auto={"command"})
    t.reload(**FRESH)
    first = refreshed(session)
    t.behind({"n1": "unanswered"})  # refresh_ms
    equal(t.grew("iop_edge_config_refreshes_total", result="unanswered"), 1, "unanswered refreshes")
    t.call(session)
    t.reload(**NEWER)
    second = refreshed(session)
    check(second.message.request_id != first.message.request_id and second.id != first.id, "two refreshes of one id")
    session.answer_refresh(first)
    t.call(session, "new")
    client = waits(t, "newer")
    check(t.edge.behind() == {"n1": "unanswered"} or t.edge.behind() == {"n1": "pending"}, "an answer to an older refresh made the node newest")
    session.answer_refresh(second)
    session.tunnel().answer()
    equal(client.finish().status, 200, "status")
    t.behind({})
    # Late, and nothing else was sent meanwhile.
    t.reload(**FRESH)
    item = refreshed(session)
    t.behind({"n1": "unanswered"})
    session.answer_refresh(item)
    t.behind({})
    t.call(session, "new")


def test_answer_to_another_refresh_is_none(t):
    session = t.ready(auto={"command"})
    t.reload(**FRESH)
    item = refreshed(session)
    for wrong in ("x", item.message.request_id + "0", ""):
        session.answer_refresh(item, request_id=wrong, reply_to=item.id + 1000)
    client = waits(t, "new")
    t.behind({"n1": "pending"})
    equal(t.grew("iop_edge_config_refreshes_total"), 0, "refreshes that ended")
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "an answer with another request id was taken")
    session.answer_refresh(item)
    session.tunnel().answer()
    equal(client.finish().status, 200, "status")
    t.behind({})
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


def test_refresh_answered_twice(t):
    session = t.ready(auto={"command"})
    t.reload(**FRESH)
    item = refreshed(session)
    with session.corked():
        session.answer_refresh(item)
        session.answer_refresh(item)
        session.answer_refresh(item, FAILED)
    t.call(session, "new")
    t.behind({})
    equal([t.grew("iop_edge_config_refreshes_total", result=r) for r in ("applied", "failed")], [1, 0], "results")
    t.reload(**NEWER)
    item = refreshed(session)
    with session.corked():
        session.answer_refresh(item, FAILED)
        session.answer_refresh(item)  # FAILED was the answer
    t.behind({"n1": "failed"})
    unserved(waits(t, "newer"), session)
    t.call(session, "new")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# Proves [R-260]
def test_reloads_during_a_refresh_cause_one_more_with_the_newest(t):
    session = t.ready(auto={"command"})
    t.reload(**FRESH)
    item = refreshed(session)
    t.reload(**NEWER)
    t.reload(**MOVED)
    t.reload(**NEWER)
    session.ping()
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 1, "refreshes while one is outstanding")
    session.answer_refresh(item)
    newest = refreshed(session)
    equal(adapters(newest.message.config)["fresher"], 3, "payload of the second refresh")
    t.behind({"n1": "pending"})
    session.answer_refresh(newest)
    t.behind({})
    t.call(session, "newer")
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 2, "refreshes")
    # There and back again: what was answered is the newest, so nothing follows.
    t.reload()
    item = refreshed(session)
    t.reload(**FRESH)
    t.reload()
    session.answer_refresh(item)
    t.behind({})
    t.call(session)
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 3, "refreshes")


# Proves [R-034] [R-265]
def test_change_while_the_node_is_pending_follows_its_ready(t):
    session = t.pending(auto={"command"})
    t.reload(**FRESH)
    session.ping()
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 0, "refreshes to a pending node")
    check(session.make_ready().ready, "not ready")
    item = refreshed(session)
    client = waits(t, "new")
    t.call(session)
    check(not session.has("ProviderTunnelRequest"), "a binding that was not in the registration's payload was used")
    session.answer_refresh(item)
    session.tunnel().answer()
    equal(client.finish().status, 200, "status")
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 1, "refreshes")
    session.close()
    session = t.pending(auto={"command"})
    t.reload()
    t.reload(**FRESH)  # back to what it was registered with
    check(session.make_ready().ready, "not ready")
    t.call(session, "new")
    equal(t.grew("iop_edge_config_refreshes_sent_total"), 1, "refreshes")


def test_agent_that_answers_no_refresh_keeps_its_old_bindings(t):
    session = t.ready(auto=())
    t.reload(**FRESH)
    refreshed(session)
    t.behind({"n1": "unanswered"})
    for model in ("m1", "two", "named", "m1"):
        t.call(session, model)
    unserved(waits(t, "new"), session)
    equal(t.edge.metric("iop_edge_nodes_outdated"), 1, "iop_edge_nodes_outdated")
    check(not session.closed, f"closed: {session.closed}")
    t.reload()  # back: nothing is missing any more
    t.call(session)
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


PROFILE = ("              path: /served/chat\n", "              path: /served/new\n            - {name: messages, method: POST, path: /served/messages}\n")


# Proves [R-260]
def test_operations_of_a_profile_are_used_only_after_applied(t):
    session = t.ready(auto={"command"})

    def asks(path):
        client = t.post("named", path=path)
        tunnel = session.tunnel()
        tunnel.answer()
        equal(client.finish().status, 200, "status")
        return tunnel.request.operation, tunnel.request.path
    equal(asks("/v1/messages"), ("", "/v1/messages"), "an operation that the profile does not have (D-09)")
    for status in (FAILED, APPLIED):
        t.reload(profile=PROFILE)
        item = refreshed(session)
        client = waits(t, "named")
        t.call(session)
        session.ping()
        check(not session.has("ProviderTunnelRequest"), "a profile that is not applied was used")
        session.answer_refresh(item, status)
        if status == FAILED:
            unserved(client, session)
    tunnel = session.tunnel()
    equal((tunnel.request.operation, tunnel.request.path), ("chat_completions", "/served/new"), "request after APPLIED")
    tunnel.answer()
    equal(client.finish().status, 200, "status of the request that waited")
    equal(asks("/v1/messages"), ("messages", "/served/messages"), "the new operation")
    again = session.register("n1")  # A-03: the payload last sent on this connection
    check(again.accepted and again.config == item.message.config, "payload of a registration again")


def test_node_lost_during_a_refresh_and_a_command(t):
    session = t.ready(auto=())
    t.reload(**FRESH)
    item = refreshed(session)
    ask = t.ask("transport_status")
    asked(session)
    t.behind({"n1": "pending"})
    session.close(abort=True)
    ask.refused(503, "node_lost")
    until("iop_edge_nodes_outdated is 0: it is not connected", lambda: t.edge.metric("iop_edge_nodes_outdated") == 0)
    t.behind({})
    session = t.ready(auto=())
    session.send(rt.NodeConfigRefreshResponse(request_id=item.message.request_id, status=FAILED), reply_to=item.id)  # of the last connection
    t.call(session, "new")
    t.behind({})
    check(not session.has("NodeConfigRefreshRequest"), "a refresh although the registration carried the newest")
    equal(t.grew("iop_edge_config_refreshes_total", result="failed"), 0, "failed refreshes")


# Proves [R-160]
def test_provider_moved_to_another_adapter(t):
    session = t.ready(auto={"command"})
    running = t.post("two")
    old = session.tunnel()
    old.start(head=SSE)
    old.body(b"data: 1\n\n")
    t.reload(**MOVED)
    item = refreshed(session)
    equal((adapters(item.message.config)["a1"], adapters(item.message.config)["fresh"]), (26, 2), "capacities")
    client = waits(t, "two")
    t.call(session)
    old.body(b"data: [DONE]\n\n")
    old.end()
    equal(running.finish().ending, "complete", "the running answer")
    session.ping()
    check(not session.has("ProviderTunnelRequest"), "a moved binding was used before APPLIED")
    session.answer_refresh(item)
    tunnel = session.tunnel()
    equal((tunnel.request.adapter, tunnel.request.target), ("fresh", "t-two"), "binding")
    tunnel.answer()
    equal(client.finish().status, 200, "status")
    equal(t.grew("iop_edge_leases_returned_total", by="terminal"), 3, "leases returned")
    # To an adapter that the node has: the payload it applied holds all the binding needs.
    t.reload(move=("{id: p-two, adapter: a1,", "{id: p-two, adapter: named,"))
    client = t.post("two")
    tunnel = session.tunnel()
    equal(tunnel.request.adapter, "named", "adapter")
    tunnel.answer()
    equal(client.finish().status, 200, "status")


def test_node_taken_out_of_the_file_is_closed(t):
    one, two = t.ready("n1"), t.ready("n2")
    client = t.post("m2")
    two.tunnel()
    begin = t.edge.text.index("  - id: n2\n")
    t.reload(node=(t.edge.text[begin:t.edge.text.index("models:\n")], ""), m2=("  - {name: m2, providers: [p2]}\n", ""), both=(", n2/p-both-2]", "]"))
    two.wait_closed()
    equal(client.head().status, 503, "status of a request whose node was taken out")
    t.call(one)
    answer = t.session(cert="host-two", expect=EDGE_NAME)
    try:
        refusal = answer.register("n2")
        check(not refusal.accepted, "a node that is not configured was accepted")
    except (Closed, OSError):
        pass
    t.restore()
    t.call(t.ready("n2"), "m2")
    t.call(one)


def judged(t, session, kind, provider, error="", **result):
    """A command whose answer the Edge has judged when this returns, whatever the operator is told."""
    ended = t.grew("iop_edge_node_commands_ended_total")
    t.ask(kind, provider=provider)
    answered(session, asked(session), error=error, **result)
    t.wait_grew("iop_edge_node_commands_ended_total", ended + 1)


# Proves [R-190]
def test_evidence_that_comes_too_late_takes_nothing_back(t):
    session = t.ready(auto=())
    t.post("ill")
    session.tunnel().stall("unavailable", seq=session.observation())
    t.wait_grew("iop_edge_provider_health_transitions_total", to="unavailable")
    ask = t.ask("capabilities", provider="p-ill")
    item = asked(session)
    ask.refused(504, "command_timeout")
    right = {"adapter_key": "a1", "target": "t-ill", "provider_status": "available"}
    answered(session, item, **right, health_observation_seq="50")
    session.ping()
    judged(t, session, "capabilities", "p1", adapter_key="a1", target="t1", provider_status="available", health_observation_seq="51")
    equal(t.grew("iop_edge_provider_health_transitions_total", to="available"), 0, "providers taken back by a late answer")
    judged(t, session, "capabilities", "p-ill", **right, health_observation_seq="52")
    equal(t.grew("iop_edge_provider_health_transitions_total", to="available"), 1, "providers taken back by one in time")
    # Nor does an answer to a command of an ended connection.
    t.ask("capabilities", provider="p-ill")
    item = asked(session)
    session.close(abort=True)
    session = t.ready(auto=())
    t.post("ill")
    session.tunnel().stall("unavailable", seq=session.observation())
    t.wait_grew("iop_edge_provider_health_transitions_total", 2, to="unavailable")
    answered(session, item, **right, health_observation_seq="60")
    session.ping()
    judged(t, session, "capabilities", "p1", adapter_key="a1", target="t1", provider_status="available", health_observation_seq="61")
    equal(t.grew("iop_edge_provider_health_transitions_total", to="available"), 1, "providers taken back by an answer of the last connection")
    judged(t, session, "capabilities", "p-ill", **right, health_observation_seq="62")
    equal(t.grew("iop_edge_provider_health_transitions_total", to="available"), 2, "providers taken back")


# Proves [R-182] [R-183] [R-184] [R-187] [R-189] [R-190] [R-191] [R-192] [R-194]
def test_only_fresh_exact_evidence_takes_a_provider_back(t):
    session = t.ready(auto=())
    client = t.post("ill")
    session.observation()
    seq = session.observation()
    session.tunnel().stall("unavailable", seq=seq)
    check(client.head().status >= 500, f"status {client.status}")
    until("p-ill is put aside", lambda: t.edge.provider("p-ill")["health"] == "unavailable", 3)
    right = {"adapter_key": "a1", "target": "t-ill", "provider_status": "available"}
    for name, result, error in [
            ("without a sequence", {}, ""), ("with the stall's sequence", {"health_observation_seq": str(seq)}, ""),
            ("with an older sequence", {"health_observation_seq": str(seq - 1)}, ""), ("with a sequence that is no number", {"health_observation_seq": "+9"}, ""),
            ("of another adapter", {"adapter_key": "named", "health_observation_seq": "90"}, ""),
            ("of another target", {"target": "t1", "health_observation_seq": "91"}, ""),
            ("without a target", {"target": "", "health_observation_seq": "92"}, ""),
            ("that it is unavailable", {"provider_status": "unavailable", "health_observation_seq": "3"}, ""),
            ("that nothing is known", {"provider_status": "unknown", "health_observation_seq": "4"}, ""),
            ("in another spelling", {"provider_status": "Available", "health_observation_seq": "5"}, ""),
            ("under another key", {"adapter_key": "", "adapter": "a1", "health_observation_seq": "7"}, ""),
            ("with an error", {"health_observation_seq": "6"}, "probe failed")]:
        judged(t, session, "capabilities", "p-ill", error, **{**right, **result})
        equal(t.grew("iop_edge_provider_health_transitions_total", to="available"), 0, f"providers taken back by an answer {name}")
    judged(t, session, "provider_status", "p-ill", **right, health_observation_seq="95")
    judged(t, session, "capabilities", "p1", adapter_key="a1", target="t1", provider_status="available", health_observation_seq="96")
    equal(t.grew("iop_edge_provider_health_transitions_total", to="available"), 0, "providers taken back by answers to other questions")
    client = waits(t, "ill")
    judged(t, session, "capabilities", "p-ill", **right, health_observation_seq="97")
    session.tunnel().answer()  # operating.md: it takes the provider back at once
    equal(client.finish().status, 200, "status of the request that waited")
    equal(t.grew("iop_edge_provider_health_transitions_total", to="available"), 1, "providers taken back")


def pour(t, models, stop, seen):
    """Requests one after the other, until told to stop; what became of each goes to `seen`."""
    def work(model):
        while not stop.is_set():
            client = Http(t.edge)
            try:
                client.send("/v1/chat/completions", b'{"model":"%s","do":"sse","count":20}' % model.encode()).finish()
                whole = client.ending == "complete" and client.body == Provider.events(20)
                seen.append((model, client.status, whole or (client.status != 200 and json.loads(client.body)["error"]["code"])))
            except Exception as error:
                seen.append((model, type(error).__name__, str(error)))
            finally:
                client.close()
    threads = [threading.Thread(target=work, args=(m,), daemon=True) for m in models]
    for one in threads:
        one.start()
    return threads


def test_traffic_does_not_notice_reloads(t):
    session = t.ready()
    session.provider = Provider()
    stop, seen = threading.Event(), []
    threads = pour(t, ("m1", "two", "one", "new"), stop, seen)
    try:
        for n in range(30):
            t.reload(**(FRESH, NEWER, {})[n % 3])
        t.reload(**NEWER)
        t.behind({})
        count = len(seen)
        until("requests go on", lambda: len(seen) > count + 20)
    finally:
        stop.set()
        for one in threads:
            one.join(8)
    bad = [s for s in seen if s[0] != "new" and s[1:] != (200, True)]
    check(not bad, f"{len(bad)} of {len(seen)} requests of models that no reload touched: {bad[:3]}")
    other = {s[1:] for s in seen if s[0] == "new"} - {(200, True), (404, "model_not_found"), (503, "queue_timeout"), (503, "no_provider_configured")}
    check(not other, f"ends of requests of a model that comes and goes: {other}")
    equal(adapters(session.config), {"a1": 28, "named": 2, "ollama": 2, "fresh": 2, "fresher": 3}, "what the node has at the end")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


def test_answer_to_a_refresh_with_another_reply_to_is_none(t):
    session = t.ready(auto={"command"})
    t.reload(**FRESH)
    item = refreshed(session)
    for wrong in (0, item.id + 1000):
        session.answer_refresh(item, reply_to=wrong)  # wire.md: a reply whose id is not outstanding on that connection is dropped
    session.ping()
    equal(t.grew("iop_edge_config_refreshes_total"), 0, "refreshes that ended")
    session.answer_refresh(item)
    t.call(session, "new")


# ---------------------------------------------------------------- an operator's drain of a node

def test_operator_drains_a_node(t):
    one, two = t.ready("n1"), t.ready("n2")
    t.reload(wait=("queue_wait_ms: 1200", "queue_wait_ms: 8000"))
    equal(t.edge.post("/nodes/n1/drain", headers=())[0], 403, "status of an order without x-iop-operator")
    equal(t.edge.post("/nodes/n-none/drain")[0], 404, "status of an unknown node")
    t.call(one)
    client = t.post()
    tunnel = one.tunnel()
    tunnel.start(head=SSE)
    tunnel.body(b"data: 1\n\n")
    client.wait_body(part=b"data: 1\n\n")
    equal(t.edge.post("/nodes/n1/drain"), (200, {"node_id": "n1", "leases": 1}), "answer to a drain")
    one.ping()
    for away in [i.message for i in one.inbox if i and i.type == "iop.transport.GoAway"]:  # the documents do not promise one
        equal(away.grace_ms, 8000, "grace (drain_ms)")
    until("n1 is shown as draining", lambda: t.edge.status()["edge"]["draining_nodes"] == ["n1"])
    waiting = waits(t, "m1")
    for both in [t.post("both") for _ in range(2)]:
        two.tunnel().answer()
        equal(both.finish().status, 200, "status of what another node serves")
    one.ping()
    check(not one.has("ProviderTunnelRequest"), "new work for a node that is drained")
    tunnel.body(b"data: [DONE]\n\n")
    tunnel.end()
    equal((bytes(client.finish().body), client.ending), (b"data: 1\n\ndata: [DONE]\n\n", "complete"), "the running answer")
    one.wait_closed()
    equal(t.edge.post("/nodes/n1/drain")[0], 409, "status for a node that is not connected")
    one = t.ready("n1")
    one.tunnel().answer()
    equal(waiting.finish().status, 200, "status of the request that waited")
    until("no node is shown as draining", lambda: t.edge.status()["edge"]["draining_nodes"] == [])
    t.call(one)
    equal((t.grew("iop_edge_node_drains_total"), t.grew("iop_edge_node_fences_total")), (1, 1), "drains and fences")


def test_idle_node_is_drained_at_once_and_a_pending_one_is_not(t):
    session = t.pending()
    equal(t.edge.post("/nodes/n1/drain")[0], 409, "status for a node that is not ready")
    session.ping()
    check(session.make_ready().ready, "not ready")
    equal(t.edge.post("/nodes/n1/drain"), (200, {"node_id": "n1", "leases": 0}), "answer to a drain")
    session.wait_closed()
    t.call(t.ready())


def test_what_outlives_a_drain_ends_with_an_error(t):
    session = t.ready()
    t.reload(grace=("drain_ms: 8000", "drain_ms: 1200"))
    client = t.post()
    tunnel = session.tunnel()
    tunnel.start(head=SSE)
    tunnel.body(b"data: 1\n\n")
    client.wait_body(part=b"data: 1\n\n")
    began = time.monotonic()
    equal(t.edge.post("/nodes/n1/drain")[0], 200, "status")
    client.finish()
    check(1 < time.monotonic() - began < 4, f"after {time.monotonic() - began:.2f} s, not 1.2 s")
    check(client.ending == "complete" and b"[DONE]" not in client.body and any(b"error" in e for e in sse_events(bytes(client.body))), f"end {bytes(client.body)}")
    session.wait_closed()
    equal(t.grew("iop_edge_leases_returned_total", by="fence"), 1, "leases returned by the fence")
    t.call(t.ready())


def test_no_request_is_lost_to_drains(t):
    one, two = t.ready("n1"), t.ready("n2")  # S-65
    one.provider = two.provider = Provider()
    stop, seen = threading.Event(), []
    threads = pour(t, ["both"] * 4, stop, seen)
    try:
        for n in range(12):
            count = len(seen)
            until("requests go on", lambda: len(seen) > count + 8)
            equal(t.edge.post("/nodes/n1/drain")[0], 200, "status of the drain")
            one.wait_closed()
            one = t.pending("n1")
            one.provider = Provider()
            check(one.make_ready().ready, "not ready")
    finally:
        stop.set()
        for thread in threads:
            thread.join(8)
    bad = [s for s in seen if s != ("both", 200, True)]
    check(not bad, f"{len(bad)} of {len(seen)} requests failed: {bad[:3]}")
    equal(t.grew("iop_edge_leases_returned_total", by="fence"), 0, "leases returned by a fence")


# ---------------------------------------------------------------- a second run after a stall

def stalled(t, first, second, act, model="both"):
    """A request of which one of two nodes says that it stalled; returns the client, the other node and the request."""
    client = t.post(model, more={"mark": "once"})
    got = []

    def arrived():
        for session, other in ((first, second), (second, first)):
            if session.has("ProviderTunnelRequest"):
                got.append((session, other))
                return True
        return False
    until("one of the nodes has the request", arrived)
    session, other = got[0]
    tunnel = session.tunnel()
    act(session, tunnel)
    return client, other, tunnel


def eligibility(t, which):
    t.wait_grew("iop_edge_liveness_recovery_eligibility_total", eligibility=which)
    equal(t.grew("iop_edge_liveness_recovery_eligibility_total"), 1, "judgements")


def test_stalled_request_is_asked_of_another_node_once(t):
    one, two = t.ready("n1"), t.ready("n2")
    for n, health in enumerate(("available", "unknown", "unavailable")):  # the last one puts its provider aside
        client, other, first = stalled(t, one, two, lambda s, r: r.stall(health, seq=s.observation()))
        again = other.tunnel()
        check(again.run_id != first.run_id, "the second run has the id of the first")
        equal((again.request.body, again.request.target, again.request.path, again.request.stream),
              (first.request.body, "t-both", first.request.path, first.request.stream), "the second request")
        t.held(1)  # never both
        first.answer(b"late")  # of a run that is over
        again.answer(b"recovered")
        client.finish()
        equal((client.status, bytes(client.body), client.ending), (200, b"recovered", "complete"), f"answer after {health}")
        t.wait_grew("iop_edge_liveness_recovery_results_total", n + 1, result="recovered")
        t.idle()
    equal(t.grew("iop_edge_liveness_recovery_eligibility_total", eligibility="eligible"), 3, "eligible")
    equal(t.grew("iop_edge_terminals_total", ending="stalled"), 3, "stalls")
    for session in (one, two):
        session.ping()
        check(not session.has("ProviderTunnelRequest"), "a third run")


def test_second_stall_of_a_request_ends_it(t):
    one, two = t.ready("n1"), t.ready("n2")
    client, other, _ = stalled(t, one, two, lambda s, r: r.stall("available", seq=s.observation()))
    other.tunnel().stall("available", seq=other.observation())
    client.head()
    check(client.status >= 500, f"status {client.status}")
    client.error()
    t.wait_grew("iop_edge_liveness_recovery_results_total", result="stalled_again")
    t.idle()
    for session in (one, two):
        session.ping()
        check(not session.has("ProviderTunnelRequest"), "a third run")
    equal(t.grew("iop_edge_leases_granted_total"), 2, "leases granted")


def test_second_run_that_fails_ends_the_request(t):
    one, two = t.ready("n1"), t.ready("n2")
    client, other, _ = stalled(t, one, two, lambda s, r: r.stall("available", seq=s.observation()))
    other.tunnel().error("provider unreachable")
    equal(client.head().status, 502, "status")
    client.error()
    t.wait_grew("iop_edge_liveness_recovery_results_total", result="failed")
    for session in (one, two):
        session.ping()
        check(not session.has("ProviderTunnelRequest"), "a third run")


def no_second_run(t, act, which, status=None, model="both"):
    one, two = t.ready("n1"), t.ready("n2")
    client, other, tunnel = stalled(t, one, two, act, model)
    client.finish()
    if status == 200:
        check(client.status == 200 and b"[DONE]" not in client.body and any(b"error" in e for e in sse_events(bytes(client.body))), f"end {bytes(client.body)}")
    else:
        check(client.status >= 500, f"status {client.status}")
        client.error()
    if which:
        eligibility(t, which)
    t.idle()
    for session in (one, two):
        session.ping()
        check(not session.has("ProviderTunnelRequest") and not session.has("RunRequest"), "the request was asked again")
    equal(t.grew("iop_edge_leases_granted_total"), 1, "leases granted")
    equal(t.grew("iop_edge_liveness_recovery_results_total"), 0, "results of second runs")


def after_output(*bodies):
    def act(session, tunnel):
        tunnel.start(head=SSE)
        for body in bodies:
            tunnel.body(body)
        tunnel.stall("available", seq=session.observation())
    return act


def test_stall_after_output_is_not_asked_again(t):
    no_second_run(t, after_output(b"data: 1\n\n"), "committed", 200)


def test_stall_after_the_head_is_not_asked_again(t):
    no_second_run(t, after_output(), "committed", 200)


def test_stall_without_a_confirmed_fence_is_not_asked_again(t):
    no_second_run(t, lambda s, r: r.stall("available", seq=s.observation(), fence="unconfirmed"), "fence_unconfirmed")


def test_stall_that_says_nothing_of_its_fence_is_not_asked_again(t):
    no_second_run(t, lambda s, r: r.stall("available", seq=s.observation(), drop=("fence",)), None)


def test_stall_of_a_model_that_nobody_else_serves_is_not_asked_again(t):
    no_second_run(t, lambda s, r: r.stall("available", seq=s.observation()), "no_other_provider", model="m1")


def test_stall_with_evidence_of_another_provider_is_not_asked_again(t):
    no_second_run(t, lambda s, r: r.stall("available", seq=s.observation(), target="t1"), "evidence_rejected")


def test_ordinary_error_is_not_asked_again(t):
    no_second_run(t, lambda s, r: r.error("response_stalled"), None)
    equal(t.grew("iop_edge_liveness_recovery_eligibility_total", eligibility="eligible"), 0, "eligible")


def test_stall_whose_client_has_left_is_not_asked_again(t):
    one, two = t.ready("n1"), t.ready("n2")

    def leave(session, tunnel):
        t.opened[-1].close(abort=True)
        tunnel.wait_cancel()
        tunnel.stall("available", seq=session.observation())
    stalled(t, one, two, leave)
    t.idle()
    for session in (one, two):
        session.ping()
        check(not session.has("ProviderTunnelRequest"), "a request that nobody waits for was asked again")
    equal(t.grew("iop_edge_leases_granted_total"), 1, "leases granted")


def test_second_run_waits_for_a_place(t):
    one, two = t.ready("n1"), t.ready("n2")
    t.reload(wait=("queue_wait_ms: 1200", "queue_wait_ms: 2500"))
    clients = [t.post("both") for _ in range(4)]  # all places of both providers
    first = [one.tunnel(), one.tunnel()]
    second = [two.tunnel(), two.tunnel()]
    first[0].stall("available", seq=one.observation())
    eligibility(t, "eligible")
    two.ping()
    check(not two.has("ProviderTunnelRequest"), "a second run beyond the capacity")
    younger = t.post("both")  # the place that the stall left on n1 is free for others, not for the stalled request
    one.tunnel().answer(b"younger")
    equal(bytes(younger.finish().body), b"younger", "answer")
    second[0].answer(b"s0")
    two.tunnel().answer(b"recovered")
    first[1].answer(b"f1")
    second[1].answer(b"s1")
    equal(sorted(bytes(c.finish().body) for c in clients), [b"f1", b"recovered", b"s0", b"s1"], "answers")
    t.wait_grew("iop_edge_liveness_recovery_results_total", result="recovered")
    # Nobody has a place in time.
    clients = [t.post("both") for _ in range(4)]
    first = [one.tunnel(), one.tunnel()]
    second = [two.tunnel(), two.tunnel()]
    first[0].stall("available", seq=one.observation())
    t.wait_grew("iop_edge_liveness_recovery_results_total", result="unserved")
    first[1].answer(b"x")
    for tunnel in second:
        tunnel.answer(b"x")
    equal(sorted(c.head().status for c in clients), [200, 200, 200, 503], "statuses")


def test_second_run_has_every_byte_of_a_large_request(t):
    one, two = t.ready("n1"), t.ready("n2")
    body = chat("both", pad="한" * 1_000_000, mark="large")
    client = t.http(timeout=15).send("/v1/chat/completions", body, [("x-request-id", "r-large")])
    until("one of the nodes has the request", lambda: one.has("ProviderTunnelRequest") or two.has("ProviderTunnelRequest"), 10)
    first, other = (one, two) if one.has("ProviderTunnelRequest") else (two, one)
    tunnel = first.tunnel()
    tunnel.stall("available", seq=first.observation())
    again = other.tunnel(10)
    check(again.request.body == tunnel.request.body and len(again.request.body) > 3_000_000, "the body of the second run is another")
    equal([(h.key, h.value) for h in again.request.headers], [(h.key, h.value) for h in tunnel.request.headers], "headers")
    again.answer(b"recovered")
    equal((client.finish().status, bytes(client.body)), (200, b"recovered"), "answer")


def test_second_run_after_the_node_is_drained_or_lost(t):
    one, two = t.ready("n1"), t.ready("n2")
    client = t.post("both")
    until("one of the nodes has the request", lambda: one.has("ProviderTunnelRequest") or two.has("ProviderTunnelRequest"))
    first, other, name = (one, two, "n1") if one.has("ProviderTunnelRequest") else (two, one, "n2")
    tunnel = first.tunnel()
    equal(t.edge.post(f"/nodes/{name}/drain")[0], 200, "status")
    tunnel.stall("available", seq=first.observation())
    other.tunnel().answer(b"recovered")
    equal((client.finish().status, bytes(client.body)), (200, b"recovered"), "answer after a drain")
    first.wait_closed()
    first = t.ready(name)
    # The node of the second run is lost: no third.
    client = t.post("both")
    until("one of the nodes has the request", lambda: first.has("ProviderTunnelRequest") or other.has("ProviderTunnelRequest"))
    a, b = (first, other) if first.has("ProviderTunnelRequest") else (other, first)
    a.tunnel().stall("available", seq=a.observation())
    b.tunnel()
    b.close(abort=True)
    equal(client.head().status, 503, "status when the second node is lost")
    client.error()
    a.ping()
    check(not a.has("ProviderTunnelRequest"), "a third run")


# ---------------------------------------------------------------- old agents beside new ones

# Proves [R-099]
def test_old_agent_works_beside_a_new_one(t):
    # It says ready, and knows no operation, no ExecutionFailure, no command and no refresh.
    old, new = t.ready("n1", auto=()), t.ready("n2")
    old.provider = Provider(old=True)
    t.ask("transport_status", node="n2").result()
    ask = t.ask("transport_status", node="n1")
    t.reload(**FRESH, other=("{id: p2, adapter: a1, target: t2, capacity: 2}", "{id: p2, adapter: a1, target: t2, capacity: 3}"))
    equal(adapters(refreshed(new).message.config), {"a1": 5}, "payload of the new agent")
    for model, target in (("m1", "t1"), ("two", "t-two"), ("named", "t-named")):
        client = t.http().send("/v1/chat/completions", b'{"model":"%s","do":"echo"}' % model.encode())
        client.finish()
        equal((client.status, bytes(client.body)), (200, b'{"model":"%s","do":"echo"}' % target.encode()), f"answer of the old agent for {model}")
    equal(old.provider.served, ["/v1/chat/completions", "/v1/chat/completions", "/served/chat"], "what told it what to do")
    t.call(new, "m2")
    ask.refused(504, "command_timeout")
    t.behind({"n1": "unanswered"})
    old.provider = None
    for _ in range(3):
        old.tunnel()  # those it has served by itself
    client, other, _ = stalled(t, old, new, lambda s, r: r.answer(b"either"))
    equal(bytes(client.finish().body), b"either", "answer of a shared model")
    # Its stall is an ordinary error, for whoever gets it.
    client = t.post("one")
    old.tunnel().error("response_stalled")
    check(client.head().status >= 500, f"status {client.status}")
    client.error()
    equal(t.edge.provider("p-one")["status"], "available", "p-one")
    t.call(old, "one")
    t.ask("transport_status", node="n2").result()
    check(not old.closed, f"the old agent's connection was closed: {old.closed}")
    equal(t.grew("iop_edge_node_fences_total"), 0, "fences")


# ---------------------------------------------------------------- the end of the Edge

def test_drain(t):
    session = t.ready()
    client = t.post()
    tunnel = session.tunnel()
    tunnel.start(head=SSE)
    tunnel.body(b"data: 1\n\n")
    client.wait_body(part=b"data: 1\n\n")
    t.edge.process.send_signal(signal.SIGTERM)
    away = session.wait("GoAway", lambda i: i.type == "iop.transport.GoAway").message
    equal(away.grace_ms, 8000, "grace (drain_ms)")
    equal(t.edge.get("/readyz")[0], 503, "/readyz")
    late = t.pending("n2")  # nodes are still served
    late.close()
    try:
        t.post()
        raise Wrong("the client listener still accepts")
    except ConnectionError:
        pass
    tunnel.body(b"data: [DONE]\n\n")
    tunnel.end()
    client.finish()
    equal((bytes(client.body), client.ending), (b"data: 1\n\ndata: [DONE]\n\n", "complete"), "the running answer")
    equal(t.edge.process.wait(10), 0, "exit code")
    session.wait_closed()


# Cases with an `Open` line are left out unless --open is given: they show what this Edge does differently.

def test_drain_answers_503_on_open_connections(t):
    session = t.ready()
    kept, fresh = t.http().send("/v1/models", method="GET"), t.http()
    equal(kept.finish().status, 200, "models")
    client = t.post()
    tunnel = session.tunnel()
    until("three clients", lambda: t.edge.metric("iop_edge_clients") == 3)
    t.edge.process.send_signal(signal.SIGTERM)
    session.wait("GoAway", lambda i: i.type == "iop.transport.GoAway")
    got = {}
    for name, one in (("kept", kept), ("fresh", fresh)):
        try:
            got[name] = one.send("/v1/chat/completions", chat("m1")).head().status
        except ConnectionError as error:
            got[name] = type(error).__name__
    tunnel.answer()
    client.finish()
    equal(got, {"kept": 503, "fresh": 503}, "new requests on open connections")


# ---------------------------------------------------------------- running them

def cases():
    """The test_ functions in their order, each with the ids it proves."""
    source = pathlib.Path(__file__).read_text().splitlines()
    found = []
    for number, line in enumerate(source):
        name = re.match(r"def (test_\w+)\(", line)
        if name:
            above = []
            while source[number - 1].startswith("#"):
                number -= 1
                above.append(source[number])
            ids = [i for a in above if a.startswith("# Proves") for i in re.findall(r"R-\d+", a)]
            found.append((globals()[name[1]], ids))
    return found


def main():
    parser = argparse.ArgumentParser(description="an independent node agent against an Edge")
    parser.add_argument("--iop", help="the binary")
    parser.add_argument("--out", help="where the certificates, the configuration and the log go")
    parser.add_argument("--only", default="", help="run the cases whose names contain this")
    parser.add_argument("--list", action="store_true", help="name the cases and what they prove")
    parser.add_argument("-v", action="store_true", help="print tracebacks and times")
    arguments = parser.parse_args()
    if arguments.list:
        for function, ids in cases():
            print(function.__name__[5:], " ".join(ids))
        return 0
    chosen = [function for function, _ in cases() if arguments.only in function.__name__]
    if not arguments.iop or not arguments.out:
        parser.error("--iop and --out are needed")
    out = pathlib.Path(arguments.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    for name in ("pki", "other-pki"):
        for old in (out / name).glob("*"):
            old.unlink()
    edge = Edge(str(pathlib.Path(arguments.iop).resolve()), out)
    edge.make_pki()
    edge.start()
    passed = failed = 0
    try:
        for function in chosen:
            name, began, why = function.__name__[5:], time.monotonic(), None
            case = None
            if edge.process.poll() is not None:
                edge.start()
            try:
                case = Case(edge)
                function(case)
                if not function.__name__.startswith("test_drain"):
                    case.finish()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if arguments.v:
                    traceback.print_exc(file=sys.stdout)
            finally:
                for one in case.opened if case else []:
                    try:
                        one.close()
                    except Exception:
                        pass
                if case:
                    try:
                        case.restore()
                    except Exception as error:
                        why = why or f"{type(error).__name__}: {error}"
            if function.__name__.startswith("test_drain"):
                edge.stop()
            took = f" ({time.monotonic() - began:.1f} s)" if arguments.v else ""
            if why is None:
                passed += 1
                print(f"ok {name}{took}", flush=True)
            else:
                failed += 1
                print(f"FAIL {name}: {why}{took}", flush=True)
                try:  # what it left behind must not fail the next one
                    until("quiet", lambda: edge.metric("iop_edge_leases_held") + edge.metric("iop_edge_sessions") == 0, 3)
                except Exception:
                    pass
    finally:
        edge.stop()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
