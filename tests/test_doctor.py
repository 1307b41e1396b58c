from types import SimpleNamespace

import torch

from onchip import dispatch, doctor
from onchip.cli import main
from onchip.doctor import DEVICES, PRECISIONS, Finding, reasons, support_table


def test_it_looks_at_the_machine():
    found = {f.subject: f for f in doctor.findings()}
    assert {"Python", "torch", "Triton", "C compiler", "CPU"} <= found.keys()
    assert found["torch"].found == torch.__version__


def test_what_is_missing_comes_with_a_sentence(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {f.subject: f for f in doctor.findings()}
    assert found["C compiler"].found == "none"
    for subject in ("C compiler", "GPU"):
        assert isinstance(found[subject], Finding)
        assert found[subject].advice.endswith(".")


def test_the_table_covers_every_kernel_and_device_and_precision():
    table = support_table()
    assert [(s.kernel, s.device) for s in table] == [
        (k, d) for k in dispatch.KERNELS for d in DEVICES
    ]
    for s in table:
        assert {*s.served, *s.refusals} == set(PRECISIONS)
        assert not set(s.served) & set(s.refusals)


def test_the_table_is_asked_for_not_typed(monkeypatch):
    """A kernel that appears in dispatch appears in the table, with what it answers."""

    def supports(problem, device):
        if device.capability != (9, 0):
            return f"needs sm_90, found {device.name or device.type}"
        return None if problem.dtype.itemsize == 2 else f"needs 16 bits, found {problem.dtype}"

    kernel = SimpleNamespace(supports=supports)
    monkeypatch.setattr(doctor, "KERNELS", {"made_up": ""})
    monkeypatch.setattr(doctor, "kernel_module", lambda name: kernel)
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
    for word in (*dispatch.KERNELS, *DEVICES, "Python", "fp64"):
        assert word in out
