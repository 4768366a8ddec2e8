"""A scripted server that speaks Ollama's own API: ollama_server.py PORT.

    POST /api/chat  /api/generate  /api/show        GET /api/tags  /requests

The model `words` talks, in pieces of a word each; what it does follows from the request, so that a test needs no
channel of its own: with tools it calls the first one, unless the last message is a tool's result, which it repeats;
with `format` it answers JSON; a prompt or last user message steers it by its first word:

    slow    pauses 50 ms before every piece       think   thinks before it talks
    slow N  the same, N pieces                    break   an error object in mid-stream
    long N  N pieces                              cut     the connection ends in mid-stream
    silent  accepts and says nothing until the client leaves

Other models are not found. `GET /requests` lists every call seen: path, body, and whether the caller left early.
Answers are made of the shapes that the official `ollama` client reads; python's standard library alone serves them.
"""
import datetime
import http.server
import json
import sys
import threading
import time

MODEL = "words"
PLAIN = "plain"  # a model without tools
WORDS = "the edge sends \u00fcber \ud55c\uad6d\uc5b4 \U0001f30d on and on".split(" ")
SEEN_MAX = 1_000

seen = []
lock = threading.Lock()


class Cut(Exception):
    """The connection ends here."""


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")


def counts(prompt, pieces):
    return {
        "total_duration": 5_000_000, "load_duration": 1_000_000, "prompt_eval_count": len(prompt.split()),
        "prompt_eval_duration": 1_000_000, "eval_count": pieces, "eval_duration": 3_000_000,
    }


def pieces_of(prompt, body):
    """What the model says."""
    first, *rest = prompt.split() or [""]
    count = int(rest[0]) if first in ("long", "slow") and rest else len(WORDS)
    count = min(count, (body.get("options") or {}).get("num_predict", count))
    words = [WORDS[n % len(WORDS)] for n in range(count)]
    return [word if n == 0 else f" {word}" for n, word in enumerate(words)]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def setup(self):
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

    # ── answers ──

    def whole(self, status, answer):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin(self):
        self.send_response(200)
        self.send_header("content-type", "application/x-ndjson")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def line(self, part):
        data = json.dumps(part).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def end(self):
        self.wfile.write(b"0\r\n\r\n")

    # ── requests ──

    def do_GET(self):
        if self.path == "/requests":
            with lock:
                return self.whole(200, list(seen))
        if self.path == "/api/tags":
            details = {"family": "words", "parameter_size": "1", "quantization_level": "F32"}
            models = [{"name": name, "model": name, "modified_at": now(), "size": 1, "digest": "0", "details": details}
                      for name in (MODEL, PLAIN)]
            return self.whole(200, {"models": models})
        return self.whole(404, {"error": "not found"})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("content-length", "0")))
        try:
            body = json.loads(raw)
            if not isinstance(body, dict):
                raise ValueError
        except ValueError:
            return self.whole(400, {"error": "invalid JSON"})
        entry = {"path": self.path, "body": body, "left": False}
        with lock:
            del seen[: -SEEN_MAX]
            seen.append(entry)
        try:
            self.serve(body)
        except Cut:
            self.close_connection = True
        except OSError:
            entry["left"] = True
            self.close_connection = True

    def serve(self, body):
        model = body.get("model", "")
        if model not in (MODEL, PLAIN):
            return self.whole(404, {"error": f"model '{model}' not found"})
        if self.path == "/api/show":
            details = {"format": "gguf", "family": "words", "families": ["words"]}
            capabilities = ["completion"] + (["tools"] if model == MODEL else [])
            return self.whole(200, {"details": details, "model_info": {}, "capabilities": capabilities, "modified_at": now()})
        if body.get("tools") and model == PLAIN:
            return self.whole(400, {"error": f"registry.ollama.ai/library/{model} does not support tools"})
        if self.path == "/api/chat":
            return self.talk(body, self.chat_prompt(body), self.chat_part)
        if self.path == "/api/generate":
            return self.talk(body, body.get("prompt", ""), self.generate_part)
        return self.whole(404, {"error": "not found"})

    @staticmethod
    def chat_prompt(body):
        messages = body.get("messages") or [{}]
        return messages[-1].get("content", "")

    def chat_part(self, text="", thinking=None, tool_calls=None):
        message = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if tool_calls:
            message["tool_calls"] = tool_calls
        return {"message": message}

    def generate_part(self, text="", thinking=None, tool_calls=None):
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def script(self, body, prompt, part):
        """Every part of the answer but the last."""
        how = (prompt.split() or [""])[0]
        last = (body.get("messages") or [{}])[-1]
        if how == "think" and body.get("think") is not False:
            for word in ("let", " me", " see"):
                yield part(thinking=word)
        if last.get("role") == "tool":
            yield part(f"{last.get('tool_name')} says {last.get('content')}")
        elif body.get("tools"):
            function = body["tools"][0]["function"]
            yield part(tool_calls=[{"function": {"name": function["name"], "arguments": {"text": prompt, "n": 1}}}])
        elif body.get("format"):
            yield part('{"answer": ')
            yield part('"the sea"}')
        else:
            for n, piece in enumerate(pieces_of(prompt, body)):
                if how == "break" and n == 2:
                    yield {"error": "an error was encountered while running the model"}
                    return
                if how == "cut" and n == 2:
                    raise Cut
                if how == "slow":
                    time.sleep(0.05)
                yield part(piece)

    def talk(self, body, prompt, part):
        if prompt.startswith("silent"):
            self.begin()
            self.connection.recv(1)
            raise ConnectionResetError
        said = list(pieces_of(prompt, body))
        last = {"done": True, "done_reason": "stop", **counts(prompt, len(said))}
        if (body.get("options") or {}).get("num_predict") == len(said):
            last["done_reason"] = "length"
        common = {"model": body["model"], "created_at": now()}
        if body.get("stream", True):
            self.begin()
            for step in self.script(body, prompt, part):
                self.line(step if "error" in step else {**common, **step, "done": False})
                if "error" in step:
                    return self.end()
            self.line({**common, **part(), **last})
            return self.end()
        return self.whole(200, self.joined(list(self.script(body, prompt, part)), part, common, last))

    @staticmethod
    def joined(steps, part, common, last):
        """A whole answer out of the parts of a stream."""
        messages = [step.get("message", {}) for step in steps]
        text = "".join(m.get("content", "") for m in messages) + "".join(s.get("response", "") for s in steps)
        calls = [call for m in messages for call in m.get("tool_calls", [])]
        return {**common, **part(text, tool_calls=calls or None), **last}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main(port):
    server = Server(("127.0.0.1", port), Handler)
    print("listening", server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
