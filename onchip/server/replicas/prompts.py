"""The keys of a request's prompt, by which requests with a common prefix find the same replica.

The chain of hashes is that of the prefix index (onchip/kvcache/prefix.py). A prompt of token ids is
cut into pages, as in the cache. A text is cut into blocks of bytes: the gateway runs no tokenizer
and no chat template, and texts with a common beginning have tokens with a common beginning.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from pydantic_core import to_json

from onchip.kvcache.prefix import chain_keys, pack_token_ids

PAGE_TOKENS = 16  # of a block of token ids: the server's default page
ID_BYTES = 8
TEXT_BYTES = 64  # of a block of text: about 16 tokens of English
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
# No other path computes pages.
PROMPT_PATHS = ("/v1/completions", "/v1/chat/completions", EMBEDDINGS, RESPONSES)
MAX_KEYS = 2048  # of one prompt; the blocks after these do not influence its route


def prompt_keys(body: Any, salt: bytes = b"", path: str = "") -> list[bytes]:
    """The keys of a parsed body, shortest prefix first; empty if it has no prompt of a full block.
    Under different salts, or different `cache_salt`, no two prompts have a key in common, as their
    pages are not shared. A request with several prompts follows its first. path: of the request;
    the body of /v1/responses is a conversation.
    """
    if not isinstance(body, Mapping):
        return []
    tenant = sha256(salt + str(body.get("cache_salt") or "").encode(errors="replace")).digest()
    if path == RESPONSES:
        return _text_keys(_conversation(body.get("tools"), _list_turns(body)), tenant)
    if body.get("messages"):
        return _text_keys(_conversation(body.get("tools"), body["messages"]), tenant)
    prompt = _first_prompt(body.get("input" if path == EMBEDDINGS else "prompt"))
    if isinstance(prompt, str):
        return _text_keys(prompt.encode(errors="replace"), tenant)
    try:
        ids = pack_token_ids(prompt or ()).tobytes()
    except ValueError:  # not token ids: the replica names the error
        return []
    return chain_keys(tenant + b"ids", ids, PAGE_TOKENS * ID_BYTES, MAX_KEYS)


def _text_keys(text: bytes, tenant: bytes) -> list[bytes]:
    return chain_keys(tenant + b"text", text, TEXT_BYTES, MAX_KEYS)


def _conversation(tools: Any, messages: Any) -> bytes:
    """Tools first: chat templates write them into the first message."""
    messages = messages if isinstance(messages, list) else []
    return b"".join(map(to_json, [tools, *messages])) if messages else b""


def _list_turns(body: Mapping[str, Any]) -> list[Any]:
    """The items of a response, as the messages of the same chat where they have a text only."""
    items, instructions = body.get("input"), body.get("instructions")
    if not isinstance(items, list):
        items = [{"role": "user", "content": items}] if isinstance(items, str) else []
    first = [{"role": "system", "content": instructions}] if instructions else []
    return [*first, *items] if items else []


def _first_prompt(prompt: Any) -> Any:
    is_batch = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    return prompt[0] if is_batch else prompt
