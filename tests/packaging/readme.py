"""README.md as the tests read it: commands and marked Python examples."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """The shell commands, one a line, continuation lines joined."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    return "".join(blocks).replace("\\\n", " ").splitlines()


def arguments(module: str) -> list[list[str]]:
    """What follows `python -m MODULE` in each command."""
    found = []
    for command in commands():
        words = shlex.split(command)
        if words[-1] == module or f"-m {module} " in command:
            found.append(words[words.index(module) + 1 :])
    return found


def example(name: str) -> str:
    """The Python behind `<!-- example: NAME -->`."""
    pattern = rf"<!-- example: {name} -->\n```python\n(.*?)```"
    [source] = re.findall(pattern, TEXT, re.DOTALL)
    return source
