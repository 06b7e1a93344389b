"""A comparison in words: the verdict, what was different before it began, the first difference and its cause."""

from explorer.compare.cause import Changed
from explorer.compare.comparison import Comparison, Pair, TokenDifference
from explorer.i18n import _, ngettext

SHOWN = 20  # requests listed


def verdict(c: Comparison) -> str:
    """One sentence."""
    if c.same:
        if c.unwatched:
            return _("The same schedule and as many tokens; which tokens, the logs do not hold.")
        return _("The same: every token of every request, and every step's schedule.")
    if c.same_tokens:
        return _("The same tokens, another schedule.")
    first = c.first
    if first is None:
        return _("Not the same requests.")
    return _("Different: the first difference is token {n} of {request}.").format(n=first.index + 1, request=first.a.request_id)


def environment_lines(c: Comparison) -> list[tuple[str, tuple[Changed, ...]]]:
    """(what, differences) for each group that has any."""
    groups = (
        (_("the model"), c.weights),
        (_("how it is computed"), c.computing),
        (_("versions"), c.versions),
        (_("configuration"), c.config),
    )
    return [(what, changed) for what, changed in groups if changed]


def pair_line(pair: Pair) -> str:
    """What became of one request in both runs."""
    if pair.a is None or pair.b is None:
        there = pair.a if pair.a is not None else pair.b
        assert there is not None
        who = _("second run") if pair.a is None else _("first run")
        return _("{request}: only in the {who}").format(request=there.request_id, who=who)
    if pair.first is None:
        return ngettext("{request}: {n} token, equal", "{request}: {n} tokens, all equal", pair.num_equal).format(
            request=pair.a.request_id, n=pair.num_equal
        )
    return _("{request}: {n} equal, then {what}").format(request=pair.a.request_id, n=pair.num_equal, what=pair.first.cause.words)


def first_lines(first: TokenDifference) -> list[str]:
    """The first difference, told."""
    lines = [
        _("{request}, output token {n} (position {position}, step {a} in the first run, {b} in the second)").format(
            request=first.a.request_id,
            n=first.index + 1,
            position=first.position,
            a=_step(first.steps[0]),
            b=_step(first.steps[1]),
        ),
        first.cause.words,
        *first.cause.facts,
    ]
    return lines


def _step(step: int) -> str:
    return str(step) if step >= 0 else _("none")


def report(c: Comparison, notes: list[str] | None = None) -> list[str]:
    """The whole comparison as lines of plain text."""
    lines = [verdict(c), ""]
    for what, changed in environment_lines(c):
        lines.append(_("Different beforehand, {what}: {changes}").format(what=what, changes=", ".join(map(str, changed))))
    if not c.environment:
        lines.append(_("The same beforehand: model, versions, device, number format, configuration."))
    lines += [_("Note: {note}").format(note=note) for note in [*c.notes, *(notes or [])]]
    if c.first is not None:
        lines += ["", _("First difference:"), *(f"  {line}" for line in first_lines(c.first))]
    if c.schedule is not None:
        lines += ["", _("First step that went otherwise: {step} ({words})").format(step=c.schedule.step, words=c.schedule.words)]
    lines += ["", *(pair_line(pair) for pair in c.pairs[:SHOWN])]
    if len(c.pairs) > SHOWN:
        lines.append(_("… and {n} more requests").format(n=len(c.pairs) - SHOWN))
    return lines
