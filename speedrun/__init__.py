"""The tools around train_gpt.py: `python -m speedrun --help`.

Reading order of those for records: logs (what is read), proof (statistics), race, rules (what a record must fulfil),
publish, plots, tried. process runs a script. check is the preflight, needs says which packages are missing, bench
times a step, lower says without a GPU what the compiler makes for one (by pretend_gpu) and how long that takes (by
roofline), evaluate scores a model, and plain_gpt is the starting point that races compare with.
"""
