"""Training of the drafters that are shipped, from text that the target writes itself. ``python -m engine.speculation.training``.

Four stages, each resumed where it was left: text (``generate``), features (``features``), one training run a drafter
(``train``), and the report on held-out prompts (``evaluate``). Everything between them lies in the user's cache directory.
"""
