"""Decode texts that users hand over: in UTF-8 or UTF-16, perhaps with a byte order mark or the line ends of Windows."""

import codecs
import re

MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def decode(content: bytes) -> str:
    r"""Return a file's text without its mark, and with \n at the end of each line. Raise UnicodeDecodeError."""
    mark = next((mark for mark in MARKS if content.startswith(mark)), b"")
    return content.removeprefix(mark).decode(MARKS.get(mark, "utf-8")).replace("\r\n", "\n")


def without_surrogates(text: str) -> str:
    """Put U+FFFD for each half of a surrogate pair, which JSON may hold and no encoding has."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def gpt2_encoding():
    """Return tiktoken's GPT-2 encoding, which it downloads on first use. Raise RuntimeError that says what to do."""
    try:
        import tiktoken

        return tiktoken.get_encoding("gpt2")
    except ImportError:
        raise RuntimeError('this needs the package tiktoken: pip install -e ".[text]"') from None
    except (OSError, ValueError) as error:  # OSError includes those of requests; ValueError: unexpected content
        fix = "set TIKTOKEN_CACHE_DIR to a folder that has it from an earlier download, perhaps on another machine"
        raise RuntimeError(f"the GPT-2 vocabulary could not be downloaded ({type(error).__name__}): {fix}") from None
