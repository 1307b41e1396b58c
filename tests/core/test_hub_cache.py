"""Models of the local Hub cache are found by their ids, and nothing else is."""

import pytest

import onchip
from onchip import models
from onchip.cli import main
from onchip.core import hub_cache
from onchip.models import builtin

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def download(cache, commit=COMMIT, ref="main"):
    """The layout of huggingface_hub: files of a snapshot are links to blobs."""
    folder = cache / "models--org--tiny-1.5"
    snapshot = folder / "snapshots" / COMMIT
    for each in (snapshot, folder / "refs", folder / "blobs"):
        each.mkdir(parents=True)
    models.save(builtin.tiny(), folder / "blobs")
    for blob in (folder / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    (folder / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c", "HF_HOME": ""}, "/c/huggingface/hub"),
        ({"HOME": "/d", "HF_HOME": ""}, "/d/.cache/huggingface/hub"),
    ],
)
def test_the_folder_is_that_of_huggingface_hub(variables, folder, cache, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache.cache_folder().as_posix() == folder


def test_an_id_is_served_from_its_snapshot(cache, capsys):
    snapshot = download(cache)
    assert hub_cache.list_models() == ["org/tiny-1.5"]
    assert models.resolve("org/tiny-1.5") == snapshot and models.is_native("org/tiny-1.5")
    with onchip.LLM("org/tiny-1.5", device="cpu", num_pages=8, max_model_len=64) as llm:
        params = onchip.SamplingParams(max_tokens=2, ignore_eos=True)
        (output,) = llm.generate([[1, 2, 3]], params)
    assert len(output.outputs[0].token_ids) == 2
    assert main(["doctor", "--model", "org/tiny-1.5"]) == 0
    assert "org/tiny-1.5: llama, 7 layers" in capsys.readouterr().out


def test_a_folder_precedes_an_id(cache, tmp_path, monkeypatch):
    download(cache)
    (tmp_path / "org" / "tiny-1.5").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert models.resolve("org/tiny-1.5") == "org/tiny-1.5"


@pytest.mark.parametrize(("commit", "ref"), [("f" * 40, "main"), ("../..", "main"), (COMMIT, "v2")])
def test_without_a_snapshot_of_main_the_download_is_named(commit, ref, cache):
    download(cache, commit, ref)
    assert hub_cache.list_models() == []
    with pytest.raises(ValueError, match="run `hf download org/tiny-1.5`$"):
        onchip.LLM("org/tiny-1.5")


@pytest.mark.parametrize("name", ["a", "a/b/c", "../b", "a/..", "a--b/c", "a/b..c", "/a", "a b/c"])
def test_other_names_are_folders_alone(name, cache):
    assert not hub_cache.is_model_id(name)
    with pytest.raises(ValueError, match="a model is the folder of a checkpoint"):
        models.resolve(name + "-missing" if name in ("a/..", "../b") else name)
