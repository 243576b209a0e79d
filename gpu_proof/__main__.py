"""Show what train_gpt.py would do on a GPU that is not here: python -m gpu_proof COMMAND --help."""

import argparse
import importlib
import sys

from speedrun import needs

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m gpu_proof", description=__doc__)
    parser.add_argument("command", choices=("gpu_graphs", "gpu_numbers", "roofline"), help="each has its own --help")
    command = parser.parse_known_args(sys.argv[1:2])[0].command
    with needs.packages("proof"):
        module = importlib.import_module(f"gpu_proof.{command}")
    try:
        sys.exit(module.main(sys.argv[2:]))
    except (RuntimeError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"python -m gpu_proof {command}: interrupted\n")
