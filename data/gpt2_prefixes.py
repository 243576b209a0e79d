"""Write data/gpt2_prefixes.bin: for each GPT-2 token the longest other token that its bytes begin with.

    python data/gpt2_prefixes.py        # needs tiktoken, of the extra "tools"

One uint16 for each of 50,257 tokens; 65535: none, for single bytes and the end of text. It follows from the vocabulary
alone. The file is in the repository: this command shows where it comes from, and refuses to write another.
"""

import hashlib
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import tiktoken

PATH, NONE = Path(__file__).with_name("gpt2_prefixes.bin"), 65535
SHA256 = "369d2091939994f1ff771dd3d52912ad53bb3daf1c7941840a1cd50d0d72f373"


def longest_prefixes(tokens: list[bytes]) -> np.ndarray:
    """Return for each token the place of the longest other one that it begins with, or NONE."""
    places = {token: i for i, token in enumerate(tokens)}
    prefixes = ([token[:n] for n in range(len(token) - 1, 0, -1)] for token in tokens)
    return np.array([next((places[p] for p in ps if p in places), NONE) for ps in prefixes], "<u2")


def main() -> None:
    ArgumentParser(description=__doc__).parse_args()
    encoding = tiktoken.get_encoding("gpt2")
    tokens = [encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token)]
    table = np.append(longest_prefixes(tokens), np.uint16(NONE)).astype("<u2").tobytes()
    assert hashlib.sha256(table).hexdigest() == SHA256, "this tiktoken has another GPT-2 vocabulary"
    PATH.write_bytes(table)


if __name__ == "__main__":
    main()
