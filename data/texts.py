"""Read what users hand over: texts of several encodings, and GPT-2's vocabulary."""

import codecs
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_text(path: Path) -> str:
    r"""Return a file's text without a byte order mark, and with \n at the end of each line.

    Files are UTF-8, or UTF-16 with a mark. Bytes that are no UTF-8, as in Latin-1, become surrogates, which keep them:
    `text.encode(errors="surrogateescape")` has them again.
    """
    content = path.read_bytes()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = content.decode("utf-16", errors="replace")
    else:
        text = content.decode("utf-8-sig", errors="surrogateescape")
    return text.replace("\r\n", "\n")


def gpt2_encoding():
    """Return tiktoken's GPT-2 encoding, which it downloads on first use. Raise RuntimeError that says what to do."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError:
        install = f'{sys.executable} -m pip install -e "{ROOT}[tools]"'
        raise RuntimeError(f"this needs the package tiktoken: {install}") from None
    except (OSError, ValueError) as error:  # OSError includes those of requests; ValueError: unexpected content
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it from an earlier download, perhaps on another machine"
        raise RuntimeError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None
