"""Make BookSansSC-Regular.otf: the part of Noto Sans CJK SC (Debian package fonts-noto-cjk, OFL 1.1) the figures use.

    python -m bookkit.fonts.subset /usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc

Needed again only when a figure uses a character that characters.txt does not hold: add it there first. A larger subset
leaves the pixels of every existing figure as they are. The family is renamed so that a Noto font installed on the
machine, in another version, is never taken in its place.
"""

import sys
from pathlib import Path

from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTCollection, TTFont

from bookkit.fonts import FAMILY, FONT

SOURCE_FAMILY = "Noto Sans CJK SC"
ASCII_LATIN_GREEK = (range(0x20, 0x7F), range(0xA0, 0x100), range(0x391, 0x3CA))
RENAMED = {1: FAMILY, 2: "Regular", 3: "BookSansSC-Regular", 4: FAMILY, 6: "BookSansSC-Regular"}


def characters() -> list[int]:
    """Code points to keep: basic Latin, Latin-1, Greek, and what characters.txt lists."""
    listed = Path(__file__).with_name("characters.txt").read_text(encoding="utf-8")
    wanted = {ord(character) for character in listed if not character.isspace()}
    for block in ASCII_LATIN_GREEK:
        wanted.update(block)
    return sorted(wanted)


def main(collection: Path) -> None:
    """Write the subset beside this file."""
    faces = TTCollection(str(collection)).fonts
    chosen = [face for face in faces if face["name"].getDebugName(1) == SOURCE_FAMILY]
    if len(chosen) != 1:
        raise ValueError(f"{collection} holds {len(chosen)} faces named {SOURCE_FAMILY!r}, expected one")
    font: TTFont = chosen[0]
    options = Options()
    options.layout_features = ["kern"]
    options.hinting = False
    options.recalc_timestamp = False
    options.name_IDs = [0, 1, 2, 3, 4, 5, 6, 13, 14]
    options.drop_tables += ["vhea", "vmtx", "VORG", "BASE", "DSIG", "GDEF"]
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=characters())
    subsetter.subset(font)
    for record in font["name"].names:
        if record.nameID in RENAMED:
            record.string = RENAMED[record.nameID]
    top = font["CFF "].cff
    top.fontNames[0] = RENAMED[6]
    top[0].FullName, top[0].FamilyName = FAMILY, FAMILY
    font.recalcTimestamp = False
    font.save(str(FONT))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
