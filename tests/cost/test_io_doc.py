"""The outputs shown in docs/io.md are what its code prints."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "io.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_every_output_equals_what_its_block_prints(capsys):
    namespace, shown, printed = {}, 0, ""
    for language, body in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "python":
            capsys.readouterr()
            exec(body, namespace)
            printed = capsys.readouterr().out
        elif printed:
            assert body == printed
            shown, printed = shown + 1, ""
    assert shown == 5
