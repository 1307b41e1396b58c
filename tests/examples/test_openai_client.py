"""examples/openai_client.py runs against a server, and leaves nothing behind in it."""

import importlib.util
import time
from pathlib import Path

import pytest

for package in ("openai", "fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package)

PATH = Path(__file__).parents[2] / "examples" / "openai_client.py"
SPEC = importlib.util.spec_from_file_location("openai_client_example", PATH)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)


def test_it_completes_streams_and_walks_away(capsys):
    from onchip.engine.llm import LLM
    from onchip.server.app import Server, ServerOptions
    from onchip.server.process import BackgroundServer

    llm = LLM("tiny", num_pages=200, max_num_seqs=8, swap_space=0)
    server = Server(llm.engine, ServerOptions("tiny"))
    with BackgroundServer(server) as url:
        example.main(url)
        end = time.monotonic() + 10
        while server.service.num_open or server.service.stats.running:
            assert time.monotonic() < end, "a request is left behind"
            time.sleep(0.01)
        stats = server.service.stats
        assert stats.pages_free == stats.pages_total
    first, again, *_, last = capsys.readouterr().out.splitlines()
    prompt = len(example.PROMPT)
    assert first == f"4 samples, {first.split()[2]} tokens, 0 of {prompt} were cached"
    assert again.endswith(f"{prompt - 1} of {prompt} were cached")
    assert last == "left after 5 chunks"
