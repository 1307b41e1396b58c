"""`onchip serve --tensor-parallel-size 2`, as processes on gloo: the responses of one process, also
after cancels; a rank that is killed, and signals.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from onchip.engine.llm import LLM
from onchip.models import ModelConfig, random_model, save
from onchip.server import command
from tests.cli.parsing import parse

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals of Unix")
tokenizers = pytest.importorskip("tokenizers")

PATH = "/v1/completions"
CHARS = [chr(c) for c in range(33, 127)] + ["\u0120"]  # a blank, as ByteLevel writes it
CONFIG = {
    "model_type": "llama",
    "vocab_size": len(CHARS) + 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": len(CHARS),
}
OPTIONS = {"num_pages": 30, "max_num_seqs": 6, "device": "cpu"}
FLAGS = ("--pages", "30", "--max-num-seqs", "6", "--device", "cpu", "--drain-s", "20")
LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
DRAFTS = {"method": "draft", "model": "tiny-draft", "num_speculative_tokens": 2}
PROMPT = "Two ranks divide the heads. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that two ranks can divide; each token is a visible character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    save(random_model(ModelConfig.from_hf(CONFIG), seed=3), path)
    vocab = {char: i for i, char in enumerate(CHARS)} | {"<|end|>": len(CHARS)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


REQUESTS = [
    {"temperature": 0, "max_tokens": 60},
    {"temperature": 0, "max_tokens": 60, "stream": True},
    {"temperature": 1.0, "seed": 7, "max_tokens": 50, "n": 2, "top_p": 0.9},
    {"temperature": 1.0, "seed": 8, "max_tokens": 50, "stream": True, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 2, "max_tokens": 60, "stop": ["e", "Q#"], "ignore_eos": True},
    {"temperature": 0, "max_tokens": 8, "n": 2, "use_beam_search": True},
    {"temperature": 0, "max_tokens": 120, "ignore_eos": True},
    {"temperature": 0, "max_tokens": 120, "ignore_eos": True, "presence_penalty": 0.4},
    {"temperature": 0, "max_tokens": 9, "logprobs": 2, "echo": True, "logit_bias": {"5": 2}},
]
STRUCTURED = [
    {"seed": 3, "max_tokens": 60, "structured_outputs": {"regex": "[a-f]{3}(-[0-9]{2}){2}"}},
    {"seed": 4, "max_tokens": 60, "structured_outputs": {"choice": ["left", "right"]}},
]


def bodies():
    """All kinds of requests, with prompts that share a prefix."""
    requests = REQUESTS + (STRUCTURED if find_spec("llguidance") else [])
    return [{"prompt": PROMPT + "x" * i} | fields for i, fields in enumerate(requests)]


def complete(ask, url, body):
    """Choices of a response without times; the texts of a stream, joined."""
    status, answer, _ = ask(url, PATH, body)
    assert status == 200, answer
    if not body.get("stream"):
        return [
            (c["index"], c["text"], c["finish_reason"], (c["logprobs"] or {}).get("tokens"))
            for c in answer["choices"]
        ]
    events = [e.removeprefix("data: ") for e in answer.split("\n\n") if e]
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    return "".join(c["text"] for c in choices), choices[-1]["finish_reason"]


def embed(ask, url):
    """The mean of a prompt's hidden states, over both ranks."""
    status, answer, _ = ask(url, "/v1/embeddings", {"input": PROMPT, "pooling": "mean"})
    assert status == 200, answer
    return answer["data"][0]["embedding"]


def read_stream(response):
    """The events of a stream until its end; a connection that is cut raises."""
    lines = [line.strip() for line in response.read().decode().split("\n")]
    return [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]


def find_ranks(child, temporary):
    """The process ids of rank 0 and of the other rank."""
    (file,) = temporary.glob("onchip-ranks-*/pid")
    leader = int(file.read_text())
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    spawned = [p for p in children if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
    (other,) = {*map(int, spawned)} - {leader}
    return leader, other


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def start(process, folder, tmp_path, monkeypatch):
    """start(*options): (launcher, address)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    flags = ("--model", str(folder), "--tensor-parallel-size", "2", *FLAGS)
    return lambda *options: process(*flags, *options)


@pytest.mark.slow
def test_two_ranks_respond_as_one(start, serving, folder, ask, open_stream, until, tmp_path):
    """Requests together, a client that leaves, and SIGTERM while a request runs."""
    chosen = [body for body in bodies() if body.get("stream") or "structured_outputs" in body]
    long = {"prompt": PROMPT} | LONG
    with serving(LLM(folder, **OPTIONS).engine) as (url, _):
        expected = [complete(ask, url, body) for body in (*chosen, long)]
        vector = embed(ask, url)
    child, url = start()
    assert embed(ask, url) == pytest.approx(vector, abs=1e-5)
    leaving = open_stream(url, **LONG)
    leaving.getresponse().readline()
    leaving.close()
    with ThreadPoolExecutor(len(chosen) + 1) as pool:
        answers = [pool.submit(complete, ask, url, body) for body in (*chosen, long)]
        assert [answer.result(60) for answer in answers[:-1]] == expected[:-1]
        ranks = find_ranks(child, tmp_path)
        child.send_signal(signal.SIGTERM)
        assert answers[-1].result(60) == expected[-1]
    assert child.wait(30) == 0
    assert not any(map(is_alive, ranks)) and not list(tmp_path.glob("onchip-ranks-*"))


@pytest.mark.slow
def test_all_requests_one_by_one_and_together(start, serving, folder, ask, until, tmp_path):
    """Every kind of request, with drafts and preemptions; then both ranks are idle."""
    with serving(LLM(folder, **OPTIONS).engine) as (url, _):
        expected = [complete(ask, url, body) for body in bodies()]
    child, url = start("--speculative-config", '{"num_speculative_tokens": 2}', "--pages", "14")
    assert [complete(ask, url, body) for body in bodies()] == expected
    with ThreadPoolExecutor(18) as pool:  # more than run at a time, and more than fit
        many = [pool.submit(complete, ask, url, body) for body in bodies() * 2]
        assert [one.result(120) for one in many] == expected * 2
    until(lambda: ask(url, "/stats")[1]["requests"]["open"] == 0)
    assert ask(url, "/stats")[1]["preempted"]

    ranks = find_ranks(child, tmp_path)
    before, began = cpu_seconds(*ranks), time.monotonic()
    time.sleep(2.0)
    passed = time.monotonic() - began
    shares = [(b - a) / passed for a, b in zip(before, cpu_seconds(*ranks), strict=True)]
    assert max(shares) < 0.3, shares  # waiting ranks compute nothing


def cpu_seconds(*pids):
    """User and system time of processes."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return [(int(f[11]) + int(f[12])) / os.sysconf("SC_CLK_TCK") for f in fields]


@pytest.mark.slow
def test_a_killed_follower_ends_the_service_in_a_sentence(start, open_stream, tmp_path):
    child, url = start()
    streams = [open_stream(url, **LONG).getresponse() for _ in range(3)]
    for response in streams:
        response.readline()
    leader, other = find_ranks(child, tmp_path)
    os.kill(other, signal.SIGKILL)
    ends = [read_stream(response)[-1]["error"] for response in streams]
    assert {end["code"] for end in ends} <= {"engine_dead", "rank_lost"}
    assert child.wait(30) == 1
    assert not is_alive(leader)
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert last == "onchip: rank 1 of 2 was ended by SIGKILL: the service has ended"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["follower", "leader"])
def test_an_idle_rank_that_is_killed_ends_the_service(start, ask, tmp_path, victim):
    child, url = start()
    assert ask(url, "/ready")[0] == 200
    ranks = find_ranks(child, tmp_path)
    rank = ["leader", "follower"].index(victim)
    os.kill(ranks[rank], signal.SIGKILL)
    assert child.wait(30) == 1
    assert not any(map(is_alive, ranks))
    log = (tmp_path / "log").read_text()
    assert log.endswith(f"onchip: rank {rank} of 2 was ended by SIGKILL: the service has ended\n")
    assert "Traceback" not in log


@pytest.mark.slow
def test_ctrl_c_drains_and_a_second_one_does_not_wait(start, ask, until, tmp_path):
    child, url = start("--log-level", "error")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, url, PATH, {"prompt": PROMPT} | LONG)
        until(lambda: ask(url, "/stats")[1]["requests"]["running"] == 1)
        child.send_signal(signal.SIGINT)
        until(lambda: ask(url, "/ready")[0] == 503)
        child.send_signal(signal.SIGINT)
        assert running.result(30)[1]["error"]["code"] == "shutdown"
    assert child.wait(30) == 130
    assert "onchip: stopped: " in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_ranks_end_with_a_launcher_that_is_killed(start, tmp_path, until):
    child, _ = start()
    ranks = find_ranks(child, tmp_path)
    child.kill()
    until(lambda: not any(map(is_alive, ranks)), 40)


@pytest.mark.slow
def test_a_signal_before_the_server_starts(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    words = ["serve", "--port", "0", "--model", str(folder), "--tensor-parallel-size", "2"]
    child = subprocess.Popen(
        [sys.executable, "-m", "onchip", *words, *FLAGS],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("onchip-ranks-*")):
        time.sleep(0.01)
    time.sleep(2.0)  # the ranks are being started
    os.killpg(child.pid, signal.SIGINT)  # to all processes, as a terminal does
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in errors, errors


@pytest.mark.slow
def test_an_error_of_the_ranks_is_one_sentence(folder, capfd):
    args = parse_flags(folder, "--max-model-len", "5000")
    with pytest.raises(ValueError, match=r"max_model_len=5000 must be in \[2, 512\]"):
        command.serve(args)
    assert "Traceback" not in capfd.readouterr().err


def parse_flags(folder, *words, size=2):
    flags = ["--port", "0", "--tensor-parallel-size", str(size), "--model", str(folder)]
    return parse(["serve", *flags, *FLAGS, *words])


@pytest.mark.parametrize(
    ("words", "size", "sentence"),
    [
        (["--replicas", "2"], 2, "replicas=2 is not served with tensor_parallel_size=2"),
        (["--kv-offloading-size", "1"], 2, "kv_offloading_size=1 is not served with"),
        (
            ["--speculative-config", json.dumps(DRAFTS)],
            2,
            "a draft model is not served with tensor_parallel_size=2",
        ),
        (["--device", "cuda:0"], 2, "device=cuda:0 is not served with tensor_parallel_size=2"),
        ([], 3, "does not divide .*: num_heads=4 cannot be divided among 3 ranks"),
        (["--model", "tiny"], 2, "does not divide tiny: num_kv_heads=1 cannot be divided among 2"),
        (["--model", "no-such-folder"], 2, "no-such-folder"),
    ],
    ids=["replicas", "offloading", "draft", "device", "heads", "built-in", "missing"],
)
def test_what_is_not_served_is_refused_before_any_process_starts(
    folder, words, size, sentence, monkeypatch
):
    monkeypatch.setattr(command, "_serve_ranks", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(ValueError, match=sentence):
        command.serve(parse_flags(folder, *words, size=size))


def test_more_ranks_than_gpus_are_refused(folder, monkeypatch):
    monkeypatch.setattr(command.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs 2 GPUs, 1 are here"):
        command.serve(parse_flags(folder, "--device", "cuda"))
