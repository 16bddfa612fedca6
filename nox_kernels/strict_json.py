"""Strict JSON: a file's JSON, refused where it gives a key twice."""

import json


def parse(text: str | bytes) -> object:
    """The value of a JSON text.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or gives a key of an object twice, of
            which every reader would believe another one.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError("a key is given twice")
        return values

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
