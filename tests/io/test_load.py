"""`load` of Hugging Face folders: dtypes, layouts, sentences about what is wrong."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax.io
from specjax.io import load

GOLDEN = Path(__file__).parents[1] / "golden" / "models"


def dtypes(checkpoint):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(checkpoint.params)}


def edit_json(path, **changes):
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["llama_mha", "llama_gqa", "llama_mqa"])
@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16, np.float16])
def test_every_leaf_has_the_dtype_asked_for(name, dtype):
    """float32, float16 and bfloat16 files; huggingface/transformers#12534 ignored it,
    https://github.com/safetensors/safetensors/issues/598 could not read bfloat16."""
    assert dtypes(load(GOLDEN / name, dtype=dtype)) == {str(jnp.dtype(dtype))}


def test_the_default_dtype_is_float32_on_a_cpu():
    assert dtypes(load(GOLDEN / "llama_mqa")) == {"float32"}


def test_the_default_dtype_is_the_checkpoints_own_elsewhere(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert dtypes(load(GOLDEN / "llama_mqa")) == {"bfloat16"}
    assert dtypes(load(GOLDEN / "llama_gqa")) == {"float16"}


def test_bfloat16_values_are_exact():
    checkpoint = load(GOLDEN / "llama_mqa", dtype="bfloat16")
    stored = load_file(GOLDEN / "llama_mqa" / "model.safetensors")
    ours = np.asarray(checkpoint.params["embed_tokens"])
    assert ours.dtype == ml_dtypes.bfloat16
    assert ours.tobytes() == stored["model.embed_tokens.weight"].tobytes()


def test_the_layout_follows_width_and_backend():
    assert specjax.io.best_kernel_layout(512, "cpu") == "oi"
    assert specjax.io.best_kernel_layout(511, "cpu") == "io"
    assert specjax.io.best_kernel_layout(4096, "gpu") == "io"
    checkpoint = load(GOLDEN / "llama_gqa")
    assert checkpoint.config.kernel_layout == "io"
    kernel = checkpoint.params["layers_0"]["mlp"]["up_proj"]["kernel"]
    assert kernel.shape == (32, 40)
    other = load(GOLDEN / "llama_gqa", kernel_layout="oi")
    turned = other.params["layers_0"]["mlp"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(turned, kernel.T)


def test_end_of_text_ids_and_their_order_of_precedence(golden, tokenizer):
    folder = golden("llama_gqa")
    edit_json(folder / "generation_config.json", eos_token_id=[7, 3])
    assert load(folder).eos_token_ids == (7, 3)
    (folder / "generation_config.json").unlink()
    assert load(folder).eos_token_ids == (2,)
    edit_json(folder / "config.json", eos_token_id=None)
    assert load(folder).eos_token_ids == ()
    tokenizer.save_pretrained(folder)
    assert load(folder).eos_token_ids == (tokenizer.eos_token_id,)


def test_a_tokenizer_is_read_as_it_was_written(golden, tokenizer):
    folder = golden("llama_gqa")
    assert load(folder).tokenizer is None
    tokenizer.save_pretrained(folder)
    # A class whose rules would rebuild the pipeline from the vocabulary.
    edit_json(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    found = load(folder).tokenizer
    ours, theirs = found.backend_tokenizer, tokenizer.backend_tokenizer
    assert ours.pre_tokenizer.__getstate__() == theirs.pre_tokenizer.__getstate__()
    assert found("the cat")["input_ids"] == tokenizer("the cat")["input_ids"]


def test_shards_are_read_by_their_index(golden):
    folder = golden("llama_gqa")
    whole = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[:5], names[5:])):
        save_file({n: tensors[n] for n in part}, folder / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{number}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, load(folder).params, whole.params)

    weight_map["model.norm.weight"] = "part0.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"part0.*holds 'model.norm.weight', which it"):
        load(folder)
    (folder / "part1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names the shard part1.safetensors"):
        load(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match="no weight_map"):
        load(folder)


def test_a_tied_head_and_old_buffers_are_not_parameters(golden):
    folder = golden("llama_gqa")

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        old = "model.layers.0.self_attn.rotary_emb.inv_freq"
        tensors[old] = np.ones(4, np.float32)

    edit_weights(folder, add)
    assert "lm_head" not in load(folder).params


def pop(name):
    return lambda tensors: tensors.pop(name)


def put(name, array):
    return lambda tensors: tensors.update({name: array})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pop("model.norm.weight"), "lacks 1 of 20 tensors, the first is 'model.norm"),
        (
            put("model.norm.weight", np.ones(3, np.float32)),
            r"'model.norm.weight' must have the shape \(32,\) .* got \(3,\)",
        ),
        (
            put("model.layers.0.self_attn.q_proj.bias", np.ones(32, np.float32)),
            "q_proj.bias', which its configuration does not use",
        ),
        (
            put("model.norm.weight", np.ones(32, np.int8)),
            "must be float32, float16 or bfloat16, got int8",
        ),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_named(golden, change, message):
    folder = golden("llama_gqa")
    edit_weights(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_truncated_file_is_named(golden):
    folder = golden("llama_gqa")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(folder)


def test_missing_and_damaged_files_are_named(golden):
    folder = golden("llama_gqa")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model.safe.*pytorch_model"):
        load(folder)
    (folder / "config.json").write_text('{"architectures": [')
    with pytest.raises(ValueError, match=r"config.json' is not whole JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json; expected"):
        load(folder)


def test_a_damaged_tokenizer_is_named(golden):
    folder = golden("llama_gqa")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokeniser files in .* cannot be read"):
        load(folder)


def test_an_unknown_architecture_is_named_with_its_file(golden):
    folder = golden("llama_gqa")
    edit_json(folder / "config.json", architectures=["LlamaForCausal"])
    with pytest.raises(ValueError, match=r"config.json: unknown .*did you mean 'Llama"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype must be float32, bfloat16, float16 or None"),
        ({"dtype": "float31"}, "got 'float31'"),
        ({"kernel_layout": "iio"}, "kernel_layout must be 'io', 'oi' or None"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load(GOLDEN / "llama_gqa", **options)


@pytest.mark.parametrize(
    "name", ["no/such/folder", "absent.gguf", "./absent", Path("a/b"), "smollm2-135m"]
)
def test_a_missing_path_is_not_looked_up_on_the_hub(name):
    with pytest.raises(FileNotFoundError, match=r"there is no model .* short name"):
        load(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"is a file but not a .gguf one"):
        load(path)


def test_a_hub_id_is_downloaded(monkeypatch, golden):
    asked = {}

    def snapshot(hub_id, **options):
        asked.update(options, hub_id=hub_id)
        return str(golden("llama_gqa"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    checkpoint = load("someone/a-model")
    assert checkpoint.source == asked["hub_id"] == "someone/a-model"
    assert "model*.safetensors" in asked["allow_patterns"]


def test_a_hub_failure_is_one_sentence(monkeypatch):
    def snapshot(hub_id, **options):
        raise RuntimeError("401 Client Error\nRepository not found\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(
        OSError, match=r"no local model 'some/one'.*401 Client"
    ) as error:
        load("some/one")
    assert "\n" not in str(error.value)
