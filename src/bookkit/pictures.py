"""Are two pictures the same figure? Yes despite another processor's antialiasing, no if one curve has moved."""

from __future__ import annotations

import base64
import io

from PIL import Image, ImageChops, ImageFilter

# A curve that moves by a fraction of a pixel, or a tick that snaps to the next one, stays within the values of its
# 3 x 3 neighbourhood. COLOUR is what rounding may add to that (of 255), PIXELS how many may still stand out.
COLOUR = 10
PIXELS = 3


def decode(png: str | bytes) -> Image.Image:
    """Return the picture as RGB on white; `png` is a notebook's base64 text, or the file's bytes."""
    content = base64.b64decode(png) if isinstance(png, str) else png
    picture = Image.open(io.BytesIO(content)).convert("RGBA")
    paper = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(paper, picture).convert("RGB")


def difference(stored: Image.Image, fresh: Image.Image) -> int:
    """Return how many pixels of either picture have no like in the other's 3 × 3 neighbourhood.

    A pixel has its like when each of its channels lies between the neighbourhood's least and greatest value, give or
    take `COLOUR`. The comparison runs both ways, so that ink which is only in one of the two counts. Sizes may differ
    by one pixel, which is how far rounding moves a tight bounding box; more than that raises ValueError.
    """
    width, height = (min(a, b) for a, b in zip(stored.size, fresh.size, strict=True))
    if any(abs(a - b) > 1 for a, b in zip(stored.size, fresh.size, strict=True)):
        raise ValueError(f"the pictures' sizes differ: stored {stored.size}, fresh {fresh.size}")
    stored, fresh = (picture.crop((0, 0, width, height)) for picture in (stored, fresh))
    outside = ImageChops.lighter(_stands_out(stored, fresh), _stands_out(fresh, stored))
    return sum(outside.histogram()[1:])


def compare(stored: str | bytes, fresh: str | bytes) -> str | None:
    """Return None when the two PNGs show the same figure, else a sentence that says how they differ."""
    try:
        count = difference(decode(stored), decode(fresh))
    except ValueError as error:
        return str(error)
    if count <= PIXELS:
        return None
    return f"the figure differs from the stored one in {count} pixels (at most {PIXELS} may)"


def _stands_out(picture: Image.Image, reference: Image.Image) -> Image.Image:
    low, high = reference.filter(ImageFilter.MinFilter(3)), reference.filter(ImageFilter.MaxFilter(3))
    below = ImageChops.subtract(low, picture)  # clips at 0
    above = ImageChops.subtract(picture, high)
    worst = ImageChops.lighter(below, above)
    red, green, blue = worst.split()
    channel = ImageChops.lighter(ImageChops.lighter(red, green), blue)
    return channel.point(lambda value: 255 if value > COLOUR else 0)
