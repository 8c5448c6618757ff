"""Looking at a run from beside it: a stopwatch, a watchdog, and faults that tests ask for."""
