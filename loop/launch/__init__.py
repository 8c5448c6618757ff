"""Processes: which backend a job uses, where a process stands in it, and how workers are started and ended."""
