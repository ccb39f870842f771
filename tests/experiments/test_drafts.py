"""Where drafts start: the head over the commonest ids, and what cannot be."""

import numpy as np
import pytest
from rich.progress import Progress

import specjax
from experiments import _two_stage_config
from experiments._config import replace
from experiments._corpus import Corpus, Sequences
from experiments._distillspec_config import PRESETS
from experiments._stages import Run
from specjax import parallel

BASE = replace(PRESETS["quick"], ["draft.layers=0"])


@pytest.fixture(scope="module")
def target(tiny_folder):
    return specjax.load(tiny_folder)


@pytest.fixture
def run(tmp_path):
    def make(*settings):
        config = replace(BASE, settings)
        return Run(config, tmp_path, parallel.make_mesh(), Progress())

    return make


def text(rows, length):
    length = np.asarray(length, np.int32)
    return Sequences(np.asarray(rows, np.int32), length, np.ones_like(length))


# What is behind a row's length is padding, and never counted.
TRAIN = text([[7, 7, 9, 250], [9, 7, 30, 250]], [3, 2])
CORPUS = Corpus(TRAIN, None, [], [])


def test_the_head_has_the_commonest_ids_and_the_end_of_text(run, target):
    job = run("draft.vocab_size=2")
    start = job.standard_draft(target)
    held_out = text([[7, 30, 7, 31]], [3])
    draft = job.reduced(start, target, CORPUS, held_out)
    assert draft.model.head_ids.tolist() == sorted([target.tokenizer.eos_token_id, 7])
    assert draft.config == draft.model.config and draft.config.num_layers == 1
    rows = start.params["embed_tokens"][draft.model.head_ids]
    np.testing.assert_array_equal(draft.params["lm_head"], rows)
    assert job.notes == {
        "draft: ids of its head": 2,
        "draft: share of the training text in its head": pytest.approx(3 / 5),
        "draft: share of held-out samples in its head": pytest.approx(2 / 3),
    }
    assert draft.eos_token_ids == target.eos_token_ids


def test_a_draft_keeps_a_whole_head_unless_it_is_told(run, target):
    job = run()
    start = job.standard_draft(target)
    assert job.reduced(start, target, CORPUS) is start
    assert job.notes == {}


def test_heads_that_cannot_be_are_refused_before_anything_is_drawn(
    run, target, tmp_path
):
    with pytest.raises(ValueError, match=r"draft.vocab_size must be at least 1 or no"):
        run("draft.vocab_size=0")
    with pytest.raises(ValueError, match=r"at most the draft's vocabulary of .*301"):
        run("draft.vocab_size=301").standard_draft(target)
    job = run("draft.vocab_size=2")
    draft = job.reduced(job.standard_draft(target), target, CORPUS)
    specjax.export(draft, tmp_path / "draft")
    loaded = f"draft.source={tmp_path / 'draft'}"
    again = run(loaded).standard_draft(target)
    assert again.model.head == draft.model.head
    with pytest.raises(ValueError, match=r"reduced to 2 ids already: leave it so with"):
        run(loaded, "draft.vocab_size=2").standard_draft(target)


def test_a_target_writes_every_token():
    for config in _two_stage_config.PRESETS.values():
        assert config.student.start.vocab_size is None
    with pytest.raises(ValueError, match=r"student.start.vocab_size must be none"):
        replace(_two_stage_config.PRESETS["quick"], ["student.start.vocab_size=5"])
