"""Reading of tables in chunks: CSV, JSON lines, Parquet and Excel. Cells keep their types."""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, SupportsInt

import numpy as np
from numpy import ndarray

from lastlayer.errors import InputError, check_choice, need
from lastlayer.tables.cells import PERCENT

CHUNK_ROWS = 16_384
BLOCK = 4 * 2**20
"""Bytes of a CSV file that are parsed at a time; no line may be longer."""
MOST_COLUMNS = 20_000
DECIMALS = ("auto", ".", ",")
SEPARATORS = ";\t|,"
"""Candidates for the separator; the one that gives most columns in the first line is used, the earlier one in a tie."""
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
"""Byte-order marks and the encodings they stand for; that of UTF-8 is skipped."""
CSV, JSON_LINES = (".csv", ".tsv"), (".jsonl", ".ndjson", ".json")
TEXTS = (*CSV, *JSON_LINES)
SHOWN = 5
"""Number of rows of the wrong length that a message lists."""
Cells = dict[str, ndarray]
"""Columns by name: numbers, dates (datetime64), or texts and numbers as objects, with None for a missing cell."""


@dataclass(frozen=True)
class Table:
    """A table, or a chunk of one."""

    columns: Cells
    first: int = 0
    """Number of rows of the file before these."""
    skipped: tuple[int, ...] = ()
    """Rows of the file that could not be read, counted from one."""
    decimal: str = "auto"
    """Decimal sign of numbers that are written as text; "auto" for that of the training table."""
    separator: str = ","
    """Separator of the cells in a CSV file; with semicolons, commas are taken as decimal signs if in doubt."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __str__(self) -> str:
        shown, n = ", ".join(map(repr, islice(self.columns, 20))), len(self.columns)
        return f"{shown}, ... ({n} columns)" if n > 20 else shown

    def cells(self, name: str, what: str) -> ndarray:
        """Return one column; `what` begins the error message if the table does not have it."""
        if name not in self.columns:
            near = {known.lower(): known for known in self.columns}.get(name.strip().lower())
            hint = f"; did you mean {near!r}?" if near else ""
            raise InputError(f"{what} column {name!r} is not in the table: it has {self}{hint}")
        return self.columns[name]

    def row(self, i: SupportsInt) -> int:
        """The number of row i in messages, counted from one without the header."""
        row = self.first + int(i) + 1
        for skipped in self.skipped:
            row += skipped <= row
        return row


@dataclass(frozen=True)
class TableFile:
    """A table in a file: .csv, .tsv, .jsonl (.ndjson, .json), any of these with .gz appended, .parquet or .xlsx."""

    path: Path
    encoding: str | None = None
    """Encoding of the text; None for UTF-8, or UTF-16 if the file begins with a byte-order mark."""
    decimal: str = "auto"
    """Decimal sign; "auto" for that of the training table."""

    def __post_init__(self) -> None:
        check_choice("decimal", self.decimal, DECIMALS)
        if self.encoding is not None:
            try:
                codecs.lookup(self.encoding)
            except LookupError as error:
                raise InputError(
                    f"--encoding {self.encoding!r} is unknown: Western Excel files are often cp1252, old ones latin-1"
                ) from error

    @property
    def suffix(self) -> str:
        return (self.path.with_suffix("") if self.packed else self.path).suffix.lower()

    @property
    def packed(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    @property
    def stem(self) -> str:
        return Path(self.path.stem).stem if self.packed else self.path.stem

    def chunks(self, rows: int = CHUNK_ROWS, *, problems: list[str] | None = None) -> Iterator[Table]:
        """Yield the table in chunks of `rows` rows, at least one row in all; rows of wrong length are `problems`."""
        first, skipped = 0, dict[int, str]()
        try:
            separator = self.separator()
            readers: dict[str, Callable[[int], Iterator[Cells]]] = {".parquet": self._parquet, ".xlsx": self._excel}
            readers |= dict.fromkeys(CSV, partial(self._csv, separator, skipped))
            for columns in readers.get(self.suffix, self._json_lines)(rows):
                yield (piece := Table(columns, first, tuple(skipped), self.decimal, separator))
                first += len(piece)
        except UnicodeError as error:
            raise InputError(self._not_decoded(error)) from error
        except PermissionError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{self.path} is not a complete gzip file: {error}") from error
        if skipped:
            found = f"{len(skipped)} rows of {self.path} have the wrong number of cells: {_listed(skipped)}"
            if problems is None or not first:
                raise InputError(found)
            problems.append(found)
        if not first:
            raise InputError(f"{self.path} has no rows below its header")

    def read(self, *, problems: list[str] | None = None) -> Table:
        parts = list(self.chunks(problems=problems))
        columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
        return replace(parts[-1], columns=columns, first=0)

    def separator(self) -> str:
        """Separator of the cells in a CSV file; a comma for every other format."""
        self._check()
        if self.suffix not in CSV:
            return ","
        with self._text() as file:
            line = self._line(file)

        def columns(separator: str) -> int:
            try:
                return len(next(csv.reader([line], delimiter=separator), []))
            except csv.Error:  # an unclosed quote
                return 0

        return max(SEPARATORS, key=columns)

    def _check(self) -> None:
        path, suffix = self.path, self.suffix
        if not path.exists():
            raise InputError(f"there is no file {path}")
        if not path.is_file():
            raise InputError(f"{path} is not a file: give the path of a table ({', '.join(TEXTS)}, .parquet, .xlsx)")
        if suffix not in (*TEXTS, *(() if self.packed else (".parquet", ".xlsx"))):
            raise InputError(
                f"{path} ends in {path.suffix!r}: a table is CSV (.csv, .tsv) or JSON lines (.jsonl), both also "
                "with .gz, Parquet (.parquet) or Excel (.xlsx); convert it first"
            )

    def _bytes(self) -> "io.BufferedReader | gzip.GzipFile":
        return gzip.open(self.path, "rb") if self.packed else self.path.open("rb")

    def _text(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(self._bytes(), self._encoding(), newline="")

    def _encoding(self) -> str:
        with self._bytes() as file:
            marked = MARKS.get(file.read(2), "utf-8-sig")
        return self.encoding or marked

    def _not_decoded(self, error: UnicodeError) -> str:
        byte = f" (byte {error.object[error.start]:#04x})" if isinstance(error, UnicodeDecodeError) else ""
        if self.encoding is not None:
            return f"{self.path} is not {self.encoding} text{byte}: give another --encoding"
        return (
            f"{self.path} is not UTF-8 text{byte}: give its encoding, such as --encoding cp1252 (Western Excel), "
            "or save the table as UTF-8 (in Excel: 'CSV UTF-8')"
        )

    def _line(self, file: io.TextIOWrapper) -> str:
        """The next line; an overlong line is an error, so that it cannot fill the memory."""
        line = file.readline(BLOCK + 1)
        if len(line) > BLOCK:
            raise InputError(self._too_long)
        return line

    @property
    def _too_long(self) -> str:
        return f"{self.path} has a line of more than {BLOCK:,} characters: that is not a table"

    def _csv(self, separator: str, skipped: dict[int, str], rows: int) -> Iterator[Cells]:
        """Read a CSV file; rows with another number of cells than the header are skipped."""
        pa, arrow = need("pyarrow", extra="cli"), need("pyarrow.csv", extra="cli")
        names, first = self._header(separator)
        _check_names(names, self.path)

        def skip(row: Any) -> str:
            number = row.number - first
            open_quote = ", with a double quote that is never closed" if row.text.count('"') % 2 else ""
            skipped[number] = f"row {number} has {row.actual_columns}, not {len(names)}{open_quote}"
            return "skip"

        texts = dict.fromkeys(map(str, range(len(names))), pa.string())
        reading = arrow.ReadOptions(
            use_threads=False,  # threads would lose the row numbers
            block_size=BLOCK,
            skip_rows=first,
            column_names=list(texts),
            encoding=self._encoding().replace("utf-8-sig", "utf8"),
        )
        parsing = arrow.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=skip)
        conversion = arrow.ConvertOptions(column_types=texts, strings_can_be_null=False)
        try:
            with self._bytes() as file, arrow.open_csv(file, reading, parsing, conversion) as batches:
                for part in (batch.slice(k, rows) for batch in batches for k in range(0, batch.num_rows, rows)):
                    yield {name: part.column(i).to_numpy(zero_copy_only=False) for i, name in enumerate(names)}
        except pa.ArrowInvalid as error:
            if "UTF8" in str(error):
                raise UnicodeError(str(error)) from error
            raise InputError(self._too_long if "straddl" in str(error) else f"{self.path}: {error}") from error

    def _header(self, separator: str) -> tuple[list[str], int]:
        """Names of the columns, and the number of lines of the header."""
        with self._text() as file:
            reader = csv.reader(iter(lambda: self._line(file), ""), delimiter=separator)
            try:
                names = [name.strip() for name in next(reader, [])]
            except csv.Error as error:
                raise InputError(f"the first line of {self.path} is not CSV: {error}") from error
        if not any(names):
            raise InputError(f"{self.path} begins with an empty line: the first line must contain the column names")
        if all(NUMBER.fullmatch(name) for name in names):
            raise InputError(
                f"the first line of {self.path} is {separator.join(names)!r}, numbers only: add a line with the column "
                "names above it"
            )
        if not names[0] and "index" not in names:
            names[0] = "index"  # as pandas writes it
        return names, reader.line_num

    def _json_lines(self, rows: int) -> Iterator[Cells]:
        names: list[str] = []

        def cells() -> Iterator[list[Any]]:
            with self._text() as file:
                for number, line in enumerate(iter(lambda: self._line(file), ""), 1):
                    if line.isspace():
                        continue
                    row = _json_row(line, f"line {number} of {self.path}")
                    names.extend(() if names else row)
                    if strange := [name for name in row if name not in names]:
                        raise InputError(
                            f"line {number} of {self.path} has the name {strange[0]!r}, which is not in the first line"
                        )
                    yield [row.get(name) for name in names]

        for columns in _blocks(cells(), rows):
            _check_names(names, self.path)
            yield dict(zip(names, columns, strict=True))

    def _parquet(self, rows: int) -> Iterator[Cells]:
        pa, parquet = arrow_modules()
        try:
            with parquet.ParquetFile(self.path) as file:
                _check_names(list(file.schema_arrow.names), self.path)
                for batch in file.iter_batches(rows):
                    if len(batch):
                        yield {name: arrow_cells(batch.column(name), name) for name in batch.schema.names}
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, PermissionError):
                raise
            raise InputError(f"{self.path} is not a complete Parquet file: {error}") from error

    def _excel(self, rows: int) -> Iterator[Cells]:
        """Read the first sheet, whose first row contains the column names."""
        openpyxl = need("openpyxl", extra="cli")
        try:
            book = openpyxl.load_workbook(self.path, read_only=True, data_only=True)
        except Exception as error:  # zip, XML and openpyxl raise different errors
            raise InputError(f"{self.path} is not a complete Excel file: {error}") from error
        try:
            sheet = iter(book.worksheets[0].iter_rows())
            names = ["" if cell.value is None else str(cell.value).strip() for cell in next(sheet, ())]
            while names and not names[-1]:
                names.pop()
            if not names:
                raise InputError(f"the first sheet of {self.path} begins with an empty row: it must name the columns")
            _check_names(names, self.path)
            lines = ([_excel_cell(cell) for cell in row] for row in sheet)
            kept = ((line + [None] * len(names))[: len(names)] for line in lines if any(c is not None for c in line))
            for columns in _blocks(kept, rows):
                yield dict(zip(names, columns, strict=True))
        finally:
            book.close()


def read(path: Path) -> Table:
    return TableFile(path).read()


def typed(cells: Sequence[Any]) -> ndarray:
    """Convert Python objects to a column: dates if all are dates, else objects; Booleans and times become texts."""
    known = [cell for cell in cells if cell is not None]
    if known and all(isinstance(cell, date) for cell in known):
        naive = [cell.replace(tzinfo=None) if isinstance(cell, datetime) else cell for cell in cells]
        return np.array(naive, dtype="datetime64[us]")  # None becomes NaT
    column = np.empty(len(cells), dtype=object)
    column[:] = [str(cell) if isinstance(cell, bool | time | datetime) else cell for cell in cells]
    return column


def _blocks(lines: Iterator[list[Any]], rows: int) -> Iterator[list[ndarray]]:
    while block := list(islice(lines, rows)):
        yield [typed(cells) for cells in zip(*block, strict=True)]


def _listed(skipped: dict[int, str]) -> str:
    shown = "; ".join(islice(skipped.values(), SHOWN))
    more = f"; and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
    return f"{shown}{more}. A cell that contains the separator must be in double quotes"


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict) or not row:
        raise InputError(
            f'{where} is not an object with named values: JSON lines look like {{"flow": 1.5, "fluid": "water"}}, '
            "one per line"
        )
    for name, value in row.items():
        if not isinstance(value, str | int | float | None):
            raise InputError(
                f"{name!r} in {where} is a {type(value).__name__}: a cell is a number, a text or null; split it into "
                "several columns"
            )
    return row


def _excel_cell(cell: Any) -> Any:
    """A number that is displayed as a percentage becomes such a text, as in a CSV file of the same sheet."""
    value = cell.value
    if isinstance(value, int | float) and not isinstance(value, bool) and PERCENT in (cell.number_format or ""):
        return f"{100 * value:.15g}{PERCENT}"
    return value


def arrow_modules() -> tuple[Any, Any]:
    return need("pyarrow", extra="cli"), need("pyarrow.parquet", extra="cli")


def arrow_cells(column: Any, name: str) -> ndarray:
    pa = arrow_modules()[0]
    types = pa.types
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_floating(kind) or types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if types.is_date(kind) or types.is_timestamp(kind):
        if types.is_timestamp(kind) and kind.tz is not None:
            column = pa.compute.local_timestamp(column)
        return column.cast(pa.timestamp("us"), safe=False).to_numpy(zero_copy_only=False)
    known = (types.is_integer, types.is_string, types.is_large_string, types.is_boolean, types.is_null, types.is_time)
    if not any(is_kind(kind) for is_kind in known):
        raise InputError(f"column {name!r} is of type {kind}: columns contain numbers, texts or dates")
    return typed(column.to_pylist())


def _check_names(names: list[str], path: Path) -> None:
    if len(names) > MOST_COLUMNS:
        raise InputError(
            f"{path} has {len(names):,} columns, but the limit is {MOST_COLUMNS:,}: is the table transposed? Keep only "
            "the columns that are needed"
        )
    for i, name in enumerate(names, 1):
        if not name.strip():
            raise InputError(f"column {i} of {path} has no name: name it or remove it")
        if not name.isprintable():
            raise InputError(f"column {i} of {path} is called {name!r}: rename it, without control characters")
    if twice := [name for name, n in Counter(names).items() if n > 1]:
        raise InputError(f"{path} has two columns called {twice[0]!r}: rename one of them")
