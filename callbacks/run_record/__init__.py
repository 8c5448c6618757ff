"""The record of a run: what is written down while it trains, and what is read and shown afterwards.

- `journal.Journal` writes each event as a line; `history` reads the rows of epochs from it.
- `record.read` makes a `Record` of a run directory, in whatever state it is; `story` and `values` do the reading.
- `report.Report` shows a record as an HTML page; `charts` computes its curves.
- `redaction` hides secrets in all that tfloop writes, shows and sends.
"""
