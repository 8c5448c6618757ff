"""Watches a run while it trains: where its time goes, whether it still makes progress, and faults that tests inject.

- `stopwatch.Stopwatch` splits a worker's time into parts; `run` holds it, and `fit` prints its `summary`.
- `watchdog.Watchdog` reports a worker that has made no progress for long.
- `phase_marker.PhaseMarker` notes the phase of a compiled call; `step` puts its marks into the graph.
- `fault_injection.reached` marks a point at which a test may have the program fail.
"""
