"""What "equal tokens" means (float32): equal up to the first position whose top-1 margin is a near tie."""

from collections.abc import Sequence

TIE = 0.02  # logits; below it another summation order may turn the choice


def assert_equal_tokens(got: Sequence[int], want: Sequence[int], margins: Sequence[float], what: str = "") -> None:
    """``margins[i]``: logit of want[i] minus the runner-up's."""
    for i, (a, b) in enumerate(zip(got, want)):
        if a != b:
            assert margins[i] < TIE, (
                f"{what}: position {i}: got {a}, want {b}, margin {margins[i]}\n got {list(got)}\nwant {list(want)}"
            )
            return
    assert len(got) == len(want), f"{what}: {len(got)} tokens, want {len(want)}"
