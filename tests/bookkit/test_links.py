"""A link that leads nowhere and a resource from another host are found; a good site is left in peace."""

import pytest

from bookkit.links import main, problems

GOOD = {
    "index.html": '<a href="sub/page.html#there">x</a> <a href="https://example.org/">out</a> <a href="#here">y</a>'
    '<h1 id="here">t</h1><link rel="stylesheet" href="a.css?v=1"><link rel="canonical" href="https://example.org/i">'
    '<img src="data:image/png;base64,AA"><a href="mailto:a@b.c">m</a><a href="sub/">d</a><a href="#top">up</a>',
    "sub/page.html": '<p id="there"></p><a href="../index.html">back</a>',
    "sub/index.html": "",
    "a.css": "body { background: url(data:image/png;base64,AA) }",
}


@pytest.fixture
def site(tmp_path):
    def build(**changes):
        for name, content in {**GOOD, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
        return tmp_path

    return build


def test_a_good_site_passes(site, capsys):
    assert problems(site()) == []
    assert main([str(site())]) == 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('<a href="none.html">x</a>', "not there"),
        ('<a href="../outside.html">x</a>', "not there"),
        ('<a href="sub/page.html#nowhere">x</a>', "no such anchor"),
        ('<a href="#nowhere">x</a>', "no such anchor"),
        ('<img src="none.png">', "not there"),
        ('<a href="file:///home/me/x.html">x</a>', "only works on the machine"),
        ('<script src="https://cdn.example.org/x.js"></script>', "from another host"),
        ('<script src="//cdn.example.org/x.js"></script>', "from another host"),
        ('<link rel="stylesheet" href="https://cdn.example.org/x.css">', "from another host"),
        ('<link rel="preconnect" href="https://fonts.example.org">', "from another host"),
        ('<img src="https://example.org/x.png">', "from another host"),
        ('<img srcset="https://example.org/x.png 2x">', "from another host"),
        ('<iframe src="https://example.org/"></iframe>', "from another host"),
        ("<style>@import 'https://example.org/x.css';</style>", "from another host"),
        ('<p style="background: url(https://example.org/x.png)">', "from another host"),
    ],
)
def test_planted_faults_are_found(site, body, said):
    root = site(broken__html=body)
    found = problems(root)
    assert len(found) == 1 and said in found[0] and "broken.html" in found[0]
    assert main([str(root)]) == 1


def test_a_stylesheet_that_loads_from_elsewhere_is_found(site):
    assert "from another host" in problems(site(b__css="@font-face { src: url('https://example.org/f.woff') }"))[0]


def test_a_folder_without_pages_does_not_pass(tmp_path):
    assert "holds no page" in problems(tmp_path)[0]
