#!/usr/bin/env python3
"""Writes one column of a Parquet table to standard output as JSON lines, {"text": ...}, with the package pyarrow.
`prepare` runs it; alone:

    python3 data/parquet_text.py table.parquet text > table.jsonl

Exit code 3: there is no pyarrow. A table or column that cannot be read: one line on standard error, and exit code 1.
"""
import sys

# `prepare` gives this text to `python3 -c`, which looks for modules in the current directory first: a json.py of
# somebody's data is not what is meant.
sys.path[:] = [place for place in sys.path if place != ""]

import json
import signal


def texts(path, column):
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(path) as table:
        schema = table.schema_arrow
        if schema.names.count(column) != 1:
            sys.exit(f'{path}: has no column "{column}", but {", ".join(schema.names) or "none"}')
        kind = schema.field(column).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            sys.exit(f'{path}: column "{column}" is {kind}, not text')
        for rows in table.iter_batches(batch_size=256, columns=[column]):
            yield from rows.column(0).to_pylist()


def main(path, column):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the reader, which then closes the pipe
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        import pyarrow.parquet
    except ImportError:
        sys.exit(3)
    try:
        for text in texts(path, column):
            line = json.dumps({column: text}, ensure_ascii=False)
            sys.stdout.buffer.write(line.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()
    except Exception as error:
        sys.exit(f"{path}: {type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
