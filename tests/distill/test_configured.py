"""Objectives from plain data."""

import json
import re
from pathlib import Path

import pytest

from specjax import distill, divergences

DOCS = Path(__file__).parents[2] / "docs" / "distillation.md"


def make(text, **options):
    return distill.make_objective(json.loads(text), **options)


def test_terms_and_their_options_are_read():
    objective = make(
        """[
        {"term": "cross_entropy", "weight": 0.5},
        {"term": "distill", "weight": 2, "temperature": 2, "squared": true},
        {"term": "hidden_state", "layers": [["layers.1", "layers.3"]],
         "distance": "cosine", "project": true},
        {"term": "minilm_v2", "relation_heads": 4, "relations": ["value"]}
        ]""",
        chunk=None,
        monitor=False,
    )
    assert objective == distill.Objective(
        (0.5, distill.CrossEntropy()),
        (2, distill.Distill(temperature=2, squared=True)),
        (1.0, distill.HiddenState((("layers.1", "layers.3"),), "cosine", True)),
        (1.0, distill.MiniLMv2(relation_heads=4, relations=("value",))),
        chunk=None,
        monitor=False,
    )
    hash(objective)


@pytest.mark.parametrize(
    "options",
    ['"divergence": "jsd(beta=0.1)"', '"divergence": "jsd", "beta": 0.1'],
)
def test_divergences_are_written_in_two_ways(options):
    objective = make(f'[{{"term": "distill", {options}}}]')
    expected = distill.Distill(divergences.resolve("jsd", beta=0.1))
    assert objective == distill.Objective.of(expected)


@pytest.mark.parametrize("name", distill.terms.names())
def test_every_registered_term_can_be_made_and_hashed(name):
    term = distill.make_term(name)
    assert isinstance(term, distill.terms.get(name))
    assert term == distill.make_term(name) and hash(term) == hash(
        distill.make_term(name)
    )


@pytest.mark.parametrize(
    "text, match",
    [
        ("[]", "at least one"),
        ('{"term": "distill"}', "an objective is a list of terms"),
        ('["distill"]', "a term is written {\"term\": NAME.* got 'distill'; known: "),
        ('[{"weight": 1}]', "a term is written"),
        ('[{"term": ["distill"]}]', "a term is written"),
        ('[{"term": "destill"}]', "unknown distillation term 'destill'; did you mean"),
        (
            '[{"term": "distill", "temprature": 2}]',
            "'distill' has no option 'temprature'; did you mean 'temperature'",
        ),
        (
            '[{"term": "distill", "divergence": "jsd", "bta": 0.1}]',
            "has no option 'bta'; did you mean 'beta'",
        ),
        ('[{"term": "distill", "beta": 0.1}]', "has no option 'beta'"),
        ('[{"term": "cross_entropy", "x": 1}]', "no option 'x'; it has none"),
        ('[{"term": "distill", "divergence": "jds"}]', "unknown divergence 'jds'"),
        ('[{"term": "distill", "divergence": "jsd", "beta": 1.5}]', "beta must be"),
        (
            '[{"term": "distill", "divergence": "jsd(beta=0.1)", "beta": 0.2}]',
            r"'beta' is given twice, in 'jsd\(beta=0.1\)' and beside it",
        ),
        ('[{"term": "distill", "weight": "1"}]', "weight must be a number, got '1'"),
        ('[{"term": "distill", "weight": -1}]', "weight >= 0"),
        (
            '[{"term": "distill", "temperature": "2"}]',
            "'temperature' of the term 'distill' must be of type float, got '2'",
        ),
        ('[{"term": "distill", "squared": 1}]', "must be of type bool, got 1"),
        ('[{"term": "distill", "temperature": true}]', "type float, got True"),
        (
            '[{"term": "minilm_v2", "relation_heads": 1.5}]',
            r"must be of type int \| None, got 1.5",
        ),
        ('[{"term": "distill", "temperature": 0}]', "term 'distill': temperature must"),
        ('[{"term": "hint", "layers": "layers.1"}]', "layers must be pairs of names"),
    ],
)
def test_wrong_objectives_are_refused(text, match):
    with pytest.raises(ValueError, match=match):
        make(text)


def test_the_page_on_distillation_has_every_term():
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", DOCS.read_text(), re.MULTILINE)
    found = {name: getattr(distill, kind) for name, kind in listed}
    assert found == {name: distill.terms.get(name) for name in distill.terms.names()}


def test_the_objectives_on_the_page_can_be_made():
    examples = re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(examples) >= 4
    for example in examples:
        assert len(make(example).terms) >= 2
