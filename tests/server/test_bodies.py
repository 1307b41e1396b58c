"""No body costs much: every field of every schema with its worst bodies."""

import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError

from onchip.server import bodies
from onchip.server.app import ServerOptions
from onchip.server.embeddings import EmbeddingRequest
from onchip.server.errors import APIError
from onchip.server.protocol import ChatRequest, CompletionRequest
from onchip.server.response_items import ResponsesRequest

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
SCHEMAS = {
    COMPLETIONS: CompletionRequest,
    CHATS: ChatRequest,
    RESPONSES: ResponsesRequest,
    EMBEDDINGS: EmbeddingRequest,
}
FEW = {
    COMPLETIONS: {"prompt": "a"},
    CHATS: {"messages": [{"role": "user", "content": "a"}]},
    RESPONSES: {"input": "a"},
    EMBEDDINGS: {"input": "a"},
}
LISTS = ("prompt", "messages", "input")  # fields with lists of many values
TEXTS = {"user", "prompt_cache_key", "safety_identifier", "prompt"}  # may be long
TEXTS |= {"input", "instructions"}
MAX_ERRORS = 1000
MIB = 1 << 20


def text(unit, size):
    """As many units as fit, as a JSON list."""
    return b"[" + b",".join([unit] * ((size - 2) // (len(unit) + 1))) + b"]"


def names(size, count=None):
    count = count or size // 12
    return b"{" + b",".join(b'"n%x":1' % i for i in range(count)) + b"}"


# kind: a value for any field, of about so many bytes
KINDS = {
    "negative ints": lambda size: text(b"-1", size),
    "ints": lambda size: text(b"300", size),
    "floats": lambda size: text(b"1.5", size),
    "strings": lambda size: text(b'"ab"', size),
    "empty strings": lambda size: text(b'""', size),
    "nulls": lambda size: text(b"null", size),
    "empty objects": lambda size: text(b"{}", size),
    "empty lists": lambda size: text(b"[]", size),
    "lists of ints": lambda size: text(text(b"300", 8000), size),
    "ints, the last one wrong": lambda size: b"[" + text(b"300", size - 10)[:-1] + b",-1]]",
    "objects": lambda size: text(b'{"a":1}', size),
    "messages": lambda size: text(b'{"role":1,"content":[{}],"x":1}', size),
    "calls": lambda size: text(b'{"type":"function_call","call_id":1,"output":[{}]}', size),
    "parts": lambda size: b'[{"role":"user","content":' + text(b'{"type":1}', size) + b"}]",
    "names": names,
    "names within bounds": lambda size: text(names(0, 500), min(size, 400_000)),
    "numbered names": lambda size: names(size).replace(b'"n', b'"'),
    "colons in texts": lambda size: (
        b'["' + b":" * 70_000 + b'",' + text(b'""', max(9, size - 70_010))[1:]
    ),
    "a long text": lambda size: b'"' + b"a" * size + b'"',
    "escapes": lambda size: b'"' + rb"\u00e9" * (size // 6) + b'"',
    "a text without an end": lambda size: b'"' + rb"\"" * (size // 2),
    "half an escape": lambda size: b'"\\' * (size // 2),
    "depth": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "depth of objects": lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "digits": lambda size: b"9" * size,
    "long ints": lambda size: text(b"9" * 4000, size),
}


def body(path, field, value):
    rest = json.dumps({k: v for k, v in FEW[path].items() if k != field})[1:-1].encode()
    return b'{"' + field.encode() + b'":' + value + (b"," + rest if rest else b"") + b"}"


def fields(path):
    """The fields of the schema and an unknown one; fields with the same type elsewhere once."""
    own, shared = SCHEMAS[path].model_fields, CompletionRequest.model_fields
    is_new = lambda name: name not in shared or own[name].annotation != shared[name].annotation
    return [name for name in own if path == COMPLETIONS or is_new(name)] + ["unknown"]


CASES = [(path, field) for path in SCHEMAS for field in fields(path)]


@pytest.mark.parametrize(("path", "field"), CASES)
def test_validation_ends_at_few_errors(path, field):
    """An error costs some kilobytes and microseconds; all work before it is bounded, too."""
    for kind, value in KINDS.items():
        sent = body(path, field, value(12_000))
        try:
            SCHEMAS[path].model_validate(bodies.load(sent))
        except APIError as refusal:
            assert refusal.status == 400 and len(refusal.message) < 500, kind
        except ValidationError as error:
            assert error.error_count() < MAX_ERRORS, kind


def test_structures_are_counted_outside_of_texts():
    legal = json.dumps({"prompt": '{"a":[' * 100_000}).encode()
    assert bodies.load(legal) == json.loads(legal)
    for unit, each in {b"{}": 1, b"[]": 1, b'{"":1}': 2, b'{"a":"}"}': 2, b'[":"]': 1}.items():
        most = (bodies.MAX_STRUCTURES - 1) // each  # the list around them is one, too
        assert len(bodies.load(b"[" + b",".join([unit] * most) + b"]")) == most
        with pytest.raises(APIError, match="lists, objects and names"):
            bodies.load(b"[" + b",".join([unit] * (most + 1)) + b"]")


def test_names_of_an_object_are_counted_wherever_it_is():
    for around in (b"%s", b"[1,%s]", b'{"a":[[%s]]}'):
        assert bodies.load(around % names(0, bodies.MAX_NAMES))
        with pytest.raises(APIError, match="513 names"):
            bodies.load(around % names(0, bodies.MAX_NAMES + 1))


def test_a_prompt_that_cannot_fit_is_refused_before_the_engine_sees_it(serving, fake, ask):
    engine = fake()
    with serving(engine) as (url, _):
        status, answer, _ = ask(url, COMPLETIONS, {"prompt": [1] * 5000, "max_tokens": 1})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert "5000 tokens" in answer["error"]["message"] and not engine.salts


class Child:
    """A process as reported by the system."""

    def __init__(self, pid):
        self.folder = Path(f"/proc/{pid}")

    def cpu_s(self):
        times = (self.folder / "stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def mib(self, what):
        line = next(x for x in (self.folder / "status").read_text().splitlines() if what in x)
        return int(line.split()[1]) / 1024

    def forget_peak(self):
        (self.folder / "clear_refs").write_text("5")


def gaps(connection):
    """Seconds between the pieces of a stream."""
    last, longest = time.monotonic(), 0.0
    for line in connection.getresponse():
        if line.startswith(b"data: "):
            last, longest = time.monotonic(), max(longest, time.monotonic() - last)
    return longest


def slowness():
    """How much longer than its processor time a thread takes here, now."""
    wall, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.1:
        pass
    return (time.monotonic() - wall) / 0.1


def attack(child, ask, url, path, sent):
    """Processor seconds and MiB that a body costs the server."""
    child.forget_peak()
    before_s, before = child.cpu_s(), child.mib("VmRSS")
    status, answer, _ = ask(url, path, sent)
    assert status == 400, answer
    return child.cpu_s() - before_s, child.mib("VmHWM") - before


linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
WORST = (
    (COMPLETIONS, "prompt", "negative ints"),
    (COMPLETIONS, "prompt", "lists of ints"),
    (COMPLETIONS, "prompt", "colons in texts"),
    (COMPLETIONS, "stop", "empty strings"),
    (CHATS, "messages", "empty objects"),
    (CHATS, "metadata", "names"),
    (RESPONSES, "input", "messages"),
    (RESPONSES, "input", "calls"),
    (RESPONSES, "tools", "empty objects"),
    (EMBEDDINGS, "input", "negative ints"),
    (EMBEDDINGS, "input", "empty strings"),
    (EMBEDDINGS, "input", "lists of ints"),
)


@linux
def test_the_worst_bodies_delay_a_stream_little(shared_process, ask, open_stream):
    """In processor time: this machine may be busy with other things."""
    running, url = shared_process
    child = Child(running.pid)
    size = ServerOptions("any").max_body_bytes - 2000
    attack(child, ask, url, COMPLETIONS, body(COMPLETIONS, "prompt", b"[-1]"))
    for path, field, kind in WORST:
        cpu_s, mib = attack(child, ask, url, path, body(path, field, KINDS[kind](size)))
        assert cpu_s < 1 and mib < 100, (field, kind, cpu_s, mib)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(gaps, open_stream(url, max_tokens=30, ignore_eos=True))
        sent = body(COMPLETIONS, "prompt", KINDS["negative ints"](size))
        while not stream.done():
            assert ask(url, COMPLETIONS, sent)[0] == 400
        assert stream.result() < 1.0 * slowness()


@linux
@pytest.mark.slow
def test_every_field_and_every_kind_of_body_cost_little(shared_process, ask):
    """Each field with some kinds, in turn, and fields with lists with all kinds."""
    running, url = shared_process
    child = Child(running.pid)
    size = ServerOptions("any").max_body_bytes - 2000
    values = {kind: value(size - 100) for kind, value in KINDS.items()}
    attack(child, ask, url, COMPLETIONS, body(COMPLETIONS, "prompt", b"[-1]"))
    for place, (path, field) in enumerate(CASES):
        kinds = list(values) if field in LISTS else list(values)[place % 7 :: 12]
        for kind in kinds:
            if field in TEXTS and values[kind][:1] == b'"':
                continue
            cpu_s, mib = attack(child, ask, url, path, body(path, field, values[kind]))
            assert cpu_s < 1 and mib < 100, (path, field, kind, cpu_s, mib)


@linux
def test_unfinished_bodies_are_bounded_in_all(shared_process, ask, connect):
    """60 clients send all but the end of 4 MiB each: the memory of their bodies stays within the
    bound, small requests are served meanwhile, and all memory is freed afterwards.
    """
    running, url = shared_process
    child = Child(running.pid)
    assert ask(url, COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
    before, some = child.mib("VmRSS"), b"a" * (4 * MIB - 1000)

    def upload():
        connection = connect(url)
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(4 * MIB))
        connection.endheaders()
        connection.send(some)
        return connection

    with ThreadPoolExecutor(8) as pool:
        clients = list(pool.map(lambda _: upload(), range(60)))
    assert ask(url, COMPLETIONS, {"prompt": "a", "max_tokens": 1})[0] == 200
    assert child.mib("VmHWM") - before < 3 * 16 + 20
    rest, answers = b"a" * 1000, []
    for client in clients:
        client.send(rest)
        response = client.getresponse()
        answers.append((response.status, response.read()))
        client.close()
    statuses = [status for status, _ in answers]
    assert set(statuses) == {400, 503} and 1 <= statuses.count(400) <= 4
    assert any(b"bodies of other requests" in answer for _, answer in answers)
    sent = body(COMPLETIONS, "prompt", KINDS["negative ints"](MIB))
    assert ask(url, COMPLETIONS, sent)[0] == 400  # the memory is free again


@pytest.mark.slow
@linux
def test_reaching_the_file_limit_is_logged_once_a_second(
    shared_process, shared_log, ask, connect, until
):
    """A process at its limit of open files accepts no connection, logs it, and recovers
    afterwards.
    """
    running, url = shared_process
    assert ask(url, "/health")[0] == 200
    used = len(list(Path(f"/proc/{running.pid}/fd").iterdir()))
    limits = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (used + 3, limits[1]))
    clients = [connect(url) for _ in range(40)]
    for client in clients:
        client.connect()
    time.sleep(1.5)
    for client in clients:
        client.close()
    resource.prlimit(running.pid, resource.RLIMIT_NOFILE, limits)
    until(lambda: ask(url, "/health")[0] == 200, 30)
    lines = [
        x for x in shared_log.read_text().splitlines() if "connections cannot be accepted" in x
    ]
    assert 1 <= len(lines) < 20 and "Traceback" not in shared_log.read_text()
