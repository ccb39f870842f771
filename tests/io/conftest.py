"""Tiny tokenisers and models in the formats that `specjax.io` reads."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def make_tokenizer(vocab_size=300, **special):
    """A byte-level BPE trained on a few words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat, then it ate"] * 9, trainer)
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **special})


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def golden(tmp_path):
    """Returns a copier: a golden model in a folder that a test may damage."""

    def copy(name):
        return Path(shutil.copytree(GOLDEN / name, tmp_path / "given" / name))

    return copy
