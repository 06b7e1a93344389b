"""What is said of a beam search: its best sequences beside the greedy one, and when which beam died. Pure."""

import html
import math
from dataclasses import dataclass

from explorer.i18n import _, ngettext
from explorer.sampling.lanes import deaths
from explorer.sampling.rows import BeamRun, Track, repeated

DEATHS_TOLD = 12
SEQUENCES = 4
NGRAM = 3


@dataclass(frozen=True)
class Sum:
    """One way to go on from the prompt."""

    name: str
    text: str
    token_ids: list[int]
    sum_logprob: float  # of the raw distribution for greedy, after the penalties for beams: the same where there are none
    score: float  # NaN: none was computed

    @property
    def repeats(self) -> tuple[int, int]:
        return repeated(self.token_ids, NGRAM)


def greedy_of(tracks: dict[str, Track], beam: Track, step: int) -> Sum | None:
    """The greedy text from the same prompt, if somebody asked for it too, and saw all of it."""
    for track in tracks.values():
        alike = not track.is_beam and track.branched_from is None and track.prompt_token_ids == beam.prompt_token_ids
        plain = track.sampling.get("temperature") == 0 and track.sampling.get("repetition_penalty", 1) == beam.sampling.get(
            "repetition_penalty", 1
        )
        points = track.until(step)
        if alike and plain and points and points[0].nth == 0:
            return Sum(
                _("greedy ({id})").format(id=track.request_id), "".join(p.text for p in points), [p.token_id for p in points],
                math.fsum(p.logprob for p in points), math.nan,
            )  # fmt: skip
    return None


def sums(run: BeamRun, tracks: dict[str, Track], step: int) -> list[Sum]:
    """The greedy text first where there is one, then the best sequences once the search is over."""
    beam = tracks.get(run.request_id)
    greedy = greedy_of(tracks, beam, step) if beam is not None else None
    found = [greedy] if greedy is not None else []
    if run.finished is not None and run.finished.step <= step:
        for i, s in enumerate(run.finished.sequences[:SEQUENCES]):
            found.append(
                Sum(
                    _("best beam") if i == 0 else _("beam result {n}").format(n=i + 1),
                    "".join(s.texts),
                    s.token_ids,
                    s.sum_logprob,
                    s.score,
                )
            )
    return found


def sums_html(found: list[Sum]) -> str:
    """As a table, with repeated n-grams counted."""
    if not found:
        return ""
    head = (
        _("text"),
        _("tokens"),
        _("sum of log-probabilities"),
        _("a token"),
        _("score"),
        _("repeated {n}-grams").format(n=NGRAM),
    )
    rows = ""
    best = max(s.sum_logprob for s in found)
    for s in found:
        again, all_ = s.repeats
        n = len(s.token_ids)
        total = f"<b>{s.sum_logprob:.3f}</b>" if s.sum_logprob == best else f"{s.sum_logprob:.3f}"
        cells = [
            str(n),
            total,
            f"{s.sum_logprob / n:.3f}" if n else "–",
            "–" if math.isnan(s.score) else f"{s.score:.3f}",
            f"{again} / {all_}",
        ]
        numbers = "".join(f'<td class="num">{cell}</td>' for cell in cells)
        rows += f'<tr><td><div class="sa-name">{html.escape(s.name)}</div><div class="sa-text">{html.escape(s.text)}</div></td>{numbers}</tr>'
    heads = "".join(f"<th{'' if i == 0 else ' class=num'}>{html.escape(name)}</th>" for i, name in enumerate(head))
    return f'<div class="sa-scroll"><table class="sa-sums"><tr>{heads}</tr>{rows}</table></div>'


def told(run: BeamRun, step: int) -> str:
    """Who died when, and why it is over."""
    steps = [e for e in run.steps if e.step <= step]
    gone = deaths(steps)
    parts = []
    if gone:
        shown = "; ".join(
            _("at {position}: {beams}").format(position=at, beams=", ".join(map(str, beams))) for at, beams in gone[:DEATHS_TOLD]
        )
        more = " …" if len(gone) > DEATHS_TOLD else ""
        parts.append(
            _("Beams whose text nothing went on from (their place is taken over by a better one): {shown}{more}").format(
                shown=shown, more=more or "."
            )
        )
    if steps:
        dropped = sum(c.fate == "dropped" for e in steps for c in e.candidates)
        parts.append(
            ngettext(
                "{n:,} way to go on was looked at and dropped.", "{n:,} ways to go on were looked at and dropped.", dropped
            ).format(n=dropped)
        )
    if run.finished is not None and run.finished.step <= step:
        parts.append(_("It ended because {why}.").format(why=run.finished.why.rstrip(".")))
    return html.escape(" ".join(parts))
