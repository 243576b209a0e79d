"""The tools with which people prove and compare records: `python -m records --help`.

A record is a folder YYYY-MM-DD_Name here, with README.md, train_gpt.py and the logs *.txt of its runs at its top level.
Reading order: logs (what is read), proof (statistics), rules (what a record must fulfil), then race, publish, plots
and masks.
"""
