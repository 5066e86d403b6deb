"""The sources of a model, and the refusal of others."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuronmm.kernels import cache
from neuronmm.kernels.cache import cache_folder, write_folder
from neuronmm.models import UserError
from neuronmm.models.contents import inspect
from neuronmm.models.load import load_pretrained, load_tokenizer
from neuronmm.models.source import read_config, resolve, short_name
from tiny_models import make_tiny


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    make_tiny().save_pretrained(tmp_path / "m")
    assert resolve(tmp_path / "m") == resolve(str(tmp_path / "m")) == tmp_path / "m"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "nowhere.gguf", "no where"])
def test_a_missing_path_is_one_clear_line(name: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(name)
    assert name.removeprefix("~").strip("./") in str(caught.value) and "\n" not in str(caught.value)


def test_an_unreachable_hub_id_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="the download from the hub failed") as caught:
        resolve("nobody/nothing-of-the-sort")
    assert "\n" not in str(caught.value)


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="the weights are missing"):
        resolve(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"pytorch_model\.bin, a pickle"):
        resolve(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGML....")
    with pytest.raises(UserError, match="neither a model folder nor a GGUF file"):
        resolve(tmp_path / "m.gguf")


def test_a_broken_gguf_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\3\0\0\0" + b"\xff" * 64)
    with pytest.raises(UserError, match="damaged GGUF file"):
        resolve(tmp_path / "m.gguf")
    assert list((tmp_path / "cache").iterdir()) == []


def test_read_config_gives_the_content_or_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(tmp_path) == {"a": 1}
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid JSON"):
        read_config(tmp_path)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("NEURONMM_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "neuronmm"


def test_the_real_gguf_unpacks_once_to_an_ordinary_folder(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NEURONMM_CACHE", str(tmp_path))
    folder = resolve(smollm2)
    config = read_config(folder)
    assert (config["model_type"], config["num_hidden_layers"], config["tie_word_embeddings"]) == ("llama", 30, True)
    assert config["rms_norm_eps"] == 1e-5 and "quantization_config" not in config
    assert config["rope_theta"] == 100000
    model = load_pretrained(folder, torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer("The sky is blue.")["input_ids"]) == "The sky is blue."
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>assistant\n")
    with torch.no_grad():
        best = model(tokenizer("The capital of France is", return_tensors="pt")["input_ids"]).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(smollm2) == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def test_the_short_name_of_a_relative_path_is_that_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "model")
    names = {name: short_name(name) for name in (".", "inside/..", "inside", "org/qwen", "qwen.gguf")}
    assert names == {
        ".": "model",
        "inside/..": "model",
        "inside": "inside",
        "org/qwen": "qwen",
        "qwen.gguf": "qwen.gguf",
    }


@pytest.mark.parametrize("folder", [False, True])
def test_a_link_out_of_a_folder_of_the_checkpoint_is_refused(folder: bool, tmp_path: Path) -> None:
    """transformers reads the chat templates of a folder in the checkpoint."""
    make_tiny().save_pretrained(tmp_path / "m")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "default.jinja").write_text("private")
    templates = tmp_path / "m" / "additional_chat_templates"
    if folder:
        templates.symlink_to(secret)
    else:
        templates.mkdir()
        (templates / "default.jinja").symlink_to(secret / "default.jinja")
    with pytest.raises(
        UserError, match=r"additional_chat_templates.*: is a link to a (file|folder) outside the checkpoint"
    ):
        resolve(tmp_path / "m")


def test_an_adapter_without_a_config_is_called_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/nothing"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds an adapter .*, not a model; merge it into its model"):
        resolve(tmp_path)


def test_a_head_that_is_tied_and_stored_has_to_be_the_embedding(tmp_path: Path) -> None:
    """transformers 5 takes the stored one, older versions and the compression the embedding."""
    make_tiny(tied=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for head, same in ((tensors["model.embed_tokens.weight"].clone(), True), (torch.ones(64, 32), False)):
        save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
        if same:
            assert "lm_head.weight" in inspect(tmp_path).files
        else:
            with pytest.raises(UserError, match=r"the stored lm_head.weight differs from it; write tie_"):
                load_pretrained(tmp_path, torch.float32)


def test_what_a_killed_process_left_in_the_cache_is_removed(tmp_path: Path) -> None:
    """But neither what another process of this machine holds, nor what one of another machine has just written."""
    left, new, busy = (tmp_path / f"model-{name}" for name in ("left", "new", "busy"))
    for folder in (left, new, busy):
        folder.mkdir()
        (folder / "shard").touch()
    for folder in (left, busy):
        os.utime(folder / "shard", (0, 0))
        os.utime(folder, (0, 0))
    os.utime(new, (0, 0))  # its shard has just been written
    lock = os.open(busy, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    write_folder(tmp_path / "model", lambda partial: (partial / "shard").touch())
    os.close(lock)
    assert {folder.name for folder in tmp_path.iterdir()} == {"model", "model-new", "model-busy"}


@pytest.mark.parametrize(("parent", "mode"), [(0o700, 0o700), (0o755, 0o755), (0o1777, 0o755), (0o2775, 0o2755)])
def test_the_cache_is_as_readable_as_its_folder_and_no_one_else_writes(parent: int, mode: int, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(parent)
    write_folder(tmp_path / "cache" / "model", lambda partial: None)
    assert stat.S_IMODE((tmp_path / "cache" / "model").stat().st_mode) == mode


def test_without_a_home_folder_the_cache_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NEURONMM_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache.write("document", {})
    assert cache.read("document") is None
    with pytest.raises(OSError, match="name a folder in NEURONMM_CACHE"):
        cache_folder()
