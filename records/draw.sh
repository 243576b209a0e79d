#!/usr/bin/env bash
# Draw the pictures of the pages anew: records/draw.sh, in an environment with records/requirements.txt
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "$0")/.."
python -m records plot --anchor records/anchor.json -o records/curves.png
python -m records plot --history -o records/history.png
