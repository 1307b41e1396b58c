"""API keys, and the prefixes that their requests share."""

import pytest

from onchip.server.api_keys import Keyring, read_keys

ANNA, BERT = "anna-secret-key", "bert-secret-key"
bearer = lambda key: f"Bearer {key}".encode()


def test_a_key_has_one_salt_and_every_other_another():
    keys = Keyring([ANNA, BERT])
    assert keys.find_salt(bearer(ANNA)) == keys.find_salt(b"bearer " + ANNA.encode())
    assert keys.find_salt(bearer(ANNA)) != keys.find_salt(bearer(BERT))
    assert len(keys.find_salt(bearer(ANNA))) == 32


def test_salts_differ_between_processes():
    assert Keyring([ANNA]).find_salt(bearer(ANNA)) != Keyring([ANNA]).find_salt(bearer(ANNA))


@pytest.mark.parametrize(
    "header", [None, b"", b"Bearer", b"Bearer ", b"Basic " + ANNA.encode(), bearer(ANNA[:-1])]
)
def test_an_unknown_key_has_no_salt(header):
    assert Keyring([ANNA]).find_salt(header) is None


def test_without_keys_all_clients_share_one_salt():
    assert Keyring().is_open and Keyring().find_salt(None) == b""


@pytest.mark.parametrize("key", ["short", "käse-käse-käse", "with\nnewline"])
def test_an_invalid_key_is_rejected_without_printing_it(key):
    with pytest.raises(ValueError, match="API key") as error:
        Keyring([key])
    assert key not in str(error.value)


def test_keys_are_read_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# of the team\n{ANNA}\n\n")
    file.chmod(0o600)
    monkeypatch.setenv("ONCHIP_API_KEYS", f"{BERT}, ")
    assert read_keys(file) == ([BERT, ANNA], [])
    file.chmod(0o644)
    assert "chmod 600" in read_keys(file)[1][0]
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no API key"):
        read_keys(file)


def test_every_path_needs_a_key_but_the_page_and_the_probes(serving, fake, ask):
    with serving(fake(), keys=[ANNA]) as (url, server):
        paths = {*server.app.openapi()["paths"], "/openapi.json", "/", "/live.css", "/live.js"}
        closed = {p for p in paths if ask(url, p)[0] == 401}
        assert paths - closed == {"/", "/live.css", "/live.js", "/health", "/ready"}
        status, _, headers = ask(url, "/nonsense")
        assert status == 401 and headers["www-authenticate"] == "Bearer"
        assert ask(url, "/v1/models", authorization=f"Bearer {ANNA}")[0] == 200


def test_a_salt_of_the_body_joins_that_of_the_key(serving, fake, ask):
    """Equal salts of two keys differ: a body cannot reach the pages of another key."""
    engine = fake()
    with serving(engine, keys=[ANNA, BERT]) as (url, _):
        for key, salt in [(ANNA, None), (ANNA, None), (BERT, None), (ANNA, "x"), (BERT, "x")]:
            body = {"prompt": "a"} | ({"cache_salt": salt} if salt else {})
            headers = {"authorization": f"Bearer {key}"}
            assert ask(url, "/v1/completions", body, **headers)[0] == 200
    first, again, *others = engine.salts
    assert first == again and len(first) == 32
    assert len({first, *others}) == 4
