"""Make the tables of docs/gpu.md: what is predicted (h100.json) and measured (h100_measured.json)."""

import json

from speedrun import cards, check, roofline
from speedrun.logs import markdown

MEASURED = cards.PREDICTED.with_name("h100_measured.json")


def steps() -> str:
    """Return the predicted ms of a step by stage, beside what was measured of other scripts."""
    found = cards.predicted()
    rows = json.loads(MEASURED.read_text())["steps"]
    rows["the root as one of 8 H100, predicted"] = [step["sum"] for step in found["predicted"]]
    told = [[name, *("" if ms is None else f"{ms:.1f}" for ms in row)] for name, row in rows.items()]
    return markdown("|".join(["ms of a step, from step", *(str(stage["first"]) for stage in found["stages"])]), told)


def parts() -> str:
    """Return the predicted ms by part and stage, with the measured ones in brackets."""
    return roofline.table(cards.predicted(), json.loads(MEASURED.read_text())["measured"])


def memory() -> str:
    """Return the peaks of a process by the number of processes."""
    found = json.loads(cards.PREDICTED.read_text())["processes"]
    names = {"ngram_rows": "rows of n-grams", "train": "training step, MiB", "validation": "validation, MiB"}
    rows = [[told, *(f"{found[n][name]:,}" for n in found)] for name, told in names.items()]
    return markdown("|".join(["processes", *found]), rows)


def one_card() -> str:
    """Return what fits on one card of each kind, and how long it takes."""
    rows = []
    for card in cards.CARDS.values():
        cfg, gib = check.fit_one(card)
        (least, most), minutes, pairs = cards.costs(card)
        name, loss = card.name.removeprefix("NVIDIA "), cards.loss_of(cfg.ngram_rows)
        row = f"{name}|{cfg.ngram_rows:,}|{gib:.0f}|{least:,.0f} to {most:,.0f}|{minutes:.1f}|{loss:.3f}|{pairs:.0f}"
        rows.append(row.split("|"))
    return markdown("one|rows of n-grams|GiB|ms a step|minutes, 1,050 steps|loss|minutes, 8 pairs of an idea", rows)


TABLES = {"steps": steps, "parts": parts, "memory": memory, "cards": one_card}
