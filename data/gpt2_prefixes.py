"""Write data/gpt2_prefixes.bin: for each GPT-2 token the longest other token that its bytes begin with.

    python data/gpt2_prefixes.py        # needs tiktoken, of the extra "tools"

One uint16 for each of 50,257 tokens; 65535: none, for single bytes and the end of text. The file is in the repository:
this command shows where it comes from.
"""

from pathlib import Path

import numpy as np
import tiktoken

NONE = 65535


def longest_prefixes(tokens: list[bytes]) -> np.ndarray:
    """Return for each token the place of the longest other one that it begins with, or NONE."""
    places = {token: i for i, token in enumerate(tokens)}
    prefixes = ([token[:n] for n in range(len(token) - 1, 0, -1)] for token in tokens)
    return np.array([next((places[p] for p in ps if p in places), NONE) for ps in prefixes], "<u2")


if __name__ == "__main__":
    encoding = tiktoken.get_encoding("gpt2")
    table = longest_prefixes([encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token)])
    np.append(table, np.array([NONE], "<u2")).tofile(Path(__file__).with_name("gpt2_prefixes.bin"))
