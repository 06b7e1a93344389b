"""Which drafters fit the model that runs, and what a live knob asks the engine for. Pure, but for a look at the files that ship."""

from functools import cache
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.speculation.files import shipped_drafter
from explorer.i18n import _

NONE = ""
UNTRAINED = "layer_skip_untrained"  # layer skipping through the target's own norm and head
TRAINED = ("draft_model", "rest", "layer_skip", "medusa", "eagle")
TREES: dict[str, tuple[int, ...] | None] = {"chain": None, "narrow": (2,) * 8, "wide": (4,) * 8}
TREE_METHODS = ("medusa", "eagle")
DEFAULT_K = 4
K_VALUES: tuple[int | str, ...] = (*range(9), "auto")

CHOICES: dict[str, str] = {
    NONE: _("none: plain decoding"),
    "ngram": _("n-gram (prompt lookup)"),
    "lookahead": _("Lookahead (Jacobi)"),
    "rest": _("REST (a datastore)"),
    "draft_model": _("draft model"),
    "layer_skip": _("layer skipping, trained exit"),
    UNTRAINED: _("layer skipping, no training"),
    "medusa": _("Medusa heads"),
    "eagle": _("EAGLE layer"),
}


@cache
def _target_of(method: str) -> str:
    """The SHA-256 of the model that a shipped drafter was trained for; "" where none ships."""
    path = shipped_drafter(method)
    if not path.exists():
        return ""
    try:
        with safe_open(path, framework="np") as file:
            return (file.metadata() or {}).get("target_sha256", "")
    except (SafetensorError, OSError):  # whoever chooses it is told by the engine
        return ""


def fitting(model: dict[str, Any]) -> dict[str, str]:
    """label -> choice, of the drafters that can be had for a model (``EngineStarted.model``)."""
    sha = model.get("sha256")
    lacking = {method for method in TRAINED if not sha or _target_of(method) != sha}
    return {label: choice for choice, label in CHOICES.items() if choice not in lacking}


def best_choice(model: dict[str, Any]) -> str:
    """A drafter with a distribution of its own, where one was trained for the model; else n-gram."""
    there = set(fitting(model).values())
    return next((method for method in ("eagle", "draft_model", "layer_skip") if method in there), "ngram")


def choice_of(facts: dict[str, Any] | None) -> str:
    if not facts:
        return NONE
    method = str(facts.get("method", ""))
    return UNTRAINED if method == "layer_skip" and facts.get("trained_exit") is False else method


def tree_of(facts: dict[str, Any] | None) -> str:
    """The name of the tree that the engine drafts; "" for one that has none here."""
    shape = tuple((facts or {}).get("tree") or ())
    return next((name for name, tree in TREES.items() if (tree or ()) == shape), "")


def wanted(facts: dict[str, Any] | None, **changes: Any) -> dict[str, Any] | None:
    """The engine's ``speculative`` with ``choice``, ``k``, ``tree``, ``acceptance`` or ``lookup`` changed; what does not fit the drafter
    goes."""
    choice = changes.get("choice", choice_of(facts))
    if choice == NONE:
        return None
    method = "layer_skip" if choice == UNTRAINED else choice
    same = facts is not None and facts.get("method") == method
    made: dict[str, Any] = dict(facts or {}) if same else {}
    made["method"] = method
    made["num_speculative_tokens"] = changes.get("k", (facts or {}).get("num_speculative_tokens", DEFAULT_K))
    acceptance = changes.get("acceptance", (facts or {}).get("acceptance", "rejection"))
    made["acceptance"] = acceptance if acceptance != "typical" or method == "medusa" else "rejection"
    tree = TREES[changes["tree"]] if "tree" in changes else (facts or {}).get("tree")
    made["tree"] = (list(tree) if tree else None) if method in TREE_METHODS else None
    lookup = changes.get("lookup", (facts or {}).get("prompt_lookup", False))
    made.pop("prompt_lookup", None)
    if lookup and method in TRAINED:
        made["prompt_lookup"] = True
    if made["tree"] is not None:
        made.pop("draft_confidence", None)
    if method == "layer_skip":
        made["trained_exit"] = choice != UNTRAINED
    else:
        made.pop("trained_exit", None)
    return made
