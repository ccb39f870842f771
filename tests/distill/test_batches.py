"""Masks and prompt lengths of a batch."""

import numpy as np
import pytest

from specjax.distill import Batch


def test_an_end_of_text_that_is_also_the_pad_id_counts():
    """https://github.com/huggingface/trl/pull/6357"""
    eos = pad = 2
    prompt, completion = [7, eos, 8], [5, 6, eos]
    row = prompt + completion + [pad] * 4
    batch = Batch.of([row], length=6, prompt_length=3)
    assert np.flatnonzero(batch.mask[0]).tolist() == [3, 4, 5]
    assert batch.tokens[0].tolist() == row
    without_eos = Batch.of([[7, eos, 8, 5, 6, pad, pad]], length=5, prompt_length=3)
    assert np.flatnonzero(without_eos.mask[0]).tolist() == [3, 4]


def test_the_first_token_is_never_predicted():
    assert not Batch.of([[1, 2, 3]], prompt_length=0).mask[0, 0]
    assert not Batch.of([[1, 2, 3]], mask=np.ones((1, 3))).mask[0, 0]


def test_a_given_mask_ends_with_the_row():
    batch = Batch.of([[1, 2, 3, 4]], length=3, mask=np.ones((1, 4)))
    assert batch.mask[0].tolist() == [False, True, True, False]


def test_a_prompt_that_fills_the_row_leaves_nothing_to_count():
    """https://github.com/huggingface/trl/issues/2217"""
    assert not Batch.of([[1, 2, 3]], prompt_length=3).mask.any()
    assert Batch.of([[1, 2, 3]], length=2, prompt_length=3).prompt_length[0] == 2


@pytest.mark.parametrize(
    "fields, match",
    [
        (dict(tokens=[1, 2]), "tokens must be"),
        (dict(tokens=[[1, 2]], length=3), "length must be 0..2, got 3..3"),
        (dict(tokens=[[1, 2]], prompt_length=-1), "prompt_length must be"),
        (dict(tokens=[[1, 2]], mask=[[1]]), "mask must have the shape"),
    ],
)
def test_wrong_shapes_and_lengths_are_named(fields, match):
    with pytest.raises(ValueError, match=match):
        Batch.of(fields.pop("tokens"), **fields)
