"""`export`: what it writes comes back bit for bit, whole or not at all."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import specjax.io
from specjax.core import Checkpoint
from specjax.io import export, load
from specjax.models import CausalLM, ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
NAMES = sorted(path.name for path in GOLDEN.iterdir())


def same(one, other):
    def bits(a, b):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(bits, one.params, other.params)


def own_dtype(folder):
    return json.loads((folder / "config.json").read_text())["dtype"]


def siblings(folder):
    return sorted(path.name for path in folder.parent.iterdir())


@pytest.mark.parametrize("kernel_layout", ["io", "oi"])
@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_to_ours_and_back_is_bit_exact(tmp_path, name, kernel_layout):
    """The file of weights is the same byte for byte, bfloat16 included."""
    given = GOLDEN / name
    checkpoint = load(given, dtype=own_dtype(given), kernel_layout=kernel_layout)
    written = export(checkpoint, tmp_path / "out")
    file = "model.safetensors"
    assert (written / file).read_bytes() == (given / file).read_bytes()
    config = json.loads((written / "config.json").read_text())
    theirs = json.loads((given / "config.json").read_text())
    for key in ("architectures", "model_type", "dtype", "eos_token_id"):
        assert config[key] == theirs[key], key
    again = load(written, dtype=own_dtype(given), kernel_layout=kernel_layout)
    assert again.config == checkpoint.config
    assert again.eos_token_ids == checkpoint.eos_token_ids
    same(again, checkpoint)


def test_large_weights_are_sharded(tmp_path):
    checkpoint = load(GOLDEN / "llama_mqa", dtype="bfloat16")
    folder = export(checkpoint, tmp_path / "out", max_shard_bytes=10_000)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = [sum(t.nbytes for t in load_file(folder / s).values()) for s in shards]
    assert len(shards) > 2
    assert max(sizes) <= 10_000
    assert index["metadata"]["total_size"] == sum(sizes)
    same(load(folder, dtype="bfloat16"), checkpoint)


def test_the_tokenizer_and_generation_settings_come_along(tmp_path, tokenizer):
    checkpoint = load(GOLDEN / "llama_gqa")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    checkpoint = dataclasses.replace(
        checkpoint,
        tokenizer=tokenizer,
        eos_token_ids=(2, 5),
        metadata={**checkpoint.metadata, "generation_config": {"temperature": 0.6}},
    )
    folder = export(checkpoint, tmp_path / "out")
    again = load(folder)
    assert again.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert again.tokenizer.chat_template == tokenizer.chat_template
    assert again.eos_token_ids == (2, 5)
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["temperature"] == 0.6
    assert settings["pad_token_id"] == tokenizer.pad_token_id
    kind = json.loads((folder / "tokenizer_config.json").read_text())
    assert kind["tokenizer_class"] == "PreTrainedTokenizerFast"


def fresh(**options):
    config = ModelConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        **options,
    )
    model = CausalLM(config)
    return Checkpoint(model, model.init(jax.random.key(0)), config=config)


def test_a_model_of_ones_own_is_exported_without_metadata(tmp_path):
    checkpoint = fresh(qk_norm=True)
    again = load(export(checkpoint, tmp_path / "deep" / "out"))
    assert again.metadata["architecture"] == "Qwen3ForCausalLM"
    assert again.config == checkpoint.config
    same(again, checkpoint)


def test_an_earlier_export_is_replaced_and_nothing_is_left_over(tmp_path):
    folder = tmp_path / "out"
    export(fresh(), folder, max_shard_bytes=1000)
    export(load(GOLDEN / "llama_gqa"), folder)
    assert load(folder).config.hidden_size == 32
    assert list(folder.glob("*.safetensors")) == [folder / "model.safetensors"]
    assert siblings(folder) == ["out"]


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    load(export(fresh(), tmp_path / "out"))


def test_what_specjax_did_not_write_is_never_replaced(tmp_path, golden):
    other = golden("llama_gqa")
    before = sorted(other.iterdir())
    with pytest.raises(FileExistsError, match=r"did not export \(config.json"):
        export(fresh(), other)
    assert sorted(other.iterdir()) == before

    folder = export(fresh(), tmp_path / "out")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds 'notes.txt' beside an earlier"):
        export(fresh(), folder)
    assert (folder / "notes.txt").read_text() == "mine"

    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        export(fresh(), file)
    with pytest.raises(OSError, match=r"cannot write to .*file'"):
        export(fresh(), file / "below")


def test_a_failure_half_way_leaves_the_earlier_export(tmp_path, monkeypatch):
    folder = export(fresh(), tmp_path / "out")
    before = (folder / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specjax.io._export.save_file", full)
    with pytest.raises(OSError, match=r"could not export to .*No space left"):
        export(load(GOLDEN / "llama_gqa"), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    with pytest.raises(OSError, match="could not export"):
        export(fresh(), tmp_path / "other")
    assert siblings(folder) == ["out"]


def test_wrong_checkpoints_are_named(tmp_path):
    checkpoint = fresh()
    cases = {
        "lack norm/scale": {**checkpoint.params, "norm": {}},
        r"embed_tokens must have the shape \(16, 8\)": {
            **checkpoint.params,
            "embed_tokens": np.zeros((8, 16), np.float32),
        },
    }
    for message, params in cases.items():
        with pytest.raises(ValueError, match=message):
            export(dataclasses.replace(checkpoint, params=params), tmp_path / "out")
    with pytest.raises(ValueError, match="config is a ModelConfig, got NoneType"):
        export(dataclasses.replace(checkpoint, config=None), tmp_path / "out")
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1"):
        export(checkpoint, tmp_path / "out", max_shard_bytes=0)
    assert not (tmp_path / "out").exists()


def test_the_public_names():
    for name in specjax.io.__all__:
        assert getattr(specjax.io, name).__doc__
