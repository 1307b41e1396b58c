"""docs/serving.md matches the options of the command and the metrics."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onchip import engine
from onchip.cli import root
from onchip.core import extras
from onchip.server import command
from onchip.server.api_keys import ENVIRONMENT, Keyring
from onchip.server.process import Address
from onchip.server.protocol import ChatRequest, CompletionRequest
from onchip.server.replicas.metrics import GatewayMetrics
from tests.cli.parsing import parse

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([\w.-]+)`", TEXT))


def test_every_option_is_explained():
    assert {flag for option in root.load("serve").params for flag in option.opts} <= NAMED


def test_every_metric_is_listed_and_no_other(shared, ask):
    assert ask(shared, "/v1/completions", {"prompt": "abc"})[0] == 200
    assert ask(shared, "/v1/completions", {"prompt": ""})[0] == 400
    page = ask(shared, "/metrics")[1] + GatewayMetrics().render({}, 0).decode()
    families = re.findall(r"^# TYPE (\w+) (?!gauge)\w+|^# TYPE (\w+) gauge", page, re.MULTILINE)
    exported = {a or b for a, b in families if not (a or b).endswith("_created")}
    assert exported == {name for name in NAMED if name.startswith("onchip_")}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--api-key", "a-secret-key"], "visible to all users"),
        (["--host", "0.0.0.0"], "every client that reaches 0.0.0.0"),
        ([], ""),
    ],
)
def test_unsafe_options_are_warned_about_without_printing_keys(options, word, capsys):
    args = parse(["serve", *options])
    keys = command._keyring(args, Address(args.host))
    output = capsys.readouterr().err
    assert word in output and bool(word) == bool(output) and "a-secret-key" not in output
    assert keys.is_open == ("--api-key" not in options)


@pytest.mark.parametrize("count", ["-1", "4097"])
def test_max_queue_is_bounded_by_the_engine(count):
    args = parse(["serve", "--max-queue", count])
    with pytest.raises(ValueError, match=f"max_queue={count}"):
        command.make_options(args, Address(), Keyring())


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[4]", "must be a dict"), ("{}", "needs num_speculative_tokens")],
)
def test_invalid_speculative_configs_are_refused_before_the_model_loads(text, message):
    args = parse(["serve", "--port", "0", "--model", "no-such-model", "--speculative-config", text])
    with pytest.raises(ValueError, match=message):
        command.serve(args)


def test_nothing_else_of_the_engine_needs_the_server():
    """Offline engines and GPU code work without FastAPI."""
    for path in Path(engine.__file__).parent.glob("*.py"):
        assert "onchip.server" not in path.read_text(encoding="utf-8"), path


def test_every_field_is_named():
    unused = {"metadata", "service_tier", "prompt_cache_key"}
    unused |= {"safety_identifier", "modalities", "store", "suffix"}
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert fields - unused <= NAMED


def test_replicas_without_ray_say_what_to_install(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    args = parse(["serve", "--port", "0", "--model", "no-such-model", "--replicas", "2"])
    message = r"--replicas needs ray: pip install '.\[ray\]'"
    with pytest.raises(extras.MissingPackageError, match=message):
        command.serve(args)


def test_ray_sees_the_port_but_no_keys(monkeypatch):
    """Processes of Ray inherit the environment, and two commands must not share a name."""

    class Started(Exception):
        pass

    def start(options):
        raise Started(os.environ.get(ENVIRONMENT), options["port"])

    monkeypatch.setenv(ENVIRONMENT, "a-secret-key")
    monkeypatch.setattr(command, "require", lambda *names: None)
    cluster = SimpleNamespace(Cluster=start)
    monkeypatch.setitem(sys.modules, "onchip.server.replicas.cluster", cluster)
    with pytest.raises(Started) as started:
        command.serve(parse(["serve", "--port", "0", "--replicas", "2"]))
    keys, port = started.value.args
    assert keys is None and port > 0
