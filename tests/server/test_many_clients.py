"""A thousand clients at once, on the CPU with a model of random weights."""

import asyncio
import os
import re
import resource
import subprocess
import sys

import pytest

from benchmarks.openloop import Load, rss_mib, run, summary
from onchip.engine.tokenizer import ByteTokenizer
from onchip.models import ModelConfig, random_model, save

CLIENTS = 1000
BATCH = 128  # requests that the engine computes together
TOKENS = 24
# Of the thousand that must be open together: the first batches last as long as it takes all clients
# to come, on a machine that is busy with something else, too.
CROWD_TOKENS = 48
MODEL = {  # small: the temporary memory of a step is negligible
    "model_type": "llama",
    "vocab_size": ByteTokenizer.VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": ByteTokenizer.EOS,
}


@pytest.fixture
def crowd_server(tmp_path):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CLIENTS + 100:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    save(random_model(ModelConfig.from_hf(MODEL)), tmp_path)
    ByteTokenizer().save(tmp_path)
    command = [sys.executable, "-m", "onchip", "serve", "--port", "0", "--max-num-seqs", str(BATCH)]
    command += ["--model", str(tmp_path), "--pages", "2049"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    for line in child.stdout:
        if match := re.search(r"http://[\d.]+:\d+", line):
            yield child, match[0]
            break
    child.kill()
    child.communicate()


async def watch(ask, url, seen):
    while True:
        _, stats, _ = await asyncio.to_thread(ask, url, "/stats")
        seen.append(stats["requests"]["open"])
        await asyncio.sleep(0.05)


@pytest.mark.slow
def test_a_thousand_open_connections_are_all_answered_in_turn(crowd_server, ask):
    """No error and no lost request: earlier requests begin earlier, up to a batch. A second
    thousand needs no more memory than the first.
    """
    child, url = crowd_server

    async def scene(num_tokens, seed):
        open_requests = []
        watching = asyncio.create_task(watch(ask, url, open_requests))
        outcomes = await run(
            url,
            Load(CLIENTS, prompt_chars=(20, 60), max_tokens=(num_tokens, num_tokens), seed=seed),
        )
        watching.cancel()
        return outcomes, max(open_requests)

    outcomes, most = asyncio.run(scene(CROWD_TOKENS, seed=0))
    assert most > CLIENTS - 2 * BATCH  # the first batches may be done before the last clients come
    assert [o for o in outcomes if not o.ok] == []
    assert all(o.num_tokens == CROWD_TOKENS for o in outcomes)
    spans = sorted(o.last_s - o.first_s for o in outcomes)
    assert spans[-1] < 20 * spans[CLIENTS // 2], summary(
        outcomes
    )  # a started request is not delayed much
    before = rss_mib(child.pid)
    asyncio.run(scene(TOKENS, seed=1))
    assert rss_mib(child.pid) < 1.05 * before + 20
    assert ask(url, "/stats")[1]["pages"]["used"] == 0
