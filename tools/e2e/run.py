"""Official clients through Edge and node to a real model server: run.py --iop BINARY --out FOLDER.

    openai, anthropic, curl ─ recorder ─ iop edge ─ iop node ─┬ recorder ─ llama.cpp server   (raw tunnels)
                                                              └ a scripted Ollama server       (normalized runs)

Both recorders keep every byte, so that what a client got can be compared with what the provider sent.
Ends with `N passed, N failed`; anything missing is a failure.
"""
import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request

import anthropic
import openai

import model
import ollama_server
import ollama_steps
import recorder

DEADLINE = 30.0
KEY = "test-key-of-alice"
HERE = pathlib.Path(__file__).resolve().parent


def free_port():
    """A port below those that outgoing connections are given, so that nobody takes it by chance."""
    for port in random.sample(range(10_000, 32_000), 200):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


def wait_for(what, seen, limit=DEADLINE):
    """Waits until `seen()` is true; what it last returned."""
    until = time.monotonic() + limit
    while not (value := seen()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {limit} s for {what}")
        time.sleep(0.005)
    return value


def fetch(port, path):
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.read().decode()
    return None


class Stage:
    """Everything that runs, in a folder of its own."""

    wait_for = staticmethod(wait_for)

    def __init__(self, iop, out, shards):
        self.iop, self.out, self.shards = iop, out, shards
        self.parts = {}
        self.logs = []

    def start(self, name, command):
        log = open(self.out / f"{name}.log", "ab")
        self.logs.append(log)
        self.parts[name] = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.out)

    def run(self, *arguments):
        subprocess.run([self.iop, *arguments], check=True, cwd=self.out, stdout=subprocess.DEVNULL)

    def open(self):
        weights = self.out / "words.gguf"
        model.write(str(weights))
        self.model_port, self.ollama_port, self.nodes, self.clients, self.admin = (free_port() for _ in range(5))
        self.start("model", [sys.executable, str(HERE / "server.py"), str(weights), str(self.model_port)])
        self.start("ollama", [sys.executable, str(HERE / "ollama_server.py"), str(self.ollama_port)])
        wait_for("the model server", lambda: fetch(self.model_port, "/v1/models"))
        wait_for("the Ollama server", lambda: fetch(self.ollama_port, "/api/tags"))
        self.provider = recorder.Recorder(("127.0.0.1", self.model_port))
        self.pki()
        self.edge_yaml()
        self.node_yaml()
        self.start("edge", [self.iop, "edge", "--config", "edge.yaml"])
        wait_for("the Edge", lambda: fetch(self.admin, "/readyz"))
        self.start_node()
        self.front = recorder.Recorder(("127.0.0.1", self.clients))
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.front.port}/v1", api_key=KEY, max_retries=0, timeout=DEADLINE
        )
        self.anthropic = anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{self.front.port}", api_key=KEY, max_retries=0, timeout=DEADLINE
        )

    def start_node(self):
        self.start("node", [self.iop, "node", "--config", "node.yaml"])
        wait_for("the node", self.connected)

    def connected(self):
        status = fetch(self.admin, "/status")
        return status and json.loads(status)["nodes"][0]["connected"]

    def pki(self):
        self.run("pki", "init", "--dir", "pki", "--trust-domain", "e2e.test", "--force")
        self.run("pki", "edge", "edge-1", "--dir", "pki", "--force")
        self.run("pki", "node", "gpu-1", "--dir", "pki", "--force")

    def edge_yaml(self):
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        (self.out / "edge.yaml").write_text(f"""
shards: {self.shards}
listeners:
  nodes: "127.0.0.1:{self.nodes}"
  clients: "127.0.0.1:{self.clients}"
  admin: "127.0.0.1:{self.admin}"
pki:
  trust_domain: e2e.test
  edge_name: edge-1
  ca: pki/ca.crt
  certificate: pki/edge-1.crt
  key: pki/edge-1.key
nodes:
  - id: gpu-1
    adapters:
      - type: openai_compat
        base_url: "http://127.0.0.1:{self.provider.port}"
      - type: ollama
        base_url: "http://127.0.0.1:{self.ollama_port}"
    providers:
      - id: words
        adapter: openai_compat
        target: words
        category: local_inference
        capacity: 2
      - id: own
        adapter: ollama
        target: {ollama_server.MODEL}
        capacity: 2
      - id: plain
        adapter: ollama
        target: {ollama_server.PLAIN}
        capacity: 1
models:
  - name: house/words
    providers: [words]
  - name: {ollama_steps.MODEL}
    providers: [own]
  - name: {ollama_steps.PLAIN}
    providers: [plain]
keys:
  - principal: alice
    sha256: {digest}
log:
  access: all
""")

    def node_yaml(self):
        (self.out / "node.yaml").write_text(f"""
node_id: gpu-1
edge:
  address: "127.0.0.1:{self.nodes}"
  trust_domain: e2e.test
  name: edge-1
pki:
  ca: pki/ca.crt
  certificate: pki/gpu-1.crt
  key: pki/gpu-1.key
reconnect:
  interval_sec: 1
  max_attempts: 20
""")

    def metric(self, series):
        for line in (fetch(self.admin, "/metrics") or "").splitlines():
            if line.startswith(series + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def idle(self):
        names = ("iop_edge_runs", "iop_edge_leases_held", 'iop_edge_pool_used_bytes{pool="body"}',
                 'iop_edge_pool_used_bytes{pool="output"}')
        return all(self.metric(name) == 0 for name in names)

    def close(self):
        for part in self.parts.values():
            part.terminate()
        for part in self.parts.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.wait(10)
            part.kill()
        for log in self.logs:
            log.close()


MODEL = "house/words"
MESSAGES = [{"role": "user", "content": "the edge sends \u00fcber \U0001f30d"}]


def same_bytes(stage, count):
    """The newest `count` answers that clients got are byte for byte those that the provider sent, and the
    requests differ in the model's name alone."""
    def id_of(headers):
        return headers.get("x-request-id")

    def settled():
        sent = {id_of(e.headers): e for e in stage.provider.exchanges() if e.method == "POST"}
        got = [e for e in stage.front.exchanges() if e.method == "POST" and id_of(e.answer_headers) in sent]
        return (sent, got) if len(got) >= count else None

    sent, got = wait_for("recorded exchanges", settled)
    for exchange in got:
        there = sent[id_of(exchange.answer_headers)]
        assert exchange.answer == there.answer, f"{exchange.path}: the answer's bytes changed"
        assert (exchange.status, exchange.path) == (there.status, there.path), (exchange.path, there.path)
        assert KEY.encode() not in there.headers.as_bytes(), f"{exchange.path}: the client's key reached the provider"
        name, target = json.dumps(MODEL).encode(), b'"words"'
        assert exchange.body.replace(name, target, 1) == there.body, f"{exchange.path}: the request's bytes changed"
    return len(got)


def models(stage):
    names = [entry.id for entry in stage.client.models.list()]
    assert names == [MODEL, ollama_steps.MODEL, ollama_steps.PLAIN], names
    assert stage.client.models.retrieve(MODEL).id == MODEL


def chat(stage):
    answer = stage.client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content.strip(), answer
    assert answer.usage.completion_tokens == 12, answer.usage


def chat_stream(stage):
    text, chunks, usage = "", 0, None
    stream = stage.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        chunks += 1
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text.strip() and chunks > 10, (chunks, text)
    assert usage.completion_tokens == 24, usage


def completions(stage):
    answer = stage.client.completions.create(model=MODEL, prompt="one two three", max_tokens=8)
    assert answer.choices[0].text.strip(), answer
    pieces = [c.choices[0].text for c in stage.client.completions.create(model=MODEL, prompt="sea", max_tokens=8, stream=True) if c.choices]
    assert "".join(pieces).strip(), pieces


def embeddings(stage):
    answer = stage.client.embeddings.create(model=MODEL, input=["the sea", "the sky"], encoding_format="float")
    assert len(answer.data) == 2 and len(answer.data[0].embedding) == 64, answer


def responses(stage):
    answer = stage.client.responses.create(model=MODEL, input="one two three", max_output_tokens=12)
    assert answer.output_text.strip() and answer.usage.output_tokens == 12, answer


def responses_stream(stage):
    text, kinds = "", []
    for event in stage.client.responses.create(model=MODEL, input="the sea", max_output_tokens=24, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text.strip() and kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    assert kinds.count("response.output_text.delta") > 10, kinds


def messages(stage):
    answer = stage.anthropic.messages.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    assert answer.content[0].text.strip() and answer.stop_reason == "max_tokens", answer
    assert answer.usage.output_tokens == 12, answer.usage
    # Its query and its headers go on to the provider.
    stage.anthropic.beta.messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, betas=["some-beta"], extra_query={"beta": "true"}
    )

    def asked():
        return [e for e in stage.provider.exchanges() if e.path == "/v1/messages?beta=true"]

    headers = wait_for("the provider's exchange", asked)[-1].headers
    assert headers["anthropic-beta"] == "some-beta" and headers["anthropic-version"], headers


def messages_stream(stage):
    kinds = []
    with stage.anthropic.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=24) as stream:
        for event in stream:
            kinds.append(event.type)
        answer = stream.get_final_message()
    assert answer.content[0].text.strip() and answer.usage.output_tokens == 24, answer
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    assert kinds.count("content_block_delta") > 10, kinds


def count_tokens(stage):
    """A storm, as coding agents make it at their start: every one is counted, a chat finds room."""
    def count(_):
        return stage.anthropic.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        counts = pool.map(count, range(50))
        chat(stage)
        counts = set(counts)
    assert len(counts) == 1 and counts.pop() > 0, counts


def bytes_are_the_providers(stage):
    assert same_bytes(stage, 60) >= 60


def unknown_model(stage):
    try:
        stage.client.chat.completions.create(model="nobody", messages=MESSAGES)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found" and error.param == "model", error.body
        return
    raise AssertionError("no error")


def anthropic_errors(stage):
    """Each error of the Edge is one that the client knows, by class and by its envelope."""
    api = stage.anthropic

    def refused(kind, word, call):
        try:
            call()
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["type"] == word, error.body
            assert error.body["request_id"] == error.response.headers["x-request-id"], error.body
            assert error.response.headers["x-iop-error-source"] == "edge"
            return
        raise AssertionError(f"no {word}")

    unknown = {"model": "nobody", "messages": MESSAGES}
    refused(anthropic.NotFoundError, "not_found_error", lambda: api.messages.create(**unknown, max_tokens=3))
    refused(anthropic.NotFoundError, "not_found_error", lambda: api.messages.count_tokens(**unknown))
    refused(anthropic.NotFoundError, "not_found_error", lambda: api.messages.batches.list())
    refused(anthropic.BadRequestError, "invalid_request_error", lambda: api.post("/v1/messages", body={}, cast_to=object))
    stranger = api.with_options(api_key="wrong")
    refused(anthropic.AuthenticationError, "authentication_error", lambda: stranger.messages.count_tokens(model=MODEL, messages=MESSAGES))
    try:
        api.post("/v1/messages", body={"model": MODEL, "messages": [7], "max_tokens": 3}, cast_to=object)
    except anthropic.APIStatusError as error:
        return is_the_providers(stage, error)
    raise AssertionError("no error")


def wrong_key(stage):
    try:
        stage.client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key", error.body
        return
    raise AssertionError("no error")


def is_the_providers(stage, error):
    """What a client was refused with is what the provider had said, untouched."""
    def said():
        sent = error.response.headers["x-request-id"]
        return [e for e in stage.provider.exchanges() if e.headers.get("x-request-id") == sent]

    there = wait_for("the provider's answer", said)[0]
    assert error.status_code == there.status >= 400, (error.status_code, there.status)
    assert error.response.content == there.answer
    assert "x-iop-error-source" not in error.response.headers


def provider_error_passes_through(stage):
    try:
        stage.client.post("/chat/completions", body={"model": MODEL, "messages": "none"}, cast_to=object)
    except openai.APIStatusError as error:
        return is_the_providers(stage, error)
    raise AssertionError("no error")


def broken_json(stage):
    try:
        stage.client.post("/chat/completions", body={"messages": MESSAGES}, cast_to=object)
    except openai.BadRequestError as error:
        assert error.code == "model_missing", error.body
        return
    raise AssertionError("no error")


def client_abort(stage):
    """A client that leaves mid-stream: the provider's call ends within 250 ms and nothing stays held."""
    for stream in long_streams(stage):
        abort(stage, stream)


def long_streams(stage):
    """An answer of 4000 tokens on each surface, one at a time."""
    yield stage.client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4000, stream=True)
    yield stage.client.responses.create(model=MODEL, input="the sea", max_output_tokens=4000, stream=True)
    yield stage.anthropic.messages.create(model=MODEL, messages=MESSAGES, max_tokens=4000, stream=True)


def abort(stage, stream):
    for _, chunk in zip(range(5), stream):
        pass
    calls = [c for c in stage.provider.connections if c.closed_by_peer_at is None and b"4000" in c.sent]
    assert len(calls) == 1, calls
    left = time.monotonic()
    stream.close()
    wait_for("the provider's call to end", lambda: calls[0].closed_by_peer_at, 2.0)
    took = calls[0].closed_by_peer_at - left
    assert took < 0.250, f"the provider saw the abort after {took * 1000:.0f} ms"
    wait_for("counters at zero", stage.idle)
    print(f"  the provider saw the abort after {took * 1000:.1f} ms")


def curl(stage):
    def run(*arguments):
        done = subprocess.run(["curl", "-sS", "-m", str(DEADLINE), *arguments], capture_output=True, check=True)
        return done.stdout.decode()

    base = f"http://127.0.0.1:{stage.clients}"
    key = ["-H", f"authorization: Bearer {KEY}"]
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "stream": True})
    streamed = run("-N", *key, "-H", "content-type: application/json", "-d", body, f"{base}/v1/chat/completions")
    assert streamed.rstrip().endswith("data: [DONE]"), streamed[-200:]
    large = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "sea " * 500}], "max_tokens": 3})
    answer = run(*key, "-H", "expect: 100-continue", "-d", large, f"{base}/v1/chat/completions")
    assert json.loads(answer)["choices"], answer
    chunked = run(*key, "-H", "transfer-encoding: chunked", "-d", large, f"{base}/v1/chat/completions")
    assert json.loads(chunked)["choices"], chunked
    one_zero = run("-0", *key, "-d", large, f"{base}/v1/chat/completions")
    assert json.loads(one_zero)["choices"], one_zero
    assert json.loads(run(*key, f"{base}/v1/models"))["data"][0]["id"] == MODEL
    assert run("-o", "/dev/null", "-w", "%{http_code}", f"{base}/v1/nothing") == "404"
    assert run("-o", "/dev/null", "-w", "%{http_code}", *key, f"{base}/v1/chat/completions") == "405"
    assert run("-I", "-o", "/dev/null", "-w", "%{http_code}", *key, f"{base}/v1/models") == "200"


def node_killed(stage):
    """The node dies mid-stream: the client can tell, capacity returns once, the next node serves."""
    for killed, stream in enumerate(long_streams(stage), 1):
        for _, chunk in zip(range(5), stream):
            pass
        stage.parts["node"].send_signal(signal.SIGKILL)
        stage.parts["node"].wait(10)
        try:
            for chunk in stream:
                pass
            raise AssertionError("the stream ended as if it were whole")
        except (openai.APIError, anthropic.APIStatusError) as error:
            assert "disconnected" in str(error), error
            assert not isinstance(error, anthropic.APIError) or error.body["error"]["type"] == "overloaded_error", error.body
        wait_for("counters at zero", stage.idle)
        assert stage.metric('iop_edge_leases_returned_total{by="fence"}') == killed
        stage.start_node()
        chat(stage)


def drain(stage):
    """SIGTERM: a stream that runs is finished, then the Edge goes with code 0."""
    stream = stage.client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=300, stream=True)
    chunks = 0
    for chunk in stream:
        chunks += 1
        if chunks == 3:
            stage.parts["edge"].terminate()
    assert chunks > 100, chunks
    assert stage.parts["edge"].wait(DEADLINE) == 0
    stage.parts["node"].terminate()
    assert stage.parts["node"].wait(DEADLINE) == 0


STEPS = [
    models, chat, chat_stream, completions, embeddings, responses, responses_stream, messages, messages_stream,
    count_tokens, bytes_are_the_providers, unknown_model, wrong_key, provider_error_passes_through, broken_json,
    anthropic_errors, client_abort, curl, *ollama_steps.STEPS, node_killed, drain,
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iop", required=True, type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--out", required=True, type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    passed = failed = 0
    for shards in arguments.shards:
        print(f"with {shards} shard(s)")
        more = run_steps(arguments.iop, arguments.out / f"shards-{shards}", shards)
        passed, failed = passed + more[0], failed + more[1]
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def run_steps(iop, out, shards):
    out.mkdir(parents=True, exist_ok=True)
    stage = Stage(iop, out, shards)
    passed = failed = 0
    try:
        stage.open()
        for step in STEPS:
            began = time.monotonic()
            try:
                step(stage)
                passed += 1
                print(f"ok    {step.__name__} ({time.monotonic() - began:.2f} s)")
            except Exception:
                failed += 1
                print(f"FAIL  {step.__name__}")
                traceback.print_exc()
    except Exception:
        failed += 1
        traceback.print_exc()
    finally:
        stage.close()
    return passed, failed


if __name__ == "__main__":
    sys.exit(main())
