"""Units and digits of what the canvases write: read from their source, as there is no browser here."""

import re

from explorer.canvas.base import HERE


def test_entropy_is_in_nats_everywhere() -> None:
    """As it is recorded, and as the plot over positions has it: the legend of the shades, and the hover of a token."""
    source = (HERE / "strip.js").read_text(encoding="utf-8")
    assert len(re.findall(r"\} nat`", source)) == 3
    assert not re.search(r"\bbits?\b|Math\.LN2", source)


def test_probabilities_in_hovers_have_three_significant_digits() -> None:
    source = (HERE / "choice.js").read_text(encoding="utf-8")
    written = re.findall(r"\\np = \$\{([^}]*)\}", source)
    assert len(written) == 3 and all("significant(" in each for each in written), written
    assert "const significant = (p) => String(Number(p.toPrecision(3)));" in source
    assert "u = ${data.u.toFixed(6)}" in source
