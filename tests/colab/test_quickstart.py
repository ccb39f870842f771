"""The notebook runs from top to bottom, on a model of a few thousand parameters."""

import ast
import html
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

import specjax
from specjax.data import chat_prompts

NOTEBOOK = Path(__file__).parents[2] / "colab" / "quickstart.ipynb"
PROMPT, NEW_TOKENS = "the sky was blue, the next day the sky was", 24
SPAN = re.compile(r'<span class="(\w+)"[^>]*>(.*?)</span>', re.DOTALL)


def read():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    return notebook, tagged


def names(source):
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return {target.id for node in assigned for target in node.targets}


def test_the_notebook_is_valid_and_carries_no_output():
    notebook, parameters = read()
    nbformat.validate(notebook)
    assert len(parameters) == 1
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.fixture(scope="module")
def executed(tiny_folder):
    small = {
        "TARGET": str(tiny_folder),
        "PROMPT": PROMPT,
        "CHAT": True,
        "MAX_NEW_TOKENS": NEW_TOKENS,
        "GAMMA": 2,
        "DRAFT_LAYERS": (0,),
        "INSTALL_FROM": "not needed here",
    }
    notebook, [parameters] = read()
    assert names(parameters.source) == set(small)
    parameters.source = "\n".join(
        f"{name} = {value!r}" for name, value in small.items()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
        client = nbclient.NotebookClient(
            notebook,
            timeout=120,
            kernel_name="python3",
            resources={"metadata": {"path": str(tiny_folder)}},
        )
        client.execute()
    return {cell.id: cell.get("outputs", []) for cell in notebook.cells}


def printed(outputs):
    return "".join(o.text for o in outputs if o.output_type == "stream")


@pytest.mark.full
def test_every_draft_leaves_the_tokens_as_they_were(executed):
    lines = printed(executed["drafts"]).splitlines()
    assert len(lines) == 2
    assert all("same tokens: True" in line for line in lines)


def shown(token, tokenizer):
    text = html.escape(tokenizer.decode([token]))
    return text.replace("\n", "&#9166;<br>")


@pytest.mark.full
def test_the_colours_add_up_to_the_tokens_and_the_counts(executed, tiny_folder):
    target = specjax.load(tiny_folder)
    out = specjax.generate(
        target,
        chat_prompts(target.tokenizer, [PROMPT]).tokens,
        drafter=specjax.drafters.PromptLookup(gamma=2),
        sampling=specjax.Sampling(temperature=0.0),
        max_new_tokens=NEW_TOKENS,
    )
    pictures = [o.data["text/html"] for o in executed["look"] if "data" in o]
    look_up, layers = (SPAN.findall(picture) for picture in pictures)
    tokens = [shown(token, target.tokenizer) for token in out.tokens[0]]
    assert [text for _, text in look_up] == [text for _, text in layers] == tokens
    kinds = [kind for kind, _ in look_up]
    assert kinds.count("accepted") == int(out.stats.accepted.sum()) > 0
    assert len(kinds) - kinds.count("accepted") <= int(out.stats.rounds.sum())
    assert "undrafted" in kinds  # at first nothing has been said before
    assert {kind for kind, _ in layers} <= {"accepted", "corrected", "bonus"}
