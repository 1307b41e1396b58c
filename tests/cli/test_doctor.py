import importlib.metadata

import pytest
import torch

import onchip
from onchip import models
from onchip.cli import doctor, main
from onchip.cli.bench import levels
from onchip.cli.doctor import DEVICES, PRECISIONS, Finding, reasons, support_table
from onchip.core import dispatch
from onchip.core.backend import make_backend
from tests.models.conftest import fields


def test_it_looks_at_the_machine():
    findings = {f.subject: f for f in doctor.findings()}
    assert {"Python", "torch", "Triton", "C compiler", "CPU"} <= findings.keys()
    assert findings["torch"].found == torch.__version__


def test_missing_tools_are_reported_with_advice(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = {f.subject: f for f in doctor.findings()}
    assert findings["C compiler"].found == "none"
    for subject in ("C compiler", "GPU"):
        assert isinstance(findings[subject], Finding)
        assert findings[subject].advice.endswith(".")


def test_the_launcher_needs_headers_too(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    finding = doctor._launcher()
    assert "no Python.h" in finding.found and finding.advice.endswith(".")
    (tmp_path / "Python.h").touch()
    assert doctor._launcher() == Finding("C compiler", "/usr/bin/gcc, with Python.h")
    monkeypatch.setenv("CC", "tcc")
    assert doctor._launcher().found.startswith("/usr/bin/tcc")


def test_the_cache_is_where_triton_looks(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    folder = tmp_path / ".triton" / "cache"
    assert doctor.cache_folder() == folder and "empty" in doctor._cache().found
    (folder / "x").mkdir(parents=True)
    (folder / "x" / "kernel.cubin").write_bytes(bytes(3_000_000))
    assert doctor._cache().found == f"{folder}, 3 MB in 1 files"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert doctor.cache_folder() == tmp_path / "other"
    triton = pytest.importorskip("triton")
    assert triton.knobs.cache.dir == str(doctor.cache_folder())


def test_first_calls_are_timed_and_refusals_left_out(monkeypatch):
    seconds = iter([3.0, 0.001] * 99)
    monkeypatch.setattr(doctor, "seconds", lambda call, device: call() is None or next(seconds))

    def attention(q, k, v, kernel, **options):
        if kernel == "hopper":
            raise onchip.UnsupportedError("no Hopper here")
        return original(q, k, v, **options)

    original = onchip.attention
    monkeypatch.setattr(onchip, "attention", attention)
    timings = list(doctor.time_first_calls(torch.device("cpu")))
    assert {c.kernel for c in timings} == {"triton"} and {c.first_s for c in timings} == {3.0}
    assert len(timings) == 2 * len(doctor.FIRST_CALLS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_memories_are_measured_and_nothing_compiles(monkeypatch, capsys):
    timing = levels.LevelTiming
    rows = [timing("L1", 16384, 150e9, 0.0), timing("DRAM", 1 << 28, 6e9, None)]
    monkeypatch.setattr(levels, "measure", lambda device, report_progress: rows)
    assert main(["doctor", "--measure"]) == 0
    out = capsys.readouterr().out
    assert "Kernels here" in out and "torch finds none" in out
    assert "150 GB/s" in out and "hidden" in out and "DRAM" in out
    assert "4,800 GB/s" in out and "NVIDIA H200 SXM datasheet" in out


@pytest.mark.gpu
@pytest.mark.alone
def test_first_calls_compile():
    timings = doctor.first_calls()
    assert {c.way for c in timings} == {"forward", "backward"}
    assert max(c.first_s for c in timings) > 10 * max(c.second_s for c in timings)


def test_the_table_covers_every_kernel_and_device_and_precision():
    table = support_table()
    assert [(s.kernel, s.device) for s in table] == [
        (k, d) for k in dispatch.backend_names() for d in DEVICES
    ]
    for s in table:
        assert {*s.served, *s.refusals} == set(PRECISIONS)
        assert not set(s.served) & set(s.refusals)


def test_the_table_has_the_answers_of_dispatch(monkeypatch):
    """A kernel that appears in dispatch appears in the table, with what it answers."""

    def supports(problem, device):
        if device.capability != (9, 0):
            return f"needs sm_90, found {device.name or device.type}"
        return None if problem.dtype.itemsize == 2 else f"needs 16 bits, found {problem.dtype}"

    backend = make_backend(supports, lambda problem, x: None, options={"causal"})
    monkeypatch.setattr(doctor, "backend_names", lambda: ("made_up",))
    monkeypatch.setattr(doctor, "get_backend", lambda name: backend)
    table = {s.device: s for s in support_table()}
    assert table["sm_90"].served == ("fp16", "bf16")
    assert table["sm_90"].refusals["fp64"] == "needs 16 bits, found torch.float64"
    assert table["CPU"].served == ()
    assert "made_up refuses CPU: needs sm_90, found cpu." in reasons(list(table.values()))
    assert "made_up refuses sm_90 fp32: needs 16 bits, found torch.float32." in reasons(
        list(table.values())
    )


def test_this_machine_serves_every_precision_on_its_cpu():
    served = {p for s in support_table(doctor.here()) if s.device == "cpu" for p in s.served}
    assert served == set(PRECISIONS)


def test_the_report_names_every_kernel(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in (*dispatch.backend_names(), *DEVICES, "Python", "fp64"):
        assert word in out


def test_models_of_our_own_and_of_transformers(monkeypatch):
    finding = {f.subject: f for f in doctor.findings()}["Models"]
    assert "qwen3" in finding.found and "slower" in finding.advice

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert doctor._models().advice == "Others need transformers, which is not installed."


def test_it_says_how_a_model_would_run(tmp_path, capsys):
    models.save(models.builtin.tiny(), tmp_path)
    assert main(["doctor", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "llama, 7 layers, torch.float32" in printed and "fused, recorded, on" in printed
    experts = models.ModelConfig.from_hf(fields("mixtral"))
    models.save(models.random_model(experts), tmp_path / "experts")
    assert main(["doctor", "--model", str(tmp_path / "experts")]) == 0
    assert "in bf16 on Hopper recorded" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    pytest.importorskip("transformers")
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "not served" in printed and "more state than keys and values" in printed
