"""The steps of run.py that an Ollama server serves: official clients, and what the server was asked."""
import contextlib
import json
import time
import urllib.request

import ollama
import openai

import ollama_server

MODEL, PLAIN = "house/own", "house/plain"
TEXT = " ".join(ollama_server.WORDS)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}}}}}]


def user(text):
    return [{"role": "user", "content": text}]


def requests(stage):
    with urllib.request.urlopen(f"http://127.0.0.1:{stage.ollama_port}/requests", timeout=5) as answer:
        return json.load(answer)


def create(stage, text, model=MODEL, **wishes):
    return stage.client.chat.completions.create(model=model, messages=user(text), **wishes)


def fails(call, kind):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("no error")


def ollama_server_is_read_by_its_own_client(stage):
    client = ollama.Client(host=f"http://127.0.0.1:{stage.ollama_port}")
    assert [m.model for m in client.list().models] == [ollama_server.MODEL, ollama_server.PLAIN]
    assert "tools" in client.show(ollama_server.MODEL).capabilities
    chat = client.chat(model=ollama_server.MODEL, messages=user("hi"))
    assert (chat.message.content, chat.done_reason) == (TEXT, "stop") and chat.eval_count > 0, chat
    parts = list(client.chat(model=ollama_server.MODEL, messages=user("think"), stream=True))
    assert "".join(part.message.content for part in parts) == TEXT and parts[0].message.thinking
    call = client.chat(model=ollama_server.MODEL, messages=user("x"), tools=TOOLS).message.tool_calls[0]
    assert (call.function.name, call.function.arguments["n"]) == ("look", 1)
    assert client.generate(model=ollama_server.MODEL, prompt="sea", options={"num_predict": 2}).response == "the edge"
    broken = client.chat(model=ollama_server.MODEL, messages=user("break"), stream=True)
    fails(lambda: list(broken), ollama.ResponseError)
    assert fails(lambda: client.show("nobody"), ollama.ResponseError).status_code == 404


def ollama_chat(stage):
    answer = create(stage, "hi", temperature=0.5, max_tokens=200, seed=7, stop=["END"], user="ann")
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.finish_reason) == ("chat.completion", MODEL, "stop"), answer
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT), choice
    assert answer.usage.completion_tokens == len(ollama_server.WORDS), answer.usage
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    asked = requests(stage)[-1]
    assert asked["path"] == "/api/chat" and asked["body"]["model"] == ollama_server.MODEL, asked
    assert asked["body"]["options"] == {"temperature": 0.5, "num_predict": 200, "seed": 7, "stop": ["END"]}, asked
    short = create(stage, "hi", max_completion_tokens=2)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("the edge", "length"), short


def ollama_chat_stream(stage):
    for text in ("hi", "think of it"):
        pieces, finish, usage = [], None, None
        stream = create(stage, text, stream=True, stream_options={"include_usage": True})
        for chunk in stream:
            assert (chunk.object, chunk.model) == ("chat.completion.chunk", MODEL), chunk
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                if choice.delta.content:
                    pieces.append(choice.delta.content)
        assert ("".join(pieces), finish) == (TEXT, "stop"), (pieces, finish)
        assert usage.completion_tokens == len(ollama_server.WORDS), usage
    # Each piece is there when it is said: 50 ms lie between them.
    times = [time.monotonic() for chunk in create(stage, "slow", stream=True) if chunk.choices and chunk.choices[0].delta.content]
    assert len(times) == len(ollama_server.WORDS) and times[-1] - times[0] > 0.04 * (len(times) - 1), times


def ollama_completions(stage):
    answer = stage.client.completions.create(model=MODEL, prompt="sea", max_tokens=3)
    assert (answer.object, answer.choices[0].text) == ("text_completion", "the edge sends"), answer
    assert requests(stage)[-1]["path"] == "/api/generate"
    stream = stage.client.completions.create(model=MODEL, prompt="sea", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == TEXT


def ollama_long(stage):
    """An answer of more than one event and more than one block arrives whole, streamed and not."""
    words = " ".join(ollama_server.WORDS[n % len(ollama_server.WORDS)] for n in range(2_000))
    assert create(stage, "long 2000").choices[0].message.content == words
    stream = create(stage, "long 2000", stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == words


def ollama_tools(stage):
    question = user("what is ü?")
    answer = stage.client.chat.completions.create(model=MODEL, messages=question, tools=TOOLS, tool_choice="auto")
    choice = answer.choices[0]
    call = choice.message.tool_calls[0]
    assert (choice.finish_reason, call.type, call.function.name) == ("tool_calls", "function", "look"), answer
    assert json.loads(call.function.arguments) == {"text": question[0]["content"], "n": 1}, call
    turn = [*question, choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    after = stage.client.chat.completions.create(model=MODEL, messages=turn, tools=TOOLS)
    assert after.choices[0].message.content == "look says 42", after
    stream = stage.client.chat.completions.create(model=MODEL, messages=question, tools=TOOLS, stream=True)
    calls, finish = [], None
    for chunk in stream:
        for choice in chunk.choices:
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
    assert [(c.index, c.function.name) for c in calls] == [(0, "look")] and finish == "tool_calls", (calls, finish)
    assert json.loads(calls[0].function.arguments)["n"] == 1 and calls[0].id


def ollama_json(stage):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    answer = create(stage, "hi", response_format=schema)
    assert json.loads(answer.choices[0].message.content) == {"answer": "the sea"}, answer
    assert requests(stage)[-1]["body"]["format"] == {"type": "object"}


def ollama_errors(stage):
    before = len(requests(stage))
    refused = fails(lambda: create(stage, "hi", logprobs=True), openai.APIStatusError)
    assert (refused.status_code, refused.code) == (502, "node_rejected"), refused.body
    assert len(requests(stage)) == before, "refused before any call"
    no_tools = fails(lambda: create(stage, "hi", model=PLAIN, tools=TOOLS), openai.APIStatusError)
    assert (no_tools.status_code, no_tools.code) == (502, "provider_unreachable"), no_tools.body
    for how in ("break", "cut"):
        stream = create(stage, how, stream=True)
        pieces = []
        with contextlib.suppress(openai.APIError):
            for chunk in stream:
                pieces += [choice.delta.content or "" for choice in chunk.choices]
            raise AssertionError(f"{how}: the stream ended as if it were whole")
        assert "".join(pieces) == "the edge", pieces


def ollama_abort(stage):
    """A client that leaves mid-stream: the server notices, and nothing stays held."""
    stream = create(stage, "slow 1000", stream=True)  # longer than what is waited for
    for _, chunk in zip(range(3), stream):
        pass
    left = time.monotonic()
    stream.close()
    stage.wait_for("the server to see its caller leave", lambda: requests(stage)[-1]["left"])
    stage.wait_for("counters at zero", stage.idle)
    print(f"  noticed after {(time.monotonic() - left) * 1000:.0f} ms")


def ollama_silence(stage):
    """A client that has waited long enough for a server that says nothing: no different."""
    impatient = stage.client.with_options(timeout=2, max_retries=0)
    for stream in (True, False):
        before = len(requests(stage))
        fails(lambda: impatient.chat.completions.create(model=MODEL, messages=user("silent"), stream=stream),
              openai.APITimeoutError)
        assert len(requests(stage)) == before + 1, "it had been asked"
        stage.wait_for("the server to see its caller leave", lambda: requests(stage)[-1]["left"])
        stage.wait_for("counters at zero", stage.idle)


STEPS = [
    ollama_server_is_read_by_its_own_client, ollama_chat, ollama_chat_stream, ollama_completions, ollama_long,
    ollama_tools, ollama_json, ollama_errors, ollama_abort, ollama_silence,
]
