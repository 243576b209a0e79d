"""The tools with which people prove and compare records: `python -m records --help`.

A record is a folder YYYY-MM-DD_Name here, with README.md, train_gpt.py, the logs *.txt of its runs at its top level and
the race.json of its race against the record before, which the row "after" of its page names; that one's logs of the
race are in its own folder, or in older/. Reading order: logs (what is read), proof (statistics), race, rules (what a
record must fulfil), then publish and plots. process runs a script, tried keeps a table of all races.
"""
