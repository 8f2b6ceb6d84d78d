"""The font of the book's figures: Latin, Greek, signs and the Chinese characters the book uses. See subset.py."""

from pathlib import Path

FONT = Path(__file__).with_name("BookSansSC-Regular.otf")
FAMILY = "Book Sans SC"
