"""The official OpenAI client with `onchip serve`: complete, stream, and disconnect.

    onchip serve &
    python examples/openai_client.py http://127.0.0.1:8000

Needs `pip install openai`. The key of a server with keys is read from OPENAI_API_KEY.
"""

import os
import sys

from openai import OpenAI

PROMPT = "Pages are lent, not given. " * 8


def complete(client: OpenAI, model: str) -> None:
    """Four samples of one prompt; the second request finds its pages in the cache."""
    for _ in range(2):
        done = client.completions.create(model=model, prompt=PROMPT, n=4, max_tokens=20)
        usage = done.usage
        print(f"{len(done.choices)} samples, {usage.completion_tokens} tokens,", end=" ")
        print(f"{usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} were cached")


def chat(client: OpenAI, model: str) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    with client.chat.completions.create(
        model=model, messages=messages, max_tokens=30, stream=True
    ) as stream:
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def walk_away(client: OpenAI, model: str) -> None:
    """Leaving the block closes the connection, and the server cancels the rest."""
    body = {"prompt": PROMPT, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
    with client.completions.create(model=model, stream=True, **body) as stream:
        for count, _ in enumerate(stream, 1):
            if count == 5:
                break
    print("left after 5 chunks")


def main(url: str) -> None:
    key = os.environ.get("OPENAI_API_KEY", "none")
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        model = client.models.list().data[0].id
        complete(client, model)
        chat(client, model)
        walk_away(client, model)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
