"""The table of defaults in the docs is the code's."""

from pathlib import Path

from triaccel.defaults import markdown


def test_the_page_equals_the_code():
    page = Path(__file__).resolve().parents[1] / "docs" / "defaults.md"
    assert page.read_text(encoding="utf-8") == markdown(), (
        "run: python -m triaccel.defaults > docs/defaults.md"
    )
