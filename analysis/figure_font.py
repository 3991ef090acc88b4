"""The one font of all figures: matplotlib's own DejaVu Sans, cut to the characters that figures use.

A PDF carries its font as TrueType, as venues ask; cutting the full DejaVu Sans (6,000 glyphs and its layout tables) down takes
0.15 s a figure. It is cut once instead, to about 300 glyphs, and registered under another name, so that no font of the system can
take its place either: the same records give the same bytes. Cost: 0.3 s once. Source: ours.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CHARACTERS", "FAMILY", "small_font"]

FAMILY = "DejaVu Sans Figures"
CHARACTERS = (
    *range(0x20, 0x7F),
    *range(0xA0, 0x180),
    *range(0x391, 0x3CA),
    *(ord(c) for c in "–—−×…†‡•●≤≥±→²³‘’“”"),
)
"""Code points kept: Latin, Greek and the signs of the tables."""


@contextmanager
def small_font() -> Iterator[str]:
    """Family name to draw with, valid inside the context."""
    import matplotlib
    from fontTools import subset
    from fontTools.ttLib import TTFont
    from matplotlib import font_manager

    source = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    manager = font_manager.fontManager
    before = list(manager.ttflist)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf"):
            options = subset.Options(
                layout_features=[], hinting=True, recalc_timestamp=False, notdef_outline=True
            )
            options.drop_tables += ["GSUB", "GPOS", "GDEF", "FFTM"]
            font = TTFont(source / name, recalcTimestamp=False)
            cutter = subset.Subsetter(options)
            cutter.populate(unicodes=CHARACTERS)
            cutter.subset(font)
            for record in font["name"].names:
                if record.nameID in (1, 16):
                    record.string = FAMILY
            font.save(Path(folder) / name)
            manager.addfont(Path(folder) / name)
        try:
            yield FAMILY
        finally:
            manager.ttflist = before
