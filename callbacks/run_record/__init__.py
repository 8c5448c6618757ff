"""What a run directory tells of its run: the journal, its reader, the report, and what keeps secrets out of them."""
