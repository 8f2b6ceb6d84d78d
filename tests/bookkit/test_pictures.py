"""The same figure passes on another processor; another figure, or one curve moved, does not."""

import base64
import io

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from bookkit.pictures import PIXELS, compare, decode, difference


def drawn(*, moved=0.0, noise=0.0, label="score s", title="0.53", width=6.4) -> bytes:
    figure = matplotlib.figure.Figure(figsize=(width, 3.4), dpi=110)
    ax = figure.subplots()
    x = np.linspace(0, 10, 100)
    jitter = noise * np.random.default_rng(0).standard_normal(100)
    ax.plot(x, np.sin(x) + jitter, label="sine")
    ax.plot(x, np.cos(x) + moved + jitter, label="cosine")
    ax.scatter(x, np.cos(x) / 2 + jitter, s=12)
    ax.bar(x[::10], np.sin(x[::10]) / 3 + noise, alpha=0.5)
    ax.set(xlabel=label, title=title, ylim=(-1.5, 1.5))
    ax.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


@pytest.fixture(scope="module")
def stored():
    return drawn()


def test_the_same_figure_passes(stored):
    assert compare(stored, drawn()) is None
    assert compare(base64.b64encode(stored).decode() + "\n", stored) is None


@pytest.mark.parametrize("noise", [1e-7, 1e-5, 1e-4])
def test_last_digits_pass(stored, noise):
    assert compare(stored, drawn(noise=noise)) is None


def test_a_few_stray_pixels_pass(stored):
    picture = decode(stored)
    for place in range(PIXELS):
        picture.putpixel((50 + 40 * place, 60), (255, 0, 0))
    assert difference(decode(stored), picture) == PIXELS
    picture.putpixel((300, 100), (255, 0, 0))
    assert difference(decode(stored), picture) == PIXELS + 1


def test_a_tick_that_snaps_to_the_next_pixel_passes(stored):
    picture = decode(stored)
    shifted = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    shifted.paste(picture, (1, 0))
    assert difference(picture.crop((5, 5, 690, 360)), shifted.crop((5, 5, 690, 360))) == 0


@pytest.mark.parametrize("moved", [0.02, -0.02, 0.05, 0.3])
def test_one_curve_moved_by_less_than_a_hundredth_of_the_axis_fails(stored, moved):
    assert "pixels" in compare(stored, drawn(moved=moved))


@pytest.mark.parametrize("change", [{"label": "score S"}, {"label": "weight s"}, {"title": "0.58"}, {"title": "0.54"}])
def test_a_changed_word_or_digit_fails(stored, change):
    assert compare(stored, drawn(**change)) is not None


def test_another_colour_fails(stored):
    picture = decode(stored)
    tinted = Image.merge("RGB", (picture.getchannel("R"), picture.getchannel("B"), picture.getchannel("G")))
    assert difference(picture, tinted) > PIXELS


def test_another_size_fails(stored):
    assert "sizes differ" in compare(stored, drawn(width=6.6))


def test_ink_only_in_the_fresh_picture_counts_too():
    blank = Image.new("RGB", (40, 40), "white")
    inked = blank.copy()
    inked.paste((0, 0, 0), (10, 10, 20, 20))
    assert difference(blank, inked) == difference(inked, blank) == 100


def test_transparent_pictures_are_seen_on_white():
    clear = Image.new("RGBA", (10, 10), (0, 0, 0, 0))
    file = io.BytesIO()
    clear.save(file, "PNG")
    assert decode(file.getvalue()).getpixel((5, 5)) == (255, 255, 255)
