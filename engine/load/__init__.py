"""Load for an engine: requests that arrive over time (``engine.load.generate``), whoever is driven with them (``drive``, ``process``,
``http``), and what the same requests would take under another policy (``ideal``, ``replay``)."""
