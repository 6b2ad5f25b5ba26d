"""A model's JSON file: those of this repository, what it becomes, and one-line refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from terapipe_ds.errors import ConfigError
from terapipe_ds.models.preset import ModelPreset, load_preset

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.json"))
LEAST: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "seq_length": 128,
}


def write(folder: Path, content: Any) -> Path:
    path = folder / "model.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_of_the_repository_load(path: Path) -> None:
    preset = load_preset(path)
    assert preset.seq_length == 2048
    given = json.loads(path.read_text())
    assert {name: getattr(preset, name) for name in given} == given


@pytest.mark.parametrize("path", [p for p in PRESETS if "gpt3" in p.name], ids=lambda p: p.stem)
def test_the_papers_models_are_as_large_as_their_names(path: Path) -> None:
    """12 h^2 weights a layer, and the embedding."""
    preset = load_preset(str(path))
    layer = 12 * preset.hidden_size**2
    weights = preset.num_layers * layer + preset.vocab_size * preset.hidden_size
    assert path.stem == f"gpt3-{round(weights / 1e9)}b"
    assert preset.dtype == "bfloat16"


def test_defaults(tmp_path: Path) -> None:
    preset = load_preset(write(tmp_path, LEAST))
    assert preset.model_dump() == {
        **LEAST,
        "num_query_groups": None,
        "ffn_hidden_size": None,
        "dtype": "float32",
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "tied_head": True,
        "activation_checkpoint_interval": 0,
    }


def test_shape_leaves_out_how_many_layers_and_tokens() -> None:
    one, other = ModelPreset(**LEAST), ModelPreset(**{**LEAST, "num_layers": 9, "seq_length": 9})
    assert one.shape() == other.shape()
    assert json.loads(json.dumps(one.shape())) == one.shape()
    assert "hidden_size" in one.shape() and "dtype" in one.shape()
    assert one.shape() != ModelPreset(**LEAST, dtype="bfloat16").shape()


def test_transformer_config_of_a_plain_gpt() -> None:
    config = ModelPreset(**LEAST).transformer_config()
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (2, 32, 4)
    assert config.num_query_groups == 4
    assert config.ffn_hidden_size == 128
    assert config.normalization == "LayerNorm"
    assert config.activation_func is functional.gelu
    assert not config.gated_linear_unit
    assert config.add_bias_linear
    assert config.params_dtype is torch.float32
    assert not config.bf16
    assert config.hidden_dropout == config.attention_dropout == 0.0


def test_transformer_config_of_everything_else() -> None:
    config = ModelPreset(
        **LEAST,
        num_query_groups=2,
        ffn_hidden_size=80,
        dtype="bfloat16",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
    ).transformer_config(num_layers=1, tensor_model_parallel_size=2)
    assert (config.num_layers, config.tensor_model_parallel_size) == (1, 2)
    assert (config.num_query_groups, config.ffn_hidden_size) == (2, 80)
    assert config.normalization == "RMSNorm"
    assert config.activation_func is functional.silu
    assert config.gated_linear_unit
    assert not config.add_bias_linear
    assert config.params_dtype is torch.bfloat16
    assert config.bf16


def test_double_precision() -> None:
    config = ModelPreset(**LEAST, dtype="float64").transformer_config()
    assert config.params_dtype is torch.float64
    assert not config.bf16


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": 0}, "found a wrong num_layers in"),
        ({"num_layers": 1.5}, "found a wrong num_layers in"),
        ({"num_layers": None}, "found a wrong num_layers in"),
        ({"hidden_size": -32}, "found a wrong hidden_size in"),
        ({"seq_length": "long"}, "found a wrong seq_length in"),
        ({"vocab_size": [64]}, "found a wrong vocab_size in"),
        ({"num_query_groups": 0}, "found a wrong num_query_groups in"),
        ({"dtype": "float16"}, "found a wrong dtype in"),
        ({"dtype": "float8"}, "'float32', 'bfloat16' or 'float64'"),
        ({"position_embedding_type": "alibi"}, "'learned_absolute' or 'rope'"),
        ({"normalization": "BatchNorm"}, "found a wrong normalization in"),
        ({"swiglu": "sometimes"}, "found a wrong swiglu in"),
        ({"activation_checkpoint_interval": -1}, "wrong activation_checkpoint_interval in"),
        ({"layers": 2}, "found a wrong layers in"),
        ({"hidden_size": 30}, "hidden_size 30 with num_attention_heads 4, allowed is a multiple"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_a_wrong_field_is_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = write(tmp_path, {**LEAST, **change})
    with pytest.raises(ConfigError) as caught:
        load_preset(path)
    message = str(caught.value)
    assert message.startswith("model: ")
    assert says in message and str(path) in message
    assert message.endswith("allowed is a JSON file as in configs/models")
    assert "\n" not in message


@pytest.mark.parametrize("name", sorted(LEAST))
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    content = {key: value for key, value in LEAST.items() if key != name}
    with pytest.raises(ConfigError, match=rf"^model: found a wrong {name} in .* \(Field required"):
        load_preset(write(tmp_path, content))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '"gpt"'])
def test_a_file_that_is_no_object_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^model: found .*allowed is a JSON file") as caught:
        load_preset(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    latin = tmp_path / "latin.json"
    latin.write_bytes('{"name": "é"}'.encode("latin-1"))
    for path in (tmp_path / "none.json", tmp_path, latin):
        with pytest.raises(ConfigError, match=r"^model: found .*, which cannot be read") as caught:
            load_preset(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"num_query_groups": 3}, {"num_layers": "2"}, {"num_layers": True}, {"swiglu": "no"}],
    ids=json.dumps,
)
def test_fields_are_read_strictly(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        load_preset(write(tmp_path, {**LEAST, **change}))
