"""The tuner: for one load and limits on latency it measures configurations, each in a fresh process, and gives the front of throughput
against latency with the configuration to copy. ``search.tune`` is the call; ``python -m engine.tuning`` the command line."""
