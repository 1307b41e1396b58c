"""Windows and macOS, simulated: the system's name is another, and what these systems lack cannot be
imported. A real Windows or macOS has not run these tests.
"""

import subprocess
import sys
import textwrap

import pytest

# Triton has wheels for Linux alone. Windows has no fcntl, resource, termios, pwd and grp.
LACKS = {
    "win32": ("triton", "fcntl", "resource", "termios", "pwd", "grp"),
    "darwin": ("triton",),
}
# Imported before the system changes its name: other packages are not simulated.
BEFORE = ("torch", "numpy", "rich.console", "fastapi", "uvicorn", "prometheus_client", "tokenizers")
# Kernels that import Triton, imported by the first call that runs one; modules that import
# transformers or Ray; and the program itself.
NOT_IMPORTED = (
    *("kernels.triton", "kernels.hopper", "kernels.llm", "kernels.runtime.raw_launch"),
    *("integrations.transformers", "integrations.flash_attn", "__main__"),
    *("server.replicas.cluster", "server.replicas.router"),
)

PROGRAM = """
import importlib, pkgutil, sys
for name in {before!r}:
    importlib.import_module(name)
sys.platform = {system!r}
for name in {lacks!r}:
    sys.modules[name] = None  # an import raises, and find_spec finds nothing
import signal
if sys.platform == "win32":
    for name in ("setitimer", "ITIMER_REAL", "SIGALRM", "SIGKILL", "SIGHUP"):
        delattr(signal, name)

import onchip, torch
for module in pkgutil.walk_packages(onchip.__path__, "onchip."):
    name = module.name.removeprefix("onchip.")
    if not name.startswith({not_imported!r}):
        importlib.import_module(module.name)
"""


def run(system, body):
    names = {
        "before": BEFORE,
        "lacks": LACKS[system],
        "not_imported": NOT_IMPORTED,
        "system": system,
    }
    program = PROGRAM.format(**names) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


CALLS = """
    from onchip import testing
    q, k, v = (t.requires_grad_() for t in testing.make_qkv(1, 63, 111, head_dim=64, num_heads=2))
    onchip.attention(q, k, v, causal=True).sum().backward()
    with torch.no_grad():
        x = testing.make_packed([5, 70], [5, 133], head_dim=64, num_heads=2)
        onchip.varlen_attention(*x[:3], **x.options)
        pages = testing.make_pages(x.k, x.v, x.cu_seqlens_k, 16)
        onchip.paged_attention(x.q[:2, None], *pages)
    try:
        onchip.attention(q, k, v, kernel="triton")
    except onchip.UnsupportedError as error:
        print(error)
    with onchip.LLM("tiny") as llm:
        print(llm.generate(["Once"], onchip.SamplingParams(max_tokens=2, temperature=0.0))[0])
    from onchip.cli import main
    from onchip.cli.bench.measure import available_bytes
    assert available_bytes(torch.device("cpu")) > 0
    print(main(["explain", "--seqlen", "100"]), main(["tune"]))
"""


SERVER = """
    from onchip.server.codec import Codec
    try:
        Codec(None, 10)
        print("a server runs")
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_every_module_is_imported_and_cpu_kernels_run(system):
    printed = run(system, CALLS + SERVER)
    assert "kernel 'triton' cannot serve this call: needs a GPU" in printed
    assert "0 2\n" in printed and "served by" in printed
    refused = "a server needs Linux or macOS (WSL on Windows): it starts text workers\n"
    assert printed.endswith(refused if system == "win32" else "a server runs\n")
