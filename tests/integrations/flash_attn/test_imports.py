"""Lines of public repositories that import flash_attn resolve."""

import pytest

from onchip.integrations import flash_attn as fa
from tests.integrations.flash_attn import imports


def test_most_repositories_find_every_name():
    repositories = imports.results()
    whole = {repository for repository, (_, lost) in repositories.items() if not lost}
    assert len(repositories) >= 44 and len(whole) >= 49
    assert {"zhuzilin/ring-flash-attention", "huggingface/diffusers", "volcengine/verl"} <= whole


def test_the_import_error_names_missing_names():
    """For every name that a repository does not find, the error names a replacement."""
    table = imports.rows()
    absent = table.pop("absent")
    with fa.installed(flash_attn_3=True):
        lost = {name for one in table.values() for name in imports.missing(one, absent)}
        assert lost
        for name in sorted(lost):
            module, _, last = name.rpartition(".")
            with pytest.raises(ImportError, match=r"onchip does not support flash_attn.*: \w+"):
                exec(f"from {module} import {last}", {})


def test_the_documents_table_is_the_generated_one():
    shown = imports.DOCUMENT.read_text().partition(imports.BEGIN)[2].partition(imports.END)[0]
    assert shown.strip() == imports.table()
