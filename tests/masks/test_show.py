"""Drawings: a terminal picture that fits the width, an image file, and clear errors."""

import sys

import pytest
import torch

from onchip import masks


def test_a_small_mask_is_drawn_block_by_block(capsys):
    masks.causal().show(384, width=80)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "▒▒····",
        "██▒▒··",
        "████▒▒",
        "·· EMPTY  ▒▒ PARTIAL  ██ FULL  (one mark: 128 x 128 tokens)",
        "384 queries x 384 keys: 3 FULL and 3 PARTIAL of 9 blocks (66.67% visited)",
    ]


@pytest.mark.parametrize("seqlens", [(131_072, 131_072), (2000, 70_000), (9000, 100)])
def test_a_large_mask_fits_the_width(capsys, seqlens):
    masks.window(4096, 0).show(*seqlens, width=60)
    picture = capsys.readouterr().out.splitlines()[:-2]
    assert max(map(len, picture)) <= 60 and len(picture) <= 60


def test_a_mark_for_many_blocks_is_full_or_empty_only_if_they_all_are(capsys):
    masks.block_local(256).show(1024, width=8)
    assert capsys.readouterr().out.splitlines()[:4] == [
        "██······",
        "··██····",
        "····██··",
        "······██",
    ]
    masks.block_local(128).show(1024, width=8)
    assert capsys.readouterr().out.splitlines()[:2] == ["▒▒······", "··▒▒····"]


def test_planes_of_a_built_mask(capsys):
    mask = masks.padding(torch.tensor([128, 256])).build(2, 1, 128, 256)
    mask.show(b=0, width=40)
    mask.show(b=1, width=40)
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[3]) == ("██··", "████")


def test_an_empty_mask_has_a_legend_but_no_picture(capsys):
    masks.causal().show(0, 100)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    masks.bigbird().show(4096, path=str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="no block to draw"):
        masks.causal().show(0, 100, path=str(path))


def test_without_matplotlib_the_error_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install '\.\[cli\]' in"):
        masks.causal().show(384, path=str(tmp_path / "mask.png"))
